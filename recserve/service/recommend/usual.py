"""The question that this server is usually asked: what is prepared for users before they ask."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from recserve.core.request import Root, WarmDraftRequest
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.history.histories import History

LATELY = 64  # questions that are remembered


@dataclass(frozen=True)
class Shape:
    """A question but for its user: what a client of this server asks of every user alike.

    width: beams. seen, seen_within_s: as in messages.Exclude. There is neither filter nor cap nor
    an item that is named: for such no draft is kept.
    """

    k: int
    width: int
    dense_weight: float
    seen: bool = True
    seen_within_s: float | None = None

    def of(
        self, root: Root, history: History, snapshot: Snapshot, deadline_s: float | None
    ) -> WarmDraftRequest:
        """It asked of a user, answered by `speculative`, and nobody waits for the answer."""
        return WarmDraftRequest(
            root,
            snapshot.trie,
            self.k,
            self.width,
            excluded=seen_rows(self.seen, self.seen_within_s, history),
            dense_weight=self.dense_weight,
            deadline_s=deadline_s,
        )


class Usual:
    """The shape that most of the last LATELY questions had; of equally many the newest."""

    def __init__(self, first: Shape) -> None:
        """first: what is expected before anybody asked."""
        self._lately: deque[Shape | None] = deque([first], LATELY)
        self._lock = threading.Lock()

    def asked(self, shape: Shape | None) -> None:
        """Note a question. None: no draft can be kept for it."""
        with self._lock:
            self._lately.append(shape)

    @property
    def shape(self) -> Shape | None:
        """None where most questions are such that no draft can be kept."""
        with self._lock:
            newest_first = list(reversed(self._lately))
        return Counter(newest_first).most_common(1)[0][0]


def seen_rows(seen: bool, within_s: float | None, history: History) -> np.ndarray:
    """Rows of the history that must not be answered; with within_s those of so many last
    seconds.
    """
    if within_s is not None:
        return history.rows_within(within_s)
    return history.rows if seen else history.rows[:0]
