"""What came after each point of each history: training data of the dense retriever.

    history   a  b  c  d  e        state after b, horizon 3: c, d, e
    outcome      v  p  v  v        groups: (v, 1 ahead) {c}, (v, 2 to 3 ahead) {d, e}

A group holds the items of one state, outcome and time offset; they share one query vector, and the
windowed relaxation asks it to find the easiest of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.features.tables.encoding import root_tokens
from recserve.features.tables.events import EventLog
from recserve.models.recommender import RecommenderConfig
from recserve.training.recommender.history_trees import bucketed, windows

Ints = NDArray[np.int64]
EVENT_BOUNDS = (1.0, 2.0, 4.0)
GAP_QUANTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class FutureBatch:
    """B histories padded to N tokens, their s states and what followed them.

    tokens [B, N]. state_nodes [s]: index into the flattened [B * N]. futures [s, S]: item rows of
    the next S events, -1 where there is none. group_states, outcomes, offsets [g]: each group's
    state, outcome and time offset. target_groups, target_rows [m]: the items of the groups.
    """

    tokens: Tensor
    state_nodes: Tensor
    futures: Tensor
    group_states: Tensor
    outcomes: Tensor
    offsets: Tensor
    target_groups: Tensor
    target_rows: Tensor

    def to(self, device: torch.device | str) -> FutureBatch:
        """The same batch on another device."""
        return FutureBatch(*(getattr(self, f.name).to(device) for f in fields(self)))


class Futures:
    """All training histories; batches are cut from them by number.

    unit: `seconds` where events have timestamps, else `events`. bounds [K]: lower end of each time
    offset in that unit. next_shares, window_shares [K]: how often the next event, and an event of
    the window, lies in each.
    """

    def __init__(
        self,
        events: EventLog,
        codes: NDArray[np.generic],
        config: RecommenderConfig,
        horizon: int,
    ) -> None:
        """codes [I, L]. horizon: S, events of a window. Raises ValueError if no user has two."""
        self.events, self.codes, self.config, self.horizon = events, codes, config, horizon
        starts = windows(events.offsets.astype(np.int64), config.max_history_items + 1)
        kept = np.diff(starts) > 1
        if not kept.any():
            raise ValueError("no user has two training events, so nothing follows anything")
        self.starts, self.ends = starts[:-1][kept], starts[1:][kept]
        self.unit: Literal["seconds", "events"] = "seconds" if events.has_timestamps else "events"
        ahead = self._ahead(np.arange(len(self.starts)))
        gaps = self._gaps(ahead)
        self.bounds: tuple[float, ...] = EVENT_BOUNDS
        if self.unit == "seconds":
            self.bounds = tuple(np.unique([0.0, *np.quantile(gaps, GAP_QUANTILES)]).tolist())
        offsets = self._offsets(gaps)
        self.next_shares = _shares(offsets[ahead.steps == 0], len(self.bounds))
        self.window_shares = _shares(offsets, len(self.bounds))

    @property
    def num_states(self) -> int:
        """States of one epoch."""
        return int((self.ends - self.starts - 1).sum())

    def epoch(self, seed: int, epoch: int, max_nodes: int) -> list[Ints]:
        """Numbers of the histories of each batch, of at most max_nodes padded tokens."""
        return bucketed(self.ends - self.starts, seed, epoch, max_nodes)

    def batch(self, pieces: Ints) -> FutureBatch:
        """The histories of these numbers, padded to the longest of them."""
        config, rows = self.config, self.events.item_rows.astype(np.int64)
        roots = [
            torch.from_numpy(
                root_tokens(rows[a : b - 1], self.codes, config.codebook_sizes, config.input)
            )
            for a, b in zip(self.starts[pieces], self.ends[pieces], strict=True)
        ]
        tokens = torch.nn.utils.rnn.pad_sequence(roots, batch_first=True)
        ahead = self._ahead(pieces)
        width = config.num_levels if config.input == "codes" else 1
        nodes = ahead.pieces * tokens.shape[1] + (ahead.places + 1) * width
        targets = rows[ahead.targets]
        futures = np.full((nodes.size, self.horizon), -1, dtype=np.int64)
        futures[ahead.states, ahead.steps] = targets
        num_outcomes, num_offsets = len(self.events.type_names), len(self.bounds)
        key = ahead.states * num_outcomes + self.events.types[ahead.targets]
        key = key * num_offsets + self._offsets(self._gaps(ahead))
        groups, target_groups = np.unique(key, return_inverse=True)
        pair, offsets = np.divmod(groups, num_offsets)
        states, outcomes = np.divmod(pair, num_outcomes)
        arrays = (nodes, futures, states, outcomes, offsets, target_groups, targets)
        return FutureBatch(tokens, *(torch.from_numpy(array) for array in arrays))

    def _ahead(self, pieces: Ints) -> _Ahead:
        counts = self.ends[pieces] - self.starts[pieces] - 1
        piece = np.repeat(np.arange(pieces.size), counts)
        places = np.arange(piece.size) - np.repeat(np.cumsum(counts) - counts, counts)
        events = self.starts[pieces][piece] + places
        ahead = events[:, None] + 1 + np.arange(self.horizon)
        states, steps = (ahead < self.ends[pieces][piece][:, None]).nonzero()
        return _Ahead(piece, places, states, steps, events[states], ahead[states, steps])

    def _gaps(self, ahead: _Ahead) -> NDArray[np.float64]:
        """[m] from the last event of the state to the target, in `unit`."""
        if self.unit == "events":
            return (ahead.steps + 1).astype(np.float64)
        times = self.events.times
        gaps: NDArray[np.float64] = (times[ahead.targets] - times[ahead.last]) / 1e6
        return gaps

    def _offsets(self, gaps: NDArray[np.float64]) -> Ints:
        return np.searchsorted(self.bounds, gaps, "right").astype(np.int64) - 1


@dataclass(frozen=True)
class _Ahead:
    """Pairs of a state and a later event.

    pieces, places [s]: each state's history and the place of its last event there. states [m]: of
    each pair; steps [m]: 0 for the next event. last, targets [m]: event numbers.
    """

    pieces: Ints
    places: Ints
    states: Ints
    steps: Ints
    last: Ints
    targets: Ints


def _shares(numbers: Ints, size: int) -> tuple[float, ...]:
    counts = np.bincount(numbers, minlength=size)
    return tuple((counts / counts.sum()).tolist())
