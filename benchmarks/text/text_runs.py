"""Runs of a method that writes text, and the figures of many: medians, and ratios to a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Written:
    """One run. texts: of each request. prefill_s: to the first commit, which gave `first` tokens of
    each; seconds: all of it. network_s: inside the network and its head, from the first commit on;
    nan where not measured.
    """

    texts: list[list[int]]
    seconds: float
    prefill_s: float
    first: int
    steps: int
    network_s: float = float("nan")

    @property
    def tokens_per_s(self) -> float:
        """With prefill."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Without prefill and the tokens it gave."""
        return sum(len(t) - self.first for t in self.texts) / (self.seconds - self.prefill_s)

    @property
    def overhead(self) -> float:
        """Share of the decode steps that is spent outside the network."""
        return 1 - self.network_s / (self.seconds - self.prefill_s)


def middle(runs: list[Written], of: Callable[[Written], float]) -> float:
    """Median."""
    return float(np.median([of(run) for run in runs]))


def figures(runs: dict[str, list[Written]], beside: dict[str, str]) -> dict[str, dict[str, float]]:
    """Medians of each method, and of the ratios to its peer (`beside`) run by run."""
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
