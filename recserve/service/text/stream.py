"""One text during its generation: takes tokens on the engine's thread, and emits pieces of text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from recserve.core.plugins import request_error
from recserve.core.request import Timing
from recserve.schemas.logprobs import PromptLogprobs
from recserve.speculation.completion import (
    Completion,
    FinishReason,
    SpeculationCounts,
    TextCommit,
    TokenLogprobs,
)
from recserve.tokenizer.detokenizer import Detokenizer
from recserve.tokenizer.token_bytes import Spelling


@dataclass(frozen=True)
class WrittenToken:
    """A token with its log-probabilities.

    Attributes:
        token: Token id.
        offset: Number of characters of the text before it.
        logprobs: Log-probabilities at this token; None for the first token of a prompt.
        num_left_out: Bytes that the token begins with and that are not in the text, such as the
            space that the tokeniser puts before a text.
    """

    token: int
    offset: int
    logprobs: TokenLogprobs | None
    num_left_out: int = 0


@dataclass(frozen=True)
class Piece:
    """A new piece of one text.

    Attributes:
        index: Number of the text in its request.
        text: New characters; may be empty while a character or a stop string is incomplete.
            A piece has the tokens of one step, and the last one the finish reason too.
        num_tokens: Tokens of the text up to and including this piece.
        first: True for the first piece.
        tokens: New tokens, if log-probabilities are requested.
        finish_reason: Why the text ended; None before the last piece.
        token_texts: The characters of `text` by token; empty for an echoed prompt.
        token_accepted: Whether a draft proposed each of these tokens.
        error: Error that ended the text.
    """

    index: int
    text: str = ""
    num_tokens: int = 0
    first: bool = False
    tokens: tuple[WrittenToken, ...] = ()
    finish_reason: FinishReason | None = None
    token_texts: tuple[str, ...] = ()
    token_accepted: tuple[bool, ...] = ()
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
        spelling: Spelling,
        stops: Sequence[str],
        min_tokens: int,
        listener: Listener | None,
        beginning: str = "",
        begun: bool = True,
        open_tokens: Sequence[int] = (),
    ) -> None:
        """Starts an empty text.

        Args:
            index: Number of the text in its request.
            spelling: What each token writes.
            stops: Strings that end the text.
            min_tokens: Number of first tokens in which stop strings are ignored.
            listener: Called with every piece; None if the text is only read at the end.
            beginning: Characters before the generated text, such as an echoed prompt.
            begun: False if the prompt has no text, so that this is the start of a text.
            open_tokens: Last tokens of an echoed prompt, which leave a character open. They are not
                in `beginning`.
        """
        self.index = index
        self._detokenizer = Detokenizer(spelling, stops, min_tokens, begun)
        self._listener = listener
        beginning += self._detokenizer.prime(open_tokens)
        self._beginning = beginning
        self._pieces: list[str] = []
        self._emitted = False
        self._ended = threading.Event()
        self._failed: Exception | None = None
        self._last_accepted = False
        # Of the newest commit, until a piece has it.
        self._unsent = beginning
        self._unsent_tokens: tuple[WrittenToken, ...] = ()
        # Characters of the tokens since the last piece, and whether a draft proposed the tokens.
        self._token_texts: list[str] = []
        self._token_accepted: list[bool] = []
        self.tokens: list[WrittenToken] = []
        # About the prompt, in a whole response: its tokens, and the same in vLLM's form.
        self.prompt: Sequence[WrittenToken] = ()
        self.prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self.finish_reason: FinishReason | None = None
        self.counts = SpeculationCounts()
        self.timing = Timing()
        if beginning:
            self._emit()

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
            if commit.logprobs:
                start, left_out = detokenizer.place(token)
                offset = len(self._beginning) + start
                written.append(WrittenToken(token, offset, commit.logprobs[place], left_out))
            shown.append(detokenizer.push(token))
        # Accepted tokens behind a stop string are not part of the text.
        num_accepted = min(commit.num_accepted, len(shown))
        if commit.num_draft_tokens:
            self.counts.add(commit.num_draft_tokens, num_accepted, commit.num_draft_levels)
        self.counts.num_paused_steps += commit.paused
        self._token_texts += shown
        self._token_accepted += [place < num_accepted for place in range(len(shown))]
        if shown:
            self._last_accepted = self._token_accepted[-1]
        self._unsent += "".join(shown)
        self._unsent_tokens += tuple(written)
        ended = detokenizer.stopped or commit.finish_reason is not None
        if shown and not ended:  # the last tokens go with the finish reason, in `_finish`
            self._emit()
        return detokenizer.stopped

    def end(self, future: Future[Any]) -> None:
        """Emits the rest of the text with its finish reason, or the error."""
        try:
            self._finish(future)
        except BaseException as error:
            self._failed = request_error(error)
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Waits until `end` has run, which follows the future's completion immediately.

        Raises:
            Exception: The error of the listener, if the last piece made it fail.
        """
        self._ended.wait()
        if self._failed is not None:
            raise self._failed

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
        self.timing = result.timing
        # Characters that were held back belong to the last token.
        if rest:
            self._token_texts.append(rest)
            self._token_accepted.append(self._last_accepted)
        self._unsent += rest
        self._emit(self.finish_reason)

    def _emit(self, finish_reason: FinishReason | None = None) -> None:
        """Sends what no piece has yet."""
        text, tokens, first = self._unsent, self._unsent_tokens, not self._emitted
        self._unsent, self._unsent_tokens, self._emitted = "", (), True
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
                token_texts=tuple(self._token_texts),
                token_accepted=tuple(self._token_accepted),
            )
            self._listener(piece)
        self._token_texts, self._token_accepted = [], []
