"""Answers of GET /v1/experiments, as the route gives them."""

from typing import Any


def arm(
    name: str, p99_ms: float | None, low_ms: float | None, high_ms: float | None
) -> dict[str, Any]:
    """Returns one arm with the given p99 and its interval."""
    counts = {"requests": 1204 if p99_ms else 0, "errors": 0, "empty": 2}
    times = {"p50_ms": p99_ms and p99_ms / 3, "p99_ms": p99_ms}
    interval = {"p99_low_ms": low_ms, "p99_high_ms": high_ms}
    return {"name": name, "weight": 0.5, **counts, **times, **interval}


def experiments(name: str = "nezha-or-beam") -> dict[str, Any]:
    """Returns a running experiment, and one that fell back and has an arm without requests."""
    running = {
        "name": name,
        "mode": "user",
        "status": "running",
        "reason": None,
        "coverage": 0.5,
        "sample_ratio_p": 0.42,
        "arms": [arm("control", 9.4, 8.9, 10.1), arm(name, 6.2, 5.8, 6.9)],
    }
    ended = {
        "name": "wide beam",
        "mode": "paired",
        "status": "fallen_back",
        "reason": f"p99 of arm {name} was 41 ms, above the limit of 30 ms",
        "coverage": 0.1,
        "sample_ratio_p": None,
        "arms": [arm("control", 9.2, 7.1, 13.5), arm("wide", None, None, None)],
    }
    return {"experiments": [running, ended]}
