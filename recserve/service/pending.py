"""A pending answer: the caller starts it, the engine computes it, and the caller finishes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from recserve.core.request import Request, Result, Timing
from recserve.engine.engine import Engine
from recserve.schemas.items import TimingMs

A = TypeVar("A")


@dataclass(frozen=True)
class Pending(Generic[A]):
    """An answer that the engine computes.

    Attributes:
        future: The engine's result; None if the answer does not need the engine.
        finish: Builds the answer from the engine's result.
    """

    future: Future[Result] | None
    finish: Callable[[Result | None], A]

    def wait(self) -> A:
        """Waits for the answer. Raises the engine's exception if the request failed."""
        if self.future is None:
            return self.finish(None)
        try:
            result = self.future.result()
        except BaseException:
            self.future.cancel()
            raise
        return self.finish(result)

    def outcome(self) -> A | Exception:
        """Waits for the answer, or for the exception if the request failed."""
        try:
            return self.wait()
        except Exception as error:
            return error


@dataclass(frozen=True)
class Prepared(Generic[A]):
    """An answer that the engine can compute.

    Attributes:
        query: The engine's request; None if the answer does not need the engine.
        finish: As in `Pending`.
    """

    query: Request | None
    finish: Callable[[Result | None], A]

    def begin(self, engine: Engine) -> Pending[A]:
        """Submits the request. Raises what the engine refuses it with."""
        return Pending(None if self.query is None else engine.submit(self.query), self.finish)


def begin_all(engine: Engine, answers: Sequence[Prepared[A] | Exception]) -> list[Pending[A]]:
    """Submits the requests of all answers, or none. An error stays the answer that it is.

    Raises:
        Exception: What the engine refuses a request with.
    """
    queries = [a.query for a in answers if isinstance(a, Prepared) and a.query is not None]
    futures = iter(engine.submit_all(queries))
    return [
        failed(one)
        if isinstance(one, Exception)
        else Pending(None if one.query is None else next(futures), one.finish)
        for one in answers
    ]


class Stopwatch:
    """Measures how long each stage of a request takes."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._features_ms = 0.0

    def features_done(self) -> None:
        """Ends the features stage: history, encoding and item ids are ready."""
        self._features_ms = (time.perf_counter() - self._began) * 1e3

    def read(self, engine: Timing | None) -> TimingMs:
        """Returns the stages of the request in milliseconds.

        Args:
            engine: Times of the engine's stages; None if the engine did not take part.

        Returns:
            The stages; `total` is the time from the start until now.
        """
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
