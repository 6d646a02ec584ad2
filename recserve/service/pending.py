"""A pending answer: a part of the service starts it, the engine computes it, the caller waits."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from recserve.core.client import LOCAL, Client
from recserve.core.errors import DeadlineExceeded
from recserve.core.futures import wait_all
from recserve.core.request import Request, Timing
from recserve.engine.engine import Engine
from recserve.schemas.items import RankRequest, RecommendRequest, TimingMs
from recserve.service.fields import check_num_values
from recserve.service.histories import Histories
from recserve.service.live_catalog import LiveCatalog
from recserve.service.snapshot import Snapshot

A = TypeVar("A", covariant=True)
B = TypeVar("B", bound=RecommendRequest | RankRequest)


@dataclass(frozen=True)
class Late(Generic[A]):
    """An answer without the engine, for a request whose deadline passes.

    Attributes:
        at_s: time.monotonic() value at which the engine's work ends, a little before the deadline.
        answer: Builds the answer.
    """

    at_s: float
    answer: Callable[[], A]


@dataclass
class Pending(Generic[A]):
    """An answer that the engine computes.

    Attributes:
        futures: The engine's results; empty if the answer does not need the engine.
        finish: Builds the answer from the results, in the order of the futures.
        late: The answer for a deadline that passes; None raises DeadlineExceeded.
    """

    futures: Sequence[Future[Any]]
    finish: Callable[[list[Any]], A]
    late: Late[A] | None = None

    def wait(self) -> A:
        """Waits for the answer. Raises the engine's exception if the request failed."""
        try:
            return self.finish(wait_all(self.futures))
        except (DeadlineExceeded, CancelledError):
            if self.late is None:
                raise
            return self.late.answer()

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
        late: As in `Pending`.
    """

    queries: Sequence[Request]
    finish: Callable[[list[Any]], A]
    late: Late[A] | None = None

    def submit(self, engine: Engine, client: Client) -> Pending[A]:
        """Submits the queries, all or none. Raises what the engine refuses them with."""
        return Pending(engine.submit_all(self.queries, client), self.finish, self.late)


def submit_prepared(
    engine: Engine, answers: Sequence[Prepared[A] | Exception], client: Client
) -> list[Pending[A]]:
    """Submits the queries of all answers, or none. An error stays the answer that it is.

    Raises:
        Exception: What the engine refuses a query with.
    """
    prepared = [one for one in answers if isinstance(one, Prepared)]
    queries = [query for one in prepared for query in one.queries]
    futures = iter(engine.submit_all(queries, client))
    return [
        fail_with(one)
        if isinstance(one, Exception)
        else Pending([next(futures) for _ in one.queries], one.finish, one.late)
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


@dataclass(frozen=True)
class ItemCall(Generic[B]):
    """A request about items from its start to its answer.

    Attributes:
        body: The request.
        request_id: Identifies the request; None draws a random id.
        deadline_s: time.monotonic() value of the deadline; None means no deadline.
        snapshot: The one catalogue version of the answer.
        watch: Stopwatch of the request.
        degraded: What the answer says about the catalogue.
    """

    body: B
    request_id: str | None
    deadline_s: float | None
    snapshot: Snapshot
    watch: Stopwatch
    degraded: tuple[str, ...] = ()


class ItemService(ABC, Generic[B, A]):
    """A part of the service that answers requests about items: how each of them begins."""

    def __init__(self, engine: Engine, catalog: LiveCatalog, histories: Histories) -> None:
        """Connects the parts that a request needs.

        Args:
            engine: Runs the queries.
            catalog: The live catalogue.
            histories: Stored events of users.
        """
        self._engine, self._catalog, self._histories = engine, catalog, histories

    def begin(
        self,
        body: B,
        request_id: str | None = None,
        deadline_s: float | None = None,
        client: Client = LOCAL,
    ) -> Pending[A]:
        """Starts an answer.

        Args:
            body: The request.
            request_id: Identifies the request; None means the body's own id, or a random one.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.
            client: Who sends the request.

        Raises:
            InvalidRequest: If the body does not match the catalogue or the models.
            QueueFull: If the queue of the engine is full.
            CatalogBehind: If the catalogue does not contain `min_catalog_version` in time.
        """
        return self._prepare(body, request_id, deadline_s).submit(self._engine, client)

    def begin_late(self, body: B, request_id: str | None = None) -> Pending[A] | None:
        """Starts the answer for a deadline that passed before the request was prepared.

        Returns:
            An answer that needs neither the engine nor the store; None if the request wants none.
        """
        return None

    def check_together(self, bodies: Sequence[B]) -> None:
        """Raises InvalidRequest if the requests of one body ask for too many values of fields."""
        check_num_values((self._num_items(body), len(body.fields)) for body in bodies)

    def _prepare(self, body: B, request_id: str | None, deadline_s: float | None) -> Prepared[A]:
        catalog = self._catalog
        if body.min_catalog_version is not None:
            catalog.await_version(body.min_catalog_version, deadline_s)
        follower = catalog.follower
        stale = () if follower is None else follower.degraded
        watch, snapshot = Stopwatch(), catalog.current
        return self._translate(
            ItemCall(body, request_id or body.request_id, deadline_s, snapshot, watch, stale)
        )

    @abstractmethod
    def _num_items(self, body: B) -> int:
        """Returns how many items an answer may have."""

    @abstractmethod
    def _translate(self, call: ItemCall[B]) -> Prepared[A]:
        """Checks a request and makes its queries. Raises InvalidRequest."""


def id_of_part(request_id: str, index: int) -> str:
    """Returns the id of one of several requests in a body."""
    return f"{request_id}.{index}"[-128:]


def earlier_deadline(timeout_ms: int | None, deadline_s: float | None = None) -> float | None:
    """Returns the earlier deadline of a timeout that begins now and another one.

    Args:
        timeout_ms: The timeout; None means no timeout.
        deadline_s: time.monotonic() value of the other deadline; None means no deadline.
    """
    if timeout_ms is None:
        return deadline_s
    own_s = time.monotonic() + timeout_ms / 1e3
    return own_s if deadline_s is None else min(own_s, deadline_s)


def fail_with(error: Exception) -> Pending[A]:
    """Returns a pending answer that raises an error."""

    def fail(_: list[Any]) -> A:
        raise error

    return Pending((), fail)
