"""Training a recommender on a bundle: recipes, the trainee of the loop, and what the bundle
keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from recserve.bundle.bundle import Bundle
from recserve.features.catalog.catalog import Catalog
from recserve.features.tables.events import EventLog
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.config import DecoderConfig
from recserve.models.recommender import Recommender, RecommenderConfig, save_recommender
from recserve.training.evaluation.cases import leave_one_out_cases
from recserve.training.evaluation.evaluation import slate_columns
from recserve.training.evaluation.slates import SlateOptions, Slates
from recserve.training.item_graph import save_graph
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.recommender.history_trees import HistoryTrees
from recserve.training.recommender.objectives import Objective, node_paths, tree_losses
from recserve.training.schedule import Schedule


@dataclass(frozen=True)
class RecommenderRecipe:
    """What a recommender is trained with.

    max_nodes: padded nodes of a batch, fewer where an epoch would have under 32 of them.
    rerank_weight: of the dense head when finished beams are ranked, kept in the bundle as the
    server's default. validation_users, validation_width: validation between epochs is on that many
    users with that beam. autoregressive, level_temperature: as in RecommenderConfig.
    """

    input: str = "items"
    normalization: str = "children"
    hidden_size: int = 192
    num_layers: int = 2
    num_heads: int = 6
    intermediate_size: int = 512
    dropout: float = 0.4
    rope_theta: float = 10_000.0
    tied: bool = False
    id_embedding: bool = True
    item_vectors: bool = True
    max_history_items: int = 50
    max_nodes: int = 4096
    objective: Objective = Objective(label_smoothing=0.05, dense_weight=2.0, heads_weight=0.1)
    schedule: Schedule = Schedule(epochs=10, learning_rate=2e-3, patience=3)
    rerank_weight: float = 2.0
    validation_users: int = 2000
    validation_width: int = 20
    autoregressive: bool = True
    level_temperature: float = 0.0

    def config(self, catalog: Catalog) -> RecommenderConfig:
        """The model's configuration on a catalogue."""
        index = catalog.index
        items = self.input == "items"
        head_dim = self.hidden_size // self.num_heads
        decoder = DecoderConfig(
            self.hidden_size,
            self.num_layers,
            self.num_heads,
            self.num_heads,
            head_dim,
            self.intermediate_size,
            rope_theta=self.rope_theta,
            dropout=self.dropout,
        )
        return RecommenderConfig(
            decoder,
            index.codebook_sizes,
            self.input,  # type: ignore[arg-type]
            self.normalization,  # type: ignore[arg-type]
            num_items=index.num_items,
            vector_dim=catalog.vectors.shape[1] if items and self.item_vectors else 0,
            id_embedding=items and self.id_embedding,
            tied=self.tied,
            dense_head=items and self.objective.dense_weight > 0,
            level_heads=self.objective.heads_weight > 0,
            level_temperature=self.level_temperature,
            autoregressive=self.autoregressive,
            max_history_items=self.max_history_items,
        )


ITEMS_MASKED = RecommenderRecipe()
ITEMS = replace(
    ITEMS_MASKED,
    tied=True,
    objective=replace(ITEMS_MASKED.objective, mask_seen=False),
    schedule=replace(ITEMS_MASKED.schedule, epochs=12),
    validation_users=1000,
)
CODES = RecommenderRecipe(
    input="codes",
    normalization="vocabulary",
    dropout=0.2,
    max_history_items=20,
    objective=Objective(label_smoothing=0.05, mask_seen=False, heads_weight=0.1),
    schedule=Schedule(epochs=10, learning_rate=2e-3, patience=3),
    rerank_weight=0.0,
)
PARALLEL = RecommenderRecipe(
    tied=True,
    objective=Objective(mask_seen=False, heads_weight=1.0),
    schedule=Schedule(epochs=20, learning_rate=3e-3, patience=3),
    rerank_weight=0.0,
    autoregressive=False,
    level_temperature=0.03,
)
MIN_BATCHES = 32
RECIPES = {"items": ITEMS, "codes": CODES}


