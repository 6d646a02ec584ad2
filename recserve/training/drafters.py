"""Training of the self-draft head: it learns what the frozen target says at every level.

The target reads the training histories with the next item's codes hanging under each position, as
in its own training; the head reads the position's hidden state and the same codes, and is pulled
towards the target's distribution over the valid children (or the level's codes) by their
Kullback-Leibler divergence. Source for the aim: AtSpeed, ICLR 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from recserve.bundle import Bundle, BundleError
from recserve.core.request import RecommendRequest, Root, Slate
from recserve.engine.engine import Engine
from recserve.engine.heads import Heads
from recserve.features.encoding import root_tokens
from recserve.kernels.trie import Trie, build_trie
from recserve.models.attention import DenseAttention
from recserve.models.drafters.nezha import SelfDraftConfig, SelfDraftHead, save_self_draft
from recserve.models.inputs import NodeInputs
from recserve.models.recommender import Recommender, load_recommender
from recserve.training.data import HistoryTrees, TreeBatch
from recserve.training.evaluate import Cases, leave_one_out_cases
from recserve.training.loop import Schedule, StepLoss, fit
from recserve.training.objectives import MASKED, node_paths
from recserve.training.options import TrainOptions, TrainReport

SECTION = "drafters/nezha"


@dataclass(frozen=True)
class DrafterRecipe:
    """max_nodes: padded nodes of a batch. validation_users, validation_width: whose answers, with
    which beam, show how many rounds the head saves.
    """

    max_nodes: int = 8192
    validation_users: int = 300
    validation_width: int = 50
    schedule: Schedule = field(
        default_factory=lambda: Schedule(5, 2e-3, weight_decay=0.01, patience=0)
    )


class DrafterTrainee:
    """A self-draft head under its frozen target, as the loop sees it."""

    selection = "one_round"

    def __init__(
        self,
        recipe: DrafterRecipe,
        target: Recommender,
        trie: Trie,
        data: HistoryTrees,
        cases: Cases,
        codes: NDArray[np.generic],
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.target, self.trie, self.data = recipe, target, trie, data
        self.cases, self.codes, self.seed = cases.sample(recipe.validation_users), codes, seed
        self.paths = node_paths(trie)
        config = target.config
        self.model = SelfDraftHead(
            SelfDraftConfig(config.decoder.hidden_size, config.codebook_sizes)
        ).to(trie.device)
        self.model.start_from(target)

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Tree numbers of each batch."""
        return self.data.epoch(self.seed, epoch, self.recipe.max_nodes)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Divergence summed over an item's levels, mean over predicted items."""
        trees = self.data.batch(batch).to(self.trie.device)
        with torch.no_grad():
            hidden = self.target(trees.tokens, trees.positions, DenseAttention(trees.mask()))
        total = divergence(
            self.model, self.target, self.trie, self.paths, trees, hidden.flatten(0, 1)
        )
        mean = total / trees.trunk_rows.shape[0]
        return StepLoss(mean, {"divergence": mean.detach()}, trees.trunk_rows.shape[0])

    def validate(self) -> dict[str, float]:
        """Share of answers proved in one round, and rounds on average."""
        engine = Engine(self.target, heads=Heads(self.model))
        width = self.recipe.validation_width
        config = self.target.config
        requests = []
        for case in range(len(self.cases)):
            history = self.cases.history(case)[-config.max_history_items :]
            tokens = root_tokens(history, self.codes, config.codebook_sizes, config.input)
            root = Root(NodeInputs(torch.from_numpy(tokens).to(self.trie.device)), tokens)
            requests.append(RecommendRequest(root, self.trie, 10, width, "speculative"))
        answers = [a for a in engine.run_many(list(requests)) if isinstance(a, Slate)]
        rounds = np.array([answer.rounds for answer in answers])
        return {"one_round": float((rounds <= 1).mean()), "rounds": float(rounds.mean())}


def divergence(
    head: SelfDraftHead,
    target: Recommender,
    trie: Trie,
    paths: Tensor,
    batch: TreeBatch,
    hidden: Tensor,
) -> Tensor:
    """Summed KL(target || head) over all predicted levels after the first.

    hidden [B * N, E] of the target. paths: of `node_paths`.
    """
    config = target.config
    roots = hidden[batch.trunk_nodes]
    state, states = roots, [roots]
    for level in range(config.num_levels - 1):
        state = head.step(level, state, target.item_tokens[batch.trunk_rows, level])
        states.append(state)
    total = hidden.new_zeros((), dtype=torch.float32)
    for level in range(1, config.num_levels):
        part = (batch.target_levels == level).nonzero().flatten()
        if not part.shape[0]:
            continue
        nodes, rows = batch.target_nodes[part], batch.target_rows[part]
        item = torch.searchsorted(batch.trunk_nodes, nodes - level)
        wanted = target.level_logits(hidden[nodes], level).float()
        given = head.level_logits(roots[item], states[level][item], level).float()
        if config.normalization == "children":
            children = trie.children(paths[rows, level])
            codes = children.codes.long()
            wanted = wanted.gather(1, codes).masked_fill(~children.valid, MASKED)
            given = given.gather(1, codes).masked_fill(~children.valid, MASKED)
        wanted, given = wanted.log_softmax(-1), given.log_softmax(-1)
        total = total + (wanted.exp() * (wanted - given)).sum()
    return total


def train_drafter(
    bundle: Bundle,
    options: TrainOptions,
    recipe: DrafterRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Train the self-draft head of the bundle's recommender and record it in the bundle.

    Raises BundleError if no recommender was trained, or one that has no beam search.
    """
    recipe = recipe or DrafterRecipe()
    if not bundle.has("recommender"):
        raise BundleError(f"{bundle.root}: no recommender was trained; a drafter learns from one")
    device = options.torch_device()
    catalog, events = bundle.catalog(), bundle.events()
    codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
    target = load_recommender(
        bundle.directory("recommender"), codes, torch.from_numpy(catalog.vectors), device
    )
    if not target.config.autoregressive:
        raise BundleError(f"{bundle.root}: a model of level heads alone has no beams to draft for")
    target.requires_grad_(False)
    trie = build_trie(codes, target.config.codebook_sizes)
    train = events.leave_one_out().train
    data = HistoryTrees(train.offsets, train.item_rows, catalog.index.codes, trie, target.config)
    trainee = DrafterTrainee(
        recipe,
        target,
        trie.to(device),
        data,
        leave_one_out_cases(events, "valid"),
        catalog.index.codes,
        options.seed,
    )
    schedule = recipe.schedule
    if options.epochs is not None:
        schedule = replace(schedule, epochs=options.epochs)
    directory = bundle.directory(SECTION, create=True)
    report = fit(trainee, schedule, options, directory, console)
    save_self_draft(trainee.model, directory)
    bundle.commit(SECTION, {"validation": report.metrics, "seconds": round(report.seconds, 1)})
    return report
