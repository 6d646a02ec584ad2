"""Stop strings in a text that arrives in pieces, wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class StopStrings:
    """Holds back what may become a stop string, and cuts the text before the first that does.

    stopped: the stop string that was found, None so far.
    """

    def __init__(self, stops: Seq[str]) -> None:
        """Raises ValueError for an empty stop string."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty; leave it out instead")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None

    def add(self, piece: str) -> str:
        """What may be given out. Nothing after a stop string was found."""
        if self.stopped is not None:
            return ""
        text = self._held + piece
        # The stop string that ends first wins: it would have ended the text token by token.
        found = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if found:
            end, _, self.stopped = min(found)
            self._held = ""
            return text[: end - len(self.stopped)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back for nothing, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
