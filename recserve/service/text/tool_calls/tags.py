"""Finds a tag in a text that arrives character by character."""

from __future__ import annotations


class TagFinder:
    """Passes a text on up to the first of some tags.

    Attributes:
        held: Last characters of the text, with which a tag may begin.
    """

    def __init__(self, *tags: str) -> None:
        self.tags, self.held = tags, ""
        self._first = {tag[0] for tag in tags}

    def read(self, character: str) -> tuple[str, str]:
        """Reads the next character.

        Returns:
            Text before the tag, and the tag if it ends with this character.
        """
        if not self.held and character not in self._first:
            return character, ""
        self.held += character
        for tag in self.tags:
            if self.held.endswith(tag):
                text, self.held = self.held[: -len(tag)], ""
                return text, tag
        size = max(self._overlap(tag) for tag in self.tags)
        text, self.held = self.held[: len(self.held) - size], self.held[len(self.held) - size :]
        return text, ""

    def _overlap(self, tag: str) -> int:
        """Returns how many of the last characters the tag begins with."""
        for size in range(min(len(self.held), len(tag) - 1), 0, -1):
            if self.held.endswith(tag[:size]):
                return size
        return 0
