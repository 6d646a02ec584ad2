"""Calls of Qwen3-Coder: tags for the function and for each parameter, whose values have no type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recserve.service.text.constraints.json_schema import UnfitSchema
from recserve.service.text.tool_calls.call_format import (
    CallFormat,
    CallParser,
    CallRules,
    Tool,
    UnfitTool,
    WriteTag,
    json_schema_rule,
    quote,
    tagged_turn,
)
from recserve.service.text.tool_calls.tags import TagFinder

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
OF_TOOL = NOTES | {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("$schema", "$id"),
}
MAX_REFERENCES = 8  # from a parameter to the schema that says its type; more are written as JSON
TEXT, MAYBE_TEXT, JSON = "text", "text or null", "json"


def kind_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Returns how a value is written: as it is (TEXT), also `null` (MAYBE_TEXT), or as JSON."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return JSON
    if "$ref" in schema:
        return kind_of(_resolve(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return TEXT if isinstance(schema["const"], str) else JSON
    if "enum" in schema:
        values = schema["enum"]
        return TEXT if values and all(isinstance(one, str) for one in values) else JSON
    for name in ("anyOf", "oneOf"):
        if name in schema:
            others = [one for one in schema[name] if one != {"type": "null"}]
            kinds = [kind_of(one, root, depth + 1) for one in others]
            if kinds and set(kinds) == {TEXT}:
                return TEXT if len(kinds) == len(schema[name]) else MAYBE_TEXT
            return JSON
    if schema.get("type") == "string":
        return TEXT
    listed = schema.get("type")
    if isinstance(listed, list) and set(listed) == {"string", "null"}:
        return MAYBE_TEXT
    return JSON


def _resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """Returns the schema of a reference into `$defs`; None if there is none."""
    found: Any = root
    for step in str(reference).removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return None if isinstance(found, Mapping) and "$ref" in found else found


class QwenCoderParser(CallParser):
    """Reads `<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>…`.

    The schema of a parameter says whether its value is a text. Texts are passed on while they are
    written, other values when they are complete.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools = {tool.name: tool.parameters for tool in tools}
        self._root: Mapping[str, Any] = {}
        self._tags = TagFinder(BEGIN)
        self._state: Callable[[str], None] = self._in_text
        self._raw = ""  # from the tag of a call on, until the call begins
        self._name = ""  # of the function or of the parameter
        self._num_values = 0
        self._kind = JSON
        self._value: list[str] = []  # what is not passed on yet
        self._newline: str | None = None  # held back; None before the first character

    def _read(self, character: str) -> None:
        self._state(character)

    def _look_for(self, state: Callable[[str], None], *tags: str) -> None:
        self._state, self._tags = state, TagFinder(*tags)

    def _in_text(self, character: str) -> None:
        text, tag = self._tags.read(character)
        self._write(text)
        if tag:
            self._enter(tag)

    def _enter(self, tag: str) -> None:
        self._raw = tag
        self._look_for(self._before_function, FUNCTION, END)

    def _before_function(self, character: str) -> None:
        self._raw += character
        _, tag = self._tags.read(character)
        if tag == FUNCTION:
            self._state, self._name = self._in_function_name, ""
        elif tag:
            self._write(self._raw)
            self._look_for(self._in_text, BEGIN)

    def _in_function_name(self, character: str) -> None:
        self._raw += character
        if character != ">":
            self._name += character
            return
        self._begin_call(self._name, "{")
        self._root, self._num_values = self._tools.get(self._name, {}), 0
        self._look_for(self._in_call, PARAMETER, END_FUNCTION, END)

    def _in_call(self, character: str) -> None:
        _, tag = self._tags.read(character)
        if tag == PARAMETER:
            self._state, self._name = self._in_parameter_name, ""
        elif tag:
            self._argue("}")
            if tag == END:
                self._look_for(self._in_text, BEGIN)
            else:
                self._look_for(self._behind_function, END, BEGIN)

    def _behind_function(self, character: str) -> None:
        _, tag = self._tags.read(character)
        if tag == END:
            self._look_for(self._in_text, BEGIN)
        elif tag:  # the end tag is missing
            self._enter(tag)

    def _in_parameter_name(self, character: str) -> None:
        if character != ">":
            self._name += character
            return
        properties = self._root.get("properties")
        schema = properties.get(self._name) if isinstance(properties, Mapping) else None
        self._kind = kind_of(schema, self._root)
        comma = ", " if self._num_values else ""
        self._argue(f"{comma}{quote(self._name)}: " + ('"' if self._kind == TEXT else ""))
        self._num_values += 1
        self._value, self._newline = [], None
        self._look_for(self._in_value, END_PARAMETER)

    def _in_value(self, character: str) -> None:
        text, tag = self._tags.read(character)
        for one in text:
            self._add(one)
        if tag:
            self._end_value()
            self._look_for(self._in_call, PARAMETER, END_FUNCTION, END)

    def _add(self, character: str) -> None:
        """Adds to a value. One line break before it and one behind it are not part of it."""
        first, held = self._newline is None, self._newline or ""
        self._newline = "\n" if character == "\n" and not first else ""
        piece = held + ("" if character == "\n" else character)
        if self._kind == TEXT:
            self._argue(quote(piece)[1:-1])
        else:
            self._value.append(piece)

    def _end_value(self) -> None:
        value = "".join(self._value)
        if self._kind == TEXT:
            self._argue('"')
        elif self._kind == JSON or value == "null":
            self._argue(value if _is_json(value) else quote(value))
        else:
            self._argue(quote(value))

    def _end(self) -> None:
        if self._state == self._in_text:
            self._write(self._tags.held)
        elif self._state in (self._before_function, self._in_function_name):
            self._write(self._raw)
        elif self._state == self._in_value:
            for one in self._tags.held:
                self._add(one)
            self._argue("".join(self._value))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class QwenCoderFormat(CallFormat):
    """Tags for the function and for each of its parameters."""

    name = "qwen_coder"
    tags = (BEGIN, END)

    @staticmethod
    def fits(template: str) -> bool:
        """Returns whether a template shows both tags."""
        return BEGIN in template and FUNCTION in template

    def parser(self, tools: Sequence[Tool]) -> CallParser:
        """Returns a parser of one turn."""
        return QwenCoderParser(tools)

    def grammar(self, tools: Sequence[Tool], rules: CallRules, tag: WriteTag) -> list[str]:
        """Returns the lines of a Lark grammar whose rule `turn` is the turn.

        Parameters stand in the order of the schema.

        Raises:
            UnfitTool: If the schema of a tool says more than which parameters there are, or that of
                a text what the grammar cannot hold.
        """
        lines = tagged_turn(rules, BEGIN, END, tag)
        lines.append("body: " + " | ".join(f"body_{n}" for n in range(len(tools))))
        for number, tool in enumerate(tools):
            lines += _function(number, tool)
        return lines


