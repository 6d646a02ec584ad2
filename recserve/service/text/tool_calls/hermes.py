"""Calls of Hermes 2 and 3, Qwen2.5 and Qwen3: JSON between the tags `<tool_call>`."""

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
    tagged_turn,
)
from recserve.service.text.tool_calls.json_call import Call, JsonCall
from recserve.service.text.tool_calls.tags import TagFinder

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Reads calls such as `<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>`.

    What stands between the tags and is no call is content, as it was written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tags = TagFinder(BEGIN)
        self._call: JsonCall | None = None
        self._raw = ""  # from the tag on, until the call begins
        self._last = ""  # characters behind the arguments, as many as a tag has

    def _read(self, character: str) -> None:
        call = self._call
        if call is None:
            text, tag = self._tags.read(character)
            self._write(text)
            if tag:
                self._begin(tag)
            return
        if not call.begun:
            self._raw += character
        if not call.ended:
            found = call.read(character)
            if isinstance(found, Call):
                self._begin_call(found.name, found.arguments)
            elif found:
                self._argue(found)
        if call.in_arguments:
            return
        self._last = (self._last + character)[-len(END) :]
        if self._last.endswith(END):
            if not call.begun:
                self._write(self._raw)
            self._call, self._tags = None, TagFinder(BEGIN)
        elif call.begun and self._last.endswith(BEGIN):  # the end tag is missing
            self._begin(BEGIN)

    def _begin(self, tag: str) -> None:
        self._call, self._raw, self._last = JsonCall(), tag, ""

    def _end(self) -> None:
        if self._call is None:
            self._write(self._tags.held)
        elif not self._call.begun:
            self._write(self._raw)


class HermesFormat(CallFormat):
    """JSON between the tags `<tool_call>` and `</tool_call>`."""

    name = "hermes"
    tags = (BEGIN, END)

    @staticmethod
    def fits(template: str) -> bool:
        """Returns whether a template shows the tag and the key of JSON inside."""
        return BEGIN in template and '"arguments' in template and "<function=" not in template

    def parser(self, tools: Sequence[Tool]) -> CallParser:
        """Returns a parser of one turn."""
        return HermesParser()

    def grammar(self, tools: Sequence[Tool], rules: CallRules, tag: WriteTag) -> list[str]:
        """Returns the lines of a Lark grammar whose rule `turn` is the turn."""
        lines = tagged_turn(rules, BEGIN, END, tag)
        lines.append("body: " + " | ".join(f"body_{n}" for n in range(len(tools))))
        for number, tool in enumerate(tools):
            head = quote(f'\n{{"name": {quote(tool.name)}, "arguments": ')
            lines.append(f"body_{number}: {head} arguments_{number} {quote('}' + chr(10))}")
            lines.append(f"arguments_{number}: {json_schema_rule(tool.parameters)}")
        return lines
