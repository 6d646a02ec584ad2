"""Training of a recommender: recipes, the trainee and the bundle's section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.accuracy import ranks_of, slate_metrics
from recserve.evaluation.cases import leave_one_out_cases
from recserve.evaluation.evaluation import make_slates
from recserve.evaluation.item_graph import save_graph
from recserve.evaluation.slates import SlateOptions, Slates, dense_slates
from recserve.evaluation.untrained import MAX_ENTRIES, SlateMaker
from recserve.features.catalog.catalog import Catalog
from recserve.features.tables.events import EventLog
from recserve.files import parse_record
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.history_bonus import FILE as HISTORY_BONUS
from recserve.models.recommender import Recommender, save_recommender
from recserve.service.auto_strategy import BEAM
from recserve.training.auto_choice import choose_auto
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.recommender.fit_history_bonus import fit_history_bonus
from recserve.training.recommender.fit_negative_weight import fit_negative_weight
from recserve.training.recommender.history_trees import HistoryTrees
from recserve.training.recommender.objectives import Objective, node_paths, tree_losses
from recserve.training.schedule import Schedule

INPUTS = ("tokens.", "ids.", "vector_projection.")  # parameters of the decoder's input


@dataclass(frozen=True)
class RecommenderRecipe:
    """Sizes of a recommender and settings of its training.

    Attributes:
        input: Input form, `items` or `codes`.
        normalization: Codes of a level's softmax: `children` or `vocabulary`.
        hidden_size: Size of the hidden states.
        num_layers: Number of layers.
        num_heads: Number of attention heads.
        intermediate_size: Size of the feed-forward layers.
        dropout: Dropout of the decoder.
        rope_theta: Base of the rotary embedding.
        tied: As in RecommenderConfig.
        id_embedding: True gives each item an embedding of its id; `items` form only.
        item_vectors: True gives the model the catalogue's item vectors; `items` form only.
        max_history_items: Maximum number of items in a history.
        max_nodes: Maximum number of padded nodes in a batch. It is lowered if an epoch would have
            fewer than MIN_BATCHES batches.
        objective: Weights and settings of the losses.
        schedule: Learning rate, averaging and stopping.
        rerank_weight: Weight of the dense head when finished beams are ranked. The bundle stores it
            as the server's default.
        validation_users: Maximum number of users in the validation between epochs.
        validation_width: Beam width of that validation. A model that `reranks` has no beams there.
        choice_users: Maximum number of validation users that choose the history bonus and the dense
            weight of `auto` after the last epoch.
        autoregressive: As in RecommenderConfig.
        level_temperature: As in RecommenderConfig.
        scale_input: True multiplies the decoder's input by the root of the hidden size, as the
            Transformer does: the initial weights and the learning rate of the embeddings and the
            vector projection. Training equals that of a model which multiplies its input, and the
            model needs no such product.
        half_life_days: An event counts half as much as a target as one that is so many days newer.
            None: all events count alike.

    Raises:
        ValueError: If the input of a tied model is scaled, since that would scale its logits too.
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
    schedule: Schedule = Schedule(epochs=10, learning_rate=2e-3)
    rerank_weight: float = 2.0
    validation_users: int = 5000
    validation_width: int = 20
    choice_users: int = 2000
    autoregressive: bool = True
    level_temperature: float = 0.0
    scale_input: bool = False
    half_life_days: float | None = None

    def __post_init__(self) -> None:
        if self.tied and self.scale_input:
            raise ValueError("tied and scale_input are set; choose one")

    @property
    def reranks(self) -> bool:
        """True if the dense head takes part in beam search."""
        has_dense_head = self.input == "items" and self.objective.dense_weight > 0
        return self.autoregressive and has_dense_head and self.rerank_weight > 0

    @property
    def input_scale(self) -> float:
        """Factor of the decoder's input."""
        return float(self.hidden_size**0.5) if self.scale_input else 1.0

    def scaled_schedule(self) -> Schedule:
        """Returns the schedule with the learning rates of a scaled input."""
        if not self.scale_input:
            return self.schedule
        rates = tuple((name, self.input_scale) for name in INPUTS)
        return replace(self.schedule, rates=self.schedule.rates + rates)

    def config(self, catalog: Catalog) -> RecommenderConfig:
        """Returns the model's configuration for a catalogue."""
        index = catalog.semantic_ids
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
    scale_input=True,
    objective=replace(ITEMS_MASKED.objective, mask_seen=False),
    schedule=replace(ITEMS_MASKED.schedule, epochs=12),
)
CODES = RecommenderRecipe(
    input="codes",
    normalization="vocabulary",
    dropout=0.2,
    max_history_items=20,
    objective=Objective(label_smoothing=0.05, mask_seen=False, heads_weight=0.1),
    schedule=Schedule(epochs=10, learning_rate=2e-3),
    rerank_weight=0.0,
    validation_users=2000,
)
PARALLEL = RecommenderRecipe(
    tied=True,
    objective=Objective(mask_seen=False, heads_weight=1.0),
    schedule=Schedule(epochs=20, learning_rate=3e-3),
    rerank_weight=0.0,
    validation_users=2000,
    autoregressive=False,
    level_temperature=0.03,
)
MIN_BATCHES = 32
CHOICE_SHARE = 0.2  # share of `max_minutes` for the history bonus and the weight of `auto`
RECIPES = {"items": ITEMS, "codes": CODES}


