"""Training of draft heads on a frozen recommender, the target.

The target reads the training histories with the next item's codes below each position, as in its
own training. The head reads the position's hidden state and the same codes. For `nezha` it also
reads the states of the placeholders behind the position. The head of `speculative` minimises the
Kullback-Leibler divergence from the target's distribution. The head of `nezha` also learns the true
next item.

Sources: AtSpeed, ICLR 2025, section 3. Learning rates of `nezha`: NEZHA, arXiv 2511.18793.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.accuracy import ranks_of, slate_metrics
from recserve.evaluation.cases import Cases
from recserve.evaluation.slates import SlateOptions, Slates
from recserve.kernels.trie.trie import Trie
from recserve.models.item_heads import (
    SelfDraftConfig,
    SelfDraftHead,
    load_self_draft,
    save_self_draft,
)
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.strategy import Heads
from recserve.training.item_drafters.calibration import BEAM_SIZES, calibrate
from recserve.training.item_drafters.draft_head_loss import head_loss, read
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.recommender.frozen_recommender import FrozenRecommender
from recserve.training.recommender.history_trees import HistoryTrees
from recserve.training.recommender.objectives import node_paths
from recserve.training.schedule import Schedule
from recserve.training.warm_start import Start, choose_start, old_section


@dataclass(frozen=True)
class DrafterRecipe:
    """Settings of the training of a draft head.

    Attributes:
        max_nodes: Maximum number of padded nodes in a batch.
        validation_users: Number of users whose slates validate the head.
        validation_width: Beam width of that validation.
        surprise_weight: Weight of the loss on the true next item, relative to the divergence from
            the target.
        schedule: Learning rate, averaging and stopping.
    """

    max_nodes: int = 8192
    validation_users: int = 300
    validation_width: int = 50
    surprise_weight: float = 0.0
    schedule: Schedule = field(default_factory=lambda: Schedule(5, 2e-3, weight_decay=0.01))


CALIBRATION_SHARE = 0.2  # share of `max_minutes` for the calibration of the drafts
RECIPES = {
    "speculative": DrafterRecipe(),
    "nezha": DrafterRecipe(
        validation_users=1000,
        surprise_weight=1.0,
        schedule=Schedule(
            6,
            1e-4,
            weight_decay=0.01,
            rates=(("tokens.", 100.0), ("cells.", 10.0), ("placeholders", 100.0)),
        ),
    ),
}


class DrafterTrainee:
    """A draft head on its frozen target, for the training loop."""

    def __init__(
        self,
        recipe: DrafterRecipe,
        frozen: FrozenRecommender,
        options: TrainOptions,
    ) -> None:
        torch.manual_seed(options.seed)
        self.name = name = options.name
        self.selection = "ndcg@10" if name == "nezha" else "one_round"
        self.recipe, self.seed = recipe, options.seed
        self.target, self.trie, self.codes = frozen.model, frozen.trie, frozen.codes
        self.cases = frozen.cases.sample(recipe.validation_users)
        events, config = frozen.events, frozen.model.config
        self.data = HistoryTrees(
            events.offsets, events.item_rows, frozen.codes, frozen.trie, config
        )
        self.paths = node_paths(self.trie)
        self.model = SelfDraftHead(
            SelfDraftConfig(config.decoder.hidden_size, config.codebook_sizes, name == "nezha")
        ).to(self.trie.device)
        self.model.start_from(self.target)

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the tree numbers of each batch."""
        return self.data.epoch(self.seed, epoch, self.recipe.max_nodes)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the loss summed over an item's levels, as the mean over predicted items."""
        trees = self.data.batch(batch).to(self.trie.device)
        reading = read(self.model, self.target, trees)
        sums = head_loss(self.model, self.target, self.trie, self.paths, trees, reading)
        count, weight = trees.trunk_rows.shape[0], self.recipe.surprise_weight
        total = (sums.divergence + weight * sums.surprise) / count
        parts = {"divergence": sums.divergence.detach() / count}
        if weight:
            parts["surprise"] = sums.surprise.detach() / count
        return StepLoss(total, parts, count)

    def validate(self) -> dict[str, float]:
        """Returns the metrics of the head's slates.

        For `nezha` these are NDCG and recall of its own slates. For `speculative` they are the
        share of slates proved in one round, and the mean number of rounds.
        """
        width = self.recipe.validation_width
        if self.name == "speculative":
            return draft_metrics(self.model, self.target, self.trie, self.codes, self.cases, width)
        slates = Slates(self.target, self.trie, self.codes, Heads(nezha=self.model))
        options = SlateOptions(width, strategy="nezha")
        ranks = [
            ranks_of(slates(self.cases, which, 10, options), self.cases.held[which])
            for which in self.cases.batches(256)
        ]
        return slate_metrics(np.concatenate(ranks), (10,))


