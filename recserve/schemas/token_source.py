"""The source of a streamed token: the draft or the target model."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class TokenSource(Struct, frozen=True):
    """The characters of one output token, and where the token came from.

    Attributes:
        text: New characters; empty while a character or a stop string is incomplete.
        source: `draft` if a drafter proposed the token and the target accepted it.
    """

    text: str
    source: Literal["draft", "target"]
