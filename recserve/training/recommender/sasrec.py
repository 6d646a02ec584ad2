"""Training of the SASRec baseline with the recommender's split, loop and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from recserve.bundle.bundle import Bundle
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.evaluation.evaluation import slate_columns
from recserve.evaluation.slates import sasrec_slates
from recserve.features.catalog.catalog import Catalog
from recserve.features.tables.events import EventLog
from recserve.models.sasrec import SasRec, SasRecConfig, save_sasrec
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.recommender.full_softmax import full_softmax_loss
from recserve.training.recommender.history_trees import bucket_sizes, windows
from recserve.training.recommender.objectives import MASKED, hits
from recserve.training.schedule import Schedule

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SasRecRecipe:
    """Sizes of SASRec and settings of its training.

    Attributes:
        hidden_size: Size of the hidden states.
        num_layers: Number of layers.
        num_heads: Number of attention heads.
        dropout: Dropout of the network.
        item_vectors: True gives the model the catalogue's item vectors.
        cosine: As in SasRecConfig.
        mask_seen: True leaves items of the history out of the negatives.
        negatives: Items that each batch draws for its softmax; 0, or a catalogue with fewer, takes
            all items.
        max_history_items: Maximum number of items in a history.
        max_nodes: Maximum number of padded positions in a batch.
        schedule: Learning rate, averaging and stopping.
        validation_users: Maximum number of users in the validation between epochs.
    """

    hidden_size: int = 192
    num_layers: int = 2
    num_heads: int = 2
    dropout: float = 0.4
    item_vectors: bool = True
    cosine: bool = True
    mask_seen: bool = True
    negatives: int = 0
    max_history_items: int = 50
    max_nodes: int = 1536
    schedule: Schedule = Schedule(epochs=12, learning_rate=2e-3)
    validation_users: int = 4000


PLAIN = SasRecRecipe(
    hidden_size=128,
    num_layers=1,
    num_heads=1,
    dropout=0.2,
    item_vectors=False,
    cosine=False,
    mask_seen=False,
    negatives=1024,
    schedule=Schedule(epochs=20, learning_rate=1e-3, weight_decay=0.0),
)
VECTORS = SasRecRecipe()


class SasRecTrainee:
    """SASRec with its histories and its validation, for the training loop."""

    selection = "ndcg@10"

    def __init__(
        self,
        recipe: SasRecRecipe,
        catalog: Catalog,
        events: EventLog,
        seed: int,
        device: torch.device,
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.seed, self.device = recipe, seed, device
        config = SasRecConfig(
            num_items=len(catalog),
            hidden_size=recipe.hidden_size,
            num_layers=recipe.num_layers,
            num_heads=recipe.num_heads,
            dropout=recipe.dropout,
            max_history_items=recipe.max_history_items,
            vector_dim=catalog.vectors.shape[1] if recipe.item_vectors else 0,
            cosine=recipe.cosine,
            input_scale=recipe.hidden_size**0.5,
        )
        self.model = SasRec(config).to(device)
        self.model.bind_vectors(torch.from_numpy(catalog.vectors))
        train = events.leave_one_out().train
        starts = windows(train.offsets, recipe.max_history_items + 1)
        useful = np.diff(starts) >= 2
        self.starts, self.stops = starts[:-1][useful], starts[1:][useful]
        if not useful.any():
            raise ValueError("no user has two training events; there is no next item to learn")
        self.rows = train.item_rows
        self.cases = leave_one_out_cases(events, "valid").sample(recipe.validation_users)

    def plan(self, epoch: int) -> Sequence[Ints]:
        """Returns the history numbers of each batch."""
        return bucket_sizes(self.stops - self.starts - 1, self.seed, epoch, self.recipe.max_nodes)

    def loss(self, batch: Ints) -> StepLoss:
        """Returns the cross-entropy over all items, at every position of these histories."""
        cases = Cases(self.rows, self.starts[batch], self.stops[batch], batch, batch)
        rows = torch.from_numpy(cases.histories(np.arange(len(batch)))).to(self.device)
        hidden = self.model(rows[:, :-1].clamp(min=0))
        tree, step = (rows[:, 1:] >= 0).nonzero(as_tuple=True)
        targets = rows[tree, step + 1]
        none = torch.zeros(0, 2, dtype=torch.int64, device=self.device)
        seen = _seen_pairs(rows, tree, step, targets) if self.recipe.mask_seen else none
        query, keys = self.model.queries(hidden[tree, step]), self.model.keys()
        if 0 < self.recipe.negatives < len(keys):
            loss = shared_negatives_loss(query, keys, targets, seen, self.recipe.negatives)
        else:
            loss = full_softmax_loss(query, keys, targets, seen)
        loss = loss / len(targets)
        return StepLoss(loss, {"items": loss.detach()}, len(targets))

    def validate(self) -> dict[str, float]:
        """Returns NDCG and recall at 10 over all items that are not in the history."""

        def slates(which: Ints, filtered: bool) -> Ints:
            return sasrec_slates(self.model, self.cases, which, 10, filtered)

        return slate_columns(self.cases, slates, (10,), columns=("filtered",))["filtered"]


def shared_negatives_loss(
    query: Tensor, items: Tensor, targets: Tensor, hidden: Tensor, drawn: int
) -> Tensor:
    """Returns the summed cross-entropy of each target among the same drawn items.

    Unlike `sampled_softmax_loss`, it does not estimate the softmax over all items: a drawn item
    stands for itself, so that a target which beats them all soon has no loss left.

    Args:
        query: [q, E] query vectors.
        items: [I, E] item vectors.
        targets: [q] item rows.
        hidden: [x, 2] pairs (row of `query`, item row) that must not be negatives.
        drawn: Number of items that are drawn uniformly, with replacement.
    """
    sample = torch.randint(len(items), (drawn,), device=query.device).sort().values
    own = torch.arange(len(targets), device=query.device)
    masked = hits(
        sample,
        torch.cat([own, hidden[:, 0]]),
        torch.cat([targets, hidden[:, 1]]),
        len(targets),
    )
    logits = F.linear(query, F.embedding(sample, items).to(query.dtype)).float()
    target = (query * F.embedding(targets, items)).sum(-1, keepdim=True).float()
    logits = torch.cat([target, logits.masked_fill(masked, MASKED)], dim=1)
    return F.cross_entropy(logits, torch.zeros_like(targets), reduction="sum")


def _seen_pairs(rows: Tensor, tree: Tensor, step: Tensor, targets: Tensor) -> Tensor:
    """Returns [x, 2] pairs of a target's number and an earlier item, without the target itself."""
    seen = rows[tree]
    index = torch.arange(rows.shape[1], device=rows.device)
    before = (index <= step[:, None]) & (seen != targets[:, None])
    which, where = before.nonzero(as_tuple=True)
    return torch.stack([which, seen[which, where]], dim=1)


