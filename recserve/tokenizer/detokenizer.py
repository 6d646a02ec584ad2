"""Tokens to text while they come: no half characters, and nothing beyond a stop string.

The result does not depend on how many tokens come at once: a stop string counts when its last
character is written, so a text drafted five tokens at a time ends where a plain one does.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed in a text that comes in pieces.

    Each stop string walks along the text with its own automaton, so that a character costs the
    same however long they are (Knuth, Morris and Pratt 1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none of them empty."""
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """What may be shown now. Sets `found`, and then shows nothing from the stop string on."""
        if not self._stops:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            self._walk(character)
            if self.found is not None:
                self._held = ""
                return text[: end - len(self.found)]
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more comes."""
        text, self._held = self._held, ""
        return text

    def _walk(self, character: str) -> None:
        """One character on; of stop strings that end with it the longest is found."""
        for number, (stop, borders) in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._matched[number] = matched
            if matched == len(stop) and len(stop) > len(self.found or ""):
                self.found = stop


def _borders(stop: str) -> list[int]:
    """[len] for each beginning of a text, the longest shorter beginning that it ends with."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders


class Detokenizer:
    """The text of one sequence, token by token.

    stops: strings that end it and are not part of it. min_tokens: stop strings are looked for in
    what follows so many tokens.
    """

    def __init__(
        self, table: Sequence[bytes], stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        """table: bytes that each token writes; numbers beyond it write nothing."""
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.num_characters = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._matcher.found is not None

    def push(self, token: int) -> str:
        """Text that can be shown after one more token. `num_characters` counts what was decoded."""
        piece = self._utf8.decode(self._table[token] if token < len(self._table) else b"")
        self.num_tokens += 1
        return self._next(piece)

    def finish(self) -> str:
        """What was held back, once no more comes: half a character shows as U+FFFD."""
        if self.stopped:
            return ""
        shown = self._next(self._utf8.decode(b"", final=True))
        return shown if self.stopped else shown + self._matcher.flush()

    def _next(self, piece: str) -> str:
        self.num_characters += len(piece)
        if self.num_tokens <= self._min_tokens:
            return piece
        return self._matcher.push(piece)
