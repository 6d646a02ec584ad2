"""The log of a live catalogue: all change sets, in one order, stored before they are served.

The position of a change set is its number. Places that keep such a log: a file of one process
(`ItemJournal`), and Redis for many processes (`RedisCatalogLog`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from recserve.features.catalog.versions import ChangeSet


class JournalError(RuntimeError):
    """The log is damaged, cannot be read or written, or belongs to another process."""


class PositionTaken(JournalError):
    """Another process has stored a change set at this position; read it first."""


class PositionLost(JournalError):
    """The log has lost a position that this process has applied; read it from the beginning."""


class LogUnavailable(JournalError):
    """The log does not answer."""


class AppendUncertain(LogUnavailable):
    """The log has not answered to a change set, which may be stored."""


class Appended(NamedTuple):
    """A change set that a log has stored.

    Attributes:
        change_set: The change set as every process reads it.
        warning: What the log could not do for its safety; empty if it did all.
    """

    change_set: ChangeSet
    warning: str = ""


class CatalogLog(Protocol):
    """Keeps the change sets of one catalogue."""

    @property
    def shared(self) -> bool:
        """Whether other processes write it meanwhile."""
        ...

    @property
    def name(self) -> str:
        """Where the log is, for messages."""
        ...

    @property
    def num_changes(self) -> int:
        """Changed items in the log; of a shared one, behind its snapshot."""
        ...

    def read(self, first: int = 0, epoch: int = 0) -> list[ChangeSet]:
        """Returns the change sets from a position on, in order.

        Args:
            first: The position.
            epoch: Epoch of the position before, which this process has applied; 0 of a file.

        Raises:
            PositionLost: If the log does not have the position before any more.
            JournalError: If the log is damaged or cannot be read.
        """
        ...

    def append(self, change_set: ChangeSet) -> Appended:
        """Stores a change set behind the position before its own. It is safe on return.

        Raises:
            PositionTaken: If another process has stored one there.
            AppendUncertain: If it may be stored, since the log does not answer.
            JournalError: If it is not stored.
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


class SharedLog(CatalogLog, Protocol):
    """A log that several processes write.

    Attributes:
        url: Where it is.
        start: Position of its snapshot; 0 without one. Read with the change sets, like the others.
        end: Its last position.
        begins: Last position before each epoch.
        wait_replicas: Copies of the log that shall have a change before it is acknowledged.
    """

    url: str
    wait_replicas: int
    start: int
    end: int
    begins: Mapping[int, int]
