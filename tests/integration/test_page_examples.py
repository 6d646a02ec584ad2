"""The examples of the pages, sent to the server of their page, are answered as the page shows."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack

import httpx
import pytest

from tests.support.grids import chosen
from tests.support.page_examples import (
    ADMIN_KEY,
    Block,
    Request,
    Serve,
    find_pages,
    page_server,
    read_page,
    serve_before,
)
from tests.support.paths import ROOT

# What the JSON blocks of a page are, in their order: the body of a route, or its answer if the
# method is GET; the answer to the example before; lines of a batch; an error, with the request
# that gets it; or none of these.
ANSWER, LINES, OTHER = "answer", "lines", "other"
TOO_MANY = {"user": {"id": "user000001"}, "k": 5000}
BLOCKS: dict[str, list[str | tuple[str, dict[str, object]]]] = {
    "docs/guides/batch-text.md": [LINES],
    "docs/guides/drafters.md": ["POST /v1/completions"],
    "docs/guides/live-catalogue.md": ["POST /v1/items:rollback", "PUT /v1/items"],
    "docs/guides/live-experiments.md": [OTHER],  # of the requests of one user in five
    "docs/guides/observability.md": [OTHER],  # a line of the log
    "docs/guides/rank.md": [ANSWER],
    "docs/guides/recommend.md": [ANSWER, "POST /v1/recommend", "POST /v1/recommend", ANSWER],
    # A call, and the answer of a model whose template has tools.
    "docs/guides/structured-text.md": [OTHER, OTHER],
    "docs/guides/text.md": ["POST /v1/completions"],
    "docs/reference/bundle-format.md": [OTHER],  # a manifest
    "docs/reference/http-text.md": ["POST /v1/completions", ANSWER],
    "docs/reference/http.md": [
        *(ANSWER, ANSWER, "POST /admin/bundle:load", "GET /admin/bundle"),
        ("POST /v1/recommend", TOO_MANY),
    ],
}
# Fields that a page leaves out where it shows one part of a body.
BESIDE = {"/v1/completions": {"prompt": "Once upon a time, once upon a time"}}
# What pages write for the version of the bundle's catalogue.
VERSIONS = ("VERSION", "a1b2c3")
JSON = "application/json"
EMPTY = ("rejected", "degraded", "unattributed", "missing_item_ids")


def find_difference(shown: object, answer: object, place: str = "") -> str | None:
    """Says where an answer lacks what a page shows; None if it has all of it.

    Fields, types, empty lists and the name of the model count. Other values differ between models.
    `null` and `…` of a page stand for anything.
    """
    if shown is None or shown == "…":
        return None
    if isinstance(shown, dict) and isinstance(answer, dict):
        named = {key: value for key, value in shown.items() if key != "…"}
        missing = sorted(named.keys() - answer.keys())
        if missing:
            return f"{place}: no {missing} in {sorted(answer)}"
        if "model" in named and named["model"] != answer["model"]:
            return f"{place}: the page names the model {named['model']}, not {answer['model']}"
        each = (find_difference(named[key], answer[key], f"{place}.{key}") for key in named)
        return next(filter(None, each), None)
    if isinstance(shown, list) and isinstance(answer, list):
        if bool(shown) != bool(answer):
            return f"{place}: shown {shown}, got {answer}"
        return find_difference(shown[0], answer[0], f"{place}[0]") if shown else None
    same = name_type(shown) == name_type(answer)
    return None if same else f"{place}: shown {shown!r}, got {answer!r}"


def name_type(value: object) -> str:
    """Name of a value's type, the same for all numbers."""
    name = type(value).__name__
    return "number" if name in ("int", "float") else name


def read_comment(comment: str) -> tuple[int | None, object]:
    """Status and answer that a comment shows; None for each that it does not show."""
    status = re.match(r"(\d{3}): ", comment)
    if status:
        return int(status[1]), None
    if not comment.startswith("{"):
        return None, None
    try:
        return None, json.loads(comment)
    except ValueError:  # shortened: fields without values, or lists with dots in them
        short = re.sub(r"\[[^\]]*\]", "[]", comment).partition("}")[0]
        return None, dict.fromkeys(re.findall(r'[{,]\s*"(\w+)"', short))