class RecommenderTrainee:
    """A recommender with its history trees and its validation, for the training loop."""

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
        self.codes = catalog.semantic_ids.codes
        config = recipe.config(catalog)
        codes = torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64))
        self.trie: Trie = build_trie(codes, config.codebook_sizes)
        train = events.leave_one_out().train
        self.data = HistoryTrees(
            train.offsets,
            train.item_rows,
            catalog.semantic_ids.codes,
            self.trie,
            config,
            train.relative_weights(recipe.half_life_days),
        )
        self.trie = self.trie.to(device)
        self.paths = node_paths(self.trie)
        self.model = Recommender(config).to(device)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name.startswith(INPUTS):
                    parameter.mul_(recipe.input_scale)
        self.model.bind_items(codes, torch.from_numpy(catalog.vectors))
        self.cases = leave_one_out_cases(events, "valid").sample(recipe.validation_users)
        filtered = recipe.reranks or recipe.objective.mask_seen
        self.column = "filtered" if filtered else "kept"
        self.selection = "ndcg@10"

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the tree numbers of each batch."""
        # With small data, batches shrink so that an epoch still has about MIN_BATCHES steps.
        most = max(self.data.num_nodes // MIN_BATCHES, 256)
        return self.data.epoch(self.seed, epoch, min(self.recipe.max_nodes, most))

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the loss of the trees with these numbers."""
        trees = self.data.batch(batch).to(self.device)
        losses = tree_losses(self.model, self.trie, self.paths, trees, self.recipe.objective)
        return StepLoss(losses.total, losses.parts, len(trees.trunk_rows))

    def validate(self) -> dict[str, float]:
        """Returns NDCG and recall at 10 on validation.

        If the dense head reranks, these are the figures of its ranking of all items: it weighs
        most in the slates that `auto` serves, and costs less per user than beam search. Otherwise
        they are the figures of the slates that a server with this model returns.
        """
        slates, batch = self._served_slates, 256
        if self.recipe.reranks:
            slates, batch = self._dense_slates, max(1, min(256, MAX_ENTRIES // len(self.codes)))
        made = make_slates(self.cases, slates(), self.column == "filtered", batch)
        return slate_metrics(ranks_of(made, self.cases.held), (10,))

    def _dense_slates(self) -> SlateMaker:
        return lambda which, filtered: dense_slates(
            self.model, self.codes, self.cases, which, 10, filtered
        )

    def _served_slates(self) -> SlateMaker:
        answers = Slates(self.model, self.trie, self.codes)

        def slates(which: NDArray[np.int64], filtered: bool) -> NDArray[np.int64]:
            options = SlateOptions(
                self.recipe.validation_width,
                filtered,
                self.recipe.rerank_weight,
                "beam" if self.recipe.autoregressive else "rpg",
            )
            return answers(self.cases, which, 10, options)

        return slates


def train_recommender(
    bundle: Bundle,
    options: TrainOptions,
    recipe: RecommenderRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Trains a recommender and records its best epoch in the bundle.

    A model with level heads over a large catalogue also gets an item graph. If the dense head takes
    part in beam search, validation fits its history bonus and then chooses its weight for `auto`.
    A time limit leaves CHOICE_SHARE of itself for that, and as many users take part as it allows.

    Args:
        bundle: The bundle with catalogue and events.
        options: Options of the run.
        recipe: Sizes and settings; None chooses by the kind of semantic ids and `options.input`.
        console: Where progress is printed; None means standard error.

    Returns:
        The report of the run.

    Raises:
        ValueError: If no event can be held out for validation, or if the checkpoint to resume
            belongs to another run.
    """
    options = options.start()
    recipe = recipe_for(bundle, options, recipe)
    device = options.torch_device()
    events = bundle.events()
    trainee = RecommenderTrainee(recipe, bundle.catalog(), events, options.seed, device)
    directory = bundle.directory("recommender")
    reserve = CHOICE_SHARE if recipe.reranks else 0.0
    report = fit(trainee, recipe.scaled_schedule(), options, directory, console, reserve)
    save_recommender(trainee.model, directory)
    save_graph(trainee.model, trainee.codes, directory)
    (directory / HISTORY_BONUS).unlink(missing_ok=True)  # that of an earlier model
    values = section(recipe, options, report)
    console = console or Console(stderr=True)
    if recipe.reranks:
        console.print(
            "choosing the history bonus and the dense weight of `auto` on at most "
            f"{recipe.choice_users:,} validation users",
            soft_wrap=True,
        )
        limit = options.limit.part(0.5)
        fitted = fit_history_bonus(trainee.model, trainee.codes, events, recipe.choice_users, limit)
        if fitted is None:
            console.print("no history bonus: max_minutes left no time to fit it", soft_wrap=True)
        else:
            if fitted.bonus is not None:
                fitted.bonus.save(directory)
            values["history_bonus"] = fitted.evidence()
            console.print(str(fitted), soft_wrap=True)
        if bundle.manifest.event_weights:
            bonus = None if fitted is None else fitted.bonus
            lowered = fit_negative_weight(
                trainee.model, bundle, bonus, recipe.choice_users, options.limit.part(0.2)
            )
            if lowered is not None:
                values["negative_weight"] = lowered.weight
                values["negative_events"] = lowered.evidence()
                console.print(str(lowered), soft_wrap=True)
    bundle.commit("recommender", values)
    if recipe.reranks:
        choices = choose_auto(
            bundle,
            "quality",
            device,
            recipe.choice_users,
            timed_users=0,
            console=Console(quiet=True),
            strategies=(BEAM,),
            limit=options.limit,
        )
        for column, choice in choices.items():
            console.print(f"auto, seen items {column}: {choice}", soft_wrap=True)
        if not choices:
            console.print(
                f"`auto` keeps the dense weight {recipe.rerank_weight:g}: max_minutes left no time "
                "to choose it; recserve bundle calibrate BUNDLE --auto-for quality does",
                soft_wrap=True,
            )
    return report


def recipe_for(
    bundle: Bundle, options: TrainOptions, recipe: RecommenderRecipe | None = None
) -> RecommenderRecipe:
    """Returns the recipe with the changes that the options ask for.

    Product codes have no order in which to generate them. So a model of product codes that reads
    items predicts all levels at once.
    """
    if recipe is None and bundle.manifest.build.get("quantizer") == "product":
        recipe = PARALLEL if options.input == "items" else None
    recipe = recipe or RECIPES[options.input]
    if options.half_life_days is not None:
        recipe = replace(recipe, half_life_days=options.half_life_days)
    return replace(recipe, schedule=recipe.schedule.with_options(options))


def recorded_recipe(bundle: Bundle) -> RecommenderRecipe:
    """Returns the recipe that a bundle's recommender was trained with.

    Raises:
        BundleError: If the manifest has no such recipe.
    """
    try:
        return parse_record(bundle.manifest.recommender["recipe"], RecommenderRecipe)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise BundleError(
            f"{bundle.root}: recommender.recipe in the manifest is not a recipe ({error}); "
            "train the recommender again"
        ) from error


def section(
    recipe: RecommenderRecipe, options: TrainOptions, report: TrainReport
) -> dict[str, Any]:
    """Returns the manifest's section of the recommender."""
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