def train_drafter(
    bundle: Bundle,
    options: TrainOptions,
    recipe: DrafterRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Trains a draft head for the strategy `options.name` and records it in the bundle.

    The head is written to `drafters/` and its name.

    Args:
        bundle: A bundle with an autoregressive recommender.
        options: Options of the run.
        recipe: Settings of the training; None means those of the drafter's name in RECIPES.
        console: Where progress is printed; None means standard error.

    Raises:
        BundleError: If the bundle has no recommender, or one without beam search, or if
            `options.start_from` has no such head.
        ValueError: If the head of `options.start_from` has other codes or another size.
    """
    options = options.start()
    recipe = recipe or RECIPES[options.name]
    console = console or Console(stderr=True)
    section = f"drafters/{options.name}"
    frozen = FrozenRecommender.open(bundle, options.torch_device())
    if not frozen.model.config.autoregressive:
        raise BundleError(f"{bundle.root}: a model of level heads alone has no beams to draft for")
    trainee = DrafterTrainee(recipe, frozen, options)
    start = None if options.start_from is None else _warm_start(trainee, options.start_from)
    directory = bundle.directory(section)
    schedule = recipe.schedule.with_options(options)
    reserve = CALIBRATION_SHARE if options.name == "speculative" else 0.0
    report = fit(trainee, schedule, options, directory, console, reserve)
    if options.name == "speculative":
        trainee.model.calibration = found = calibrate(
            trainee.model, frozen.model, frozen.trie, frozen.codes, trainee.cases, options.limit
        )
        num_sizes = 0 if found is None else len(found.plans)
        if num_sizes < len(BEAM_SIZES):
            console.print(
                f"max_minutes left time to measure the drafts of {num_sizes} of {len(BEAM_SIZES)} "
                "sizes; recserve bundle calibrate BUNDLE measures all",
                soft_wrap=True,
            )
    save_self_draft(trainee.model, directory)
    _record(bundle, section, report, start)
    return report


def _warm_start(trainee: DrafterTrainee, old: Path) -> Start:
    """Starts from the head of an older bundle if its loss is lower.

    The output codes and code embeddings belong to one recommender, the layers between less so.
    Thus the old cells alone are one of the starts.

    Raises:
        BundleError: If the older bundle has no such head.
        ValueError: If that head has other codes or another size.
    """
    section = f"drafters/{trainee.name}"
    folder = old_section(Bundle.open(old), section).directory(section)
    head = load_self_draft(folder, trainee.target)
    weights = head.state_dict()
    bound = ("tokens.", "head.", "placeholders")  # made for the old recommender
    cells = {name: value for name, value in weights.items() if not name.startswith(bound)}
    return choose_start(trainee, {"old head": weights, "old cells": cells})


def _record(bundle: Bundle, section: str, report: TrainReport, start: Start | None = None) -> None:
    values: dict[str, Any] = {"validation": report.metrics, "seconds": round(report.seconds, 1)}
    if start is not None:
        values["start"] = start.to_dict()
    bundle.commit(section, values | {"recommender": bundle.digest("recommender")})


def draft_metrics(
    head: SelfDraftHead,
    target: SemanticIdModel,
    trie: Trie,
    codes: NDArray[np.generic],
    cases: Cases,
    width: int,
) -> dict[str, float]:
    """Measures a draft head on `speculative` requests with seen items filtered.

    Args:
        head: The draft head.
        target: The recommender that it drafts for.
        trie: Trie of the semantic ids.
        codes: [I, L] semantic ids of the items.
        cases: Validation users.
        width: Beam width.

    Returns:
        `one_round`, the share of slates that are proved in one round, and `rounds`, their mean
        number.
    """
    slates = Slates(target, trie, codes, Heads(head))
    options = SlateOptions(width, strategy="speculative")
    found = [slates.answers(cases, which, 10, options) for which in cases.batches(256)]
    rounds = np.array([answer.rounds for answers in found for answer in answers])
    return {"one_round": float((rounds <= 1).mean()), "rounds": float(rounds.mean())}