def _function(number: int, tool: Tool) -> list[str]:
    """Returns the rule of a function and those of its parameters."""
    root = tool.parameters
    if others := sorted(set(root) - OF_TOOL):
        raise UnfitTool(number, f".{others[0]}", "this model's calls have no such rule")
    required, parts, lines = root.get("required") or (), [], []
    for place, (key, schema) in enumerate((root.get("properties") or {}).items()):
        if ">" in key or "\n" in key:
            raise UnfitTool(number, f".properties.{key}", "the name has a `>` or a line break")
        name = f"value_{number}_{place}"
        head, end = quote(f"{PARAMETER}{key}>\n"), quote(f"\n{END_PARAMETER}\n")
        lines.append(f"parameter_{number}_{place}: {head} {name}")
        parts.append(f"parameter_{number}_{place}" + ("" if key in required else "?"))
        try:
            lines += _value(name, schema, root, end)
        except UnfitTool as error:
            path = f".properties.{key}{error.path}"
            raise UnfitTool(number, path, str(error)) from None
    head, end = quote(f"\n{FUNCTION}{tool.name}>\n"), quote(f"{END_FUNCTION}\n")
    return [f"body_{number}: {head} {' '.join(parts)} {end}", *lines]


def _value(name: str, schema: Any, root: Mapping[str, Any], end: str) -> list[str]:
    """Returns the rule of a value and the tag behind it."""
    kind = kind_of(schema, root)
    if kind == JSON:
        whole = dict(schema) if isinstance(schema, Mapping) else {}
        if schema is False:
            raise UnfitTool(0, "", "no value fulfils it")
        whole |= {key: root[key] for key in ("$defs", "definitions") if key in root}
        _check_references(whole)
        try:
            return [f"{name}: {name}_json {end}", f"{name}_json: {json_schema_rule(whole)}"]
        except UnfitSchema as error:
            raise UnfitTool(0, error.path, str(error)) from None
    if "$ref" in schema:
        return _value(name, _resolve(schema["$ref"], root), root, end)
    if "const" in schema or "enum" in schema:
        texts = schema.get("enum", [schema.get("const")])
        return [f"{name}: ({' | '.join(map(quote, texts))}) {end}"]
    if others := sorted(set(schema) - NOTES - {"type", "minLength", "maxLength", "anyOf", "oneOf"}):
        raise UnfitTool(0, f".{others[0]}", "this model writes texts as they are, without it")
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _either(name, schema[key], root, end)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    count = f"{{{least},{most}}}" if least or most != "" else "*"
    return [f"{name}[lazy]: /(.|\\n){count}\\n<\\/parameter>\\n/"]


def _check_references(schema: Any, path: str = "") -> None:
    """Raises UnfitTool for a reference to anything but a definition: it stands in another schema.

    The schema has been compiled before, so it is not nested deeply.
    """
    if isinstance(schema, list):
        for place, one in enumerate(schema):
            _check_references(one, f"{path}[{place}]")
    elif isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
            reason = f"expected a reference to $defs for this model, got {reference[:60]!r}"
            raise UnfitTool(0, f"{path}.$ref", reason)
        for key, one in schema.items():
            _check_references(one, f"{path}.{key}")


def _either(name: str, schemas: Any, root: Mapping[str, Any], end: str) -> list[str]:
    """Returns the rule of a value that is one of some texts, or null."""
    names, lines = [], []
    for place, schema in enumerate(schemas):
        names.append(f"{name}_{place}")
        if schema == {"type": "null"}:
            lines.append(f'{name}_{place}: "null" {end}')
        else:
            lines += _value(f"{name}_{place}", schema, root, end)
    return [f"{name}: {' | '.join(names)}", *lines]
