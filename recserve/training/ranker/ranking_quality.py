"""Ranking quality: AUC and GAUC of each user's held-out event among sampled items."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from recserve.evaluation.accuracy import auc, gauc
from recserve.features.ranking.ranking import dense_names
from recserve.features.ranking.ranking_tables import RankingSettings, RankingTables
from recserve.features.tables.events import EventLog
from recserve.models.attention import DenseSiluAttention
from recserve.models.ranker import Ranker
from recserve.training.ranker.ranking_batch import RankingBatch
from recserve.training.ranker.ranking_data import HeldOut, NegativeSampler, held_batches

BASELINES = {
    "popularity": "log_count",
    "vectors": "similarity_all",
    "co-occurrence": "cooccurrence",
}


@dataclass(frozen=True)
class RankingQuality:
    """AUC and GAUC of held-out events among sampled items.

    Attributes:
        users: Number of users.
        negatives: Sampled items per event.
        popular_share: Share of the sampled items that is drawn by popularity.
        metrics: AUC and GAUC by task, for example `click_auc` and `click_gauc`. A user whose
            held-out event is not a conversion has no positive for the conversion task.
        baselines: GAUC of clicks when a single feature gives the score.
    """

    users: int
    negatives: int
    popular_share: float
    metrics: dict[str, float]
    baselines: dict[str, float]


def attend_within(model: Ranker, batch: RankingBatch) -> DenseSiluAttention:
    """Returns the attention of a padded batch under MTGR's mask."""
    return DenseSiluAttention(batch.mask(), model.config.normalizer)


@torch.no_grad()
def ranking_quality(
    model: Ranker,
    tables: RankingTables,
    log: EventLog,
    users: np.ndarray,
    held: HeldOut,
) -> RankingQuality:
    """Ranks each user's held-out event against sampled items that the user never had.

    Args:
        model: Left in eval mode.
        tables: Features of items and users.
        log: All events.
        users: Numbers of users in the log.
        held: Which event is held out, and what it is ranked against.

    Raises:
        ValueError: If there are no users.
    """
    if not users.size:
        raise ValueError("no user has a held-out event; events need at least three per user")
    sampler = NegativeSampler(log, tables)
    batches = held_batches(log, tables, users, sampler, held)
    labels, scores, features = _score(model.eval(), batches)
    groups = np.arange(len(labels)) // (1 + held.negatives)
    metrics = {}
    for column, task in enumerate(model.config.tasks):
        metrics[f"{task}_auc"] = auc(labels[:, column], scores[:, column])
        metrics[f"{task}_gauc"] = gauc(labels[:, column], scores[:, column], groups)
    names = dense_names(tables.settings)
    baselines = {
        name: gauc(labels[:, 0], features[:, names.index(feature)], groups)
        for name, feature in BASELINES.items()
    }
    return RankingQuality(users.size, held.negatives, held.popular_share, metrics, baselines)


def _score(
    model: Ranker, batches: Iterable[RankingBatch]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns labels [M, tasks], scores [M, tasks] and dense columns [M, F] of all candidates."""
    device = model.group_embedding.weight.device
    model.freeze_items()
    labels, scores, features = [], [], []
    for batch in batches:
        moved = batch.to(device)
        assert moved.inputs.groups is not None and batch.inputs.dense is not None
        hidden = model(model.embed(moved.inputs), moved.inputs.groups, attend_within(model, moved))
        chosen = hidden.flatten(0, 1)[moved.candidates]
        scores.append(model.heads(chosen).float().cpu().numpy())
        labels.append(batch.labels.numpy())
        features.append(batch.inputs.dense.flatten(0, 1)[batch.candidates].numpy())
    return np.concatenate(labels), np.concatenate(scores), np.concatenate(features)


def conversion_words(settings: RankingSettings) -> str:
    """Returns a phrase for reports that says which events count as conversions."""
    if settings.conversion_types:
        return f"events of type {', '.join(settings.conversion_types)}"
    if settings.conversion_value is not None:
        return f"events with a value of {settings.conversion_value:g} or more"
    return "every click: nothing tells conversions apart, so the ranker has one task"
