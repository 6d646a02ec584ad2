"""A pending answer: the caller starts it, the engine computes it, the caller finishes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from recserve.core.request import Result, Timing
from recserve.schemas.items import TimingMs

A = TypeVar("A")


@dataclass(frozen=True)
class Pending(Generic[A]):
    """An answer that the engine computes.

    Attributes:
        future: Result of the engine; None: the answer needs none.
        finish: Makes the answer from the engine's result.
    """

    future: Future[Result] | None
    finish: Callable[[Result | None], A]

    def wait(self) -> A:
        """Waits for the answer. Raises what the engine raised."""
        return self.finish(None if self.future is None else self.future.result())

    def outcome(self) -> A | Exception:
        """Waits for the answer. Returns the error in its place where there is one."""
        try:
            return self.wait()
        except Exception as error:
            return error


class Stopwatch:
    """Splits a request's time into the stages of the answer."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._features_ms = 0.0

    def features_done(self) -> None:
        """History, encoding and ids are ready; the engine takes over."""
        self._features_ms = (time.perf_counter() - self._began) * 1e3

    def read(self, engine: Timing | None) -> TimingMs:
        """The stages so far; `total` is everything from the start until now."""
        spent = engine or Timing()
        return TimingMs(
            queue=round(spent.queue_ms, 3),
            features=round(self._features_ms, 3),
            prefill=round(spent.prefill_ms, 3),
            draft=round(spent.draft_ms, 3),
            verify=round(spent.verify_ms, 3),
            total=round((time.perf_counter() - self._began) * 1e3, 3),
        )


def failed(error: Exception) -> Pending[A]:
    """Returns a pending answer that raises an error."""

    def fail(_: Result | None) -> A:
        raise error

    return Pending(None, fail)
