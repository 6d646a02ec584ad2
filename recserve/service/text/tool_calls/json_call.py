"""One call as a JSON object: a name, and the arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from recserve.service.text.tool_calls.call_format import JsonScanner

KEYS = ("arguments", "parameters")
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL
)


@dataclass(frozen=True)
class Call:
    """A call, or what is known of it.

    Attributes:
        name: Name of the function.
        arguments: First characters of the arguments, which are JSON.
    """

    name: str
    arguments: str


class JsonCall:
    """Reads `{"name": N, "arguments": {…}}` character by character.

    A call begins with its arguments if its name stands before them, else with the end of the
    object.

    Attributes:
        raw: All characters before the call began.
        begun: Whether the call has begun.
        ended: Whether the object has ended.
        in_arguments: Whether the next character belongs to the arguments.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.begun = self.ended = self.in_arguments = False
        self._object, self._arguments = JsonScanner(), JsonScanner()

    def read(self, character: str) -> Call | str:
        """Reads the next character.

        Returns:
            The call when it begins; further characters of its arguments; or an empty text.
        """
        depth = self._object.depth
        self.ended = self._object.read(character)
        if self.in_arguments:
            self.in_arguments = not self._arguments.read(character)
            return character
        if self.begun:
            return ""
        self.raw += character
        if (depth, self._object.depth) == (1, 2) and (head := _HEAD.fullmatch(self.raw)):
            self.begun = self.in_arguments = True
            self._arguments.read(character)
            try:
                return Call(json.loads(head[1], strict=False), character)
            except ValueError:
                self.begun = self.in_arguments = False
        if self.ended and (call := self._whole()):
            self.begun = True
            return call
        return ""

    def _whole(self) -> Call | None:
        """Returns the call of the whole object; None if it is none."""
        try:
            found: Any = json.loads(self.raw, strict=False)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        arguments: Any = next((found[key] for key in KEYS if key in found), None)
        if arguments is None:
            return Call(found["name"], "{}")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return Call(found["name"], arguments)
