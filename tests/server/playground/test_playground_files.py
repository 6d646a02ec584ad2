"""Files of the playground: types, caching and strict headers."""

from importlib.resources import files

import pytest

from recserve.server import playground
from recserve.server.playground import POLICY, static_files
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

FILES = static_files()
SOURCES = {name: file.body.decode() for name, file in FILES.items()}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    with live(Service.open(shared_bundle(), f"lmdb:{store}", "cpu")) as running:
        yield running


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


def test_all_files_of_the_page_are_packaged():
    kinds = {name.rpartition(".")[2] for name in SOURCES}
    assert kinds == {"html", "css", "js", "svg"}
    there = {file.name for file in files(playground.__package__).iterdir() if file.is_file()}
    assert there == {*SOURCES, "__init__.py"}
