"""What a measurement that failed leaves behind: a row that names it, and the rest goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def failure(name: str, why: object) -> dict[str, Any]:
    """A row that is not `ok`. why: an exception, or words."""
    note = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else str(why)
    return {"name": name, "ok": False, "note": note[:600]}


def attempted(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row that is measured, or that of its failure."""
    try:
        return measure()
    except Exception as error:
        return failure(name, error)


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What recserve logs meanwhile as a warning or worse: why a step was not recorded, say."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words, error = record.getMessage(), record.exc_info and record.exc_info[1]
            while error:  # a capture that cannot be ended hides what spoiled it
                words, error = f"{words}: {type(error).__name__}: {error}", error.__context__
            heard.append(words)

    log, ear = logging.getLogger("recserve"), Ear(logging.WARNING)
    log.addHandler(ear)
    try:
        yield heard
    finally:
        log.removeHandler(ear)


def once(make: Callable[..., T]) -> Callable[..., T]:
    """What is made for each set of arguments, made at its first call; so is what it failed with,
    in words, since an error would keep alive what lay on the device.
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
