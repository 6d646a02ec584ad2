"""The log of a live catalogue: all change sets, in one order, stored before they are served.

The position of a change set is its number. Places that keep such a log: a file of one process
(`ItemJournal`), and Redis for many processes (`RedisCatalogLog`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from recserve.features.catalog.versions import ChangeSet


class JournalError(RuntimeError):
    """The log is damaged, cannot be read or written, or belongs to another process."""


class PositionTaken(JournalError):
    """Another process has stored a change set at this position; read it first."""


class PositionLost(JournalError):
    """The log has lost a position that this process has applied; read it from the beginning."""


class CatalogLog(Protocol):
    """Keeps the change sets of one catalogue."""

    @property
    def name(self) -> str:
        """Where the log is, for messages."""
        ...

    @property
    def num_changes(self) -> int:
        """Changed items in the part that this process has read or written."""
        ...

    def read(self, first: int = 0) -> list[ChangeSet]:
        """Returns the change sets from a position on, in order.

        Raises:
            JournalError: If the log is damaged or cannot be read.
        """
        ...

    def append(self, change_set: ChangeSet) -> None:
        """Stores a change set behind the position before its own. It is safe on return.

        Raises:
            JournalError: If it is not stored, because another process has changed the log or the
                log cannot be written.
        """
        ...

    def wait(self, first: int, timeout_s: float) -> bool:
        """Waits until another process has stored a change set at a position or behind it.

        Args:
            first: The position.
            timeout_s: Longest wait.

        Returns:
            Whether there is one.

        Raises:
            JournalError: If the log cannot be read.
        """
        ...

    def replace(self, change_sets: Sequence[ChangeSet]) -> None:
        """Replaces all change sets up to a position by a shorter way to the same content, or none.

        Args:
            change_sets: They make the version of the last one out of the bundle.

        Raises:
            JournalError: As in `append`. The log is unchanged then.
        """
        ...

    def close(self) -> None:
        """Releases the log."""
        ...
