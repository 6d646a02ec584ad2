"""A turn of the assistant while it is written: thoughts, content and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from recserve.service.text.tool_calls.call_format import CallDelta, CallFormat, CallParser, Tool
from recserve.service.text.tool_calls.tags import TagFinder

BEGIN_THOUGHTS, END_THOUGHTS = "<think>", "</think>"


class Thinking(Enum):
    """Whether a turn begins with thoughts, which stand between `<think>` and `</think>`."""

    NONE = "none"
    MAY = "may"  # if it begins with the tag
    OPEN = "open"  # the prompt ends inside them


@dataclass(frozen=True)
class TurnForm:
    """What a turn may consist of beside content.

    Attributes:
        thinking: Whether it begins with thoughts.
        format: How calls are written; None if there are none.
        tools: What may be called.
    """

    thinking: Thinking = Thinking.NONE
    format: CallFormat | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that mark thoughts and calls."""
        thoughts = () if self.thinking is Thinking.NONE else (BEGIN_THOUGHTS, END_THOUGHTS)
        return (*thoughts, *(() if self.format is None else self.format.tags))


@dataclass(frozen=True)
class TurnDelta:
    """What a piece of text adds to a turn.

    Attributes:
        thoughts: New characters of the thoughts.
        content: New characters of the content.
        calls: At most one delta for each call.
    """

    thoughts: str = ""
    content: str = ""
    calls: Sequence[CallDelta] = ()


class TurnParser:
    """Divides the text of a turn. The result does not depend on the pieces in which it arrives."""

    def __init__(self, form: TurnForm) -> None:
        self._calls: CallParser | None = None
        if form.format is not None:
            self._calls = form.format.parser(form.tools)
        self._state = form.thinking
        self._start = ""  # what may be the tag of thoughts
        self._end = TagFinder(END_THOUGHTS)
        self._blanks: str | None = None  # inside thoughts; None before the first other character
        self._skips = False  # white space between thoughts and content

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def in_call(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        return self._calls is not None and self._calls.in_call

    def push(self, text: str) -> TurnDelta:
        """Returns what a piece of text adds."""
        thoughts = list[str]()
        place = 0
        while place < len(text) and self._state is not Thinking.NONE:
            self._think(text[place], thoughts)
            place += 1
        rest = text[place:]
        if self._state is Thinking.NONE and self._start:
            rest, self._start = self._start + rest, ""
        return self._answer("".join(thoughts), rest)

    def finish(self) -> TurnDelta:
        """Returns what was held back, once no more text follows."""
        thoughts, rest = list[str](), self._start
        if self._state is Thinking.OPEN:
            for character in self._end.held:
                self._add(character, thoughts)
        self._state = Thinking.NONE
        begun = self._answer("".join(thoughts), rest)
        if self._calls is None:
            return begun
        content, calls = self._calls.finish()
        return TurnDelta(begun.thoughts, begun.content + content, calls or begun.calls)

    def _think(self, character: str, thoughts: list[str]) -> None:
        """Reads a character before the end of the thoughts."""
        if self._state is Thinking.MAY:
            self._start += character
            begun = self._start.lstrip()
            if begun == BEGIN_THOUGHTS:
                self._state, self._start = Thinking.OPEN, ""
            elif not BEGIN_THOUGHTS.startswith(begun):
                self._state = Thinking.NONE
            return
        text, tag = self._end.read(character)
        for one in text:
            self._add(one, thoughts)
        if tag:
            self._state, self._skips = Thinking.NONE, True

    def _add(self, character: str, thoughts: list[str]) -> None:
        """Adds a character to the thoughts; white space around them is left out."""
        if not character.isspace():
            thoughts.append((self._blanks or "") + character)
            self._blanks = ""
        elif self._blanks is not None:
            self._blanks += character

    def _answer(self, thoughts: str, text: str) -> TurnDelta:
        """Reads text behind the thoughts."""
        if self._skips:
            text = text.lstrip()
            self._skips = not text
        if self._calls is None or not text:
            return TurnDelta(thoughts, text)
        content, calls = self._calls.push(text)
        return TurnDelta(thoughts, content, calls)


def thinking_of(template: str, prompt: str, continued: str | None = None) -> Thinking:
    """Returns whether the answer to a prompt begins with thoughts.

    Args:
        template: Jinja source of the chat template.
        prompt: The prompt.
        continued: Content of the last turn if the answer continues it.
    """
    if END_THOUGHTS not in template:
        return Thinking.NONE
    if continued is not None:
        opened, closed = continued.rfind(BEGIN_THOUGHTS), continued.rfind(END_THOUGHTS)
        return Thinking.OPEN if opened > closed else Thinking.NONE
    prompt = prompt[-64:].rstrip()
    if prompt.endswith(BEGIN_THOUGHTS):
        return Thinking.OPEN
    return Thinking.NONE if prompt.endswith(END_THOUGHTS) else Thinking.MAY
