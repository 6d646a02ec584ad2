"""The campaign's budget, tables and exit status; the checks themselves in a short form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.campaign import registry
from benchmarks.campaign.check import Budget, Check, Figure, Finding, NotRun
from benchmarks.campaign.isolation import run_isolated
from benchmarks.campaign.records import document, outcome_of, read_done, record
from benchmarks.campaign.report import markdown, rows, summary
from benchmarks.campaign.runner import (
    FAILED,
    NOT_JUDGED,
    NOT_RUN,
    PASSED,
    Listener,
    planned,
    run_all,
)
from benchmarks.campaign.site import Site
from tests.support.paths import ROOT

MACHINE = {"processor": "one", "cores": 2, "load_before": 0.5}
# Checks whose bounds hold on a busy machine too.
SHORT = ("R4", "R14", "R21", "R22")


def checked(number, run, minimum_s=1.0, weight=1.0):
    return Check(number, f"check {number}", "what", 10, minimum_s, weight, run)


def found(value, bound=1.0, at_least=False):
    return lambda site, budget: Finding(3, (Figure("a figure", value, bound, at_least),))


def ran(*checks, seconds=60.0, **options):
    return run_all(checks, None, seconds, Listener(), **{"clock": lambda: 0.0, **options})


@pytest.mark.parametrize(
    "value, at_least, state",
    [(1.0, False, PASSED), (1.1, False, FAILED), (1.0, True, PASSED), (0.9, True, FAILED)]
    + [(float("nan"), False, FAILED), (float("nan"), True, FAILED)],
)
def test_a_figure_beside_its_bound(value, at_least, state):
    (outcome,) = ran(checked("R1", found(value, 1.0, at_least)))
    assert outcome.state == state


def test_a_check_that_cannot_run_has_not_passed():
    def absent(site, budget):
        raise NotRun("no such tool")

    def broken(site, budget):
        raise ValueError("it broke")

    one, two, three = ran(
        checked("R1", absent), checked("R2", broken), checked("R3", found(0.0), minimum_s=90)
    )
    assert (one.state, one.reason) == (NOT_RUN, "no such tool")
    assert (two.state, two.reason) == (FAILED, "ValueError: it broke")
    assert (three.state, three.reason) == (NOT_RUN, "needs 90 s; 60 s left")
    assert summary([one, two, three]) == "2 not run, 1 failed"


def test_checks_that_are_named_run_even_when_time_is_short():
    (outcome,) = ran(checked("R1", found(0.0), minimum_s=90), seconds=1.0, skip=False)
    assert outcome.state == PASSED


def test_time_beyond_the_minima_is_shared_by_weight():
    given = []

    def note(site, budget):
        given.append(budget.seconds)
        return Finding(1, ())

    ran(checked("R1", note, 10, 3), checked("R2", note, 5, 1), seconds=55)
    assert given == [10 + 40 * 3 / 4, 5 + 50]  # the clock stands still: the first used nothing


def test_the_plan_uses_the_budget_and_a_check_without_weight_gets_its_minimum():
    checks = [checked("R1", None, 10, 3), checked("R2", None, 5, 0), checked("R3", None, 5, 1)]
    assert planned(checks, 60) == [10 + 40 * 3 / 4, 5, 5 + 10]
    assert planned(checks, 1) == [10, 5, 5]


def test_an_hour_gives_the_soak_a_quarter_of_it():
    checks = registry.all_checks()
    assert len(checks) == 24
    minutes = dict(zip((one.number for one in checks), planned(checks, 3600), strict=True))
    assert sum(minutes.values()) == pytest.approx(3600)
    assert minutes["R20"] >= 900
    shortest = [one for one in checks if minutes[one.number] < one.minimum_s]
    assert not shortest


def test_a_figure_that_is_not_judged_neither_fails_nor_passes():
    def short(value):
        figures = (Figure("slope", 99.0, 1.0, judged=False), Figure("errors", value, 0))
        return lambda site, budget: Finding(1, figures)

    one, two = ran(checked("R1", short(0)), checked("R2", short(1)))
    assert (one.state, two.state) == (NOT_JUDGED, FAILED)
    assert [row[-1] for row in rows([one])] == [NOT_JUDGED, ""]
    assert [row[-1] for row in rows([two])] == [FAILED, FAILED]


def test_outcomes_are_told_one_by_one_and_continue_from_their_file(tmp_path):
    told, path = [], tmp_path / "campaign.json"

    def broken(site, budget):
        raise ValueError("it broke")

    def never(site, budget):
        raise AssertionError("this check has run already")

    def ended(outcome, so_far):
        told.append((outcome.check.number, len(so_far)))
        path.write_text(json.dumps(document(so_far, MACHINE, 3, 1.0)))

    one, two, late = checked("R1", found(0.5)), checked("R2", broken), checked("R3", found(0), 90)
    first = run_all([one, two, late], None, 60, Listener(ended=ended), clock=lambda: 0.0)
    assert told == [("R1", 1), ("R2", 2), ("R3", 3)]
    again = [checked("R1", never), checked("R2", never), checked("R3", found(0.0))]
    done = read_done(path, again, 3)
    assert sorted(done) == ["R1", "R2"]
    second = ran(*again, done=done)
    assert [one.state for one in second] == [PASSED, FAILED, PASSED]
    assert [record(one) for one in second[:2]] == [record(one) for one in first[:2]]
    with pytest.raises(ValueError, match="--seed 3"):
        read_done(path, again, 4)


def test_time_of_an_earlier_part_counts():
    given = []

    def note(site, budget):
        given.append(budget.seconds)
        return Finding(1, ())

    earlier = outcome_of({**record(ran(checked("R1", found(0.5)))[0]), "seconds": 20.0}, None)
    ran(checked("R1", note), checked("R2", note, 5, 1), seconds=60, done={"R1": earlier})
    assert given == [40]


@pytest.mark.slow
def test_a_check_that_hangs_or_dies_is_ended_with_its_processes(tmp_path):
    started = tmp_path / "started"

    def hangs(site, budget):
        command = ["sh", "-c", f"echo $$ > {started}; sleep 600"]
        subprocess.run(command, start_new_session=True)

    def dies(site, budget):
        os._exit(7)

    def notes(site, budget):
        return Finding(2, (Figure("folder", float(site.scratch().exists()), 1),))

    site = Site(tmp_path, 0)

    def run(check, site, seconds):
        return run_isolated(check, site, 1.0, late_s=0.5)

    checks = [checked("R1", hangs), checked("R2", dies), checked("R3", notes)]
    one, two, three = run_all(checks, site, 60, Listener(), run=run)
    assert one.state == FAILED and "without a result" in one.reason
    assert two.state == FAILED and "status 7" in two.reason
    assert three.state == PASSED and three.finding.cases == 2
    pid = int(started.read_text())
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_budget_yields_one_case_at_least():
    assert list(Budget(0.0).cases(5)) == [0]
    assert list(Budget(60.0).cases(5)) == [0, 1, 2, 3, 4]
    assert list(Budget(0.0).cases(5, least=3)) == [0, 1, 2]


def test_tables_and_document():
    outcomes = ran(checked("R1", found(2.0)), checked("R2", found(0.5)))
    first, second = rows(outcomes)
    assert first == ("R1", "check R1", "a figure", "2", "≤ 1", "3 of 10", "0", FAILED)
    assert second[-1] == PASSED
    assert "| R1 | check R1 | a figure | 2 | ≤ 1 |" in markdown(outcomes, MACHINE)
    said = document(outcomes, MACHINE, 0, 1.0)["checks"]
    assert [one["state"] for one in said] == [FAILED, PASSED]


def test_every_check_has_a_number_of_the_table():
    numbers = [check.number for check in registry.all_checks()]
    assert set(numbers) <= {f"R{n}" for n in range(1, 25)}
    with pytest.raises(ValueError, match="unknown checks"):
        registry.chosen(["R99"])


@pytest.mark.slow
def test_the_short_form(tmp_path):
    command = [sys.executable, "-m", "benchmarks.campaign", "--minutes", "0.3"]
    files = ["--json", str(tmp_path / "c.json"), "--markdown", str(tmp_path / "c.md")]
    done = subprocess.run(
        [*command, "--only", *SHORT, *files], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads((tmp_path / "c.json").read_text())["checks"]
    assert {check["number"]: check["state"] for check in checks} == dict.fromkeys(SHORT, PASSED)
    assert (tmp_path / "c.md").read_text().count("passed") >= len(SHORT)
