"""Leave-one-out over all items: how good are the slates of a model, seen items kept and filtered.

Users with at least three events take part. For `valid` the history is all but the last two events,
for `test` all but the last; nothing is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from recserve.bundle import Bundle, BundleError
from recserve.core.request import RecommendRequest, Root, Slate
from recserve.engine.engine import Engine
from recserve.features.encoding import root_tokens, window_start
from recserve.features.events import EventLog
from recserve.kernels.trie import Trie, build_trie
from recserve.models.attention import DenseAttention
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender, load_recommender
from recserve.models.sasrec import SasRec, load_sasrec
from recserve.training.metrics import ranks_of, slate_metrics

Ints = NDArray[np.int64]
STRATEGIES = ("auto", "beam", "dense", "sasrec")


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

    def history(self, case: int) -> Ints:
        """[n] item rows of one case, oldest first."""
        return self.rows[self.starts[case] : self.stops[case]]

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
class SlateOptions:
    """How slates are made. width: of the beam. filtered: without the items of the history.
    dense_weight: of the dense head's log-probability when finished beams are ranked.
    """

    width: int = 50
    filtered: bool = True
    dense_weight: float = 0.0


class Slates:
    """The engine's answers to cases: what a server with this model would say."""

    def __init__(self, model: Recommender, trie: Trie, codes: NDArray[np.generic]) -> None:
        """codes: [I, L]. The engine is built here and reads the weights as they are now."""
        self.model, self.trie, self.codes = model, trie, codes
        self.engine = Engine(model)

    def __call__(self, cases: Cases, which: Ints, k: int, options: SlateOptions) -> Ints:
        """[n, k] item rows, best first, -1 where fewer were found."""
        answers = self.engine.run_many(
            [self._request(cases.history(case), k, options) for case in which.tolist()]
        )
        slates = np.full((len(which), k), -1, dtype=np.int64)
        for slate, answer in zip(slates, answers, strict=True):
            assert isinstance(answer, Slate)
            slate[: len(answer.rows)] = answer.rows
        return slates

    def _request(self, history: Ints, k: int, options: SlateOptions) -> RecommendRequest:
        config = self.model.config
        size = config.max_history_items
        start = window_start(len(history), size, max(1, size // 4))
        tokens = root_tokens(history[start:], self.codes, config.codebook_sizes, config.input)
        inputs = NodeInputs(torch.from_numpy(tokens).to(self.trie.device))
        return RecommendRequest(
            Root(inputs, tokens),
            self.trie,
            k,
            options.width,
            excluded=history if options.filtered else None,
            dense_weight=options.dense_weight,
        )


@torch.no_grad()
def dense_slates(
    model: Recommender,
    codes: NDArray[np.generic],
    cases: Cases,
    which: Ints,
    k: int,
    filtered: bool,
) -> Ints:
    """[n, k] item rows, best first, of the dense head alone."""
    config, device = model.config, model.item_tokens.device
    roots = [
        torch.from_numpy(root_tokens(rows, codes, config.codebook_sizes, config.input))
        for rows in (cases.history(case)[-config.max_history_items :] for case in which.tolist())
    ]
    tokens = torch.nn.utils.rnn.pad_sequence(roots, batch_first=True).to(device)
    positions = torch.arange(tokens.shape[1], device=device)
    hidden = model(tokens, positions, DenseAttention())
    last = torch.tensor([len(root) - 1 for root in roots], device=device)
    states = hidden[torch.arange(len(roots), device=device), last]
    seen = torch.from_numpy(cases.histories(which)).to(device)
    return best_items(model.dense_scores(states), seen if filtered else seen[:, :0], k)


@torch.no_grad()
def sasrec_slates(model: SasRec, cases: Cases, which: Ints, k: int, filtered: bool) -> Ints:
    """[n, k] item rows, best first."""
    device = model.ids.weight.device
    rows = torch.from_numpy(cases.histories(which, model.config.max_history_items)).to(device)
    last = (rows >= 0).sum(1) - 1
    hidden = model(rows.clamp(min=0))[torch.arange(rows.shape[0], device=device), last]
    seen = torch.from_numpy(cases.histories(which)).to(device)
    return best_items(model.scores(hidden), seen if filtered else seen[:, :0], k)


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


def evaluate_bundle(
    bundle: Bundle,
    split: Literal["valid", "test"] = "test",
    strategy: str = "auto",
    k: Sequence[int] = (5, 10),
    *,
    width: int = 50,
    dense_weight: float | None = None,
    users: int | None = None,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Evaluate a trained model of the bundle, seen items kept and filtered.

    strategy: `beam` (and `auto`) is the engine's beam search, `dense` the dense head alone,
    `sasrec` the baseline. dense_weight: None takes the bundle's. users: that many of them, drawn
    with a fixed seed; None takes all. Raises ValueError for an unknown strategy or cut-off,
    BundleError if the model was not trained.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; choose one of {STRATEGIES}")
    if not k or min(k) < 1 or max(k) > width:
        raise ValueError(f"k is {tuple(k)}; cut-offs lie between 1 and the beam width {width}")
    name = "sasrec" if strategy == "sasrec" else "recommender"
    if not bundle.has(name):
        raise BundleError(f"{bundle.root}: no {name} was trained; run `recserve train {name}`")
    began = time.monotonic()
    cases = leave_one_out_cases(bundle.events(), split)
    if users is not None:
        cases = cases.sample(users)
    catalog, most = bundle.catalog(), max(k)
    codes, vectors = catalog.index.codes, torch.from_numpy(catalog.vectors)
    folder = bundle.directory(name)
    weight = 0.0
    if strategy == "sasrec":
        sasrec = load_sasrec(folder, vectors, device)

        def slates(which: Ints, filtered: bool) -> Ints:
            return sasrec_slates(sasrec, cases, which, most, filtered)
    else:
        model = load_recommender(folder, torch.from_numpy(codes.astype(np.int64)), vectors, device)
        if strategy == "dense":

            def slates(which: Ints, filtered: bool) -> Ints:
                return dense_slates(model, codes, cases, which, most, filtered)
        else:
            default = bundle.manifest.recommender.get("dense_weight", 0.0)
            weight = float(default if dense_weight is None else dense_weight)
            trie = build_trie(torch.from_numpy(codes.astype(np.int64)), model.config.codebook_sizes)
            answers = Slates(model, trie.to(device), codes)

            def slates(which: Ints, filtered: bool) -> Ints:
                options = SlateOptions(width, filtered, weight)
                return answers(cases, which, most, options)

    columns = slate_columns(cases, slates, k)
    shown = "beam" if strategy == "auto" else strategy
    seconds = time.monotonic() - began
    return Evaluation(name, shown, split, len(cases), width, weight, columns, seconds)
