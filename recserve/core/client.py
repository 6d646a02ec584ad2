"""Who sends a request."""

from __future__ import annotations

from typing import NamedTuple


class Client(NamedTuple):
    """Who sends a request. Every call that leads to the engine or to a thread takes it.

    A client has a share of each model's queue and of the threads. Requests with different salts
    share no cached prefix: a client can infer from the time to the first token whether its prompt
    was cached. Without salts, it could guess prompts and histories of other clients
    (CVE-2025-46570).

    Attributes:
        key: Any bytes that only this client has. Empty if a caller in this process sends the
            request: no share binds it.
        salt: Only requests with the same salt share cached prefixes, and what drafters learn. At
            most 64 bytes.
    """

    key: bytes = b""
    salt: bytes = b""


LOCAL = Client()
"""A caller in this process."""
