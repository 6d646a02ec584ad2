"""Calls of Llama 3.1 to 3.3: a turn that is a JSON object."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recserve.service.text.tool_calls.call_format import (
    CallFormat,
    CallParser,
    CallRules,
    JsonScanner,
    Tool,
    WriteTag,
    json_schema_rule,
    quote,
)

PYTHON_TAG = "<|python_tag|>"
KEYS = ("parameters", "arguments")
BLANKS = " \t\n\r"  # of JSON


class LlamaParser(CallParser):
    """Reads `{"name": "f", "parameters": {"a": 1}}`, and further calls behind a semicolon.

    A turn is a call only if it begins as a call of a known function, up to the first character of
    the arguments. Any other turn is content, JSON too, and passed on as soon as that is sure.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        # Beginnings of calls without blanks.
        self._heads = {
            f"{tag}{{{quote('name')}:{quote(tool.name)},{quote(key)}:{{": tool.name
            for tool in tools
            for key in KEYS
            for tag in ("", PYTHON_TAG)
        }
        self._raw = ""  # since the last call
        self._head = ""  # the same without blanks, and without the semicolon
        self._in_string = self._has_joint = self._is_text = False
        self._object: JsonScanner | None = None  # of a call that has begun

    def _read(self, character: str) -> None:
        if self._is_text:
            self._write(character)
        elif self._object is None:
            self._begin(character)
        else:
            ended = self._object.read(character)
            if self.in_call:
                self._argue(character)
            if ended:
                self._object, self._raw, self._head = None, "", ""
                self._in_string = self._has_joint = False

    def _begin(self, character: str) -> None:
        """Reads a character before a call begins."""
        self._raw += character
        in_tag = self._head != PYTHON_TAG and PYTHON_TAG.startswith(self._head or " ")
        if character in BLANKS and not self._in_string and not in_tag:
            return
        if character == ";" and self.num_calls and not self._head and not self._has_joint:
            self._has_joint = True
            return
        self._head += character
        self._in_string ^= character == '"'
        if name := self._heads.get(self._head):
            self._begin_call(name, character)
            self._object = JsonScanner()
            self._object.depth = 2
        elif not any(head.startswith(self._head) for head in self._heads):
            self._is_text = True
            self._write(self._raw)

    def _end(self) -> None:
        if self._object is None and not self._is_text and (self._head or not self.num_calls):
            self._write(self._raw)


class LlamaFormat(CallFormat):
    """A turn that is a JSON object. Their template takes no history with two calls in a turn.

    Text is free, and JSON too, up to the beginning of a call of a known function.
    """

    name = "llama"
    several = False
    beside_json = False

    @staticmethod
    def fits(template: str) -> bool:
        """Returns whether a template has the role of results, and shows the key of JSON.

        Templates for calls as Python have the role, too.
        """
        return "ipython" in template and '"parameters' in template

    def parser(self, tools: Sequence[Tool]) -> CallParser:
        """Returns a parser of one turn."""
        return LlamaParser(tools)

    def grammar(self, tools: Sequence[Tool], rules: CallRules, tag: WriteTag) -> list[str]:
        """Returns the lines of a Lark grammar whose rule `turn` is the turn."""
        mark = tag(PYTHON_TAG)
        head = "" if mark.startswith('"') else f"{mark}? "
        lines = [f"turn: {head}body" + ("" if rules.required else " | PLAIN")]
        if not rules.required:
            lines.append(f"PLAIN: ~/{_beginning(tools)}(?s:.*)/ & {rules.first_text}")
        lines.append("body: " + " | ".join(f"body_{n}" for n in range(len(tools))))
        for number, tool in enumerate(tools):
            # Line breaks behind thoughts are part of it: texts that begin so are read beside it.
            lines.append(
                rf'HEAD_{number}: /\n{{0,2}}\{{"name": "{_escape(tool.name)}", "parameters": /'
            )
            lines.append(f'body_{number}: HEAD_{number} arguments_{number} "}}"')
            lines.append(f"arguments_{number}: {json_schema_rule(tool.parameters)}")
        return lines


def _beginning(tools: Sequence[Tool]) -> str:
    """Returns a regular expression for the beginnings of calls, as the parser knows them."""
    names = "|".join(_escape(tool.name) for tool in tools)
    parts = (
        *("", rf"({re.escape(PYTHON_TAG)})?", r"\{", '"name"', ":", f'"({names})"', ","),
        *(f'"({"|".join(KEYS)})"', ":", r"\{"),
    )
    return r"[ \t\n\r]*".join(parts)


def _escape(name: str) -> str:
    return re.escape(name).replace("/", r"\/")
