"""`recserve bundle load|rollback|status` against a running server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import Result
from typer.testing import CliRunner

from recserve.cli import app
from recserve.engine.engine_config import EngineConfig
from recserve.service import Service, ServiceOptions
from tests.support.bundle_shelf import shelf
from tests.support.live_server import live

KEY = "an-admin-key-of-some-length"


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("shelf")
    bundles = shelf(folder)
    (bundles / "other" / "manifest.json").write_text("{}")
    options = ServiceOptions(engine=EngineConfig(kv_bytes=2**22), journal=bundles / ".items")
    service = Service.open(bundles / "one", f"lmdb:{folder}/history", "cpu", options)
    with live(service, bundles_dir=bundles, admin_keys=[KEY], kv_bytes=2**22) as server:
        yield str(server.base_url)


def run(*words: str, key: str | None = f"{KEY},another-key-of-16-characters") -> Result:
    environment = {"RECSERVE_ADMIN_KEYS": key}
    return CliRunner().invoke(app, ["bundle", *words], env=environment)


def test_load_follows_the_replacement_and_rollback_undoes_it(address):
    done = run("load", address, "two")
    assert done.exit_code == 0, done.output
    assert "current: two (model" in done.output and "previous: one" in done.output
    assert "ready: two answers" in done.output
    done = run("rollback", address)
    assert done.exit_code == 0 and "current: one" in done.output
    done = run("status", address)
    assert done.exit_code == 0 and "previous: two" in done.output


def test_a_refused_bundle_is_an_exit_status_of_1(address):
    done = run("load", address, "other")
    assert done.exit_code == 1
    assert "failed: other is not loaded: " in done.output and "current: one" in done.output


def test_errors_are_one_line(address):
    for words, key, message in (
        (["load", address, "nothing"], KEY, "404 unknown_bundle: bundles_dir has no bundle"),
        (["status", address], "wrong", "401 invalid_api_key: an admin key is needed"),
        (["status", "http://127.0.0.1:9"], KEY, "http://127.0.0.1:9: "),
        (["status", "nonsense"], KEY, "nonsense: "),
    ):
        done = run(*words, key=key)
        assert done.exit_code == 1 and isinstance(done.exception, RuntimeError)
        assert str(done.exception).startswith(message), done.exception
