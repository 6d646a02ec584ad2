"""Planned requests and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from recserve.experiments.load.targets import Reply


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Attributes:
        url: Full address.
        body: JSON.
        arm: Number of the arm.
        sample: Number of the sample.
    """

    url: str
    body: bytes
    arm: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Shot:
    """Calls that are sent one after the other.

    Attributes:
        at_s: Scheduled time of the first call, in seconds from the start; ignored in a closed loop.
        calls: One call, or the calls of a pair.
    """

    at_s: float
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """One request and what became of it. Times are seconds from the start of the run.

    Attributes:
        shot: Number of the shot.
        place: Place of the call within its shot.
        arm: Number of the arm.
        sample: Number of the sample.
        scheduled: When it was to be sent; for later calls of a shot, when the one before ended.
        sent: When it was sent.
        done: When the last byte arrived, or the request failed.
        status: HTTP status; 0 if there was no answer.
        error: Kind of failure; None if the answer was read.
        detail: What the server or the client said of the failure.
        pieces: Times at which pieces of text arrived.
        reply: What the answer said; None on failure.
    """

    shot: int
    place: int
    arm: int
    sample: int
    scheduled: float
    sent: float
    done: float
    status: int
    error: str | None
    detail: str = ""
    pieces: tuple[float, ...] = ()
    reply: Reply | None = None

    @property
    def latency_ms(self) -> float:
        """Time from the scheduled send to the last byte."""
        return (self.done - self.scheduled) * 1e3
