"""Streams tokens as text, without partial characters and up to the first stop string.

The result is independent of how many tokens arrive at once. A stop string ends the text as soon as
its last character is decoded. A text that is drafted five tokens at a time therefore ends where a
plain text ends.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from recserve.tokenizer.token_bytes import Spelling, bytes_of_token, clean_up

MAX_HELD = 16  # bytes of complete characters
_WORD_BORDER = re.compile(r"(?<=[^ ']) (?=[^ '])")


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

    def completes(self, piece: str) -> bool:
        """Returns whether a piece would complete a stop string."""
        state = list(self._matched), self._held
        self.push(piece)
        found, self.found = self.found is not None, None
        self._matched, self._held = state
        return found

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


class SpaceCleaner:
    """Leaves out the spaces before punctuation of a text that arrives in pieces, as `clean_up`."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, piece: str) -> str:
        """Returns the text that no later piece changes."""
        text = self.held + piece
        # No pattern reaches over a space between two characters that are neither space nor quote.
        end = max((match.start() for match in _WORD_BORDER.finditer(text)), default=0)
        self.held = text[end:]
        return clean_up(text[:end])

    def flush(self) -> str:
        """Returns the rest, once no more text follows."""
        text, self.held = self.held, ""
        return clean_up(text)


class Detokenizer:
    """Converts the tokens of one sequence to text, one token at a time.

    The pieces together are the text that the tokenizer decodes the tokens to. One exception keeps a
    stream running: of a run of tokens that are one byte each, characters that are complete after
    MAX_HELD bytes stay, even if a later byte makes the run invalid.

    Attributes:
        num_tokens: Tokens pushed so far.
        num_characters: Characters decoded so far, including those held back.
    """

    def __init__(
        self,
        spelling: Spelling,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        begun: bool = False,
    ) -> None:
        """Starts an empty text.

        Args:
            spelling: What each token writes. Token ids beyond it write nothing.
            stops: Strings that end the text and are not part of it.
            min_tokens: Stop strings are searched only in text after this many tokens.
            begun: True if the text follows other text, such as a prompt.
        """
        self._table = spelling.texts
        self._bytes = spelling.bytes_only
        self._first = None if begun else spelling.first or None
        self._stripped = spelling.stripped
        self._num_stripped = 0 if begun else spelling.num_stripped
        self._cleaner = SpaceCleaner() if spelling.cleans else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.num_characters = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._matcher.found is not None

    def prime(self, tokens: Sequence[int]) -> str:
        """Begins with a character that tokens before the text leave open, see `num_open`.

        Returns:
            Text of these tokens before that character.
        """
        written = b"".join(bytes_of_token(self._table, token) for token in tokens)
        if written:
            self._first = None
        if not self._bytes.isdisjoint(tokens):
            self._run += written
            return ""
        return self._utf8.decode(written)

    def push(self, token: int) -> str:
        """Returns the text that can be shown after one more token."""
        written = self._table[token] if token < len(self._table) else b""
        if self._first is not None and (written or token in self._first):
            written = self._first.get(token, written)
            self._first = None
        if self._bytes and written:
            return self._push_beside_bytes(token, written)
        self.num_tokens += 1
        return self._next(self._utf8.decode(written))

    def _push_beside_bytes(self, token: int, written: bytes) -> str:
        """Does the work of `push` where tokens can be single bytes."""
        if token not in self._bytes:
            shown = self._next(_run_text(self._run))
            self._run.clear()
            self.num_tokens += 1
            return shown if self.stopped else shown + self._next(written.decode())
        self.num_tokens += 1
        self._run += written
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        stops = self.num_tokens > self._min_tokens and self._cleaner is None
        if len(self._run) < MAX_HELD and not (stops and self._matcher.completes(text)):
            return ""
        self._run.clear()
        return self._next(text)

    def place(self, token: int) -> tuple[int, int]:
        """Returns where a token, which is pushed next, stands in the text.

        A token that continues a character has the place of that character.

        Returns:
            The number of characters before the token, and the number of bytes at the start of the
            token that the text leaves out.
        """
        written = self._table[token] if token < len(self._table) else b""
        start = self.num_characters
        if self._cleaner is not None:
            start += len(clean_up(self._cleaner.held))
        if self._run:
            goes_on = not written or token in self._bytes
            run = _run_text(self._run, written if goes_on else None)
            start += len(self._strip_left(run))
        elif written and (pending := self._utf8.getstate()[0]):
            try:
                codecs.getincrementaldecoder("utf-8")().decode(pending + written[:1])
            except UnicodeDecodeError:  # the bytes before it become U+FFFD
                start += 1
        begins = written
        if self._first is not None:
            begins = self._first.get(token, written)
        if self._num_stripped and not self._run:
            text = begins.decode("utf-8", "surrogateescape")
            begins = self._strip_left(text).encode("utf-8", "surrogateescape")
        return start, len(written) - len(begins) if written.endswith(begins) else 0

    def finish(self) -> str:
        """Returns the text that was held back, once no more tokens follow.

        An incomplete character becomes U+FFFD.
        """
        if self.stopped:
            return ""
        rest = self._utf8.decode(b"", final=True) + _run_text(self._run)
        self._run.clear()
        shown = self._next(rest, final=True)
        return shown if self.stopped else shown + self._matcher.flush()

    def _strip_left(self, text: str) -> str:
        num = min(len(text) - len(text.lstrip(self._stripped)), self._num_stripped)
        return text[num:]

    def _next(self, piece: str, final: bool = False) -> str:
        if self._num_stripped and piece:
            stripped = self._strip_left(piece)
            self._num_stripped = 0 if stripped else self._num_stripped - len(piece)
            piece = stripped
        if self._cleaner is not None:
            piece = self._cleaner.push(piece) + (self._cleaner.flush() if final else "")
        self.num_characters += len(piece)
        if self.num_tokens <= self._min_tokens:
            return piece
        return self._matcher.push(piece)


def _run_text(run: bytes | bytearray, following: bytes | None = None) -> str:
    """Returns the text of a run of bytes; if it is invalid, U+FFFD for each of them.

    Args:
        run: The run.
        following: Bytes that continue the run; None if it has ended. If it goes on, an incomplete
            character at its end is left out.
    """
    try:
        if following is None:
            return run.decode()
        codecs.getincrementaldecoder("utf-8")().decode(bytes(run) + following)
        return run.decode("utf-8", "ignore")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
