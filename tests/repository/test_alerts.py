"""The alert rules: valid, explained in the docs, and each fires when it should and only then."""

import re
from collections.abc import Iterable

import yaml

from recserve.server.errors import REASONS
from tests.support.paths import ROOT
from tests.support.promtool import promtool

FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
BY_NAME = {rule["alert"]: rule for rule in RULES}

JOB = {"job": "recserve", "instance": "a"}
FAILED, COUNT = "recserve_requests_failed_total", "recserve_request_seconds_count"
Series = dict[str, str]


def series(name: str, values: str, **labels: str) -> Series:
    inside = ", ".join(f'{key}="{value}"' for key, value in {**JOB, **labels}.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def failing(reason: str, per_minute: int) -> list[Series]:
    return [series(FAILED, f"0+{per_minute}x60", reason=reason), series(COUNT, "0+600x60")]


def latency(name: str, bounds: Iterable[str], slow: int, fast: int, **labels: str) -> list[Series]:
    low, high = bounds
    counts = {low: fast, high: fast + slow, "+Inf": fast + slow}
    return [series(f"{name}_bucket", f"0+{n}x60", le=le, **labels) for le, n in counts.items()]


def items(slow: int) -> list[Series]:
    return latency("recserve_request_seconds", ("0.5", "2.0"), slow, 1000, route="/v1/recommend")


def first_token(slow: int) -> list[Series]:
    return latency("recserve_first_token_seconds", ("5.0", "10.0"), slow, 1000)


def missing(per_minute: int, **labels: str) -> list[Series]:
    asked = series(COUNT, "0+600x60", route="/v1/recommend")
    return [series("recserve_degraded_answers_total", f"0+{per_minute}x60", **labels), asked]


def pages(used: int) -> list[Series]:
    values = {"used": used, "free": 2, "cached": 1}
    return [series("recserve_kv_pages", f"{n}x60", state=state) for state, n in values.items()]


def one(name: str, values: str, **labels: str) -> list[Series]:
    return [series(name, values, **labels)]


# By alert: series that fire it, series that do not, and the labels that the alert keeps.
SLATES, DRAFTS = "recserve_slate_log_dropped_total", "recserve_draft_acceptance_alarm"
FDS = one("process_max_fds", "1024x60")
CASES = {
    "RecserveDown": (one("up", "0x60"), one("up", "1x60"), JOB),
    "RecserveRestarting": (
        one("process_start_time_seconds", "1 1 2 2 3 3 4 4x60"),
        one("process_start_time_seconds", "1x60"),
        JOB,
    ),
    "RecserveErrors": (failing("internal", 12), failing("invalid", 400), {"instance": "a"}),
    "RecserveDeadlines": (failing("deadline", 12), failing("deadline", 3), {"instance": "a"}),
    "RecserveRejecting": (failing("queue_full", 12), failing("deadline", 12), {"instance": "a"}),
    "RecserveSlow": (items(100), items(1), {"instance": "a", "route": "/v1/recommend"}),
    "RecserveSlowFirstToken": (first_token(100), first_token(1), {"instance": "a"}),
    "RecserveIllegalItems": (
        one("recserve_illegal_items_total", "0x20 1x40"),
        one("recserve_illegal_items_total", "0x60"),
        JOB,
    ),
    "RecserveHistoryStoreFailing": (
        failing("features_down", 1),
        failing("invalid", 9),
        {"instance": "a"},
    ),
    "RecserveHistoriesMissing": (
        missing(12, code="history_unavailable"),
        missing(500, code="cold_start"),
        {"instance": "a"},
    ),
    "RecserveKvCacheFull": (pages(97), pages(30), JOB),
    "RecserveDraftAcceptance": (
        one(DRAFTS, "1x60", drafter="ngram"),
        one(DRAFTS, "0x60", drafter="ngram"),
        {**JOB, "drafter": "ngram"},
    ),
    "RecserveSlateLogDrops": (
        one(SLATES, "0x20 7x40", reason="queue_full"),
        one(SLATES, "7x60", reason="queue_full"),
        {"instance": "a"},
    ),
    "RecserveCatalogStale": (
        one("recserve_catalog_lag_seconds", "60x60"),
        one("recserve_catalog_lag_seconds", "1x60"),
        JOB,
    ),
    "RecserveCatalogLost": (
        one("recserve_catalog_losses_total", "0x20 1x40"),
        one("recserve_catalog_losses_total", "1x60"),
        JOB,
    ),
    "RecserveOpenFiles": (
        [*FDS, *one("process_open_fds", "900x60")],
        [*FDS, *one("process_open_fds", "80x60")],
        JOB,
    ),
}


def test_promtool_accepts_rules_and_configuration():
    assert f"{len(RULES)} rules found" in promtool("check", "rules", str(FOLDER / "alerts.yaml"))
    promtool("check", "config", "--syntax-only", str(FOLDER / "prometheus.yml"))


def test_reasons_of_failures_exist():
    named = re.findall(r'reason=~?"([^"]+)"', str([rule["expr"] for rule in RULES]))
    reasons = {reason for each in named for reason in each.split("|")}
    assert reasons and reasons <= {*REASONS, "queue_full", "write_failed"}


def test_every_alert_fires_when_it_should_and_only_then(tmp_path):
    assert set(CASES) == set(BY_NAME)
    tests = []
    for name, (firing, quiet, labels) in CASES.items():
        rule = BY_NAME[name]
        alert = {
            "exp_labels": {**labels, "severity": rule["labels"]["severity"]},
            "exp_annotations": rule["annotations"],
        }
        for given, expected in ((firing, [alert]), (quiet, [])):
            check = {"eval_time": "30m", "alertname": name, "exp_alerts": expected}
            tests.append(
                {"interval": "1m", "input_series": given, "alert_rule_test": [check], "name": name}
            )
    document = {"rule_files": [str(FOLDER / "alerts.yaml")], "tests": tests}
    path = tmp_path / "alerts_test.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(path))
