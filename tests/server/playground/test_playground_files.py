"""The files of the playground: strict headers, nothing from elsewhere, data is never code."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from recserve.server import playground
from recserve.server.playground import POLICY, static_files
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

FILES = static_files()
SOURCES = {name: file.body.decode() for name, file in FILES.items()}
PAGE = SOURCES["index.html"]
SCRIPTS = "".join(text for name, text in SOURCES.items() if name.endswith(".js"))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    with live(Service.open(shared_bundle(), f"lmdb:{store}", "cpu")) as running:
        yield running


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_file_loads_nothing_from_elsewhere_and_is_short(name):
    text = SOURCES[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import|\burl\(", text)
    assert text.count("\n") <= 350


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_data_cannot_become_code(name):
    text = SOURCES[name]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text
    assert not re.search(r"<[a-z][^>]*\s(?:on\w+|style)=", text)
    assert "new Function" not in text and "unsafe" not in POLICY


def test_the_page_has_no_inline_code():
    assert not re.search(r"<script(?![^>]*\ssrc=)", PAGE) and "<style" not in PAGE
    linked = re.findall(r'(?:src|href)="/playground/([^"]+)"', PAGE)
    imported = re.findall(r'from "\./([^"]+)"', SCRIPTS)
    assert {*linked, *imported} == {*SOURCES} - {"index.html"}


def test_every_element_that_a_script_asks_for_is_there():
    ids = re.findall(r'\bid="([\w-]+)"', PAGE)
    asked = set(re.findall(r'byId\("([\w-]+)"\)', SCRIPTS))
    assert len(ids) == len(set(ids))
    assert asked and asked <= set(ids)


def test_no_list_of_strategies_or_drafters_stands_in_the_page():
    for name in ("speculative", "nezha", "specgr", "ngram", "suffix", "lookahead"):
        assert f'"{name}"' not in SCRIPTS and f">{name}<" not in PAGE


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/", "text/html; charset=utf-8"),
        ("/playground/app.js", "text/javascript; charset=utf-8"),
        ("/playground/base.css", "text/css; charset=utf-8"),
        ("/playground/mark.svg", "image/svg+xml"),
    ],
)
def test_a_file_has_its_type_and_is_asked_for_again_only_if_it_changed(client, path, kind):
    answer = client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
    same = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "..%2Fapp.py", "%2e%2e", "a/b.js"])
def test_other_names_are_unknown(client, name):
    answer = client.get(f"/playground/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_route"


def test_all_files_of_the_page_are_packaged():
    kinds = {name.rpartition(".")[2] for name in SOURCES}
    assert kinds == {"html", "css", "js", "svg"}
    there = {file.name for file in files(playground.__package__).iterdir() if file.is_file()}
    assert there == {*SOURCES, "__init__.py"}


def test_every_button_and_link_is_clicked_in_a_browser_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    clicked = re.findall(r'\.click\(f?"#([\w-]+)(\{?)', tests)
    controls = re.findall(r"<(?:button|a|summary)\b([^>]*)>", PAGE)
    ids = {re.search(r'\bid="([\w-]+)"', one)[1] for one in controls}
    ids -= {"browse-go"}  # makes Enter submit the form; it is never seen
    # `#tab-{name}` stands for all ids that begin with `tab-`.
    missing = [
        one
        for one in ids
        if not any(one == name or brace and one.startswith(name) for name, brace in clicked)
    ]
    assert ids and not missing
