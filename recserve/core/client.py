"""The client of the current request: who it is, and the salt of its cached prefixes.

A client has a share of each model's queue. Requests with different salts share no cached prefix: a
client can infer from the time to the first token whether its prompt was cached. Without salts, it
could guess prompts and histories of other clients (CVE-2025-46570).

A query takes over both from the context that it is made and submitted in, so that they follow the
request to other threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CURRENT: ContextVar[tuple[bytes, bytes]] = ContextVar("client", default=(b"", b""))


def current_client() -> bytes:
    """Returns the client of this context; empty outside of `client_scope`."""
    return _CURRENT.get()[0]


def current_salt() -> bytes:
    """Returns the salt of this context; empty outside of `client_scope`."""
    return _CURRENT.get()[1]


@contextmanager
def client_scope(client: bytes, salt: bytes = b"") -> Iterator[None]:
    """Sets the client and the salt of the queries that are made inside.

    Args:
        client: Any bytes that only this client has.
        salt: At most 64 bytes.
    """
    token = _CURRENT.set((client, salt))
    try:
        yield
    finally:
        _CURRENT.reset(token)
