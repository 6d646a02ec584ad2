"""What .ci/run makes of the ends of its parts, with a `make` that only prints."""

import os
import shutil
import subprocess

import pytest

from tests.support.paths import ROOT

# Prints what MAKE_<target> says; `; ` ends a line, and a line `exit N` ends the command.
MAKE = """#!/usr/bin/env bash
said=MAKE_${1//-/_}
for argument in "$@"; do
    case $argument in PYTEST_ARGS=*last-failed*) said=${said}_again ;; esac
done
while read -r line; do
    case $line in exit*) $line ;; *) echo "$line" ;; esac
done < <(sed 's/; /\\n/g' <<<"${!said:-12 passed in 1.00s}")
"""
FAILED = (
    "FAILED tests/test_a.py::test_one - it broke; 1 failed, 11 passed, 1 skipped in 1.00s; exit 2"
)
THREE = "3 failed, 9 passed in 1.00s; exit 2"


@pytest.fixture
def run(tmp_path):
    """Runs .ci/run with the given words of `make`; returns the status and the lines."""
    folder = tmp_path / "checkout" / ".ci"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / "run")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "make").write_text(MAKE)
    (tools / "make").chmod(0o755)

    def run(**said):
        environment = {f"MAKE_{name}": text for name, text in said.items()}
        environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "CI_TIER": "torch"}
        found = subprocess.run([folder / "run"], env=environment, capture_output=True, text=True)
        return found.returncode, found.stdout.splitlines()

    return run


def test_the_last_line_sums_up_all_parts(run):
    status, lines = run(check="all is well")
    assert status == 0 and lines[-1] == "36 passed in 3.00s"
    assert not any("once more" in line for line in lines)


def test_a_failed_test_that_passes_alone_is_named(run):
    status, lines = run(check="ok", test=FAILED, test_again="1 passed in 0.10s")
    assert status == 0 and lines[-1] == "36 passed, 2 skipped in 3.00s"
    named = "unsteady, passed when run again: tests: tests/test_a.py::test_one"
    assert named in lines
    assert named.replace("tests:", "tests, tier torch:", 1) in lines


@pytest.mark.parametrize("again", ["1 failed in 0.10s; exit 2", "no tests ran in 0.10s", "oops"])
def test_a_test_that_fails_twice_is_a_failure(run, again):
    status, lines = run(check="ok", test_slow=FAILED, test_slow_again=again)
    assert status == 2 and lines[-1] == "1 failed, 35 passed, 1 skipped in 3.00s"


def test_three_failed_tests_do_not_run_again(run):
    status, lines = run(check="ok", test_slow=THREE, test_slow_again="3 passed in 0.10s")
    assert status == 2 and lines[-1] == "3 failed, 33 passed in 3.00s"


def test_a_part_that_ends_early_is_an_error(run):
    status, lines = run(check="E501 Line too long; exit 1", test_slow="8 passed in 1.00s; exit 3")
    assert status == 1 and lines[-1] == "32 passed, 2 errors in 3.00s"
