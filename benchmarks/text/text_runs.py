"""Runs of text methods, and the medians and ratios of several runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Written:
    """One run.

    Attributes:
        texts: Text of each request.
        seconds: Duration of the whole run.
        prefill_s: Time to the first commit.
        first: Tokens of each text in the first commit.
        steps: Number of decode steps.
        network_s: Time in the network and its head after the first commit; nan if not measured.
    """

    texts: list[list[int]]
    seconds: float
    prefill_s: float
    first: int
    steps: int
    network_s: float = float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, with prefill."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second, without prefill and the tokens of the first commit."""
        return sum(len(t) - self.first for t in self.texts) / (self.seconds - self.prefill_s)

    @property
    def overhead(self) -> float:
        """Share of the decode time that is spent outside the network."""
        return 1 - self.network_s / (self.seconds - self.prefill_s)


def middle(runs: list[Written], of: Callable[[Written], float]) -> float:
    """Returns the median."""
    return float(np.median([of(run) for run in runs]))


def figures(runs: dict[str, list[Written]], beside: dict[str, str]) -> dict[str, dict[str, float]]:
    """Returns medians of each method, and of its ratio to its peer (`beside`), run by run."""
    out: dict[str, dict[str, float]] = {}
    for name, own in runs.items():
        peer = runs.get(beside.get(name, "none"))
        out[name] = {
            "tokens_per_s": middle(own, lambda r: r.tokens_per_s),
            "decode_tokens_per_s": middle(own, lambda r: r.decode_tokens_per_s),
            "prefill_ms": 1e3 * middle(own, lambda r: r.prefill_s),
            "tokens_per_step": middle(own, lambda r: len(r.texts[0]) / r.steps),
            "overhead": middle(own, lambda r: r.overhead),
        }
        if peer is not None:
            pairs = list(zip(own, peer, strict=True))
            for field in ("tokens_per_s", "decode_tokens_per_s"):
                ratios = [getattr(a, field) / getattr(b, field) for a, b in pairs]
                out[name][f"{field}_ratio"] = float(np.median(ratios))
    return out
