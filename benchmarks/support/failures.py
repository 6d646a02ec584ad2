"""Rows for failed measurements, so that the other measurements continue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def failure(name: str, why: object) -> dict[str, Any]:
    """Returns a row that is not `ok`. `why` is an exception or a text."""
    note = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else str(why)
    return {"name": name, "ok": False, "note": note[:600]}


def attempted(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the measured row, or the row of its failure."""
    try:
        return measure()
    except Exception as error:
        return failure(name, error)


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Collects recserve's warnings and errors, for example why a capture failed."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words, error = record.getMessage(), record.exc_info and record.exc_info[1]
            while error:  # the error that broke a capture is the cause of the visible one
                words, error = f"{words}: {type(error).__name__}: {error}", error.__context__
            heard.append(words)

    log, ear = logging.getLogger("recserve"), Ear(logging.WARNING)
    log.addHandler(ear)
    try:
        yield heard
    finally:
        log.removeHandler(ear)


def once(make: Callable[..., T]) -> Callable[..., T]:
    """Caches the result of each set of arguments.

    A failure is cached too, as text, since an exception would keep tensors on the device alive.
    """
    made: dict[Any, T] = {}
    failed: dict[Any, str] = {}

    def kept(*key: Any) -> T:
        if key not in made and key not in failed:
            try:
                made[key] = make(*key)
            except Exception as error:
                failed[key] = f"{type(error).__name__}: {error}"
        if key in failed:
            raise RuntimeError(failed[key])
        return made[key]

    return kept
