"""Small bundles whose events have given types."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.features.synthetic import SyntheticFiles, SyntheticOptions, write_synthetic
from tests.support.tiny_bundle import built, with_models


def write_events(folder: Path, names: Sequence[str | None]) -> SyntheticFiles:
    """Writes items and events; the types are drawn, and each name occurs."""
    options = SyntheticOptions(num_items=500, num_users=40, mean_events=16, seed=3)
    files = write_synthetic(folder, options)
    events = pq.read_table(files.events)
    drawn = np.random.default_rng(5).integers(0, len(names), events.num_rows)
    drawn[: len(names)] = np.arange(len(names))
    place = events.schema.get_field_index("type")
    column = pa.array([names[i] for i in drawn.tolist()], pa.string())
    pq.write_table(events.set_column(place, "type", column), files.events)
    return files


def typed_bundle(folder: Path, names: Sequence[str | None], ranker: bool = False) -> Path:
    """Builds a bundle with these types under `folder`, and returns its path."""
    out = folder / "bundle"
    built(write_events(folder / "data", names), out)
    return with_models(out, ranker=True, recommender=False) if ranker else out
