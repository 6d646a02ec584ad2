"""`recserve experiments`, against a live server."""

import json
import socket
import threading

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
    assert listed.exit_code == 0 and "speed (split, coverage 1, since 20" in listed.stdout
    assert "): running" in listed.stdout and "a restart forgets" not in listed.stdout
    stopped = invoke("stop", url, "speed", "--key", ADMIN)
    assert stopped.exit_code == 0 and "): stopped by an operator" in stopped.stdout
    found = json.loads(invoke("list", url, "--json").stdout)
    assert found == client.get("/v1/experiments").json()
    assert found["experiments"][0]["status"] == "stopped"
    started = invoke("start", url, "speed", RECSERVE_ADMIN_KEYS=f"{ADMIN}, another-key-of-24-chars")
    assert started.exit_code == 0 and "running" in started.stdout


def test_list_shows_goals_and_verdicts_and_writes_a_report(client, tmp_path):
    body = {"user": {"id": "anna"}, "k": 3}
    slate = client.post("/v1/recommend", json=body).json()
    click = {
        "user_id": "anna",
        "item_id": slate["items"][0]["item_id"],
        "type": "click",
        "attribution_token": slate["attribution_token"],
    }
    assert client.post("/v1/events", json={"events": [click]}).json()["accepted"] == 1
    report = tmp_path / "live.html"
    listed = invoke("list", client.base_url, "--report", report, COLUMNS="200")
    assert listed.exit_code == 0, listed.output
    assert "not yet: 1 of at least 50 clicks" in listed.stdout
    assert "goal" in listed.stdout and "per answer" in listed.stdout
    page = report.read_text()
    assert "Goal: click" in page and "1 of at least 50 clicks" in page


def test_plan_says_how_long_an_experiment_takes():
    short = invoke("plan", "--rate", 0.1, "--traffic", 10_000, "--effect", 0.2)
    assert short.exit_code == 0 and short.stdout.startswith("2.0 days: 20,064 answers with 2,006")
    long = invoke("plan", "--rate", 0.1, "--traffic", 10_000, "--effect", 0.01, "--arms", 3)
    assert " days: " in long.stdout and "with power 0.8" in long.stdout
    wrong = invoke("plan", "--rate", 0, "--traffic", 10_000)
    assert "rate: expected more than 0, got 0" in str(wrong.exception)


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


@pytest.mark.parametrize("address", ["http://127.0.0.1:port", "http://[::1", "http://a b"])
def test_an_address_that_names_no_server(address):
    refused = invoke("list", address)
    assert isinstance(refused.exception, RuntimeError)
    assert f"{address} does not answer" in str(refused.exception)


def test_a_server_that_speaks_no_http():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            with server.accept()[0] as one:
                one.recv(4096)
                one.sendall(b"220 mail.example ready\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        refused = invoke("list", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert isinstance(refused.exception, RuntimeError)
    assert "does not answer" in str(refused.exception)


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
