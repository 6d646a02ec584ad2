"""The campaign's budget, tables and exit status; the checks themselves in a short form."""

import json
import subprocess
import sys

import pytest

from benchmarks.campaign import registry
from benchmarks.campaign.check import Budget, Check, Figure, Finding, NotRun
from benchmarks.campaign.report import document, markdown, rows, summary
from benchmarks.campaign.runner import FAILED, NOT_RUN, PASSED, run_all
from tests.support.paths import ROOT

MACHINE = {"processor": "one", "cores": 2, "load_before": 0.5}
# Checks whose bounds hold on a busy machine too.
SHORT = ("R4", "R14", "R21", "R22")


def checked(number, run, minimum_s=1.0, weight=1.0):
    return Check(number, f"check {number}", "what", 10, minimum_s, weight, run)


def found(value, bound=1.0, at_least=False):
    return lambda site, budget: Finding(3, (Figure("a figure", value, bound, at_least),))


def ran(*checks, seconds=60.0, clock=lambda: 0.0):
    return run_all(checks, None, seconds, lambda _: None, clock)


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
    assert (three.state, three.reason) == (NOT_RUN, "needs 90 s; 60 s are left")
    assert summary([one, two, three]) == "2 not run, 1 failed"


def test_checks_that_are_named_run_even_when_time_is_short():
    (outcome,) = run_all(
        [checked("R1", found(0.0), minimum_s=90)], None, 1.0, lambda _: None, skip=False
    )
    assert outcome.state == PASSED


def test_time_beyond_the_minima_is_shared_by_weight():
    given = []

    def note(site, budget):
        given.append(budget.seconds)
        return Finding(1, ())

    ran(checked("R1", note, 10, 3), checked("R2", note, 5, 1), seconds=55)
    assert given == [10 + 40 * 3 / 4, 5 + 50]  # the clock stands still: the first used nothing


def test_a_budget_yields_one_case_at_least():
    assert list(Budget(0.0).cases(5)) == [0]
    assert list(Budget(60.0).cases(5)) == [0, 1, 2, 3, 4]
    assert list(Budget(0.0).cases(5, least=3)) == [0, 1, 2]


def test_tables_and_document():
    outcomes = ran(checked("R1", found(2.0)), checked("R2", found(0.5)))
    first, second = rows(outcomes)
    assert first == ("R1", "check R1", "a figure", "2", "≤ 1", "3 of 10", "0", FAILED)
    assert second[-1] == PASSED
    assert "| R1 | check R1 | a figure | 2 | ≤ 1 |" in markdown(outcomes, MACHINE, 2.0)
    assert [one["state"] for one in document(outcomes, MACHINE)["checks"]] == [FAILED, PASSED]


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
