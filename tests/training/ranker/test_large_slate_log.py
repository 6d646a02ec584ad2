"""A slate log that is read in parts gives the impressions of one that is read at once."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rank.impressions import FeedOptions, simulate
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables import mapped_arrays
from recserve.service.attribution import Signer
from recserve.service.parquet_log import LogFiles
from recserve.service.slate_log import reader
from recserve.service.slate_log.records import SCHEMAS
from recserve.training.ranker.impressions import Impressions, SlateSource

SIGNER = Signer(b"k" * 16)


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_a_slate_log_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Users of all kinds, several files, slates of one time, repeated slates and outcomes."""
    draw = random.Random(seed)
    feed = simulate(FeedOptions(draw.choice([3, 30]), 60, 6, slate=5, seed=seed))
    hashes = draw.random() < 0.5
    for row in [*feed.slates, *feed.outcomes]:
        unknown = draw.choice([None, "stranger"]) if draw.random() < 0.05 else row["user"]
        row["user"] = SIGNER.user(row["user"]) if hashes and unknown == row["user"] else unknown
    for row in feed.slates:
        if draw.random() < 0.3:
            row["time"] = feed.slates[0]["time"]
    for row in feed.outcomes:
        row["type"], row["value"] = draw.choice(["click", "buy", "hide"]), draw.random()
    for rows in (feed.slates, feed.outcomes):
        rows += [dict(draw.choice(rows), time=draw.choice(rows)["time"]) for _ in range(5)]
        draw.shuffle(rows)
    files = LogFiles(tmp_path, 1 << 40, SCHEMAS)
    for kind, rows in (("slates", feed.slates), ("outcomes", feed.outcomes)):
        cut = draw.randrange(1, len(rows))
        files.write(kind, rows[:cut])
        files.write(kind, rows[cut:])
    train = feed.log.leave_one_out().train
    tables = RankingTables.fit(train, feed.items, feed.vectors, 12, 8, 4)
    source = SlateSource(tmp_path, signer=SIGNER if hashes else None, unlooked_weight=0.25)
    found = []
    for parts in (False, True):
        if parts:
            monkeypatch.setattr(reader, "PART_SLATES", draw.choice([1, 7, 40]))
            monkeypatch.setattr(mapped_arrays, "BLOCK_ROWS", 13)
            monkeypatch.setattr(mapped_arrays, "IN_MEMORY_BYTES", 100)
        read: Any = Impressions.read(source, feed.log, feed.items, tables.settings)
        found.append([getattr(read, one.name) for one in fields(read)] + [read.explained(train)])
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one, two) and np.asarray(one).dtype == np.asarray(two).dtype
    assert found[0][3].size and found[0][-1].any()
