"""Translates what a request says about its text into a constraint, and compiles it.

A chat's turn may begin with thoughts. Its grammar has them too, so that the constraint begins
behind `</think>` wherever a draft meets it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recserve.core.constraint import Choices, Constraint, Grammar
from recserve.schemas.constraints import NamedTool
from recserve.schemas.encoding import TokenizeRequest
from recserve.schemas.items import InvalidRequest, UnsupportedField
from recserve.schemas.numbers import ENCODER
from recserve.schemas.text import ChatRequest, TextRequest
from recserve.service.text.constraints.json_schema import UnfitSchema
from recserve.service.text.constraints.trial import is_costly
from recserve.service.text.model import TextModel
from recserve.service.text.tool_calls.call_format import (
    CallRules,
    Tool,
    UnfitTool,
    WriteTag,
    json_schema_rule,
    quote,
)
from recserve.service.text.tool_calls.registry import call_formats, format_of
from recserve.service.text.tool_calls.turn import (
    BEGIN_THOUGHTS,
    END_THOUGHTS,
    Thinking,
    TurnForm,
    thinking_of,
)

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT = '{"type":"object"}'
TEXT = r"/(.|\n)*/"
# Text that does not begin with the tag of thoughts.
OTHER_TEXT = rf"/(?s:.*)/ & ~/\s*{BEGIN_THOUGHTS}(?s:.*)/"
# Parts of a Lark grammar in which a name is none, and names.
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|[\w-]+|.', re.DOTALL)


@dataclass(frozen=True)
class Wanted:
    """What a request wants its text to be.

    Attributes:
        param: Field that says it, for errors.
        text: The constraint; None leaves the text free.
    """

    param: str
    text: Grammar | Choices | None


def text_constraint(body: TextRequest, model: TextModel) -> Constraint | None:
    """Returns the constraint of a text without thoughts and calls; None if it is free.

    Raises:
        Uncompiled: If it has to be compiled first.
        InvalidRequest: If the constraint is invalid or cannot be kept.
    """
    wanted, allowed = read_wanted(body), body.allowed_token_ids
    if allowed and max(allowed) >= model.vocab_size:
        place = next(n for n, token in enumerate(allowed) if token >= model.vocab_size)
        raise InvalidRequest(
            f"allowed_token_ids[{place}]",
            f"expected a token id below {model.vocab_size}, got {allowed[place]}, "
            "which is out of vocabulary",
        )
    if wanted.text is None and not allowed:
        return None
    return model.constrain(wanted.param, wanted.text, allowed or None, cached=True)


def chat_constraint(
    body: ChatRequest, form: TurnForm, plain: Constraint | None, model: TextModel
) -> Constraint | None:
    """Returns the constraint of a turn with thoughts or calls; None if it is free.

    Args:
        body: The request.
        form: What the turn may have beside content.
        plain: Constraint of the content alone.
        model: The served model.

    Raises:
        Uncompiled: If it has to be compiled first.
        InvalidRequest: If the constraint is invalid or cannot be kept.
    """
    wanted = read_wanted(body)
    if form.format is None and wanted.text is None:
        return plain
    param = wanted.param if form.format is None else "tools"
    lines = _turn(body, form, wanted, model)
    try:
        whole = Grammar("lark", "\n".join(lines))
    except ValueError as error:
        raise InvalidRequest(param, str(error)) from None
    try:
        return model.constrain(param, whole, body.allowed_token_ids or None, cached=True)
    except InvalidRequest as error:
        # A grammar that takes too much is not compiled tool by tool as well.
        if form.format is not None and not is_costly(str(error)):
            _check_tools(form.tools, model)
        raise


def turn_form(
    body: ChatRequest, model: TextModel, prompt: str, continued: str | None
) -> TurnForm | None:
    """Returns what a chat's turn consists of; None if it is content only.

    Args:
        body: The request.
        model: The served model, which has a chat template.
        prompt: The prompt.
        continued: Text of the last message if the turn continues it.

    Raises:
        InvalidRequest: If tools are given, and the template has no place for them.
    """
    template = model.tokenizer.template
    assert template is not None
    thinking = thinking_of(template.source, prompt, continued)
    if not body.calls_tools:
        return None if thinking is Thinking.NONE else TurnForm(thinking)
    found = format_of(template.source)
    if found is None:
        raise UnsupportedField(
            "tools",
            "this model's chat template has no calls of tools that the server knows: "
            f"{', '.join(call_formats())}",
        )
    return TurnForm(thinking, found, tuple(_tools(body)))


def template_tools(body: ChatRequest | TokenizeRequest) -> list[dict[str, Any]] | None:
    """Returns the tools that a chat template shows, as OpenAI's API writes them."""
    if not body.tools or (isinstance(body, ChatRequest) and not body.calls_tools):
        return None
    listed = []
    for tool in body.tools:
        own = tool.function
        function = {"name": own.name, "description": own.description, "parameters": own.parameters}
        given = {name: value for name, value in function.items() if value is not None}
        listed.append({"type": "function", "function": given})
    plain: list[dict[str, Any]] = json.loads(ENCODER.encode(listed))
    return plain


