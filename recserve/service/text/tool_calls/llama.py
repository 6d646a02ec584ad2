"""Calls of Llama 3.1 to 3.3: a turn that is a JSON object."""

from __future__ import annotations

from collections.abc import Sequence

from recserve.service.text.tool_calls.call_format import (
    CallFormat,
    CallParser,
    CallRules,
    Tool,
    WriteTag,
    json_schema_rule,
    quote,
)
from recserve.service.text.tool_calls.json_call import Call, JsonCall

PYTHON_TAG = "<|python_tag|>"


class LlamaParser(CallParser):
    """Reads `{"name": "f", "parameters": {"a": 1}}`, and further calls behind a semicolon.

    A turn that begins otherwise is content. So is an object that is no call, with all that follows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._call: JsonCall | None = None
        self._raw = ""  # since the last call
        self._is_text = False

    def _read(self, character: str) -> None:
        if self._is_text:
            self._write(character)
            return
        if self._call is None:
            self._raw += character
            before = self._raw.replace(";", "", 1) if self.num_calls else self._raw
            start = before.strip()
            if start.removeprefix(PYTHON_TAG).lstrip() == "{":
                self._call = JsonCall(needs_arguments=True)
                self._call.read(character)
            elif start and not PYTHON_TAG.startswith(start) and start != PYTHON_TAG:
                self._give_up()
            return
        found = self._call.read(character)
        if isinstance(found, Call):
            self._begin_call(found.name, found.arguments)
            self._raw = ""
        elif found:
            self._argue(found)
        if not self._call.begun:
            self._raw += character
            if self._call.ended:
                self._give_up()
        elif self._call.ended:
            self._call = None

    def _give_up(self) -> None:
        self._is_text = True
        self._write(self._raw)

    def _end(self) -> None:
        if not self._is_text and (self._raw.strip(" \n\r\t;") or not self.num_calls):
            self._write(self._raw)


class LlamaFormat(CallFormat):
    """A turn that is a JSON object. Their template takes no history with two calls in a turn."""

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
        return LlamaParser()

    def grammar(self, tools: Sequence[Tool], rules: CallRules, tag: WriteTag) -> list[str]:
        """Returns the lines of a Lark grammar whose rule `turn` is the turn."""
        mark = tag(PYTHON_TAG)
        head = "" if mark.startswith('"') else f"{mark}? "
        lines = [f"turn: {head}body" + ("" if rules.required else " | PLAIN")]
        if not rules.required:
            lines.append(rf"PLAIN: /(\s*[^{{\s](.|\n)*)?/ & {rules.first_text}")
        lines.append("body: " + " | ".join(f"body_{n}" for n in range(len(tools))))
        for number, tool in enumerate(tools):
            begin = quote(f'{{"name": {quote(tool.name)}, "parameters": ')
            lines.append(f'body_{number}: {begin} arguments_{number} "}}"')
            lines.append(f"arguments_{number}: {json_schema_rule(tool.parameters)}")
        return lines
