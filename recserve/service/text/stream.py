"""One text while it is written: tokens in on the engine's thread, pieces of text out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from recserve.core.request import Timing
from recserve.speculation.completion import (
    Completion,
    FinishReason,
    SpeculationCounts,
    TextCommit,
    TokenLogprobs,
)
from recserve.tokenizer.detokenizer import Detokenizer


@dataclass(frozen=True)
class WrittenToken:
    """A token with its log-probabilities. offset: characters of the text before it."""

    token: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Piece:
    """What one step added to the text number `index`; text may be empty while more is needed.

    first: nothing came before. ended: nothing follows; then finish_reason or error is set.
    num_tokens: tokens of the text up to and including this piece.
    """

    index: int
    text: str = ""
    num_tokens: int = 0
    first: bool = False
    tokens: tuple[WrittenToken, ...] = ()
    finish_reason: FinishReason | None = None
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether this is the last piece of its text."""
        return self.finish_reason is not None or self.error is not None


Listener = Callable[[Piece], None]


class TextStream:
    """Gathers one text. Its methods run on the engine's thread, one after another.

    listener: told of every piece as it comes; None: the text is read at the end.
    """

    def __init__(
        self,
        index: int,
        table: Sequence[bytes],
        stops: Sequence[str],
        min_tokens: int,
        listener: Listener | None,
        beginning: str = "",
    ) -> None:
        """table: bytes of each token. beginning: stands before the text, as an echoed prompt."""
        self.index = index
        self._detokenizer = Detokenizer(table, stops, min_tokens)
        self._listener = listener
        self._beginning = beginning
        self._pieces: list[str] = []
        self._emitted = False
        self._ended = threading.Event()
        self.tokens: list[WrittenToken] = []
        self.finish_reason: FinishReason | None = None
        self.counts = SpeculationCounts()
        self.timing = Timing()
        if beginning:
            self._emit(beginning)

    @property
    def text(self) -> str:
        """What has been written and may be shown."""
        return "".join(self._pieces)

    @property
    def num_tokens(self) -> int:
        """Written tokens, up to the one that completed a stop string."""
        return self._detokenizer.num_tokens

    def on_commit(self, commit: TextCommit) -> bool:
        """Tokens of one step. True: a stop string ended the text."""
        detokenizer = self._detokenizer
        shown: list[str] = []
        written: list[WrittenToken] = []
        for place, token in enumerate(commit.tokens):
            if detokenizer.stopped:
                break
            offset = len(self._beginning) + detokenizer.num_characters
            shown.append(detokenizer.push(token))
            if commit.logprobs:
                written.append(WrittenToken(token, offset, commit.logprobs[place]))
        text = "".join(shown)
        if text or written:
            self._emit(text, tuple(written))
        return detokenizer.stopped

    def end(self, future: Future[Any]) -> None:
        """The engine is done with it: the rest of the text and why it ended, or the error."""
        try:
            self._finish(future)
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Until `end` is done, which is an instant after its future is."""
        self._ended.wait()

    def _finish(self, future: Future[Any]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            if self._listener is not None:
                self._listener(Piece(self.index, error=error))
            return
        result = future.result()
        assert isinstance(result, Completion)
        rest = self._detokenizer.finish()
        self.finish_reason = "stop" if self._detokenizer.stopped else result.finish_reason
        self.counts = result.counts
        self.timing = result.timing
        self._emit(rest, finish_reason=self.finish_reason)

    def _emit(
        self,
        text: str,
        tokens: tuple[WrittenToken, ...] = (),
        finish_reason: FinishReason | None = None,
    ) -> None:
        first = not self._emitted
        self._emitted = True
        self._pieces.append(text)
        self.tokens += tokens
        if self._listener is not None:
            piece = Piece(self.index, text, self.num_tokens, first, tokens, finish_reason)
            self._listener(piece)