class RecommenderTrainee:
    """A recommender with its history trees, as the loop sees it."""

    def __init__(
        self,
        recipe: RecommenderRecipe,
        catalog: Catalog,
        events: EventLog,
        seed: int,
        device: torch.device,
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.seed, self.device = recipe, seed, device
        self.codes = catalog.index.codes
        config = recipe.config(catalog)
        codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
        self.trie: Trie = build_trie(codes, config.codebook_sizes)
        train = events.leave_one_out().train
        self.data = HistoryTrees(
            train.offsets, train.item_rows, catalog.index.codes, self.trie, config
        )
        self.trie = self.trie.to(device)
        self.paths = node_paths(self.trie)
        self.model = Recommender(config).to(device)
        self.model.bind_items(codes, torch.from_numpy(catalog.vectors))
        self.cases = leave_one_out_cases(events, "valid").sample(recipe.validation_users)
        self.column = "filtered" if recipe.objective.mask_seen else "kept"
        self.selection = "ndcg@10"

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Tree numbers of each batch."""
        # A small catalogue still takes enough steps for the schedule to mean something.
        most = max(int(self.data.tree_starts[-1]) // MIN_BATCHES, 256)
        return self.data.epoch(self.seed, epoch, min(self.recipe.max_nodes, most))

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Loss of the trees of these numbers."""
        trees = self.data.batch(batch).to(self.device)
        losses = tree_losses(self.model, self.trie, self.paths, trees, self.recipe.objective)
        return StepLoss(losses.total, losses.parts, len(trees.trunk_rows))

    def validate(self) -> dict[str, float]:
        """NDCG and recall at 10 of the slates that the server would give."""
        options = SlateOptions(
            self.recipe.validation_width,
            self.column == "filtered",
            self.recipe.rerank_weight,
            "beam" if self.recipe.autoregressive else "rpg",
        )
        answers = Slates(self.model, self.trie, self.codes)

        def slates(which: NDArray[np.int64], filtered: bool) -> NDArray[np.int64]:
            return answers(self.cases, which, 10, replace(options, filtered=filtered))

        columns = slate_columns(self.cases, slates, (10,), columns=(self.column,))
        return columns[self.column]


def train_recommender(
    bundle: Bundle,
    options: TrainOptions,
    recipe: RecommenderRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Train, keep the best epoch on validation and record it in the bundle.

    recipe: None takes that of the bundle's ids and options.input. A large catalogue of a model with
    level heads gets its item graph too. Raises ValueError if the bundle's events hold nothing out
    to validate on, or for a checkpoint of another run.
    """
    recipe = recipe_for(bundle, options, recipe)
    device = options.torch_device()
    events = bundle.events()
    trainee = RecommenderTrainee(recipe, bundle.catalog(), events, options.seed, device)
    directory = bundle.directory("recommender")
    report = fit(trainee, recipe.schedule, options, directory, console)
    save_recommender(trainee.model, directory)
    save_graph(trainee.model, trainee.codes, directory)
    bundle.commit("recommender", section(recipe, options, report))
    return report


def recipe_for(
    bundle: Bundle, options: TrainOptions, recipe: RecommenderRecipe | None = None
) -> RecommenderRecipe:
    """The recipe with what the options say otherwise. Product ids have no order to write them in,
    so a model of them that reads items predicts all levels at once.
    """
    if recipe is None and bundle.manifest.build.get("quantizer") == "product":
        recipe = PARALLEL if options.input == "items" else None
    recipe = recipe or RECIPES[options.input]
    return replace(recipe, schedule=recipe.schedule.asked(options))


def section(
    recipe: RecommenderRecipe, options: TrainOptions, report: TrainReport
) -> dict[str, Any]:
    """What the manifest says of the recommender."""
    return {
        "input": recipe.input,
        "normalization": recipe.normalization,
        "dense_weight": recipe.rerank_weight,
        "seed": options.seed,
        "epochs": report.epochs,
        "best_epoch": report.best_epoch,
        "validation": report.metrics,
        "seconds": round(report.seconds, 1),
        "recipe": asdict(recipe),
    }
