"""Every recorded answer is given again, over HTTP and by `Service`."""

from collections import defaultdict

import pytest

from tests.recorded.cases import Case, read_cases
from tests.recorded.files_check import JOBS, check_files
from tests.recorded.replay import replay_http, replay_service
from tests.recorded.worlds import WORLDS
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
