"""Responses of OpenAI's two text routes, whole or in chunks, made from generated texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import UNSET, structs

from recserve.schemas.logprobs import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from recserve.schemas.speculation import TokenSource
from recserve.schemas.text import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    TextResponse,
)
from recserve.service.text.stream import Piece, TextStream, WrittenToken
from recserve.speculation.completion import FinishReason
from recserve.tokenizer.token_bytes import bytes_of_token, format_token

# Stands for minus infinity, which JSON cannot express; the same number as OpenAI's.
LOWEST = -9999.0
Table = Sequence[bytes]


class Shape(ABC):
    """The response format of a route.

    Args:
        table: Bytes of each token.
        logprobs: True to report log-probabilities.
        sources: True to report the source of each token in chunks.

    Attributes:
        prefix: First part of a response's id.
    """

    prefix: ClassVar[str]

    def __init__(self, table: Table, logprobs: bool, sources: bool = False) -> None:
        self.table = table
        self.logprobs = logprobs
        self.sources = sources

    @abstractmethod
    def answer(self, head: dict[str, Any], streams: Sequence[TextStream]) -> TextResponse:
        """Builds the whole response.

        Args:
            head: Fields that every response and chunk begins with.
            streams: All texts, ended.
        """

    @abstractmethod
    def chunk(self, head: dict[str, Any], pieces: Sequence[Piece]) -> TextResponse:
        """Builds a chunk.

        Args:
            head: Fields that every response and chunk begins with.
            pieces: PieceQueue of texts; empty for a chunk that only has token counts.
        """


class CompletionShape(Shape):
    """The response format of /v1/completions."""

    prefix = "cmpl"

    def answer(self, head: dict[str, Any], streams: Sequence[TextStream]) -> TextResponse:
        """Builds the whole response."""
        choices = [
            structs.replace(
                self._choice(s.index, s.text, [*s.prompt, *s.tokens], s.finish_reason),
                prompt_logprobs=s.prompt_logprobs or None,
            )
            for s in streams
        ]
        return CompletionResponse(object="text_completion", choices=choices, **head)

    def chunk(self, head: dict[str, Any], pieces: Sequence[Piece]) -> TextResponse:
        """Builds a chunk."""
        choices = [
            structs.replace(
                self._choice(p.index, p.text, p.tokens or None, p.finish_reason),
                token_sources=token_sources(p) if self.sources else UNSET,
            )
            for p in pieces
        ]
        return CompletionResponse(object="text_completion", choices=choices, **head)

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[WrittenToken] | None,
        finish_reason: FinishReason | None,
    ) -> CompletionChoice:
        logprobs = None if tokens is None or not self.logprobs else self._logprobs(tokens)
        return CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=finish_reason
        )

    def _logprobs(self, tokens: Sequence[WrittenToken]) -> CompletionLogprobs:
        names = [
            format_token(bytes_of_token(self.table, written.token)[written.num_left_out :])
            for written in tokens
        ]
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for name, written in zip(names, tokens, strict=True):
            likely = written.logprobs
            if likely is None:  # the first token of a prompt
                chosen.append(None)
                top.append(None)
                continue
            value = max(likely.chosen, LOWEST)
            row: dict[str, float] = {}
            for token, logprob in zip(likely.top_tokens, likely.top_values, strict=True):
                there = (
                    name
                    if token == written.token
                    else format_token(bytes_of_token(self.table, token))
                )
                row.setdefault(there, max(logprob, LOWEST))
            chosen.append(value)
            top.append({**row, name: value})
        return CompletionLogprobs(names, chosen, top, [written.offset for written in tokens])


class ChatShape(Shape):
    """The response format of /v1/chat/completions."""

    prefix = "chatcmpl"

    def answer(self, head: dict[str, Any], streams: Sequence[TextStream]) -> TextResponse:
        """Builds the whole response."""
        choices = [
            ChatChoice(
                index=stream.index,
                message=AssistantMessage(content=stream.text),
                logprobs=self._logprobs(stream.tokens),
                finish_reason=stream.finish_reason or "stop",
            )
            for stream in streams
        ]
        return ChatResponse(object="chat.completion", choices=choices, **head)

    def chunk(self, head: dict[str, Any], pieces: Sequence[Piece]) -> TextResponse:
        """Builds a chunk; the first piece of each text has the role."""
        choices = [
            ChatChunkChoice(
                index=piece.index,
                delta=ChatDelta(
                    role="assistant" if piece.first else UNSET,
                    content=piece.text,
                ),
                logprobs=self._logprobs(piece.tokens) if piece.tokens else None,
                finish_reason=piece.finish_reason,
                token_sources=token_sources(piece) if self.sources else UNSET,
            )
            for piece in pieces
        ]
        return ChatChunk(object="chat.completion.chunk", choices=choices, **head)

    def _logprobs(self, tokens: Sequence[WrittenToken]) -> ChatLogprobs | None:
        if not self.logprobs:
            return None
        return ChatLogprobs([self._token(written) for written in tokens])

    def _token(self, written: WrittenToken) -> TokenLogprob:
        likely = written.logprobs
        assert likely is not None, "a token of the prompt"
        own = bytes_of_token(self.table, written.token)[written.num_left_out :]
        top = []
        for token, logprob in zip(likely.top_tokens, likely.top_values, strict=True):
            there = bytes_of_token(self.table, token)
            top.append(TopLogprob(format_token(there), max(logprob, LOWEST), list(there)))
        return TokenLogprob(format_token(own), max(likely.chosen, LOWEST), list(own), top)


def token_sources(piece: Piece) -> list[TokenSource]:
    """Returns the characters of a piece by token, with the source of each token."""
    return [
        TokenSource(text, "draft" if accepted else "target")
        for text, accepted in zip(piece.token_texts, piece.token_accepted, strict=True)
    ]
