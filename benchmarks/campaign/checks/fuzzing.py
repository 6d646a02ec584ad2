"""R10: requests drawn from openapi.json by schemathesis."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.campaign.check import Budget, Figure, Finding, NotRun, check
from benchmarks.campaign.site import ADMIN_KEY, ServerProcess, Site

START_S = 6  # schemathesis takes seconds to start
# What schemathesis checks, and the statuses from 500 on that openapi.json describes.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance", "unsupported_method"),
)
SCHEMATHESIS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "501", "504"]
"""


@check(
    "R10", "API fuzzing", "requests drawn from openapi.json", cases=200_000, minimum_s=60, weight=2
)
def api(site: Site, budget: Budget) -> Finding:
    """Sends valid, damaged and senseless requests to every operation."""
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    if program is None:
        raise NotRun("schemathesis is not installed")
    with (
        site.server(llm=site.llm, admin_keys=[ADMIN_KEY], default_timeout_ms=60_000) as server,
        server.client(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        seconds = int(0.9 * budget.left_s) - START_S
        sent, failures = by_schemathesis(program, server, site, Path(folder), seconds)
        alive = client.get("/health/ready").status_code == 200
    figures = (
        Figure("failures of schemathesis' checks", len(failures), 0),
        Figure("not ready afterwards", not alive, 0),
    )
    return Finding(sent, figures, "; ".join(failures))


def by_schemathesis(
    program: str, server: ServerProcess, site: Site, folder: Path, seconds: int
) -> tuple[int, list[str]]:
    """Lets schemathesis test the server; returns how many requests it sent, and what failed."""
    settings, report = folder / "schemathesis.toml", folder / "report.json"
    settings.write_text(SCHEMATHESIS, encoding="utf-8")
    command = [program, "--config-file", str(settings), "run", f"{server.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {ADMIN_KEY}", "--checks", ",".join(CHECKS)]
    command += ["--phases", "examples,coverage,fuzzing", "--max-time", str(max(seconds, 1))]
    command += ["--no-shrink", "--continue-on-failure", "--no-color", "--seed", str(site.seed)]
    command += ["--generation-database", "none", "--report-json-path", str(report)]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds + 120
    )
    if not report.is_file():
        return 0, [f"schemathesis: {(ended.stdout + ended.stderr).strip()[-300:]}"]
    said = json.loads(report.read_text(encoding="utf-8"))
    failures = [f"{one['title']}: {', '.join(one['operations'])}" for one in said["failures"]]
    return said["test_cases"]["generated"], failures + [str(one) for one in said["errors"]]
