"""Training of the dense retriever, which finds later events from each state of a recommender.

    loss of a group = min over its items i of -log( e^s(q,i) / (e^s(q,i) + sum_j e^s(q,j) / n_j) )

q is the vector of the group's outcome and time offset, and s is the scaled cosine. j runs over
items of the same batch and over uniformly drawn items. n_j is the expected number of j among them,
where the item's frequency comes from a count-min sketch. So the sum estimates the sum over the
whole catalogue. The minimum is at the nearest item of the group, since all its items share q.

Source: PinRec, arXiv 2504.10507, windowed relaxation and sampled softmax with frequency correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.accuracy import ranks_of, slate_metrics
from recserve.evaluation.slates import SlateOptions, Slates
from recserve.features.tables.count_min import CountMinSketch
from recserve.features.vectors.vector_index import FaissIndex
from recserve.models.attention import DenseAttention
from recserve.models.dense_retriever import (
    DenseRetriever,
    RetrieverConfig,
    item_vectors,
    load_retriever,
    save_retriever,
)
from recserve.models.recommender import Recommender
from recserve.search.strategy import Heads
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.recommender.frozen_recommender import FrozenRecommender
from recserve.training.recommender.futures import FutureBatch, Futures
from recserve.training.recommender.objectives import MASKED, hits
from recserve.training.schedule import Schedule
from recserve.training.time_limit import NO_LIMIT, TimeLimit
from recserve.training.warm_start import choose_start, old_section

SECTION = "retriever"
LOOKAHEADS = (0.0, 0.25, 0.5, 1.0)
LOOKAHEAD_SHARE = 0.2  # share of `max_minutes` for the choice of one of them


@dataclass(frozen=True)
class RetrieverRecipe:
    """Settings of the training of a retriever.

    Attributes:
        horizon: Events in a window.
        drawn: Uniformly drawn negatives per batch.
        in_batch: Maximum number of negatives from the same batch.
        max_nodes: Maximum number of padded tokens in a batch.
        sketch_width: Counters per row of the count-min sketch.
        sketch_depth: Rows of the count-min sketch.
        width: Size of the hidden layers, in multiples of the recommender's hidden size.
        validation_users: Maximum number of users in the validation between epochs.
        schedule: Learning rate, averaging and stopping.
    """

    horizon: int = 8
    drawn: int = 2048
    in_batch: int = 2048
    max_nodes: int = 2048
    sketch_width: int = 1 << 18
    sketch_depth: int = 4
    width: int = 2
    validation_users: int = 1000
    schedule: Schedule = field(default_factory=lambda: Schedule(2, 1e-3, weight_decay=0.05))


class RetrieverTrainee:
    """A retriever on its frozen recommender, for the training loop."""

    selection = "ndcg@10"

    def __init__(
        self,
        recipe: RetrieverRecipe,
        frozen: FrozenRecommender,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.seed = recipe, seed
        self.target, self.trie, self.codes = frozen.model, frozen.trie, frozen.codes
        self.cases = frozen.cases.sample(recipe.validation_users)
        target, events = frozen.model, frozen.events
        self.data = Futures(events, frozen.codes, target.config, recipe.horizon)
        self.sketch = CountMinSketch(recipe.sketch_width, recipe.sketch_depth)
        self.sketch.add(events.item_rows)
        size = target.config.decoder.hidden_size
        counts = np.bincount(events.types, minlength=len(events.type_names))
        config = RetrieverConfig(
            size,
            recipe.width * size,
            events.type_names,
            tuple((counts / counts.sum()).tolist()),
            self.data.unit,
            self.data.bounds,
            self.data.next_shares,
        )
        self.model = DenseRetriever(config).to(self.trie.device)
        self.model.start_from(target)

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the history numbers of each batch."""
        return self.data.epoch(self.seed, epoch, self.recipe.max_nodes)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the mean loss over the groups of the batch.

        The recommender runs with dropout, as noise that makes the retriever robust.
        """
        futures = self.data.batch(batch).to(self.trie.device)
        with torch.no_grad():
            positions = torch.arange(futures.tokens.shape[1], device=self.trie.device)
            hidden = self.target.train()(futures.tokens, positions, DenseAttention())
        states = hidden.flatten(0, 1)[futures.state_nodes]
        negatives = self._negatives(futures)
        mean = retrieval_loss(self.model, self.target, states, futures, negatives)
        return StepLoss(mean, {"retrieval": mean.detach()}, futures.outcomes.shape[0])

    def validate(self) -> dict[str, float]:
        """Returns NDCG and recall at 10 of the server's slates, with seen items filtered."""
        index = FaissIndex(item_vectors(self.model, self.target.eval()).numpy())
        slates = Slates(self.target, self.trie, self.codes, Heads(retriever=self.model), index)
        which = np.arange(len(self.cases))
        rows = slates(self.cases, which, 10, SlateOptions(strategy="dense"))
        return slate_metrics(ranks_of(rows, self.cases.held), (10,))

    def look_ahead(self, limit: TimeLimit = NO_LIMIT) -> dict[str, float]:
        """Chooses by validation how far ahead the slates look, and sets it in the model.

        The choices range from the time offsets of next events to those of the whole window. Those
        that the time limit does not allow are left out; without any, the model stays as it is.

        Returns:
            The selection metric of each choice.
        """
        tried: dict[str, float] = {}
        configs = {}
        ends = np.array([self.data.next_shares, self.data.window_shares])
        trained = self.model.config
        for ahead in LOOKAHEADS:
            if limit.is_over:
                break
            shares = (1 - ahead) * ends[0] + ahead * ends[1]
            name = f"{ahead:g}"
            configs[name] = replace(self.model.config, offset_shares=tuple(shares.tolist()))
            self.model.config = configs[name]
            tried[name] = self.validate()[self.selection]
        self.model.config = configs[max(tried, key=lambda name: tried[name])] if tried else trained
        return tried

    def _negatives(self, futures: FutureBatch) -> Negatives:
        recipe, num_items = self.recipe, self.target.num_bound_items
        device = futures.tokens.device
        in_batch = futures.futures[:, 0]
        in_batch = in_batch[torch.randperm(in_batch.shape[0], device=device)[: recipe.in_batch]]
        drawn = torch.randint(num_items, (recipe.drawn,), device=device)
        rows = torch.cat([in_batch, drawn]).sort().values
        share = self.sketch.estimate(rows.cpu().numpy()) / self.sketch.total
        expected = in_batch.shape[0] * share + recipe.drawn / num_items
        return Negatives(rows, torch.from_numpy(np.log(expected)).float().to(device))


