"""Compares the kinds of draft heads for `speculative` on the same users of several bundles.

    python -m benchmarks.recommend.draft_heads --bundles a.bundle b.bundle --json heads.json
    python -m benchmarks.recommend.draft_heads --bundles a.bundle --heads mlp lattice --seed 1

Each head is trained like `recserve train drafter --head KIND` does, in a temporary folder, so the
bundles stay as they are. Then every margin of the calibration drafts for the same test users, one
request at a time with a cached prefix and their seen items excluded. A row reports the margin with
the least expected work, which is the rule of the server. Rounds and nodes do not depend on the
machine, times do. `share` is proposing as a share of the request's time. Only the recurrent head
and the level heads search in C; `recurrent in torch` is the same head without C, whose times
compare with those of the other kinds. Every slate is compared with beam search's: the run fails if
one differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.support.report import Report
from recserve.bundle.bundle import Bundle
from recserve.core.request import Slate
from recserve.models.drafters.calibration import DraftPlan
from recserve.models.drafters.level_draft import LevelDraftHead
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.drafters.prefix_head import HEAD_KINDS, LEVELS, PrefixHead
from recserve.search.recommend_strategy import Heads
from recserve.search.strategies import SpeculativeStrategy
from recserve.search.strategies.speculative import work
from recserve.training.evaluation.cases import Cases, leave_one_out_cases
from recserve.training.evaluation.slates import SlateOptions, Slates
from recserve.training.item_drafters.calibration import MARGINS
from recserve.training.item_drafters.draft_head import RECIPES, DrafterTrainee
from recserve.training.loop import fit
from recserve.training.options import TrainOptions
from recserve.training.recommender.frozen_recommender import FrozenRecommender

K = 10
BEAM = "beam"


@dataclass(frozen=True)
class Row:
    """Figures of one head at one beam width, as means over the users.

    Attributes:
        bundle: Name of the bundle.
        head: Kind of head, or `beam` for full beam search.
        width: Beam width.
        margin: Margin with the least expected work; 0 for beam search.
        rounds: Rounds per request.
        one_round: Share of the requests that took one round.
        nodes: Tree nodes per request.
        request_ms: Median time of a request.
        propose_ms: Median time of proposing.
        share: Total time of proposing, relative to that of the requests.
        train_s: Seconds of training.
        differing: Slates that differ from those of beam search, over all margins.
    """

    bundle: str
    head: str
    width: int
    margin: float
    rounds: float
    one_round: float
    nodes: float
    request_ms: float
    propose_ms: float
    share: float
    train_s: float
    differing: int

    @property
    def work(self) -> float:
        """Expected work, by the rule of the server."""
        return work(DraftPlan(self.margin, self.nodes, self.rounds - 1, self.one_round))

    def words(self) -> list[str]:
        """Returns the row for a table."""
        return [
            self.bundle,
            str(self.width),
            self.head,
            f"{self.margin:g}",
            f"{self.rounds:.2f}",
            f"{self.one_round:.0%}",
            f"{self.nodes:.0f}",
            f"{self.work:.0f}",
            f"{self.request_ms:.2f}",
            f"{self.propose_ms:.2f}",
            f"{self.share:.0%}",
        ]


HEADINGS = ("bundle", "beam", "head", "margin", "rounds", "one round", "nodes", "work")
HEADINGS += ("ms", "proposing ms", "share")


@dataclass(frozen=True)
class Trained:
    """A head, and the seconds of its training."""

    head: PrefixHead
    seconds: float


def trained(kind: str, frozen: FrozenRecommender, options: argparse.Namespace) -> Trained:
    """Trains a head of one kind; level heads belong to the recommender and need no training."""
    if kind == LEVELS:
        return Trained(LevelDraftHead(frozen.model), 0.0)
    recipe = RECIPES["speculative"]
    train = TrainOptions(options.epochs, seed=options.seed, device="cpu", head=kind)
    trainee = DrafterTrainee(recipe, frozen, train)
    with tempfile.TemporaryDirectory() as folder:
        report = fit(trainee, recipe.schedule.with_options(train), train, Path(folder))
    return Trained(trainee.model.eval(), report.seconds)


def answers(slates: Slates, cases: Cases, options: SlateOptions) -> list[Slate]:
    """Returns the slates of all cases, requested one at a time."""
    each = np.arange(len(cases))[:, None]
    return [slate for case in each for slate in slates.answers(cases, case, K, options)]


class Comparison:
    """One bundle: its users and the slates of beam search at each width."""

    def __init__(self, path: Path, users: int) -> None:
        bundle = Bundle.open(path)
        self.name = path.name.removesuffix(".bundle")
        self.frozen = FrozenRecommender.open(bundle, torch.device("cpu"))
        self.cases = leave_one_out_cases(bundle.events(), "test").sample(users)
        self.plain: dict[int, list[list[int]]] = {}

    @torch.inference_mode()
    def beam(self, width: int) -> Row:
        """Measures full beam search and keeps its slates."""
        frozen = self.frozen
        slates = Slates(frozen.model, frozen.trie, frozen.codes)
        options = SlateOptions(width)
        answers(slates, self.cases, options)  # fills the prefix cache
        found = answers(slates, self.cases, options)
        self.plain[width] = [slate.rows.tolist() for slate in found]
        return self._row(BEAM, width, 0.0, found, 0.0)

    @torch.inference_mode()
    def head(self, name: str, width: int, of: Trained, native: bool = True) -> Row:
        """Measures a head at the margin with the least expected work."""
        frozen = self.frozen
        slates = Slates(frozen.model, frozen.trie, frozen.codes, Heads(of.head))
        if not native:
            of.head.search = None
        rows, options = [], SlateOptions(width, strategy="speculative")
        for margin in MARGINS[1:]:
            plan = DraftPlan(margin, 0.0, 0.0, 1.0)
            strategy = SpeculativeStrategy(frozen.model, of.head, plan, caches=False)
            slates.engine.offer("speculative", strategy)
            if not rows:
                answers(slates, self.cases, options)  # fills the prefix cache
            found = answers(slates, self.cases, options)
            rows.append(self._row(name, width, margin, found, of.seconds))
        best = min(rows, key=lambda row: row.work)
        return Row(**{**asdict(best), "differing": sum(row.differing for row in rows)})

    def _row(self, name: str, width: int, margin: float, found: list[Slate], train_s: float) -> Row:
        rounds = np.array([slate.rounds for slate in found])
        times = [slate.timing for slate in found]
        total = np.array([time.total_ms - time.queue_ms for time in times])
        draft = np.array([time.draft_ms for time in times])
        rows = [slate.rows.tolist() for slate in found]
        return Row(
            bundle=self.name,
            head=name,
            width=width,
            margin=margin,
            rounds=float(rounds.mean()),
            one_round=float((rounds <= 1).mean()),
            nodes=float(np.mean([time.nodes for time in times])),
            request_ms=float(np.median(total)),
            propose_ms=float(np.median(draft)),
            share=float(draft.sum() / total.sum()),
            train_s=train_s,
            differing=sum(a != b for a, b in zip(rows, self.plain[width], strict=True)),
        )


def measured(options: argparse.Namespace, path: Path, report: Report) -> list[Row]:
    """Measures one bundle and adds each row to the report."""
    comparison, rows = Comparison(path, options.users), []

    def add(row: Row) -> None:
        rows.append(row)
        cell: dict[str, Any] = asdict(row) | {"seed": options.seed, "work": row.work}
        report.add([cell])
        report.console.print(" | ".join(row.words()))

    for width in options.beams:
        add(comparison.beam(width))
    for kind in options.heads:
        if kind == LEVELS and not comparison.frozen.model.config.level_heads:
            report.console.print(f"{comparison.name} has no level heads; they are left out")
            continue
        of = trained(kind, comparison.frozen, options)
        for width in options.beams:
            add(comparison.head(kind, width, of))
            if isinstance(of.head, SelfDraftHead):
                add(comparison.head(f"{kind} in torch", width, of, native=False))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundles", nargs="+", type=Path, required=True, help="bundles to measure")
    parser.add_argument("--heads", nargs="+", choices=HEAD_KINDS, default=list(HEAD_KINDS))
    parser.add_argument("--beams", nargs="+", type=int, default=[10, 50], help="beam widths")
    parser.add_argument("--users", type=int, default=100, help="number of test users")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each head's training")
    parser.add_argument("--seed", type=int, default=0, help="seed of each head's training")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    options.clock = "wall"
    report = Report(options)
    rows = [row for path in options.bundles for row in measured(options, path, report)]
    table = Table(*HEADINGS, title_justify="left")
    for row in rows:
        table.add_row(*row.words())
    report.console.print(table)
    if differing := sum(row.differing for row in rows):
        report.console.print(f"{differing} slates differ from beam search's")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
