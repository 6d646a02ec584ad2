"""What the campaign makes of the fuzzers' results."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from benchmarks.campaign.checks.fuzzing import Target, by_coverage, by_schemathesis


def script(path, *lines):
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def test_failures_of_schemathesis_are_told(tmp_path):
    said = {
        "test_cases": {"generated": 70},
        "failures": [{"title": "Server error", "operations": ["POST /v1/rank"]}],
        "errors": [],
    }
    site, server = SimpleNamespace(seed=3), SimpleNamespace(url="http://127.0.0.1:1")
    report = shlex.quote(json.dumps(said))
    sound = script(tmp_path / "a", f"for last; do :; done; echo {report} > $last")
    number, failures = by_schemathesis(sound, server, site, tmp_path, 1)
    assert (number, failures) == (70, ["Server error: POST /v1/rank"])
    (tmp_path / "report.json").unlink()
    broken = script(tmp_path / "b", "echo cannot load the schema; exit 1")
    assert by_schemathesis(broken, server, site, tmp_path, 1) == (
        0,
        ["schemathesis: cannot load the schema"],
    )


@pytest.mark.parametrize("status", [0, 77])
def test_an_input_that_atheris_finds_is_told(status, tmp_path, monkeypatch):
    lines = ["echo '#512 pulse' >&2", "echo 'Done 1234 runs in 5 second(s)' >&2"]
    if status:
        lines = [lines[0], 'printf bad > "$5/crash-1"', f"exit {status}"]
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", *lines))
    parser = Target("manifest", (b"{}",), json.loads, (ValueError,))
    site = SimpleNamespace(seed=0, bundle=tmp_path)
    number, failures = by_coverage(parser, site, tmp_path, 1)
    if status:
        (failure,) = failures
        assert number == 512 and failure.startswith("manifest: ") and "b'bad'" in failure
    else:
        assert (number, failures) == (1234, [])
