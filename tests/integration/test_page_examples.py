"""Every `curl` of the pages, sent to a server with a bundle and a language model, is answered."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

from recserve.service import Service, ServiceOptions
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.paths import ROOT, reference
from tests.support.tiny_bundle import shared_bundle

FENCE = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A quoted body may go over several lines; a comment ends with its line.
COMMAND = re.compile(r"^curl (?:'[^']*'|\\\n|[^'\n])*", re.MULTILINE)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def requests_of(page: str) -> list[tuple[str, str, str | None]]:
    """Method, path and body of each example."""
    found = []
    for block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        for command in COMMAND.findall(block):
            words = shlex.split(command.replace("\\\n", " "), comments=True)
            given = dict(zip(words, words[1:], strict=False))
            (url,) = (word for word in words if word.startswith("localhost:8080/"))
            method = given.get("-X") or ("POST" if "-d" in given else "GET")
            found.append((method, url.removeprefix("localhost:8080"), given.get("-d")))
    return found


def pages() -> list[str]:
    """README and the pages of the site that have an example, relative to the checkout."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [page.relative_to(ROOT).as_posix() for page in found]
    return [name for name in names if requests_of(name)]


@pytest.fixture
def client(tmp_path):
    """A server of its own for each page: one page deletes the user whom another asks for."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    llm = reference("stories260k")
    settings = TextSettings(llm, chat_template=tmp_path / "template.jinja")
    text = load_text(settings, torch.device("cpu"))
    store, journal = f"lmdb:{tmp_path}/store", tmp_path / "items"
    service = Service.open(
        shared_bundle(), store, "cpu", ServiceOptions(text=text, journal=journal)
    )
    with live(service) as running:
        yield running


@pytest.mark.parametrize("page", pages())
def test_examples_are_answered(client, page):
    base = client.get("/version").json()["catalog_version"].partition(".")[0]
    for method, path, body in requests_of(page):
        sent = body and body.replace("VERSION", base)
        answer = client.request(method, path, content=sent)
        assert answer.is_success, f"{method} {path} {sent}: {answer.text}"
        if answer.headers.get("content-type", "").startswith("application/json"):
            said = answer.json()
            assert not said.get("rejected") and not said.get("degraded"), said


def test_examples_are_found():
    assert ("DELETE", "/v1/users/user000030", None) in requests_of("docs/reference/http.md")
    (rollback,) = (
        one for one in requests_of("docs/reference/http.md") if one[1] == "/v1/items:rollback"
    )
    assert rollback[2] == '{"catalog_version": "VERSION.1"}'
    assert {"README.md", "docs/getting-started.md", "docs/guides/recommend.md"} <= set(pages())
