"""What a text must be, in the fields of OpenAI and vLLM: formats, grammars and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from recserve.bounds import MAX_BLANKS, MAX_CHOICES
from recserve.schemas.items import InvalidRequest, MissingField, StrictStruct

MAX_TOOLS = 128
ToolName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}\Z", description="1 to 128 of A-Z a-z 0-9 _ . : / -"),
]
JsonSchema = dict[str, Any]
Choice = Annotated[str, Meta(min_length=1)]
ChoiceTexts = Annotated[list[Choice], Meta(max_length=MAX_CHOICES)]
GrammarText = Annotated[str, Meta(min_length=1)]


class JsonSchemaFormat(Struct, frozen=True, kw_only=True):
    """A JSON schema for texts. `name`, `description` and `strict` change nothing."""

    schema: JsonSchema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictStruct, frozen=True, kw_only=True):
    """What a text is: free, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def check(self) -> None:
        """Raises InvalidRequest unless there is a schema exactly where the type needs one."""
        if self.type == "json_schema" and self.json_schema is None:
            raise MissingField("response_format.json_schema", "is required for this type")
        if self.type != "json_schema" and self.json_schema is not None:
            why = f"is for the type json_schema, not {self.type}"
            raise InvalidRequest("response_format.json_schema", why)


class StructuredOutputs(StrictStruct, frozen=True, kw_only=True):
    """vLLM's field for constraints; at most one of them.

    Attributes:
        json: A JSON schema, or the text of one.
        regex: A regular expression for the whole text.
        choice: Texts, of which the output is one.
        grammar: A Lark grammar.
        json_object: Whether the text is a JSON object.
        blanks: Most blanks in a row between the tokens of JSON; 0 is compact JSON. It counts for
            `response_format` and `guided_json` too.
    """

    json: JsonSchema | GrammarText | None = None
    regex: GrammarText | None = None
    choice: ChoiceTexts | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    blanks: Annotated[int, Meta(ge=0, le=MAX_BLANKS)] | None = None


class ToolFunction(Struct, frozen=True, kw_only=True):
    """A function that the model may call. `strict` changes nothing: calls fit their schema.

    Attributes:
        name: Its name.
        description: What it does. The chat template shows it to the model.
        parameters: JSON schema of its arguments, which are an object; None for none.
    """

    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """A tool; only functions are supported."""

    function: ToolFunction
    type: Literal["function"] = "function"


class FunctionName(Struct, frozen=True, kw_only=True):
    """The name of a function."""

    name: ToolName


class NamedTool(Struct, frozen=True, kw_only=True):
    """The function that the model must call."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required", ""] | NamedTool
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