@dataclass(frozen=True)
class Negatives:
    """Sampled items.

    Attributes:
        rows: [n] item rows, ascending, repeats allowed.
        log_expected: [n] log of the item's expected number of occurrences in such a sample.
    """

    rows: Tensor
    log_expected: Tensor


def retrieval_loss(
    retriever: DenseRetriever,
    recommender: Recommender,
    states: Tensor,
    batch: FutureBatch,
    negatives: Negatives,
) -> Tensor:
    """Returns the mean loss of the groups of a batch.

    Args:
        retriever: The retriever.
        recommender: The frozen recommender, which embeds the items.
        states: [s, E] states of the batch.
        batch: Groups and their items.
        negatives: Sampled items.
    """
    query = retriever.queries(states[batch.group_states], batch.outcomes, batch.offsets)
    query = query * retriever.scale
    targets = retriever.items(recommender.embed_items(batch.target_rows))
    own = (query[batch.target_groups] * targets).sum(-1).float()
    groups = query.shape[0]
    nearest = own.new_full((groups,), MASKED)
    nearest = nearest.scatter_reduce(0, batch.target_groups, own, "amax")
    items = retriever.items(recommender.embed_items(negatives.rows))
    logits = F.linear(query, items).float() - negatives.log_expected
    window = batch.futures[batch.group_states]
    which, where = (window >= 0).nonzero(as_tuple=True)
    # Items of the state's own future are not negatives.
    logits = logits.masked_fill(hits(negatives.rows, which, window[which, where], groups), MASKED)
    first = torch.zeros(groups, dtype=torch.int64, device=logits.device)
    return F.cross_entropy(torch.cat([nearest[:, None], logits], dim=1), first)


def _same_shapes(one: DenseRetriever, other: DenseRetriever) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    names = one.config.outcomes == other.config.outcomes
    return names and all(a.shape == b.shape for a, b in pairs)


def train_retriever(
    bundle: Bundle,
    options: TrainOptions,
    recipe: RetrieverRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Trains the dense retriever of the bundle's recommender and records it in the bundle.

    Args:
        bundle: A bundle with a recommender.
        options: Options of the run.
        recipe: Settings of the training; None means the defaults.
        console: Where progress is printed; None means standard error.

    Returns:
        The report of the run.

    Raises:
        BundleError: If the bundle has no recommender, or if the retriever of `options.start_from`
            is missing or has other outcomes.
    """
    options = options.start()
    recipe = recipe or RetrieverRecipe()
    console = console or Console(stderr=True)
    frozen = FrozenRecommender.open(bundle, options.torch_device())
    trainee = RetrieverTrainee(recipe, frozen, options.seed)
    start = None
    if options.start_from is not None:
        folder = old_section(Bundle.open(options.start_from), SECTION).directory(SECTION)
        old = load_retriever(folder, frozen.model)
        if old.config != trainee.model.config and not _same_shapes(old, trainee.model):
            raise BundleError(f"{options.start_from}: its retriever has other outcomes or offsets")
        start = choose_start(trainee, {"old head": old.state_dict()})
    directory = bundle.directory(SECTION)
    schedule = recipe.schedule.with_options(options)
    report = fit(trainee, schedule, options, directory, console, LOOKAHEAD_SHARE)
    with torch.no_grad():
        ahead = trainee.look_ahead(options.limit)
    if len(ahead) < len(LOOKAHEADS):
        console.print(
            f"max_minutes left time to try {len(ahead)} of {len(LOOKAHEADS)} time offsets",
            soft_wrap=True,
        )
    save_retriever(trainee.model, directory)
    values: dict[str, Any] = {
        "validation": report.metrics,
        "look_ahead": ahead,
        "seconds": round(report.seconds, 1),
    }
    if start is not None:
        values["start"] = start.to_dict()
    bundle.commit(SECTION, values | {"recommender": bundle.digest("recommender")})
    return report