class Reader:
    """Follows a page from top to bottom and sends what it shows.

    Attributes:
        page: The page.
        servers: Holds the running server.
        serve: The command `recserve serve` read last; None means `make demo`.
        client: Client of its server, once a request needs it.
        variables: What the shell has by now.
        answer: The answer to the example before.
    """

    def __init__(self, page: str, servers: ExitStack) -> None:
        self.page, self.servers = page, servers
        self.serve: Serve | None = None
        self.client: httpx.Client | None = None
        self.variables: dict[str, str] = {}
        self.answer: object = None

    def read(self) -> None:
        """Reads the page."""
        kinds = iter(BLOCKS.get(self.page, ()))
        for part in read_page(self.page):
            if isinstance(part, Serve):
                self.servers.close()
                self.serve, self.client = part, None
            elif isinstance(part, Request):
                self.send_command(part)
            elif part.language == "json":
                kind = next(kinds, None)
                assert kind is not None, f"say in BLOCKS what {part.text} is"
                self.read_block(part.text, kind)
        assert next(kinds, None) is None, f"{self.page} has fewer JSON blocks than BLOCKS says"

    def send_command(self, request: Request) -> None:
        """Sends a `curl` and compares the answer with its comment."""
        status, shown = read_comment(request.shown)
        answer = self.send(request.method, request.path, request.body, request.content_type)
        assert status in (None, answer.status_code), f"{request}: {answer.status_code}"
        assert (fault := find_difference(shown, self.answer)) is None, f"{request}: {fault}"
        if request.variable is not None:
            self.variables[request.variable] = answer.json()[request.field]
            # The pages say that this id stands for an item of the slate.
            self.variables["item000009"] = answer.json()["items"][0]["item_id"]

    def read_block(self, text: str, kind: str | tuple[str, dict[str, object]]) -> None:
        """Sends a JSON block, or compares it with an answer."""
        if isinstance(kind, tuple):
            method, path = kind[0].split()
            assert self.start().request(method, path, json=kind[1]).json() == json.loads(text)
        elif kind == LINES:
            for line in map(json.loads, text.splitlines()):
                self.send(line["method"], line["url"], json.dumps(line["body"]))
        elif kind == ANSWER or kind.startswith("GET "):
            if kind != ANSWER:
                self.send("GET", kind.removeprefix("GET "))
            fault = find_difference(json.loads(text), self.answer)
            assert fault is None, f"{text}: {fault}"
        elif kind != OTHER:
            method, path = kind.split()
            self.send(method, path, json.dumps({**BESIDE.get(path, {}), **json.loads(text)}))

    def start(self) -> httpx.Client:
        """Returns a client of the server of the last command."""
        if self.client is None:
            self.client = self.servers.enter_context(page_server(self.page, self.serve))
        return self.client

    def send(
        self, method: str, path: str, body: str | None = None, content_type: str = JSON
    ) -> httpx.Response:
        """Sends a request; it must be served, and in full."""
        client = self.start()
        for name, value in self.variables.items():
            body = body and body.replace(name if name.startswith("item") else f"${name}", value)
        for name in VERSIONS:
            if body and f'"{name}.' in body:
                version = client.get("/version").json()["catalog_version"].partition(".")[0]
                body = body.replace(name, version)
        headers = {"Content-Type": content_type} if body is not None else {}
        if path.startswith("/admin"):
            headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        answer = client.request(method, path, content=body, headers=headers)
        assert answer.is_success, f"{method} {path} {body}: {answer.status_code} {answer.text}"
        is_json = answer.headers.get("content-type", "").startswith(JSON)
        self.answer = answer.json() if is_json else None
        if isinstance(self.answer, dict):
            incomplete = {name: self.answer[name] for name in EMPTY if self.answer.get(name)}
            assert not incomplete, f"{method} {path} {body}: {incomplete}"
        return answer


OTHER_BUNDLE = "docs/guides/import.md"  # its items have other ids


def has_example(page: str) -> bool:
    """Whether a page has a `curl` or a JSON block for a bundle that was built here."""
    return page != OTHER_BUNDLE and any(
        isinstance(part, Request) or (isinstance(part, Block) and part.language == "json")
        for part in read_page(page)
    )


@pytest.mark.parametrize(
    "page",
    chosen([page for page in find_pages() if has_example(page)], "docs/getting-started.md"),
)
def test_examples_are_answered(tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    with ExitStack() as servers:
        Reader(page, servers).read()


def test_a_page_says_what_serves_the_model_that_it_names():
    """By a command `recserve serve --llm DIR` before the example, or by `make demo`."""
    for page in find_pages():
        parts = read_page(page)
        demo = "`make demo`" in (ROOT / page).read_text(encoding="utf-8")
        for index, part in enumerate(parts):
            text = part.text if isinstance(part, Block) else str(part)
            if re.search(r'model="|"model": "', text) and not isinstance(part, Serve):
                assert serve_before(parts, index) or demo, f"{page}: {text}"
