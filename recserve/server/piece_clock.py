"""Measures the times between the pieces of the texts of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass

from recserve.metrics import Metrics
from recserve.service.text.stream import Piece


@dataclass
class _Progress:
    """What is known of one text.

    Attributes:
        first_s: Time of the first piece.
        last_s: Time of the last piece with new tokens.
        first_tokens: Tokens of the first piece.
        num_tokens: Tokens so far.
    """

    first_s: float
    last_s: float
    first_tokens: int
    num_tokens: int


class StreamLatency:
    """Takes every piece on the engine's thread and counts the times in the metrics."""

    def __init__(self, metrics: Metrics, began_s: float) -> None:
        """Starts without pieces.

        Args:
            metrics: The server's metrics.
            began_s: time.monotonic() value at the first byte of the request.
        """
        self._metrics, self._began_s = metrics, began_s
        self._texts: dict[int, _Progress] = {}

    def take(self, piece: Piece) -> None:
        """Counts the time since the text's last piece; the first piece of text 0 ends the wait."""
        now = time.monotonic()
        known = self._texts.get(piece.index)
        if known is None:
            if piece.index == 0 and piece.error is None:
                self._metrics.first_token.observe(now - self._began_s)
            tokens = piece.num_tokens
            self._texts[piece.index] = _Progress(now, now, tokens, tokens)
        elif piece.num_tokens > known.num_tokens:
            self._metrics.inter_token.observe(now - known.last_s)
            known.last_s, known.num_tokens = now, piece.num_tokens

    def close(self) -> None:
        """Counts the mean time per token of each text."""
        for text in self._texts.values():
            tokens = text.num_tokens - text.first_tokens
            if tokens > 0:
                self._metrics.token_seconds.observe((text.last_s - text.first_s) / tokens)
