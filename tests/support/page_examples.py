"""The examples of a page in their order, and the server that answers them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import httpx
import torch
import typer.main

from recserve.bundle.bundle import Bundle
from recserve.cli import app
from recserve.cli.demo import DRAFTER, LLM
from recserve.config import ServerConfig
from recserve.drafters.eagle.files import save_eagle
from recserve.drafters.medusa.files import save_medusa
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig, save_retriever
from recserve.models.loading import load_language_model
from tests.support.live_server import run_server
from tests.support.paths import ROOT
from tests.support.shared_folders import shared_folder
from tests.support.text_engines import eagle
from tests.support.tiny_bundle import tiny_bundle
from tests.support.tiny_llm import tiny_llm

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A quoted body may go over several lines; a comment ends with its line.
COMMAND = re.compile(
    r"^((?:[A-Z_]+=[^\s$]+ )*recserve serve|(?:[A-Z]+=\$\()?curl) (?:'[^']*'|\\\n|[^'\n])*",
    re.MULTILINE,
)
FILE = re.compile(r"^# (\w+\.yaml)$", re.MULTILINE)
ADDRESS = "localhost:8080"
FORM = "content-type: application/x-www-form-urlencoded"
LMDB = "lmdb:store"  # in place of a Redis, which the tests of Redis start
ADMIN_KEY = "an-admin-key-of-some-length"
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@dataclass(frozen=True)
class Serve:
    """A command `recserve serve`.

    Attributes:
        words: The command.
        environment: Variables set before it.
    """

    words: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Request:
    """A command `curl`.

    Attributes:
        method: Method.
        path: Path with query.
        body: Body, or None. It may name a shell variable.
        content_type: Type of the body: that of `-H`, or curl's own.
        shown: The comment behind it or on the next line, or "".
        variable: Shell variable that gets a field of the answer, or None.
        field: That field.
    """

    method: str
    path: str
    body: str | None
    content_type: str
    shown: str
    variable: str | None
    field: str


@dataclass(frozen=True)
class Block:
    """A block that is not of the shell."""

    language: str
    text: str


def read_page(page: str) -> list[Serve | Request | Block]:
    """Returns the commands `recserve serve` and `curl`, and the other blocks, in their order."""
    parts: list[Serve | Request | Block] = []
    for language, block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        if language not in ("bash", "sh"):
            parts.append(Block(language, block))
            continue
        for command in COMMAND.finditer(block):
            following = re.match(r"\n# (.*)", block[command.end() :])
            comment = re.search(r"\s# (.*)$", command[0]) or following
            words = shlex.split(command[0].replace("\\\n", " "), comments=True)
            if "curl" in command[1]:
                parts.append(_read_request(words, "" if comment is None else comment[1]))
            else:
                first = words.index("recserve")
                variables = dict(word.split("=", 1) for word in words[:first])
                parts.append(Serve(tuple(words[first:]), variables))
    return parts


def _read_request(words: list[str], shown: str) -> Request:
    given = dict(zip(words, words[1:], strict=False))
    (url,) = (word for word in words if word.startswith(f"{ADDRESS}/"))
    method = given.get("-X") or ("POST" if "-d" in given else "GET")
    variable, assigned, _ = words[0].partition("=$(")
    return Request(
        method,
        url.removeprefix(ADDRESS),
        given.get("-d"),
        given.get("-H", FORM).partition(": ")[2],
        shown,
        variable if assigned else None,
        words[-1].strip(".)") if assigned else "",
    )


def find_pages() -> list[str]:
    """README and the pages of the site, relative to the checkout."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in pages]


def serve_before(parts: list[Serve | Request | Block], index: int) -> Serve | None:
    """Returns the last command `recserve serve` before a part; None means `make demo`."""
    return next((part for part in parts[index::-1] if isinstance(part, Serve)), None)


@contextmanager
def page_server(page: str, serve: Serve | None) -> Iterator[httpx.Client]:
    """Yields a client of the server that a command of a page starts, with small models.

    The command runs in the current folder, which gets the bundle and the models that it names.

    Args:
        page: The page, whose YAML blocks with a name are written into files.
        serve: The command; None serves what `make demo` serves, with an admin key and the folder
            `bundles`, whose bundle `monday` may be loaded.
    """
    for language, block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        if language == "yaml" and (name := FILE.match(block)):
            Path(name[1]).write_text(block, encoding="utf-8")
    with mock.patch.dict(os.environ, {"RECSERVE_KV_BYTES": str(2**24)}):
        config = _load_demo() if serve is None else _load(serve)
    with run_server(config) as client:
        yield client


def _load_demo() -> ServerConfig:
    bundles, llm = Path("bundles"), Path(LLM)
    _make_bundle(bundles / "monday")
    _make_bundle(bundles / "sunday")
    _make_llm(llm)
    named = {"bundle": bundles / "sunday", "llm": llm, "drafters": (DRAFTER,)}
    admin = {"bundles_dir": bundles, "admin_keys": [ADMIN_KEY]}
    return ServerConfig.load({**named, **admin, "port": 0})


def _load(serve: Serve) -> ServerConfig:
    """Returns the settings that the command gives, after making the folders that it names."""
    named = list(zip(serve.words, serve.words[1:], strict=False))
    for flag, value in named:
        if flag == "--bundle":
            _make_bundle(Path(value))
        elif flag == "--llm":
            _make_llm(Path(value))
        elif flag == "--drafter" and "=" in value:
            name, _, place = value.partition("=")
            _make_drafter(name, Path(place), Path(serve.words[serve.words.index("--llm") + 1]))
    words = [LMDB if word.startswith("redis://") else word for word in serve.words[1:]]
    with (
        mock.patch.dict(os.environ, serve.environment),
        mock.patch("recserve.server.run.serve", return_value=0) as run,
    ):
        typer.main.get_command(app)([*words, "--port", "0"], standalone_mode=False)
    (config,) = run.call_args.args
    return config


def _make_bundle(place: Path) -> None:
    if not place.exists():
        shutil.copytree(shared_folder("bundle-of-pages", _fill_bundle) / "bundle", place)


def _fill_bundle(folder: Path) -> None:
    """Writes a small bundle whose retriever knows two outcomes."""
    bundle = Bundle.open(tiny_bundle(folder))
    torch.manual_seed(0)
    outcomes, shares = ("click", "purchase"), (0.6, 0.4)
    shape = RetrieverConfig(32, 24, outcomes, shares, "events", (1, 2), (0.6, 0.4))
    save_retriever(DenseRetriever(shape), bundle.directory("retriever"))
    bundle.commit("retriever", {})


def _make_llm(place: Path) -> None:
    if not place.exists():
        tiny_llm(place)
        settings = place / "tokenizer_config.json"
        known = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        settings.write_text(json.dumps({**known, "chat_template": CHAT}), encoding="utf-8")


def _make_drafter(name: str, place: Path, target: Path) -> None:
    model = load_language_model(target)
    if name == "draft_model":
        tiny_llm(place, seed=1)
    elif name == "medusa":
        size, words = model.config.decoder.hidden_size, model.config.vocab_size
        heads = MedusaHeads(MedusaConfig(size, words, 3))
        heads.start_from(model)
        save_medusa(heads, place)
    elif name == "eagle":
        save_eagle(eagle(model, True).network, place)
    else:
        raise ValueError(f"drafter {name}: say here how a small one is made")
