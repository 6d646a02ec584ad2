"""A backup of a running server holds all that it stores; restored, it serves the same again."""

import shutil
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from recserve import Service, ServiceOptions
from recserve.cli import app
from recserve.cli.backup import StateFolders, back_up, restore
from recserve.features.history.history import StoreUnavailable
from tests.support.live_server import live
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture
def bundle(tmp_path):
    return shutil.copytree(shared_bundle(), tmp_path / "shop.bundle")


ADMIN = "an-admin-key-of-24-chars"
EXPERIMENT = {
    "name": "fast",
    "use": "recommend",
    "arms": [
        {"name": "control", "fields": {"strategy": "beam"}},
        {"name": "nezha", "fields": {"strategy": "nezha"}},
    ],
}


def state_of(bundle, store=None):
    return StateFolders.of_server(bundle, store, None, None)


def run_beside(*arguments):
    """Runs a command as an operator does beside a server, in another process."""
    done = subprocess.run(
        [sys.executable, "-c", "from recserve.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_command(*arguments):
    """Runs a command in this process, which has no server."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def stored_files(folder):
    """Names of the files of a folder, without locks."""
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    return files - {"lock.mdb", ".lock"}


def test_what_was_backed_up_is_served_again(tmp_path, bundle):
    with Service.open(bundle, device="cpu") as service:
        item = service.samples(1, 1)["items"][0]
        service.put_items({"items": [{"item_id": "fresh", "title": "Rose"}]})
        service.add_events({"events": [{"user_id": "ann", "item_id": item}]})
        copy = tmp_path / "copy"
        told = run_beside("history", "backup", "--bundle", bundle, "--out", copy)
        assert "without counts of the list popular, 1 journals, and counts of 0 experi" in told
        service.delete_user("ann")
    for name in ("shop.bundle.history", "shop.bundle.items"):
        with pytest.raises(ValueError, match="exists; stop the server"):
            restore(state_of(bundle), tmp_path / "copy")
        shutil.rmtree(tmp_path / name)
    restore(state_of(bundle), tmp_path / "copy")
    with Service.open(bundle, device="cpu") as service:
        assert [event.item_id for event in service.history("ann").events] == [item]
        assert service.item("fresh").title == "Rose"


def test_a_backup_has_every_file_that_a_server_writes_beside_its_bundle(tmp_path, bundle):
    """Events and their types, item changes, counts of `popular` and of experiments."""

    def start(seed):
        experiments = [{**EXPERIMENT, "seed": seed}]
        service = Service.open(bundle, device="cpu", options=ServiceOptions(event_types=("wish",)))
        settings = {"experiments_dir": None, "admin_keys": ADMIN}
        return live(service, experiments=experiments, **settings)

    def ask(client, path):
        return client.get(path, headers={"Authorization": f"Bearer {ADMIN}"}).json()

    def state(client):
        (one,) = ask(client, "/v1/experiments")["experiments"]
        answer = client.post("/v1/recommend", json={"strategy": "popular", "k": 3})
        return [
            [(arm["name"], arm["answers"]) for arm in one["arms"]],
            [item["item_id"] for item in answer.json()["items"]],
            ask(client, "/v1/event-types"),
            ask(client, "/v1/users/ann/history"),
            ask(client, "/v1/items/fresh"),
        ]

    now = int(time.time())
    for seed in ("1", "2"):  # other settings put the counts of an experiment aside
        with start(seed) as client:
            client.put("/v1/items", json={"items": [{"item_id": "fresh", "title": "Rose"}]})
            seen = {"user_id": "ann", "item_id": "fresh", "type": "wish"}
            events = [{**seen, "timestamp": now - n} for n in range(60)]
            stored = client.post("/v1/events", json={"events": events})
            assert stored.json()["accepted"] == (60 if seed == "1" else 0)
            for n in range(4):
                client.post("/v1/recommend", json={"user": {"id": f"u{n}"}, "k": 3})
    with start("2") as client:
        expected = state(client)
    assert sum(answers for _, answers in expected[0]) == 4 and expected[1][0] == "fresh"

    folders = [path for path in tmp_path.iterdir() if path.name.startswith("shop.bundle.")]
    told = run_command("history", "backup", "--bundle", bundle, "--out", tmp_path / "copy")
    assert "with counts of the list popular, 1 journals, and counts of 1 experiments" in told
    assert stored_files(tmp_path / "copy") == set().union(*map(stored_files, folders))
    for folder in folders:
        shutil.rmtree(folder)
    run_command("history", "restore", "--bundle", bundle, "--from", tmp_path / "copy")
    with start("2") as client:
        assert state(client) == expected


def test_what_cannot_be_copied_is_said(tmp_path, bundle):
    with pytest.raises(StoreUnavailable):
        back_up(state_of(bundle, f"lmdb:{tmp_path}/none"), tmp_path / "one")
    with pytest.raises(ValueError, match="BGSAVE"):
        state_of(bundle, "redis://127.0.0.1:1/0")
    with pytest.raises(ValueError, match="is not empty"):
        back_up(state_of(bundle), bundle)
    with pytest.raises(ValueError, match="is no backup"):
        restore(state_of(bundle), tmp_path)
