"""How a family of models writes calls of tools: the base class, and what formats share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from recserve.core.plugins import Pluggable
from recserve.service.text.constraints.json_schema import json_options, read_schema

# Writes a tag in a Lark grammar: the text itself, or the token if the tokeniser has a special one.
WriteTag = Callable[[str], str]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Name of the function.
        parameters: JSON schema of its arguments, which are an object.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class CallDelta:
    """New characters of a call.

    Attributes:
        index: Number of the call in its turn.
        arguments: New characters of the arguments, which are JSON.
        name: Name of the function in the first delta of a call; None in all others.
    """

    index: int
    arguments: str = ""
    name: str | None = None


@dataclass(frozen=True)
class CallRules:
    """What a grammar of calls allows.

    Attributes:
        required: Whether the turn is calls and nothing else.
        several: Whether the turn may have several calls.
        answer: Name of the rule for turns without calls; None for any text.
        first_text: Name of the terminal for text at the start of the turn.
        text: Name of the terminal for any text.
    """

    required: bool
    several: bool
    answer: str | None = None
    first_text: str = "TEXT"
    text: str = "TEXT"


class JsonScanner:
    """Finds the end of a JSON object in a text."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = self._escaped = False

    def read(self, character: str) -> bool:
        """Reads the next character. Returns whether the object ends with it."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            return self.depth <= 0
        return False


class CallParser(ABC):
    """Divides a text into content and calls while it is written.

    The result depends on the whole text alone, and not on the pieces in which it arrives: a parser
    reads one character after another.

    Attributes:
        num_calls: Number of calls so far.
        in_call: Whether the arguments of the last call are incomplete.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.in_call = False
        self._scanner = JsonScanner()
        self._content: list[str] = []
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}
        self._blanks = ""  # white space that is content only if more content follows
        self._has_content = False

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Returns new content, and at most one delta for each call."""
        for character in text:
            self._read(character)
        return self._take()

    def finish(self) -> tuple[str, list[CallDelta]]:
        """Returns what was held back, once no more text follows."""
        self._end()
        if not self.num_calls:
            self._content.append(self._blanks)
        self._blanks = ""
        return self._take()

    @abstractmethod
    def _read(self, character: str) -> None:
        """Reads the next character."""

    @abstractmethod
    def _end(self) -> None:
        """Reads what is held back as far as it goes."""

    def _write(self, text: str) -> None:
        """Adds content. White space beside a call is none."""
        for character in text:
            if character.isspace():
                self._blanks += character
                continue
            if self._has_content or not self.num_calls:
                self._content.append(self._blanks)
            self._content.append(character)
            self._blanks, self._has_content = "", True

    def _begin_call(self, name: str, arguments: str = "") -> None:
        """Begins the next call."""
        self._blanks = ""
        self._names[self.num_calls] = name
        self.num_calls += 1
        self.in_call, self._scanner = True, JsonScanner()
        self._argue(arguments)

    def _argue(self, arguments: str) -> None:
        """Adds characters to the arguments of the last call."""
        self._arguments.setdefault(self.num_calls - 1, []).append(arguments)
        for character in arguments:
            if self._scanner.read(character):
                self.in_call = False

    def _take(self) -> tuple[str, list[CallDelta]]:
        content = "".join(self._content)
        calls = [
            CallDelta(index, "".join(parts), self._names.get(index))
            for index, parts in self._arguments.items()
        ]
        self._content, self._names, self._arguments = [], {}, {}
        return content, calls


class CallFormat(Pluggable, ABC):
    """How a family of models writes calls of tools.

    Attributes:
        name: Name of the format.
        tags: Texts that mark calls. The parser sees them even if they are special tokens.
        several: Whether a turn may have several calls.
        beside_json: Whether a turn may be JSON of another schema instead.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    several: ClassVar[bool] = True
    beside_json: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def fits(template: str) -> bool:
        """Returns whether a chat template asks for calls of this format.

        Args:
            template: Jinja source, which mentions `tools`.
        """

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> CallParser:
        """Returns a parser of one turn."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], rules: CallRules, tag: WriteTag) -> list[str]:
        """Returns the lines of a Lark grammar whose rule `turn` is the turn.

        Args:
            tools: At least one tool. Their schemas can be constraints.
            rules: What the turn may be.
            tag: Writes a tag.

        Raises:
            UnfitTool: If a tool has arguments that this format cannot write.
        """


class UnfitTool(ValueError):
    """A format cannot write the arguments of a tool.

    Attributes:
        index: Number of the tool.
        path: Path inside its parameters.
    """

    def __init__(self, index: int, path: str, reason: str) -> None:
        super().__init__(reason)
        self.index, self.path = index, path


def quote(text: str) -> str:
    """Returns a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def json_schema_rule(schema: Mapping[str, Any], blanks: int | None = None) -> str:
    """Returns a schema as an expression of a Lark grammar.

    Args:
        schema: The schema.
        blanks: Most blanks in a row between tokens. None writes those of Jinja's filter `tojson`,
            with which templates show calls to models.

    Raises:
        UnfitSchema: If not all of the schema would be enforced.
    """
    options = json_options(blanks or 0)
    if blanks is None:
        options |= {"item_separator": ", ", "key_separator": ": "}
    enforced = read_schema(json.dumps(schema))
    return "%json " + json.dumps({**enforced, "x-guidance": options}, ensure_ascii=False)


def tagged_turn(rules: CallRules, begin: str, end: str, tag: WriteTag) -> list[str]:
    """Returns the rule `turn` of a format whose calls stand between two tags.

    Any text may stand around a call. From the tag `begin` on, the rule `body` holds, and then the
    tag `end` follows.

    Args:
        rules: What the turn may be.
        begin: Tag before a call.
        end: Tag after a call.
        tag: Writes a tag.
    """
    opened = tag(begin)
    bare = f"bare: {opened} body {tag(end)}"
    calls = 'bare ("\\n" bare)*' if rules.several else "bare"
    if rules.required:
        return [f"turn: {calls}", bare]
    if rules.answer is not None:
        return [f"turn: {calls} | {rules.answer}", bare]
    lines = [f"tail: {rules.text}", f"first_tail: {rules.first_text}"]
    for name, text in (("first", rules.first_text), ("next", rules.text)):
        if opened.startswith('"'):
            lines.append(f"{name}_head[lazy]: {text} {opened}")
        else:
            lines.append(f"{name}_head: {text} {opened}")
        lines.append(f"{name}_call: {name}_head body {tag(end)}")
    after = " next_call* tail" if rules.several else ""
    return [f"turn: first_tail | first_call{after}", *lines]
