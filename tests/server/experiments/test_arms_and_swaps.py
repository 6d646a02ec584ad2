"""A new bundle must have the models that the arms of experiments need."""

import shutil
import time
from dataclasses import replace

import pytest

from recserve.bundle.bundle import MANIFEST, Bundle
from recserve.service import Service
from tests.support.bundle_shelf import shelf
from tests.support.live_server import live

KEY = "an-admin-key-of-24-chars"
ADMIN = {"Authorization": f"Bearer {KEY}"}
ARMS = [{"name": "beam"}, {"name": "nezha", "fields": {"strategy": "nezha"}}]
EXPERIMENT = {"name": "search", "use": "recommend", "arms": ARMS}


def without_nezha(folder):
    """Takes the weights of one strategy out of a bundle."""
    manifest, gone = Bundle.open(folder).manifest, "drafters/nezha"
    shutil.rmtree(folder / gone)
    files = {k: v for k, v in manifest.files.items() if not k.startswith(gone)}
    sections = {k: v for k, v in manifest.sections.items() if k != gone}
    changed = replace(manifest, files=files, sections=sections)
    (folder / MANIFEST).write_text(changed.to_json())


@pytest.fixture
def server(tmp_path):
    bundles = shelf(tmp_path)
    without_nezha(bundles / "two")
    service = Service.open(bundles / "one", f"lmdb:{tmp_path}/store", "cpu")
    settings = {"bundles_dir": bundles, "admin_keys": [KEY], "device": "cpu"}
    with live(service, experiments=[EXPERIMENT], **settings) as client:
        yield client


def load(server, name, **options):
    begun = server.post("/admin/bundle:load", json={"path": name, **options}, headers=ADMIN)
    assert begun.status_code == 202, begun.text
    end = time.monotonic() + 60
    while (found := server.get("/admin/bundle", headers=ADMIN).json())["state"] == "loading":
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_a_bundle_that_an_arm_does_not_fit_is_refused(server):
    found = load(server, "two")
    assert found["state"] == "failed" and found["current"]["path"] == "one"
    words = "two is not loaded: experiment search, arm nezha: strategy: expected one of"
    assert found["message"].startswith(words)
    assert load(server, "other")["state"] == "ready"


def test_force_loads_it_and_the_arm_gets_plain_answers(server, caplog):
    with caplog.at_level("WARNING", "recserve"):
        found = load(server, "two", force=True)
    assert found["state"] == "ready" and found["current"]["path"] == "two"
    assert any("by force" in record.message for record in caplog.records)
    reasons = set()
    for number in range(20):
        body = {"user": {"id": f"user{number:06d}"}, "k": 3}
        answer = server.post("/v1/recommend", json=body)
        assert answer.status_code == 200, answer.text
        reasons.add(answer.json()["experiment"]["reason"] is None)
    assert reasons == {True, False}
