"""From commits of the engine to pieces of text: the listener of a text request."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from recserve.core.text_request import FinishReason, TextCommit, TokenLogprobs
from recserve.text.detokenizer import Detokenizer
from recserve.text.stop_strings import StopStrings
from recserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextPiece:
    """What a step added for a reader.

    text: may be empty while a character or a possible stop string is unfinished. tokens and
    logprobs: of the step, those of a stop string included. finish_reason: with the last piece.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None


class TextStream:
    """A TextRequest's `on_commit`: gives out text, and ends the request at a stop string.

    text: all that was given out. stopped: the stop string found, None if none was.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Seq[str] = (),
        emit: Callable[[TextPiece], None] | None = None,
    ) -> None:
        """emit: called with every piece on the engine's thread; None: only `text` is kept."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._emit = emit
        self.text = ""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.stopped

    def __call__(self, commit: TextCommit) -> bool:
        """Take a commit in; True where the text shall end."""
        piece = self._stops.add(self._detokenizer.add(commit.tokens))
        if commit.finish_reason is not None and self.stopped is None:
            piece += self._stops.add(self._detokenizer.finish())
            piece += self._stops.finish()
        reason: FinishReason | None = "stop" if self.stopped is not None else commit.finish_reason
        self.text += piece
        if self._emit is not None:
            self._emit(TextPiece(piece, commit.tokens, commit.logprobs, reason))
        return self.stopped is not None