def read_wanted(body: TextRequest) -> Wanted:
    """Returns what a checked body wants its text to be.

    Raises:
        InvalidRequest: If it is too large.
    """
    outputs = body.structured_outputs
    blanks = (outputs and outputs.blanks) or 0
    param = "allowed_token_ids"
    text: Grammar | Choices | None = None
    found: Any
    try:
        for name in body.constrained_by:
            param, _, key = name.partition(".")
            found = getattr(getattr(body, param), key) if key else getattr(body, param)
            kind, param = (key or param).removeprefix("guided_"), name
            if kind == "response_format":
                param, text = _of_format(body, blanks)
            elif kind == "choice":
                text = Choices(tuple(found))
            elif kind in ("json", "json_object"):
                schema = ANY_OBJECT if found is True else _schema_text(found)
                text = Grammar("json_schema", schema, blanks)
            elif kind == "grammar" and "::=" in found:
                raise ValueError("expected a Lark grammar, got one in GBNF or EBNF (`::=`)")
            elif kind == "regex":
                text = Grammar("regex", found)
            else:
                text = Grammar("lark", _enforce_schemas(found, blanks))
    except UnfitSchema as error:
        raise InvalidRequest(f"{param}{error.path}", str(error)) from None
    except ValueError as error:
        raise InvalidRequest(param, str(error)) from None
    return Wanted(param, text)


def _enforce_schemas(grammar: str, blanks: int) -> str:
    """Returns a Lark grammar whose JSON schemas let nothing else pass. Raises UnfitSchema."""
    if "%json" not in grammar:
        return grammar
    parts, place = list[str](), 0
    while found := _LARK.match(grammar, place):
        place = found.end()
        parts.append(found[0])
        if parts[-2:] != ["%", "json"]:
            continue
        begin = place + len(grammar[place:]) - len(grammar[place:].lstrip())
        schema: Any = None
        with contextlib.suppress(ValueError, RecursionError):  # the compiler says what is wrong
            schema, end = json.JSONDecoder().raw_decode(grammar, begin)
        if isinstance(schema, dict):
            parts[-2:], place = [json_schema_rule(schema, blanks)], end
    return "".join(parts)


def _of_format(body: TextRequest, blanks: int) -> tuple[str, Grammar]:
    assert body.response_format is not None
    given = body.response_format.json_schema
    if given is None:
        return "response_format", Grammar("json_schema", ANY_OBJECT, blanks)
    schema = Grammar("json_schema", _schema_text(given.schema), blanks)
    return "response_format.json_schema.schema", schema


def _schema_text(given: Any) -> str:
    return given if isinstance(given, str) else ENCODER.encode(given).decode()


def _tools(body: ChatRequest) -> list[Tool]:
    """Returns the tools with the schemas of their arguments."""
    tools = []
    for tool in body.tools or ():
        schema: dict[str, Any] = NO_ARGUMENTS
        if tool.function.parameters is not None:
            schema = {"type": "object"} | json.loads(ENCODER.encode(tool.function.parameters))
        tools.append(Tool(tool.function.name, schema))
    return tools


