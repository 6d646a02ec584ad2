"""Errors of the engine that any request may meet."""

from __future__ import annotations


class DeadlineExceeded(TimeoutError):
    """The request's deadline passed before its result was ready."""


class EngineStopped(RuntimeError):
    """The engine's thread has ended with an error. The process has to be started again."""


class TooManyQueries(ValueError):
    """A request has more texts, inputs or rankings than the engine's queue has places for it."""


class QueueFull(RuntimeError):
    """The engine's queue has no room for a request now.

    Attributes:
        retry_after_s: Seconds until half of the queue is likely to be free.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
