"""Every recorded answer is given again, over HTTP and by `Service`; wrong answers are found."""

import hashlib
import json
import shutil
from collections import defaultdict
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from recserve.features.catalog import filter_columns
from recserve.schemas import validation
from tests.recorded import record
from tests.recorded.cases import ANSWERS, Case, read_cases, write_cases
from tests.recorded.compare import differences
from tests.recorded.files_check import JOBS, check_files
from tests.recorded.replay import Finding, replay_http, replay_service
from tests.recorded.worlds import WORLDS, World
from tests.support.grids import chosen

WITH_BUNDLE = chosen([name for name, world in WORLDS.items() if world.bundle is not None], "items")
SHOWN = 20


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_server_gives_the_recorded_answers(name):
    found = list(replay_http(WORLDS[name], read_cases(name)))
    assert not found, report(found)


def test_server_gives_some_recorded_answers_of_texts():
    """The first cases of each route and status. Only the metrics depend on all requests before."""
    cases: dict[tuple[str, int], list[Case]] = defaultdict(list)
    for case in read_cases("text"):
        if case.path != "/metrics":
            cases[case.route, case.answer["status"]].append(case)
    some = sorted((c for alike in cases.values() for c in alike[:8]), key=lambda case: case.at)
    found = list(replay_http(WORLDS["text"], some))
    assert len(some) > 60 and not found, report(found)


@pytest.mark.parametrize("name", WITH_BUNDLE)
def test_service_gives_the_recorded_answers(name):
    found = list(replay_service(WORLDS[name], read_cases(name)))
    assert not found, report(found)


@pytest.mark.parametrize("jobs", [(), pytest.param(JOBS, marks=pytest.mark.slow)])
def test_recorded_files_can_be_used(jobs):
    found = check_files(jobs=jobs)
    assert not found, report(found)


def report(found: list) -> str:
    return "\n".join([f"{len(found)} differences", *map(str, found[:SHOWN])])


def some_cases(route: str, status: int, count: int = 60):
    """Returns cases at the beginning of the world `items`, before anything is changed."""
    cases = read_cases("items")
    changed = min(c.at for c in cases if c.route == "post-v1-events")
    cases = [c for c in cases if c.at < changed and c.route == route and c.service]
    return [c for c in cases if c.answer["status"] == status][:count]


def replayed(cases, world: World = WORLDS["items"]) -> list[str]:
    return [str(finding) for finding in replay_service(world, cases)]


@pytest.mark.slow
def test_scores_that_are_off_by_less_than_1e_4_are_found(monkeypatch):
    """The norm before the recommender's head is scaled by 1.00005."""
    prepare = World.prepare

    def scaled(world, folder):
        settings = prepare(world, folder)
        bundle, name = folder / "bundles" / "items", "recommender/model.safetensors"
        weights = load_file(bundle / name)
        weights["decoder.norm.weight"] = weights["decoder.norm.weight"] * 1.00005
        save_file(weights, bundle / name)
        manifest = json.loads((bundle / "manifest.json").read_text())
        digest = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
        manifest["files"][name]["sha256"] = digest
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        return settings

    cases = some_cases("post-v1-recommend", 200, 400)
    cases = [case for case in cases if case.body.get("strategy") == "beam"]
    assert not replayed(cases)
    monkeypatch.setattr(World, "prepare", scaled)
    found = [f.difference for f in replay_service(WORLDS["items"], cases)]
    off = [abs(d.recorded - d.got) for d in found if d.place.endswith(".score")]
    assert len(off) > 20 and min(off) < 1e-4


@pytest.mark.slow
def test_range_filter_without_its_lower_end_is_found(monkeypatch):
    cases = [c for c in some_cases("post-v1-recommend", 200, 400) if "range" in json.dumps(c.body)]
    column = filter_columns.WholeColumn
    within = column.within
    monkeypatch.setattr(
        column, "within", lambda c, low, high: within(c, low, high) & ~c.equal([low or 0])
    )
    assert any(".items" in line for line in replayed(cases))


def test_another_error_message_is_found(monkeypatch):
    cases = some_cases("post-v1-recommend", 422)
    assert cases and not replayed(cases)
    summary = validation._summary
    monkeypatch.setattr(validation, "_summary", lambda value: summary(value).upper())
    assert any(".message" in line for line in replayed(cases))


def test_every_promised_field_counts():
    case = some_cases("post-v1-recommend", 200)[0]
    body = case.answer["body"]
    for name in body:
        other = {**case.answer, "body": {n: v for n, v in body.items() if n != name}}
        assert [d.place for d in differences(case.answer, other)] == [f"$.body.{name}"]


@pytest.mark.parametrize("reason", ["", "   ", "wanted"])
def test_a_change_needs_a_reason(reason):
    with pytest.raises(ValueError, match="a reason has 20 characters"):
        record.record_changes([], reason)


def test_a_wanted_change_is_recorded_with_its_reason(tmp_path):
    """Only the answer that differs changes, and the log names reason and route."""
    case = read_cases("product")[0]
    wrong = {**case.answer, "status": 500}
    folder = tmp_path / "answers"
    write_cases("product", [replace(case, answer=wrong)], folder)
    shutil.copy(ANSWERS / "changes.md", folder)
    (broken,) = read_cases("product", folder)
    (difference,) = differences(broken.answer, case.answer)
    found = [Finding("product", "http", broken, difference, case.answer)]
    assert record.record_changes(found, "the server no longer fails here", folder=folder) == 1
    assert [c.answer for c in read_cases("product", folder)] == [case.answer]
    log = (folder / "changes.md").read_text()
    assert "the server no longer fails here" in log and f"product/{case.route}: 1" in log
