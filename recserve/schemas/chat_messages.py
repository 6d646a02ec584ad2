"""The turns of a conversation, in OpenAI's format.

Unknown fields inside a turn, such as `cache_control`, are ignored, as in vLLM. Clients of other
servers send them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from recserve.schemas.items import InvalidRequest, MissingField, UnsupportedField

# Fields of a turn that the chat template does not see; values other than these are refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "refusal": (None, ""),
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
}


# A template knows system, user and assistant; it may take other roles, or refuse them.
Role = Annotated[str, Meta(min_length=1, max_length=64)]


class TextPart(Struct, frozen=True, kw_only=True):
    """A text part of a message; no other kind is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, frozen=True, kw_only=True):
    """Name of a function, and its arguments as a JSON object or as the text of one."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call of a function that the assistant wanted."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One turn. The template receives the role `developer` as `system`.

    Attributes:
        role: Who speaks: system, developer, user, assistant, tool, or another role that the chat
            template takes.
        content: The text; None only beside `tool_calls`, which gives the template an empty text.
        tool_calls: Functions that the assistant called. The template receives them.
        tool_call_id: The call whose result a turn of the role `tool` holds.
        reasoning_content: The assistant's thoughts before its answer. The template receives them.
    """

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning_content: str | None = None

    def check(self, param: str) -> None:
        """Raises InvalidRequest if the turn is not one that a template can write.

        Args:
            param: Path of the turn, such as `messages[0]`.
        """
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{param}.tool_calls", f"is for the assistant, not {self.role}")
        if self.content is None and not self.tool_calls:
            raise MissingField(f"{param}.content", "is required")
        for name, neutral in REFUSED.items():
            if getattr(self, name) not in neutral:
                raise UnsupportedField(f"{param}.{name}", "not supported; write it as content")
