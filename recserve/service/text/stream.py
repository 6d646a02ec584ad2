"""One text during its generation: takes tokens on the engine's thread, and emits pieces of text."""

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
    """An output token with its log-probabilities.

    Attributes:
        token: Token id.
        offset: Number of characters of the text before it.
        logprobs: Log-probabilities at this token.
    """

    token: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Piece:
    """A new piece of one text.

    Attributes:
        index: Number of the text in its request.
        text: New characters; may be empty while a character or a stop string is incomplete.
        num_tokens: Tokens of the text up to and including this piece.
        first: True for the first piece.
        tokens: New tokens, if log-probabilities are requested.
        finish_reason: Why the text ended; None before the last piece.
        token_texts: The characters of `text` by token; the first `num_accepted` are of tokens that
            a draft proposed. Empty for an echoed prompt.
        num_accepted: Number of first entries of `token_texts` that a draft proposed.
        error: Error that ended the text.
    """

    index: int
    text: str = ""
    num_tokens: int = 0
    first: bool = False
    tokens: tuple[WrittenToken, ...] = ()
    finish_reason: FinishReason | None = None
    token_texts: tuple[str, ...] = ()
    num_accepted: int = 0
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """True if this is the last piece of its text."""
        return self.finish_reason is not None or self.error is not None


Listener = Callable[[Piece], None]


class TextStream:
    """Collects one text. Its methods run on the engine's thread, one after another."""

    def __init__(
        self,
        index: int,
        table: Sequence[bytes],
        stops: Sequence[str],
        min_tokens: int,
        listener: Listener | None,
        beginning: str = "",
    ) -> None:
        """Starts an empty text.

        Args:
            index: Number of the text in its request.
            table: Bytes of each token.
            stops: Strings that end the text.
            min_tokens: Number of first tokens in which stop strings are ignored.
            listener: Called with every piece; None if the text is only read at the end.
            beginning: Characters before the generated text, such as an echoed prompt.
        """
        self.index = index
        self._detokenizer = Detokenizer(table, stops, min_tokens)
        self._listener = listener
        self._beginning = beginning
        self._pieces: list[str] = []
        self._emitted = False
        self._ended = threading.Event()
        self._last_accepted = False
        self.tokens: list[WrittenToken] = []
        self.finish_reason: FinishReason | None = None
        self.counts = SpeculationCounts()
        self.timing = Timing()
        if beginning:
            self._emit(beginning)

    @property
    def text(self) -> str:
        """The text so far, without characters that may still belong to a stop string."""
        return "".join(self._pieces)

    @property
    def num_tokens(self) -> int:
        """Output tokens, up to and including the one that completed a stop string."""
        return self._detokenizer.num_tokens

    def on_commit(self, commit: TextCommit) -> bool:
        """Adds the tokens of one step. Returns True if a stop string ended the text."""
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
        text, accepted = "".join(shown), min(commit.num_accepted, len(shown))
        if shown:
            self._last_accepted = accepted == len(shown)
        if text or written:
            self._emit(text, tuple(written), texts=tuple(shown), num_accepted=accepted)
        return detokenizer.stopped

    def end(self, future: Future[Any]) -> None:
        """Emits the rest of the text with its finish reason, or the error."""
        try:
            self._finish(future)
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Waits until `end` has run, which follows the future's completion immediately."""
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
        # Characters that were held back belong to the last token.
        texts = (rest,) if rest else ()
        accepted = len(texts) if self._last_accepted else 0
        self._emit(rest, (), self.finish_reason, texts, accepted)

    def _emit(
        self,
        text: str,
        tokens: tuple[WrittenToken, ...] = (),
        finish_reason: FinishReason | None = None,
        texts: tuple[str, ...] = (),
        num_accepted: int = 0,
    ) -> None:
        first = not self._emitted
        self._emitted = True
        self._pieces.append(text)
        self.tokens += tokens
        if self._listener is not None:
            piece = Piece(
                index=self.index,
                text=text,
                num_tokens=self.num_tokens,
                first=first,
                tokens=tokens,
                finish_reason=finish_reason,
                token_texts=texts,
                num_accepted=num_accepted,
            )
            self._listener(piece)
