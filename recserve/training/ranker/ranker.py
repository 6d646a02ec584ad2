"""Training of the ranker: binary cross-entropy per task for the candidates of each prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from recserve.bundle.bundle import Bundle
from recserve.features.ranking.event_features import EVENT_COLUMNS, PROFILE_COLUMNS
from recserve.features.ranking.ranking import LONG, RECENT, dense_names, max_prefix_rows
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.models.ranker import Ranker, RankerConfig, save_ranker
from recserve.service.attribution import Signer
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.ranker.impressions import BiasedRanker, Impressions, SlateSource
from recserve.training.ranker.ranking_data import (
    BatchPlan,
    HeldOut,
    RankingData,
    cross_fitted_vectors,
)
from recserve.training.ranker.ranking_quality import (
    attend_within,
    conversion_words,
    ranking_quality,
)
from recserve.training.schedule import Schedule

SECTION = "ranker"
STATISTICS_BATCHES = 8


@dataclass(frozen=True)
class RankerRecipe:
    """Sizes of the ranker and settings of its training.

    The defaults are the best found for training runs of minutes on a CPU.

    Attributes:
        hidden_size: Size of the hidden states.
        num_layers: Number of layers.
        num_heads: Number of attention heads.
        dropout: Dropout of the network.
        id_dropout: Dropout of item id embeddings.
        normalizer: Divisor of the SiLU attention's sums.
        long_items: Maximum number of long-term events in a prefix.
        recent_items: Maximum number of recent events in a prefix.
        block: Step, in events, by which the window of recent events moves.
        negatives: Sampled items per positive.
        positives: Maximum number of a prefix's events that become candidates.
        batch_roots: Prefixes per step.
        validation_users: Maximum number of validation users, drawn once.
        validation_popular_share: Share of validation negatives that is drawn by popularity.
        slates: Maximum number of slates of a prefix's time, if a slate log is given.
        unlooked_weight: Weight of shown items below the last one that was taken.
        popularity_bias: Whether training takes the popularity of shown items as a bias, too.
        ignored: Names of dense columns that are not used.
        schedule: Learning rate, averaging and stopping.
    """

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    dropout: float = 0.1
    id_dropout: float = 0.5
    normalizer: float = 32.0
    long_items: int = 128
    recent_items: int = 64
    block: int = 32
    negatives: int = 4
    positives: int = 16
    batch_roots: int = 64
    validation_users: int = 2000
    validation_popular_share: float = 0.5
    slates: int = 8
    unlooked_weight: float = 1.0
    popularity_bias: bool = False
    ignored: tuple[str, ...] = ()
    schedule: Schedule = Schedule(epochs=4, learning_rate=2e-3, weight_decay=0.1, averaging=0.98)

    def __post_init__(self) -> None:
        for name, value in (("negatives", self.negatives), ("slates", self.slates)):
            if value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more")
        if not 0 <= self.unlooked_weight <= 1:
            raise ValueError(f"unlooked_weight is {self.unlooked_weight}; expected 0 to 1")


class RankerTrainee:
    """A ranker with its batches and its validation, for the training loop."""

    selection = "click_gauc"

    def __init__(
        self,
        model: Ranker,
        data: RankingData,
        log: EventLog,
        users: np.ndarray,
        popular_share: float,
        popularity_bias: bool = False,
    ) -> None:
        self.biased = None
        if data.impressions is not None:
            self.biased = BiasedRanker(model, popularity_bias).to(model.item_vectors.device)
        self.model: nn.Module = model if self.biased is None else self.biased
        self.ranker, self.data = model, data
        self._log_count = dense_names(data.tables.settings).index("log_count")
        self.log, self.users, self.popular_share = log, users, popular_share

    def plan(self, epoch: int) -> Sequence[BatchPlan]:
        """Returns one plan per batch of the epoch."""
        return self.data.plan(epoch)

    def loss(self, batch: BatchPlan) -> StepLoss:
        """Returns the mean binary cross-entropy per candidate, summed over the tasks."""
        ranker, device = self.ranker, self.ranker.group_embedding.weight.device
        made = self.data.batch(batch).to(device)
        assert made.inputs.groups is not None
        attend = attend_within(ranker, made)
        hidden = ranker(ranker.embed(made.inputs), made.inputs.groups, attend)
        logits = ranker.heads(hidden.flatten(0, 1)[made.candidates]).float()
        labels = made.labels[:, : logits.shape[1]]
        if self.biased is not None and made.ranks is not None:
            assert made.inputs.dense is not None
            counts = made.inputs.dense.flatten(0, 1)[made.candidates][:, self._log_count]
            mean, scale = (
                ranker.get_buffer(name)[self._log_count] for name in ("dense_mean", "dense_scale")
            )
            logits = logits + self.biased.bias(made.ranks, (counts - mean) * scale)
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        if made.weights is not None:
            losses = losses * made.weights[:, None]
        each = losses.mean(0)
        parts = dict(zip(ranker.config.tasks, each.detach(), strict=True))
        return StepLoss(each.sum(), parts, made.candidates.shape[0])

    def validate(self) -> dict[str, float]:
        """Returns AUC and GAUC per task on the validation events of the users."""
        quality = ranking_quality(
            self.ranker,
            self.data.tables,
            self.log,
            self.users,
            HeldOut(2, popular_share=self.popular_share),
        )
        return quality.metrics


def train_ranker(
    bundle: Bundle,
    options: TrainOptions,
    recipe: RankerRecipe | None = None,
    console: Console | None = None,
    slate_log: Path | None = None,
    signing_key: bytes | None = None,
) -> TrainReport:
    """Trains a ranker on the bundle's events and records the best one in the bundle.

    The last two events of each user are held out.

    Args:
        bundle: The bundle with catalogue and events.
        options: Options of the run.
        recipe: Sizes and settings; None means the defaults.
        console: Where progress is printed; None means standard error.
        slate_log: Folder of a slate log, whose shown items are candidates too.
        signing_key: Key of the hashes by which the slate log names users; None if it has ids.

    Returns:
        The report of the run.

    Raises:
        ValueError: If no user has three events, if the checkpoint to resume has another recipe, or
            if the slate log has no slate of the bundle's users.
    """
    options = options.start()
    recipe = recipe or RankerRecipe()
    catalog, log = bundle.catalog(), bundle.events()
    directory = bundle.directory(SECTION)
    built = bundle.manifest.build
    fold_vectors = cross_fitted_vectors(
        catalog.vectors,
        log.leave_one_out().train,
        bundle.manifest.collaborative_dim,
        built.get("collaborative_weight", 1.0),
        built.get("seed", 0),
    )
    slates = None
    if slate_log is not None:
        signer = None if signing_key is None else Signer(signing_key)
        kinds = bundle.manifest.event_kinds
        slates = SlateSource(slate_log, kinds, signer, recipe.unlooked_weight)
    source = RankerSource(log, catalog.items, catalog.vectors, fold_vectors, slates)
    report = fit_ranker(source, directory, options, recipe, console)
    tables = RankingTables.load(directory, catalog.items, catalog.vectors)
    bundle.commit(
        SECTION,
        {
            "catalog_version": catalog.version,
            "conversion": conversion_words(tables.settings),
            "seed": options.seed,
            "best_epoch": report.best_epoch,
            "epochs": report.epochs,
            "seconds": round(report.seconds, 1),
            "validation": report.metrics,
            "recipe": asdict(recipe),
        },
    )
    return report


@dataclass(frozen=True)
class RankerSource:
    """What a ranker is trained on.

    Attributes:
        log: All events; the last two of each user are held out.
        items: The catalogue of I items.
        vectors: [I, F] item vectors.
        fold_vectors: Vectors per fold of users (see `cross_fitted_vectors`). They are needed where
            `vectors` are fitted on the training events; empty otherwise.
        slates: What users were shown; None without a slate log.
    """

    log: EventLog
    items: ItemTable
    vectors: np.ndarray
    fold_vectors: Sequence[np.ndarray] = ()
    slates: SlateSource | None = None


def fit_ranker(
    source: RankerSource,
    directory: Path,
    options: TrainOptions,
    recipe: RankerRecipe,
    console: Console | None = None,
) -> TrainReport:
    """Trains a ranker on all but the last two events of each user.

    Args:
        source: Events, items and vectors.
        directory: Folder that receives the ranker and its tables.
        options: Options of the run.
        recipe: Sizes of the model and settings of its training.
        console: Where progress is printed; None means standard error.

    Returns:
        The report of the run.

    Raises:
        ValueError: If no user has three events.
    """
    log, items, vectors = source.log, source.items, source.vectors
    split = log.leave_one_out()
    users = np.flatnonzero(split.valid_rows >= 0)
    if not users.size:
        raise ValueError("no user has a held-out event; events need at least three per user")
    tables = RankingTables.fit(
        split.train, items, vectors, recipe.long_items, recipe.recent_items, recipe.block
    )
    console = console or Console(stderr=True)
    impressions = None
    if source.slates is not None:
        impressions = Impressions.read(source.slates, log, items, tables.settings)
        console.print(str(impressions))
    data = RankingData(
        split.train,
        tables,
        options.seed,
        recipe.negatives,
        recipe.positives,
        recipe.batch_roots,
        source.fold_vectors,
        impressions,
        recipe.slates,
    )
    noise = np.random.default_rng(options.seed)
    chosen = np.sort(noise.permutation(users)[: recipe.validation_users])
    model = make_ranker(tables, vectors, recipe, options.seed).to(options.torch_device())
    fit_dense_columns(model, data, recipe.ignored)
    trainee = RankerTrainee(
        model, data, log, chosen, recipe.validation_popular_share, recipe.popularity_bias
    )
    console.print(f"conversion: {conversion_words(tables.settings)}")
    report = fit(trainee, recipe.schedule.with_options(options), options, directory, console)
    save_ranker(model, directory)
    tables.save(directory)
    return report


def make_ranker(
    tables: RankingTables, vectors: np.ndarray, recipe: RankerRecipe, seed: int
) -> Ranker:
    """Returns an untrained ranker for these tables, with item vectors [I, F] bound."""
    torch.manual_seed(seed)
    settings = tables.settings
    model = Ranker(
        RankerConfig(
            num_items=settings.num_items,
            vector_size=vectors.shape[1],
            dense_size=len(dense_names(settings)),
            num_types=len(settings.type_names),
            tasks=("click", "conversion") if settings.tells_conversions else ("click",),
            hidden_size=recipe.hidden_size,
            num_layers=recipe.num_layers,
            num_heads=recipe.num_heads,
            head_dim=recipe.hidden_size // recipe.num_heads,
            max_positions=max_prefix_rows(settings) + 1,
            normalizer=recipe.normalizer,
            dropout=recipe.dropout,
            id_dropout=recipe.id_dropout,
        )
    )
    model.bind_items(torch.from_numpy(np.asarray(vectors, dtype=np.float32)))
    return model


def fit_dense_columns(model: Ranker, data: RankingData, ignored: Sequence[str] = ()) -> None:
    """Fits the standardisation of the dense columns on the first STATISTICS_BATCHES batches.

    Each column is standardised over the rows of the token group that uses it.

    Args:
        model: Receives mean and deviation of each column.
        data: Training data.
        ignored: Names of columns that become zero.

    Raises:
        ValueError: If an ignored column does not exist.
    """
    names = dense_names(data.tables.settings)
    unknown = set(ignored) - set(names)
    if unknown:
        raise ValueError(f"unknown dense columns {sorted(unknown)}; known are {', '.join(names)}")
    # Rows of the three token groups: profile, events and candidates.
    parts: tuple[list[Tensor], ...] = ([], [], [])
    for plan in data.plan(0)[:STATISTICS_BATCHES]:
        batch = data.batch(plan)
        groups, dense = batch.inputs.groups, batch.inputs.dense
        assert groups is not None and dense is not None
        parts[0].append(dense[:, 0])
        parts[1].append(dense[(groups == LONG) | (groups == RECENT)])
        parts[2].append(dense.flatten(0, 1)[batch.candidates])
    first = len(PROFILE_COLUMNS)
    ranges = (slice(0, first), slice(first, first + len(EVENT_COLUMNS)))
    mean, deviation = torch.zeros(2, model.config.dense_size)
    for columns, rows in zip((*ranges, slice(ranges[1].stop, None)), parts, strict=True):
        own = torch.cat(rows)[:, columns]
        mean[columns], deviation[columns] = own.mean(0), own.std(0, correction=0)
    deviation[[name in ignored for name in names]] = math.inf  # x / inf is 0
    model.fit_dense(mean, deviation)
