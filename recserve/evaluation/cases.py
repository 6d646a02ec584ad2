"""Leave-one-out cases: user histories, each with the held-out item that follows.

Users with at least three events take part; `EventLog.held_out` may name some of them. For `valid`
the history is all but the last two events, for `test` all but the last. `Cases.sample` draws users;
the items are never sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from recserve.features.tables.events import EventLog

Ints = NDArray[np.int64]
SAMPLE_SEED = 0


@dataclass(frozen=True)
class Cases:
    """Histories, each with its held-out item.

    Attributes:
        rows: Item rows of all events, of any integer type. History n is
            `rows[starts[n] : stops[n]]`, oldest first.
        starts: [n] first event of each history.
        stops: [n] one past the last event of each history.
        held: [n] item row of the held-out event.
        users: [n] number of the user in the event log.
        user_ids: Ids of the log's users. None: not known.
    """

    rows: NDArray[np.integer]
    starts: Ints
    stops: Ints
    held: Ints
    users: Ints
    user_ids: list[str] | None = None

    def __len__(self) -> int:
        return len(self.held)

    def take(self, which: Ints) -> Cases:
        """Returns the cases with the numbers `which`, in that order."""
        return replace(
            self,
            starts=self.starts[which],
            stops=self.stops[which],
            held=self.held[which],
            users=self.users[which],
        )

    def sample(self, size: int) -> Cases:
        """Returns `size` random cases, the same on every call, or all cases if there are fewer."""
        if size >= len(self):
            return self
        return self.take(np.sort(np.random.default_rng(SAMPLE_SEED).permutation(len(self))[:size]))

    def groups(self, size: int) -> Iterator[Cases]:
        """Yields all cases in groups of `size`, each of which is a random sample."""
        order = np.random.default_rng(SAMPLE_SEED).permutation(len(self))
        for first in range(0, len(order), size):
            yield self.take(np.sort(order[first : first + size]))

    def history(self, case: int) -> Ints:
        """Returns the [n] item rows of one case, oldest first."""
        history: Ints = self.rows[self.starts[case] : self.stops[case]].astype(np.int64)
        return history

    def user_id(self, case: int) -> str | None:
        """Returns the id of the user of one case, None if ids are not known."""
        return None if self.user_ids is None else self.user_ids[int(self.users[case])]

    def batches(self, size: int, shown: str | None = None) -> Iterator[Ints]:
        """Yields case numbers in batches; a batch holds histories of similar length.

        Args:
            size: Maximum number of cases in a batch.
            shown: Label of a progress bar on standard error, which appears only on a terminal. None
                means no bar.
        """
        order = np.argsort(self.stops - self.starts, kind="stable")
        console = Console(stderr=True)
        for first in track(
            range(0, len(order), size),
            shown or "",
            console=console,
            transient=True,
            disable=shown is None or not console.is_terminal,
        ):
            yield order[first : first + size]

    def histories(self, which: Ints, limit: int | None = None) -> Ints:
        """Returns the histories of some cases as a padded matrix.

        Args:
            which: Numbers of n cases.
            limit: Maximum number of latest events of each history; None means all.

        Returns:
            [n, S] item rows, -1 after the end of a history.
        """
        lengths = (self.stops - self.starts)[which]
        if limit is not None:
            lengths = np.minimum(lengths, limit)
        column = np.arange(int(lengths.max()))
        inside = column < lengths[:, None]
        source = np.where(inside, (self.stops[which] - lengths)[:, None] + column, 0)
        histories: Ints = np.where(inside, self.rows[source].astype(np.int64), -1)
        return histories


def leave_one_out_cases(events: EventLog, split: Literal["valid", "test"]) -> Cases:
    """Returns the leave-one-out cases of an event log.

    Raises:
        ValueError: If no user has three events, or if the split is unknown.
    """
    if split not in ("valid", "test"):
        raise ValueError(f"split is {split!r}; choose 'valid' or 'test'")
    offsets = events.offsets.astype(np.int64)
    users = np.flatnonzero(events.holdout())
    if not users.size:
        raise ValueError("no user has three events, so there is nothing to hold out")
    stops = offsets[1:][users] - (2 if split == "valid" else 1)
    rows = events.item_rows
    held = rows[stops].astype(np.int64)
    return Cases(rows, offsets[:-1][users], stops, held, users, events.user_ids)
