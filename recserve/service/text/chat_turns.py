"""The response format of chats whose turns have thoughts or calls beside content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from recserve.schemas.text import (
    AssistantFunction,
    AssistantMessage,
    AssistantToolCall,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    ChatResponse,
    FunctionDelta,
    TextResponse,
    ToolCallDelta,
)
from recserve.service.text.answers import ChatShape, Table, token_sources
from recserve.service.text.stream import Piece, TextStream
from recserve.service.text.tool_calls.call_format import CallDelta
from recserve.service.text.tool_calls.turn import TurnDelta, TurnForm, TurnParser
from recserve.speculation.completion import FinishReason


class TurnShape(ChatShape):
    """The response format of /v1/chat/completions for turns with thoughts or calls.

    Args:
        table: Bytes of each token.
        logprobs: True to report log-probabilities.
        sources: True to report the source of each token in chunks.
        form: What a turn may consist of.
        thoughts: False leaves thoughts out.
    """

    def __init__(
        self, table: Table, logprobs: bool, sources: bool, form: TurnForm, thoughts: bool = True
    ) -> None:
        super().__init__(table, logprobs, sources)
        self.form, self.thoughts = form, thoughts
        self._parsers: dict[int, TurnParser] = {}  # of the turns of a stream

    def answer(self, head: dict[str, Any], streams: Sequence[TextStream]) -> TextResponse:
        """Builds the whole response."""
        return ChatResponse(
            object="chat.completion",
            choices=[self._whole(head, stream) for stream in streams],
            **head,
        )

    def chunk(self, head: dict[str, Any], pieces: Sequence[Piece]) -> TextResponse:
        """Builds a chunk; the first piece of each text has the role."""
        choices = [self._piece(head, piece) for piece in pieces]
        return ChatChunk(object="chat.completion.chunk", choices=choices, **head)

    def _whole(self, head: dict[str, Any], stream: TextStream) -> ChatChoice:
        parser = TurnParser(self.form)
        turn = _joined(parser.push(stream.text), parser.finish())
        calls = [
            AssistantToolCall(
                id=_call_id(head, stream.index, call.index),
                function=AssistantFunction(name=call.name or "", arguments=call.arguments),
            )
            for call in turn.calls
        ]
        message = AssistantMessage(
            content=turn.content if turn.content or not (calls or turn.thoughts) else None,
            reasoning_content=(self.thoughts and turn.thoughts) or UNSET,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            index=stream.index,
            message=message,
            logprobs=self._logprobs(stream.tokens),
            finish_reason=_reason(stream.finish_reason or "stop", parser),
        )

    def _piece(self, head: dict[str, Any], piece: Piece) -> ChatChunkChoice:
        parser = self._parsers.setdefault(piece.index, TurnParser(self.form))
        turn = parser.push(piece.text)
        if piece.finish_reason is not None:
            turn = _joined(turn, parser.finish())
        role: Any = "assistant" if piece.first else UNSET
        only_content = not (turn.thoughts or turn.calls)
        calls = [self._call(head, piece.index, call) for call in turn.calls]
        return ChatChunkChoice(
            index=piece.index,
            delta=ChatDelta(
                role=role,
                content=turn.content if turn.content or only_content else UNSET,
                reasoning_content=(self.thoughts and turn.thoughts) or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(piece.tokens) if piece.tokens else None,
            finish_reason=piece.finish_reason and _reason(piece.finish_reason, parser),
            token_sources=token_sources(piece) if self.sources else UNSET,
        )

    def _call(self, head: dict[str, Any], index: int, call: CallDelta) -> ToolCallDelta:
        name: str | UnsetType = UNSET if call.name is None else call.name
        function = FunctionDelta(name=name, arguments=call.arguments)
        if call.name is None:
            return ToolCallDelta(index=call.index, function=function)
        identity = _call_id(head, index, call.index)
        return ToolCallDelta(index=call.index, id=identity, type="function", function=function)


def _joined(first: TurnDelta, last: TurnDelta) -> TurnDelta:
    """Returns what two pieces add together."""
    calls = {call.index: call for call in first.calls}
    for call in last.calls:
        before = calls.get(call.index, CallDelta(call.index))
        arguments = before.arguments + call.arguments
        calls[call.index] = CallDelta(call.index, arguments, before.name or call.name)
    return TurnDelta(
        first.thoughts + last.thoughts, first.content + last.content, list(calls.values())
    )


def _reason(reason: FinishReason, parser: TurnParser) -> ChatFinishReason:
    calls = parser.num_calls and not parser.in_call  # a stop string may end a call
    return "tool_calls" if reason == "stop" and calls else reason


def _call_id(head: dict[str, Any], choice: int, call: int) -> str:
    """Returns the id of a call: another one for each response, choice and call."""
    text = f"{head['id']}:{choice}:{call}"
    return "call_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