def fit_sasrec(
    bundle: Bundle,
    options: TrainOptions,
    recipe: SasRecRecipe,
    directory: Path,
    console: Console | None = None,
) -> tuple[SasRec, TrainReport]:
    """Trains SASRec on a bundle's events without changing the bundle.

    Args:
        bundle: The bundle with catalogue and events.
        options: Options of the run.
        recipe: Sizes and settings.
        directory: Receives checkpoint and plot.
        console: Where progress is printed; None means standard error.

    Returns:
        The model of the best epoch in eval mode, and the report of the run.

    Raises:
        ValueError: If no event can be held out for validation, or if the checkpoint to resume
            belongs to another run.
    """
    recipe = replace(recipe, schedule=recipe.schedule.with_options(options))
    device = options.torch_device()
    trainee = SasRecTrainee(recipe, bundle.catalog(), bundle.events(), options.seed, device)
    report = fit(trainee, recipe.schedule, options, directory, console)
    return trainee.model, report


def train_sasrec(
    bundle: Bundle,
    options: TrainOptions,
    recipe: SasRecRecipe = VECTORS,
    console: Console | None = None,
) -> TrainReport:
    """Trains SASRec as `fit_sasrec` does, and records its best epoch in the bundle."""
    directory = bundle.directory("sasrec")
    model, report = fit_sasrec(bundle, options, recipe, directory, console)
    save_sasrec(model, directory)
    bundle.commit(
        "sasrec",
        {
            "seed": options.seed,
            "epochs": report.epochs,
            "best_epoch": report.best_epoch,
            "validation": report.metrics,
            "seconds": round(report.seconds, 1),
            "recipe": asdict(replace(recipe, schedule=recipe.schedule.with_options(options))),
        },
    )
    return report