def _turn(body: ChatRequest, form: TurnForm, wanted: Wanted, model: TextModel) -> list[str]:
    """Returns a Lark grammar of thoughts, calls and the wanted text."""
    first = "TEXT"
    lines = ["%llguidance {}", f"TEXT: {TEXT}", r"GAP: /\n{0,2}/"]

    def tag(name: str) -> str:
        number = model.tokenizer.hidden(name)
        return quote(name) if number is None else f"<[{number}]>"

    if form.thinking is not Thinking.NONE:
        end = tag(END_THOUGHTS)
        if end.startswith('"'):
            lines.append(rf"thoughts[lazy]: /(.|\n)*{END_THOUGHTS.replace('/', chr(92) + '/')}/")
        else:
            lines.append(f"thoughts: TEXT {end}")
    begin = tag(BEGIN_THOUGHTS)
    if form.thinking is Thinking.MAY and begin.startswith('"'):
        first = "FIRST"
        lines.append(f"FIRST: {OTHER_TEXT}")
    if form.format is None:
        lines.append("turn: answer")
    else:
        lines += _calls(body, form, wanted, model, first, tag)
    behind = "thoughts GAP turn"
    lines.append(
        {
            Thinking.NONE: "start: turn",
            Thinking.OPEN: f"start: {behind}",
            Thinking.MAY: f"start: turn | {begin} {behind}",
        }[form.thinking]
    )
    if wanted.text is not None:
        lines += _answer(wanted.text)
    return lines


def _calls(
    body: ChatRequest, form: TurnForm, wanted: Wanted, model: TextModel, first: str, tag: WriteTag
) -> list[str]:
    """Returns the lines of the grammar for a turn with calls. Raises InvalidRequest."""
    assert form.format is not None
    chosen, tools = body.tool_choice, list(enumerate(form.tools))
    if isinstance(chosen, NamedTool):
        tools = [(n, tool) for n, tool in tools if tool.name == chosen.function.name]
    required = chosen == "required" or isinstance(chosen, NamedTool)
    if wanted.text is not None and not required and not form.format.beside_json:
        raise InvalidRequest(
            "response_format",
            "cannot be combined with tools for this model, whose calls are JSON objects too",
        )
    rules = CallRules(
        required=required,
        several=form.format.several
        and body.parallel_tool_calls is not False
        and not isinstance(chosen, NamedTool),
        answer=None if wanted.text is None else "answer",
        first_text=first,
    )
    try:
        return form.format.grammar([tool for _, tool in tools], rules, tag)
    except UnfitTool as error:
        param = f"tools[{tools[error.index][0]}].function.parameters{error.path}"
        raise InvalidRequest(param, str(error)) from None
    except (UnfitSchema, AttributeError, TypeError):  # no schema, which a format need not check
        _check_tools(form.tools, model)
        raise


def _check_tools(tools: Sequence[Tool], model: TextModel) -> None:
    """Raises InvalidRequest for the first tool whose schema is refused, with its path.

    All tools are compiled as one grammar. Only if that fails, they are compiled one by one.
    """
    for number, tool in enumerate(tools):
        schema = Grammar("json_schema", json.dumps(tool.parameters, ensure_ascii=False))
        model.constrain(f"tools[{number}].function.parameters", schema, cached=True)


def _answer(wanted: Grammar | Choices) -> list[str]:
    """Returns the lines of a Lark grammar whose rule `answer` is a wanted text."""
    if isinstance(wanted, Choices):
        return ["answer: " + " | ".join(map(quote, wanted.texts))]
    if wanted.kind == "json_schema":
        schema = json.loads(wanted.text)
        return [f"answer: {json_schema_rule({} if schema is True else schema, wanted.blanks)}"]
    if wanted.kind == "regex":
        pattern = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], wanted.text)
        return [f"answer: /{pattern}/".replace("\n", r"\n")]
    names = [{"start": "answer"}.get(m[0], m[0]) for m in _LARK.finditer(wanted.text)]
    return ["".join(names)]
