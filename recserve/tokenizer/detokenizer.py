"""Streams tokens as text, without partial characters and up to the first stop string.

The result is independent of how many tokens arrive at once. A stop string ends the text as soon as
its last character is decoded. A text that is drafted five tokens at a time therefore ends where a
plain text ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string that is completed in a text that arrives in pieces.

    Each stop string has its own automaton, so the cost of a character does not depend on the length
    of the stop strings.

    Attributes:
        found: Stop string that ended the text. None while there is none.

    Source: Knuth, Morris and Pratt 1977.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: Stop strings, none of them empty."""
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Returns the text that can be shown now, without any part of a stop string.

        Sets `found` once a stop string is complete; the text ends there.
        """
        if not self._stops:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            self._walk(character)
            if self.found is not None:
                self._held = ""
                return text[: end - len(self.found)]
        # The last `keep` characters may be the start of a stop string.
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text that was held back, once no more text follows."""
        text, self._held = self._held, ""
        return text

    def _walk(self, character: str) -> None:
        """Advances all automata by one character; the longest stop string that ends here wins."""
        for number, (stop, borders) in enumerate(self._stops):
            matched = self._matched[number]
            # On a mismatch, fall back to the next shorter prefix that still matches.
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._matched[number] = matched
            if matched == len(stop) and len(stop) > len(self.found or ""):
                self.found = stop


def _borders(stop: str) -> list[int]:
    """Returns the KMP failure table of a stop string.

    Entry i is the length of the longest proper prefix of `stop[: i + 1]` that is also its suffix.
    """
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders


class Detokenizer:
    """Converts the tokens of one sequence to text, one token at a time.

    Attributes:
        num_tokens: Tokens pushed so far.
        num_characters: Characters decoded so far, including those held back.
    """

    def __init__(
        self, table: Sequence[bytes], stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        """Starts an empty text.

        Args:
            table: Bytes that each token writes. Token ids beyond it write nothing.
            stops: Strings that end the text and are not part of it.
            min_tokens: Stop strings are searched only in text after this many tokens.
        """
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
        """Returns the text that can be shown after one more token."""
        piece = self._utf8.decode(self._table[token] if token < len(self._table) else b"")
        self.num_tokens += 1
        return self._next(piece)

    def start_of(self, token: int) -> int:
        """Returns the number of characters before a token, which is pushed next.

        A token that continues a character has the place of that character.
        """
        pending, _ = self._utf8.getstate()
        spelled = self._table[token] if token < len(self._table) else b""
        if pending and spelled:
            try:
                codecs.getincrementaldecoder("utf-8")().decode(pending + spelled[:1])
            except UnicodeDecodeError:  # the bytes before it become U+FFFD
                return self.num_characters + 1
        return self.num_characters

    def finish(self) -> str:
        """Returns the text that was held back, once no more tokens follow.

        An incomplete character becomes U+FFFD.
        """
        if self.stopped:
            return ""
        shown = self._next(self._utf8.decode(b"", final=True))
        return shown if self.stopped else shown + self._matcher.flush()

    def _next(self, piece: str) -> str:
        self.num_characters += len(piece)
        if self.num_tokens <= self._min_tokens:
            return piece
        return self._matcher.push(piece)
