"""Leave-one-out over all items: how good are the slates of a model, seen items kept and filtered.

Users with at least three events take part. For `valid` the history is all but the last two events,
for `test` all but the last; nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from recserve.features.events import EventLog
from recserve.kernels.trie import Trie
from recserve.models.recommender import BOS, Recommender
from recserve.training.metrics import ranks_of, slate_metrics
from recserve.training.search import beam_search

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cases:
    """Histories and the one item that is to be found after each.

    rows: item rows of all events; history n is `rows[starts[n] : stops[n]]`, oldest first. held [n]
    item rows. users [n]: number of the user in the event log.
    """

    rows: Ints
    starts: Ints
    stops: Ints
    held: Ints
    users: Ints

    def __len__(self) -> int:
        return len(self.held)

    def take(self, which: Ints) -> Cases:
        """Some of the cases, in the order of `which`."""
        return Cases(
            self.rows, self.starts[which], self.stops[which], self.held[which], self.users[which]
        )

    def sample(self, size: int) -> Cases:
        """The same `size` cases each time, all of them if there are fewer."""
        if size >= len(self):
            return self
        return self.take(np.sort(np.random.default_rng(0).permutation(len(self))[:size]))

    def batches(self, size: int) -> Iterator[Ints]:
        """Numbers of cases, histories of like length together, at most `size` each."""
        order = np.argsort(self.stops - self.starts, kind="stable")
        for first in range(0, len(order), size):
            yield order[first : first + size]

    def histories(self, which: Ints, limit: int | None = None) -> Ints:
        """[n, S] item rows, -1 after the end. limit: only that many of the latest."""
        lengths = (self.stops - self.starts)[which]
        if limit is not None:
            lengths = np.minimum(lengths, limit)
        column = np.arange(int(lengths.max()))
        inside = column < lengths[:, None]
        source = np.where(inside, (self.stops[which] - lengths)[:, None] + column, 0)
        histories: Ints = np.where(inside, self.rows[source], -1)
        return histories


def leave_one_out_cases(events: EventLog, split: Literal["valid", "test"]) -> Cases:
    """Raises ValueError if no user has three events, or the split is another."""
    if split not in ("valid", "test"):
        raise ValueError(f"split is {split!r}; choose 'valid' or 'test'")
    offsets = events.offsets.astype(np.int64)
    users = np.flatnonzero(np.diff(offsets) >= 3)
    if not users.size:
        raise ValueError("no user has three events, so there is nothing to hold out")
    stops = offsets[1:][users] - (2 if split == "valid" else 1)
    rows = events.item_rows.astype(np.int64)
    return Cases(rows, offsets[:-1][users], stops, rows[stops], users)


@dataclass(frozen=True)
class Roots:
    """Root tokens of n histories: tokens [n, S], right-padded with BOS; lengths [n]."""

    tokens: Tensor
    lengths: Tensor


def root_batch(model: Recommender, histories: Ints) -> Roots:
    """Roots of histories [n, S] of item rows, -1 after the end, in the model's input form."""
    rows = torch.from_numpy(histories).to(model.item_tokens.device)
    inside = rows >= 0
    lengths = inside.sum(1)
    if model.config.input == "items":
        tokens = rows + model.config.num_code_tokens
    else:
        tokens = model.item_tokens[rows.clamp(min=0)].flatten(1)
        inside = inside.repeat_interleave(model.config.num_levels, dim=1)
        lengths = lengths * model.config.num_levels
    tokens = torch.where(inside, tokens, BOS)
    return Roots(torch.nn.functional.pad(tokens, (1, 0), value=BOS), lengths + 1)


@dataclass(frozen=True)
class SlateOptions:
    """How slates are made. width: of the beam. filtered: without the items of the history.
    dense_weight: of the dense head's log-probability when finished beams are ranked. strategy:
    `beam`, or `dense` for that head alone.
    """

    width: int = 50
    filtered: bool = True
    dense_weight: float = 0.0
    strategy: Literal["beam", "dense"] = "beam"


@torch.no_grad()
def recommender_slates(
    model: Recommender, trie: Trie, cases: Cases, which: Ints, k: int, options: SlateOptions
) -> Ints:
    """[n, k] item rows, best first, -1 where fewer were found."""
    device = model.item_tokens.device
    roots = root_batch(model, cases.histories(which, model.config.max_history_items))
    seen = torch.from_numpy(cases.histories(which)).to(device)
    excluded = seen if options.filtered else torch.full_like(seen[:, :1], -1)
    width = options.width if options.strategy == "beam" else 1
    found = beam_search(model, trie, roots.tokens, roots.lengths, width, excluded)
    if options.strategy == "dense":
        return best_items(model.dense_scores(found.hidden), excluded, k)
    scores, rows = found.scores, found.rows
    if options.dense_weight:
        dense = model.dense_scores(found.hidden).gather(1, rows.clamp(min=0))
        scores = scores + options.dense_weight * dense
    order = scores.masked_fill(rows < 0, -torch.inf).argsort(dim=1, descending=True, stable=True)
    slates: Ints = rows.gather(1, order[:, :k]).cpu().numpy()
    return slates


def best_items(scores: Tensor, excluded: Tensor, k: int) -> Ints:
    """[n, k] rows of the best items. scores: [n, I]. excluded: [n, X] rows, -1 where padded."""
    which, where = (excluded >= 0).nonzero(as_tuple=True)
    scores[which, excluded[which, where]] = -torch.inf
    rows: Ints = scores.topk(min(k, scores.shape[1]), dim=1).indices.cpu().numpy()
    return rows


@dataclass(frozen=True)
class Evaluation:
    """Metrics by column, `kept` and `filtered` for what happens to seen items, and what they are
    of."""

    model: str
    strategy: str
    split: str
    users: int
    width: int
    dense_weight: float
    columns: dict[str, dict[str, float]]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __rich__(self) -> Table:
        title = f"{self.model}, {self.strategy}, {self.split}, {self.users} users"
        table = Table(title=title, title_justify="left")
        table.add_column("seen items")
        names = list(next(iter(self.columns.values())))
        for name in names:
            table.add_column(name, justify="right")
        for column, metrics in self.columns.items():
            table.add_row(column, *(f"{metrics[name]:.4f}" for name in names))
        return table

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()


def slate_columns(
    cases: Cases,
    slates: Callable[[Ints, bool], Ints],
    cutoffs: Sequence[int],
    batch: int = 256,
    columns: Sequence[str] = ("kept", "filtered"),
) -> dict[str, dict[str, float]]:
    """Metrics of each column. slates: numbers of cases and whether seen items are filtered -> [n,
    k] rows."""
    metrics: dict[str, dict[str, float]] = {}
    for column in columns:
        ranks = np.empty(len(cases), dtype=np.int64)
        for which in cases.batches(batch):
            ranks[which] = ranks_of(slates(which, column == "filtered"), cases.held[which])
        metrics[column] = slate_metrics(ranks, cutoffs)
    return metrics
