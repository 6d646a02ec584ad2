"""Training data of the dense retriever: the events that follow each point of each history.

    history   a  b  c  d  e        state after b, horizon 3: c, d, e
    outcome      v  p  v  v        groups: (v, 1 ahead) {c}, (v, 2 to 3 ahead) {d, e}

A group holds the items of one state, outcome and time offset. They share one query vector. The
windowed relaxation trains this vector to find the nearest item of its group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.features.tables.events import EventLog
from recserve.models.config import RecommenderConfig
from recserve.models.prefix_template import HistoryTemplate
from recserve.training.recommender.history_trees import bucket_sizes, windows

Ints = NDArray[np.int64]
EVENT_BOUNDS = (1.0, 2.0, 4.0)
GAP_QUANTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class FutureBatch:
    """B histories padded to N tokens, with s states and the events that follow them.

    Attributes:
        tokens: [B, N] tokens of the histories.
        state_nodes: [s] index of each state in the flattened [B * N].
        futures: [s, S] item rows of the next S events, -1 after the end of the history.
        group_states: [g] state of each group.
        outcomes: [g] outcome of each group.
        offsets: [g] time offset of each group.
        target_groups: [m] group of each target item.
        target_rows: [m] item row of each target item.
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
        """Returns the batch on another device."""
        return FutureBatch(*(getattr(self, f.name).to(device) for f in fields(self)))


class Futures:
    """All training histories, cut into batches by number.

    Attributes:
        unit: `seconds` if events have timestamps, `events` otherwise.
        bounds: [K] lower end of each time offset, in `unit`.
        next_shares: [K] share of next events in each time offset.
        window_shares: [K] share of all window events in each time offset.
    """

    def __init__(
        self,
        events: EventLog,
        codes: NDArray[np.generic],
        config: RecommenderConfig,
        horizon: int,
    ) -> None:
        """Cuts the histories into pieces and measures the time offsets.

        Args:
            events: Training events.
            codes: [I, L] semantic ids of the items.
            config: Configuration of the recommender that reads the histories.
            horizon: Number S of events in a window.

        Raises:
            ValueError: If no user has two events.
        """
        self.events, self.codes, self.config, self.horizon = events, codes, config, horizon
        starts = windows(events.offsets.astype(np.int64), config.max_history_items + 1)
        long_enough = np.diff(starts) > 1
        if not long_enough.any():
            raise ValueError("no user has two training events, so there is no later event to learn")
        self.starts, self.ends = starts[:-1][long_enough], starts[1:][long_enough]
        self.unit: Literal["seconds", "events"] = "seconds" if events.has_timestamps else "events"
        ahead = self._ahead(np.arange(len(self.starts)))
        gaps = self._gaps(ahead)
        self.bounds: tuple[float, ...] = EVENT_BOUNDS
        if self.unit == "seconds":
            self.bounds = tuple(np.unique([0.0, *np.quantile(gaps, GAP_QUANTILES)]).tolist())
        offsets = self._offsets(gaps)
        self.next_shares = _shares(offsets[ahead.steps == 0], len(self.bounds))
        self.window_shares = _shares(offsets, len(self.bounds))

    def epoch(self, seed: int, epoch: int, max_nodes: int) -> list[Ints]:
        """Returns the history numbers of each batch, with at most `max_nodes` padded tokens."""
        return bucket_sizes(self.ends - self.starts, seed, epoch, max_nodes)

    def batch(self, pieces: Ints) -> FutureBatch:
        """Returns the histories with these numbers, padded to the longest of them."""
        config, rows = self.config, self.events.item_rows
        template = HistoryTemplate.of(config)
        prefixes = [
            torch.from_numpy(template.tokens(rows[a : b - 1].astype(np.int64), self.codes))
            for a, b in zip(self.starts[pieces], self.ends[pieces], strict=True)
        ]
        tokens = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True)
        ahead = self._ahead(pieces)
        width = config.num_levels if config.input == "codes" else 1
        nodes = ahead.pieces * tokens.shape[1] + (ahead.places + 1) * width
        targets = rows[ahead.targets].astype(np.int64)
        futures = np.full((nodes.size, self.horizon), -1, dtype=np.int64)
        futures[ahead.states, ahead.steps] = targets
        num_outcomes, num_offsets = len(self.events.type_names), len(self.bounds)
        # A group's key is one mixed-radix number: state, outcome, offset.
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
        """Returns [m] distances from the last event of the state to the target, in `unit`."""
        if self.unit == "events":
            return (ahead.steps + 1).astype(np.float64)
        times = self.events.times
        gaps: NDArray[np.float64] = (times[ahead.targets] - times[ahead.last]) / 1e6
        return gaps

    def _offsets(self, gaps: NDArray[np.float64]) -> Ints:
        return np.searchsorted(self.bounds, gaps, "right").astype(np.int64) - 1


@dataclass(frozen=True)
class _Ahead:
    """Pairs of a state and a later event within the horizon.

    Attributes:
        pieces: [s] history of each state.
        places: [s] position in that history of the state's last event.
        states: [m] state of each pair.
        steps: [m] position of the later event after the state; 0 is the next event.
        last: [m] event number of the state's last event.
        targets: [m] event number of the later event.
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
