"""A pending answer: a part of the service starts it, the engine computes it, the caller waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from recserve.core.futures import wait_all
from recserve.core.request import Request, Timing
from recserve.engine.engine import Engine
from recserve.schemas.items import TimingMs

A = TypeVar("A", covariant=True)


@dataclass
class Pending(Generic[A]):
    """An answer that the engine computes.

    Attributes:
        futures: The engine's results; empty if the answer does not need the engine.
        finish: Builds the answer from the results, in the order of the futures.
    """

    futures: Sequence[Future[Any]]
    finish: Callable[[list[Any]], A]

    def wait(self) -> A:
        """Waits for the answer. Raises the engine's exception if the request failed."""
        return self.finish(wait_all(self.futures))

    def cancel(self) -> None:
        """Ends the work of the engine, if it is not done."""
        for future in self.futures:
            future.cancel()

    def outcome(self) -> A | Exception:
        """Waits for the answer, or for the exception if the request failed."""
        try:
            return self.wait()
        except Exception as error:
            return error


@dataclass(frozen=True)
class Prepared(Generic[A]):
    """A checked and translated request.

    Attributes:
        queries: What the engine computes; empty if the answer does not need the engine.
        finish: As in `Pending`.
    """

    queries: Sequence[Request]
    finish: Callable[[list[Any]], A]

    def begin(self, engine: Engine) -> Pending[A]:
        """Submits the queries, all or none. Raises what the engine refuses them with."""
        return Pending(engine.submit_all(self.queries), self.finish)


def begin_all(engine: Engine, answers: Sequence[Prepared[A] | Exception]) -> list[Pending[A]]:
    """Submits the queries of all answers, or none. An error stays the answer that it is.

    Raises:
        Exception: What the engine refuses a query with.
    """
    prepared = [one for one in answers if isinstance(one, Prepared)]
    futures = iter(engine.submit_all([query for one in prepared for query in one.queries]))
    return [
        failed(one)
        if isinstance(one, Exception)
        else Pending([next(futures) for _ in one.queries], one.finish)
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

    def fail(_: list[Any]) -> A:
        raise error

    return Pending((), fail)
