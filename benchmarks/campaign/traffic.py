"""Requests of the campaign, and figures of what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from benchmarks.campaign.site import LLM_NAME
from recserve.load.generator import Call, HttpExchange, LoadOptions, Shot, drive
from recserve.load.targets import TARGETS, Target, Text
from tests.support.tiny_bundle import NUM_ITEMS

Body = dict[str, object]
COMPLETIONS = Text(name="completions", path="/v1/completions", streams=False)


def item(number: int) -> str:
    """Returns the id of an item of the campaign's bundle."""
    return f"item{number % NUM_ITEMS:06d}"


def history(random: np.random.Generator, most: int = 12) -> list[str]:
    """Returns a drawn history of 1 to `most` items."""
    return [item(int(n)) for n in random.integers(0, NUM_ITEMS, random.integers(1, most + 1))]


def slate_bodies(
    random: np.random.Generator, count: int, strategy: str = "beam", beam_width: int = 20
) -> list[Body]:
    """Returns bodies of /v1/recommend for histories that are drawn."""
    fixed = {"k": 10, "strategy": strategy, "beam_width": beam_width}
    return [{"history": history(random), **fixed} for _ in range(count)]


def text_bodies(random: np.random.Generator, count: int, tokens: int) -> list[Body]:
    """Returns bodies of /v1/completions with drawn prompts that write `tokens` tokens each."""
    fixed: Body = {"model": LLM_NAME, "max_tokens": tokens, "ignore_eos": True}
    return [
        {**fixed, "prompt": "".join(chr(97 + n) for n in random.integers(0, 26, 20)), "seed": seed}
        for seed in range(count)
    ]


def send(
    url: str,
    bodies: Sequence[Body],
    *,
    target: Target = TARGETS["recommend"],
    workers: int = 0,
    rate: float = 0.0,
    seconds: float | None = None,
) -> tuple[HttpExchange, ...]:
    """Sends requests and waits for all answers.

    Args:
        url: Address of the server.
        bodies: The bodies, used in turn.
        target: The route, which reads the answers.
        workers: Clients of a closed loop; 0 sends at `rate`.
        rate: Requests per second of an open loop.
        seconds: How long to send; None sends each body once.
    """
    encoded = [msgspec.json.encode(body) for body in bodies]
    count = len(bodies)
    if seconds is not None:
        count = max(1, int(rate * seconds)) if rate else int(seconds * 5000)
    shots = [
        Shot(n / rate if rate else 0.0, (Call(f"{url}{target.path}", encoded[n % len(encoded)]),))
        for n in range(count)
    ]
    options = LoadOptions(workers=workers, stop_after_s=seconds, max_in_flight=4096)
    return asyncio.run(drive(shots, target, options)).exchanges


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile; nan without values."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def apart(some: Sequence[float], others: Sequence[float], percent: float = 99) -> float:
    """Returns the larger percentile of two samples over the smaller one; at least 1."""
    low, high = sorted((percentile(some, percent), percentile(others, percent)))
    return high / low


def latencies_ms(exchanges: Sequence[HttpExchange], status: int = 200) -> list[float]:
    """Returns the latencies of the answers with a status."""
    return [one.latency_ms for one in exchanges if one.status == status]


def count(exchanges: Sequence[HttpExchange], test: Callable[[int], bool]) -> int:
    """Counts the exchanges whose status passes a test; 0 means that there was no answer."""
    return sum(test(one.status) for one in exchanges)


def statuses(exchanges: Sequence[HttpExchange]) -> str:
    """Returns how often each status came."""
    found: dict[int, int] = {}
    for one in exchanges:
        found[one.status] = found.get(one.status, 0) + 1
    return ", ".join(f"{n} x {status or 'no answer'}" for status, n in sorted(found.items()))
