"""Triton's statistics: what a process has answered with each model."""

from __future__ import annotations

import time

from recserve.schemas.inference import Durations, InferenceStats, ModelStatistics


class InferenceCounts:
    """Answers of a model in one version: Triton's statistics."""

    def __init__(self) -> None:
        self._requests = {True: 0, False: 0}
        self._times_ns = {True: 0, False: 0}
        self._rows = 0
        self._last_ms = 0

    def count(self, began_ns: int, rows: int) -> None:
        """Counts a request; one without answered rows has failed."""
        answered = rows > 0
        self._requests[answered] += 1
        self._times_ns[answered] += time.monotonic_ns() - began_ns
        self._rows += rows
        if answered:
            self._last_ms = time.time_ns() // 10**6

    def describe(self, name: str, version: str) -> ModelStatistics:
        """Returns the statistics under a name."""
        success, fail = (
            Durations(count=self._requests[answered], ns=self._times_ns[answered])
            for answered in (True, False)
        )
        return ModelStatistics(
            name=name,
            version=version,
            last_inference=self._last_ms,
            inference_count=self._rows,
            execution_count=success.count,
            inference_stats=InferenceStats(success=success, fail=fail),
        )
