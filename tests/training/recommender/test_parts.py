"""What training counts and lays out in parts is what it counts at once."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from recserve.features.tables import mapped_arrays
from recserve.features.tables.events import EventLog
from recserve.features.vectors import cooccurrence, vectors
from recserve.kernels.trie.trie import build_trie
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.training.recommender import fit_history_bonus, history_trees

SIZES = (3, 4, 2)
CODES = np.array([[0, 0, 0], [0, 1, 0], [1, 2, 0], [1, 2, 1], [2, 0, 0], [2, 3, 1]])


def drawn_log(draw: np.random.Generator) -> EventLog:
    lengths = draw.integers(0, 25, int(draw.integers(1, 30)))
    lengths[0] += 1
    total = int(lengths.sum())
    return EventLog(
        [str(user) for user in range(len(lengths))],
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        draw.integers(0, len(CODES), total).astype(np.int32),
        np.arange(total),
        np.zeros(total, np.int16),
        ("event",),
        np.ones(total, np.float32),
        True,
        draw.random(total).astype(np.float32) if draw.random() < 0.5 else None,
    )


def counted(log: EventLog, seed: int) -> list[Any]:
    """Returns links, neighbours, vectors and the batches of an epoch, as flat lists."""
    items = len(CODES)
    decoder = DecoderConfig(16, 2, 2, 1, 8, 32)
    trie = build_trie(torch.from_numpy(CODES), SIZES)
    found: list[Any] = list(vars(fit_history_bonus.link_items(log, items)).values())
    found += cooccurrence.neighbours(log, items)
    found.append(vectors.collaborative_vectors(log, items, 4, 0))
    for form in ("items", "codes"):
        config = RecommenderConfig(
            decoder, SIZES, form, "children", num_items=items, max_history_items=1 + seed % 7
        )
        trees = history_trees.HistoryTrees(
            log.offsets, log.item_rows, CODES, trie, config, log.weights
        )
        for numbers in trees.epoch(seed, 0, 60):
            batch = trees.batch(numbers)
            found += [getattr(batch, field.name) for field in fields(batch)]
    return [np.asarray(value).tolist() for value in found]


@pytest.mark.parametrize("seed", range(12))
def test_parts_count_as_a_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(seed)
    log = drawn_log(draw)
    whole = counted(log, seed)
    for module, bound, most in (
        (mapped_arrays, "BLOCK_ROWS", 50),
        (fit_history_bonus, "RANGE_EVENTS", 60),
        (cooccurrence, "RANGE_EVENTS", 60),
        (cooccurrence, "CHUNK", 90),
        (vectors, "RANGE_EVENTS", 60),
        (history_trees, "BLOCK_TREES", 6),
    ):
        monkeypatch.setattr(module, bound, int(draw.integers(1, most)))
    assert counted(log, seed) == whole
