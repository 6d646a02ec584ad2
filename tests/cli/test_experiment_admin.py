"""`recserve experiments`, against a live server."""

import json

import pytest
from typer.testing import CliRunner

from recserve.cli import app
from recserve.service import Service
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle

ADMIN = "an-admin-key-of-24-chars"
ONE = {
    "name": "speed",
    "use": "recommend",
    "arms": [{"name": "beam", "fields": {"strategy": "beam"}}, {"name": "auto"}],
}


def invoke(*arguments, **environment):
    return CliRunner().invoke(app, ["experiments", *map(str, arguments)], env=environment)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = f"lmdb:{tmp_path_factory.mktemp('store')}"
    service = Service.open(shared_bundle(), store, "cpu")
    with live(service, experiments=[ONE], admin_keys=ADMIN) as running:
        yield running


def test_list_stop_and_start(client):
    url = client.base_url
    listed = invoke("list", url)
    assert listed.exit_code == 0 and "speed (split, coverage 1): running" in listed.stdout
    stopped = invoke("stop", url, "speed", "--key", ADMIN)
    assert stopped.exit_code == 0 and "stopped by an operator" in stopped.stdout
    found = json.loads(invoke("list", url, "--json").stdout)
    assert found == client.get("/v1/experiments").json()
    assert found["experiments"][0]["status"] == "stopped"
    started = invoke("start", url, "speed", RECSERVE_ADMIN_KEYS=f"{ADMIN}, another-key-of-24-chars")
    assert started.exit_code == 0 and "running" in started.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stop", "speed"), "answered 401: an admin key is needed"),
        (("stop", "none", "--key", ADMIN), "answered 404: experiments of this server: speed"),
    ],
)
def test_a_refusal_is_shown(client, arguments, words):
    command, *rest = arguments
    refused = invoke(command, client.base_url, *rest)
    assert refused.exit_code != 0 and words in str(refused.exception)


def test_a_server_that_is_not_there():
    refused = invoke("list", "http://127.0.0.1:9")
    assert refused.exit_code != 0 and "does not answer" in str(refused.exception)
    assert invoke("list", "127.0.0.1:9").exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "expected a mapping, got list"),
        ("experiments: {}", "expected one key experiments with a list"),
        ("experiments: []\nport: 1", "expected one key experiments with a list"),
        ("a: [", "cannot be read"),
    ],
)
def test_serve_refuses_a_wrong_file(tmp_path, text, words):
    path = tmp_path / "experiments.yaml"
    path.write_text(text)
    refused = CliRunner().invoke(app, ["serve", "--bundle", "b", "--experiments", str(path)])
    assert refused.exit_code == 2
    assert words in " ".join(refused.output.replace("│", " ").split())


def test_serve_names_the_wrong_setting(tmp_path):
    path = tmp_path / "experiments.yaml"
    path.write_text("experiments: [{name: a, use: recommend, arms: [{name: x}]}]")
    bundle = tmp_path / "b"
    bundle.mkdir()
    (bundle / "manifest.json").write_text("{}")
    refused = CliRunner().invoke(
        app, ["serve", "--bundle", str(bundle), "--experiments", str(path)]
    )
    assert refused.exit_code != 0
    assert "experiments[0].arms: expected array of length >= 2" in str(refused.exception)
