"""What the ranker's features look up: item statistics, co-occurrence, categories, vectors.

Everything counted here is counted on training events. For a training candidate its own event is
taken back where the tables are read (cross_features.py), else it would give the answer away.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from recserve.features.catalog.item_categories import category_matrix, category_vocabulary
from recserve.features.catalog.row_tables import Table
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.features.vectors.cooccurrence import neighbours

MAX_VECTOR_SIZE = 256
FARTHEST = 1e6  # deviations from the mean; squares of much more overflow in the ranker
CONVERSION_TYPES = ("purchase", "buy", "order", "conversion")
FITTED = ("item_counts", "value_sums", "neighbour_offsets", "neighbours", "neighbour_counts")


@dataclass(frozen=True)
class RankingSettings:
    """What was decided when the tables were fitted.

    long_items, recent_items, block: the windows of a root (see `split_history`).
    conversion_types: names of the event types that count as a conversion; conversion_value: the
    least value that counts as one; empty and None: the data cannot tell, every event counts.
    category_names, category_weights: known categories, log(items / items of the category).
    side_names, side_means, side_deviations: numeric item attributes and their standardisation.
    """

    num_items: int
    long_items: int
    recent_items: int
    block: int
    has_timestamps: bool
    has_values: bool
    mean_value: float
    type_names: tuple[str, ...]
    conversion_types: tuple[str, ...]
    conversion_value: float | None
    category_names: tuple[str, ...]
    category_weights: tuple[float, ...]
    side_names: tuple[str, ...]
    side_means: tuple[float, ...]
    side_deviations: tuple[float, ...]

    def side_range(self, name: str) -> tuple[float, float]:
        """Least and greatest value of a numeric item attribute that the ranker can be told."""
        place = self.side_names.index(name)
        reach = FARTHEST * self.side_deviations[place]
        return self.side_means[place] - reach, self.side_means[place] + reach

    @property
    def tells_conversions(self) -> bool:
        """Whether conversions differ from clicks in this data."""
        return bool(self.conversion_types) or self.conversion_value is not None

    def is_conversion(self, types: np.ndarray, values: np.ndarray) -> np.ndarray:
        """[n] bool from event types (index into type_names) and values, any shape."""
        if self.conversion_types:
            wanted = [self.type_names.index(name) for name in self.conversion_types]
            return np.isin(types, wanted)
        if self.conversion_value is not None:
            return np.asarray(values >= self.conversion_value)
        return np.ones(types.shape, dtype=bool)


@dataclass(frozen=True)
class RankingTables:
    """Lookups by item row; rows beyond `settings.num_items` came later and have no counts.

    item_counts, value_sums [I] float32: events of the item, and the sum of their values.
    neighbour_offsets [I+1] int64, neighbours int32, neighbour_counts float32: co-occurrence.
    categories [I, K] int32, rarest first, G where padded. category_weights [G+1] float32, 0 for the
    padding. vectors [I, D] float32, rows of length 1 (or 0). side [I, S] float32, standardised, 0
    where unknown. learned [I] int64: the fitted row whose events a row inherits, itself if none;
    None: every row its own.
    """

    settings: RankingSettings
    item_counts: Table
    value_sums: Table
    neighbour_offsets: np.ndarray
    neighbours: np.ndarray
    neighbour_counts: np.ndarray
    categories: Table
    category_weights: np.ndarray
    vectors: Table
    side: Table
    learned: Table | None = None

    @property
    def num_items(self) -> int:
        """I of the catalogue version the tables are bound to."""
        return int(self.item_counts.shape[0])

    def fitted_rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows under which the events of items were counted. rows: any shape."""
        return rows if self.learned is None else self.learned[rows]

    def neighbour_ranges(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First neighbour of each fitted row, and how many; none of rows that came later."""
        last = len(self.neighbour_offsets) - 1
        starts = self.neighbour_offsets[np.minimum(rows, last)]
        return starts, self.neighbour_offsets[np.minimum(rows + 1, last)] - starts

    @staticmethod
    def fit(
        train: EventLog,
        items: ItemTable,
        vectors: np.ndarray,
        long_items: int = 128,
        recent_items: int = 64,
        block: int = 32,
    ) -> RankingTables:
        """Count training events. vectors: [I, F].

        Raises ValueError where sizes or windows do not fit.
        """
        if not 0 < block <= recent_items:
            raise ValueError(f"block is {block}; it must be in 1..{recent_items} (recent_items)")
        num_items = len(items)
        counts = train.popularity(num_items)
        sums = np.bincount(train.item_rows, train.values, num_items).astype(np.float32)
        has_values = bool(np.ptp(train.values)) if train.num_events else False
        names, weights = category_vocabulary(items.categories)
        sides = numeric_attributes(items.attributes)
        columns = np.stack([*sides.values()], 1) if sides else np.zeros((num_items, 0))
        settings = RankingSettings(
            num_items,
            long_items,
            recent_items,
            block,
            train.has_timestamps,
            has_values,
            float(train.values.mean()) if has_values else 0.0,
            train.type_names,
            *_conversion_rule(train, has_values),
            names,
            weights,
            tuple(sides),
            tuple(float(v) for v in np.nan_to_num(np.nanmean(columns, 0))),
            tuple(float(v) or 1.0 for v in np.nan_to_num(np.nanstd(columns, 0))),
        )
        return _bind(settings, (counts, sums, *neighbours(train, num_items)), items, vectors)

    def save(self, directory: str | Path) -> None:
        """Write features.json and features.safetensors; each is replaced whole or not at all."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        fitted = {name: np.ascontiguousarray(np.asarray(getattr(self, name))) for name in FITTED}
        save_file(fitted, folder / "features.safetensors.new")
        (folder / "features.json.new").write_text(json.dumps(asdict(self.settings)))
        for name in ("features.safetensors", "features.json"):
            os.replace(folder / f"{name}.new", folder / name)

    @staticmethod
    def load(directory: str | Path, items: ItemTable, vectors: np.ndarray) -> RankingTables:
        """Read saved tables and bind them to a catalogue version, which may hold later items too.

        vectors: [I, F].
        Raises ValueError where a file is missing, damaged or does not fit the catalogue.
        """
        folder = Path(directory)
        try:
            values: dict[str, Any] = json.loads((folder / "features.json").read_text())
            lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
            settings = RankingSettings(**(values | lists))
            fitted = load_file(folder / "features.safetensors")
            arrays = tuple(fitted[name] for name in FITTED)
        except (OSError, TypeError, KeyError, json.JSONDecodeError, SafetensorError) as error:
            raise ValueError(f"{folder} holds no usable ranking features: {error}") from error
        return _bind(settings, arrays, items, vectors)


def _bind(
    settings: RankingSettings,
    fitted: tuple[np.ndarray, ...],
    items: ItemTable,
    vectors: np.ndarray,
) -> RankingTables:
    """Fitted counts, padded to the catalogue's rows, beside what the catalogue itself says."""
    num_items = len(items)
    if vectors.ndim != 2 or vectors.shape[0] != num_items:
        raise ValueError(f"vectors have shape {vectors.shape}; expected [{num_items}, F]")
    if num_items < settings.num_items:
        raise ValueError(
            f"the catalogue has {num_items} items, the tables were fitted on {settings.num_items}"
        )
    counts, sums, offsets, neighbour_rows, pair_counts = fitted
    later = num_items - settings.num_items
    sides = numeric_attributes(items.attributes)
    unknown = np.full(num_items, np.nan)
    columns = [sides.get(name, unknown) for name in settings.side_names]
    side = np.stack(columns, 1) if columns else np.zeros((num_items, 0))
    return RankingTables(
        settings,
        np.pad(counts, (0, later)),
        np.pad(sums, (0, later)),
        np.pad(offsets, (0, later), mode="edge"),
        neighbour_rows,
        pair_counts,
        category_matrix(items.categories, settings.category_names, settings.category_weights),
        np.array([*settings.category_weights, 0.0], dtype=np.float32),
        unit_rows(vectors),
        standardise(side, settings),
    )


def standardise(side: np.ndarray, settings: RankingSettings) -> np.ndarray:
    """[n, S] raw attributes, NaN where unknown -> float32, 0 where unknown, at most FARTHEST away,
    whatever the catalogue says.
    """
    with np.errstate(over="ignore"):
        scaled = (side - np.array(settings.side_means)) / np.array(settings.side_deviations)
    known: np.ndarray = np.nan_to_num(scaled.clip(-FARTHEST, FARTHEST)).astype(np.float32)
    return known


def _conversion_rule(train: EventLog, has_values: bool) -> tuple[tuple[str, ...], float | None]:
    """Types named as purchases where there are any; else a value above the median; else nothing."""
    named = tuple(name for name in train.type_names if name.lower() in CONVERSION_TYPES)
    if named and len(named) < len(train.type_names):
        return named, None
    if has_values:
        levels = np.unique(train.values)
        above = levels[levels > np.median(train.values)]
        return (), float(above[0] if above.size else levels[-1])
    return (), None


def numeric_attributes(attributes: pa.Table) -> dict[str, np.ndarray]:
    """Numeric and boolean columns as float64, NaN for null; other columns are left out."""
    found = {}
    for name in attributes.column_names:
        kind = attributes.schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            values = pc.cast(attributes.column(name), pa.float64())
            found[name] = pc.fill_null(values, float("nan")).to_numpy()
    return found


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1; wide vectors pass a fixed random projection, which nearly keeps angles."""
    if vectors.shape[1] > MAX_VECTOR_SIZE:
        generator = np.random.default_rng(vectors.shape[1])
        vectors = vectors @ generator.standard_normal((vectors.shape[1], MAX_VECTOR_SIZE))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
