"""Answers of GET /v1/experiments, as the route gives them."""

from typing import Any

NOTHING = (
    "nothing to judge: in mode paired every answer is of control, so clicks say nothing about "
    "wide; judge clicks in mode split"
)

WARNING = (
    "users may not be divided by the weights (641, 559 users, p = 0.00042); check that no arm "
    "loses users. One fair experiment of 25 looks so at some time"
)
FIRST = {
    "kind": "keep_control",
    "text": "keep control: clicks fell by 60 % (21 % to 99 %)",
    "time": "2026-11-27T14:02:11.000001Z",
    **{"answers": 812, "events": 61, "control_answers": 803, "control_events": 149},
}
KEPT = {"started": "2026-11-20T08:00:00Z", "durable": True}


def verdict(kind: str, text: str) -> dict[str, Any]:
    """Returns a verdict whose guardrails hold."""
    guardrails = [
        {"name": name, "result": "holds", "control": 0.0, "arm": 0.0}
        for name in ("errors", "empty", "p99")
    ]
    return {"kind": kind, "text": text, "guardrails": guardrails, "days": None}


def clicks(events: int, answers: int, *change: float) -> dict[str, Any]:
    """Returns the goal `click` with a change, its lower and its upper end."""
    ends = dict(zip(("change", "change_low", "change_high"), change or (None,) * 3, strict=True))
    return {"type": "click", "events": events, "rate": events / answers, "spread": 1.1, **ends}


def arm(
    name: str,
    p99_ms: float | None,
    low_ms: float | None,
    high_ms: float | None,
    goals: tuple[dict[str, Any], ...] = (),
    verdict: dict[str, Any] | None = None,
    first: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns one arm with the given p99 and its interval, 1,200 answers and their clicks."""
    counts = {"requests": 1204 if p99_ms else 0, "errors": 0, "empty": 2}
    times = {"p50_ms": p99_ms and p99_ms / 3, "p99_ms": p99_ms}
    interval = {"p99_low_ms": low_ms, "p99_high_ms": high_ms}
    judged = {"answers": 1200 if goals else 0, "goals": list(goals), "verdict": verdict}
    judged |= {"first_verdict": first, "users": 641}
    return {"name": name, "weight": 0.5, **counts, **times, **interval, **judged}


def experiments(name: str = "nezha-or-beam") -> dict[str, Any]:
    """Returns a running experiment, and one that fell back and has an arm without requests."""
    running = {
        "name": name,
        "mode": "split",
        "status": "running",
        "reason": None,
        "coverage": 0.5,
        "smallest_effect": 0.1,
        "sample_ratio_p": 0.00042,
        "warning": WARNING,
        **KEPT,
        "arms": [
            arm("control", 9.4, 8.9, 10.1, (clicks(212, 1200),)),
            arm(
                *(name, 6.2, 5.8, 6.9),
                (clicks(103, 1200, -0.51, -0.72, -0.31),),
                verdict("keep_control", "keep control: clicks fell by 51 % (31 % to 72 %)"),
                FIRST,
            ),
        ],
    }
    ended = {
        "name": "wide beam",
        "mode": "paired",
        "status": "fallen_back",
        "reason": f"p99 of arm {name} was 41 ms, above the limit of 30 ms",
        "coverage": 0.1,
        "smallest_effect": 0.1,
        "sample_ratio_p": None,
        "warning": None,
        **KEPT,
        "arms": [
            arm("control", 9.2, 7.1, 13.5),
            arm("wide", None, None, None, (), verdict("no_goal", NOTHING)),
        ],
    }
    return {"experiments": [running, ended]}
