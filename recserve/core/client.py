"""The salt of the current request: requests with different salts share no cached prefix.

A client can infer from the time to the first token whether its prompt was cached. Without salts, a
client could guess prompts and histories of other clients (CVE-2025-46570). A query takes over the
salt of the context that it is made in, so that it follows the request to other threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CURRENT: ContextVar[bytes] = ContextVar("cache_salt", default=b"")


def current_salt() -> bytes:
    """Returns the salt of this context; empty outside of `salted`."""
    return _CURRENT.get()


@contextmanager
def salted(salt: bytes) -> Iterator[None]:
    """Sets the salt of the queries that are made inside.

    Args:
        salt: At most 64 bytes.
    """
    token = _CURRENT.set(salt)
    try:
        yield
    finally:
        _CURRENT.reset(token)
