"""Lookup tables of the ranker's features: item statistics, co-occurrence, categories, vectors.

All counts are counts of training events. For a training candidate, cross_features.py subtracts the
candidate's own event, which would otherwise reveal the label.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from safetensors.numpy import save_file

from recserve.features.history.type_names import check_type_names
from recserve.features.ranking.item_categories import category_matrix, category_vocabulary
from recserve.features.tables.arrays import Table
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.features.tables.mapped_arrays import sum_by_row
from recserve.features.vectors.cooccurrence import neighbours
from recserve.files import read_arrays, read_record, whole_file

MAX_VECTOR_SIZE = 256
FARTHEST = 1e6  # standard deviations; squares of much larger values overflow in the ranker
CONVERSION_TYPES = ("purchase", "buy", "order", "conversion")
MAX_PREFIX = 1 << 20  # events
FITTED = ("item_counts", "value_sums", "neighbour_offsets", "neighbours", "neighbour_counts")


@dataclass(frozen=True)
class RankingSettings:
    """Settings that are fixed when the tables are fitted.

    Attributes:
        num_items: Items of the fitted catalogue.
        long_items: Largest number of events in the long part of a prefix, see `split_history`.
        recent_items: Largest number of events in the recent part of a prefix.
        block: Events by which the split between the parts moves.
        has_timestamps: Whether events have timestamps.
        has_values: Whether the values of events differ.
        mean_value: Mean value of training events, 0 without values.
        type_names: Names of the event types.
        conversion_types: Event types that count as conversions. Empty if types do not show them.
        conversion_value: Least value that counts as a conversion, or None. If neither types nor
            values show conversions, every event counts.
        category_names: [G] known categories.
        category_weights: [G] log(number of items / number of items of the category).
        side_names: [S] numeric item attributes.
        side_means: [S] means of the attributes.
        side_deviations: [S] standard deviations of the attributes.
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

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_items", 1, 1 << 31),
            ("long_items", 0, MAX_PREFIX),
            ("recent_items", 1, MAX_PREFIX),
            ("block", 1, self.recent_items),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in {least}..{most}")
        for name, others in (
            ("category_names", ("category_weights",)),
            ("side_names", ("side_means", "side_deviations")),
        ):
            for other in others:
                if len(getattr(self, other)) != len(getattr(self, name)):
                    raise ValueError(
                        f"{other} has {len(getattr(self, other))} values; expected one for each of "
                        f"the {len(getattr(self, name))} {name}"
                    )
        if any(deviation <= 0 for deviation in self.side_deviations):
            raise ValueError(f"side_deviations are {self.side_deviations}; expected values above 0")
        check_type_names(self.type_names)

    def side_range(self, name: str) -> tuple[float, float]:
        """Returns the least and the greatest value that a numeric item attribute may have."""
        place = self.side_names.index(name)
        reach = FARTHEST * self.side_deviations[place]
        return self.side_means[place] - reach, self.side_means[place] + reach

    @property
    def tells_conversions(self) -> bool:
        """Whether conversions differ from clicks in this data."""
        return bool(self.conversion_types) or self.conversion_value is not None

    def is_conversion(self, types: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns bool of the input's shape, True for conversions.

        Args:
            types: Index of the event type in `type_names`, any shape.
            values: Event values, same shape.
        """
        if self.conversion_types:
            wanted = [self.type_names.index(name) for name in self.conversion_types]
            return np.isin(types, wanted)
        if self.conversion_value is not None:
            return np.asarray(values >= self.conversion_value)
        return np.ones(types.shape, dtype=bool)


@dataclass(frozen=True)
class RankingTables:
    """Lookup tables by item row. Rows after the fitted ones have no counts of their own.

    Attributes:
        settings: Settings of the fit.
        item_counts: [I] float32 events of each item.
        value_sums: [I] float32 sum of these events' values.
        neighbour_offsets: [I+1] int64 first neighbour of each fitted row.
        neighbours: int32 rows of co-occurring items.
        neighbour_counts: float32 users that had both items.
        categories: [I, K] int32 category numbers, rarest first, padded with G.
        category_weights: [G+1] float32 weights, 0 for the padding.
        vectors: [I, D] float32 vectors of length 1, or 0.
        side: [I, S] float32 standardised attributes, 0 if unknown.
        trained_rows: [I] int64 fitted row whose events a row inherits, or the row itself. None
            means that every row is its own.
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
    trained_rows: Table | None = None

    @property
    def num_items(self) -> int:
        """I, the number of rows of the catalogue version."""
        return int(self.item_counts.shape[0])

    def fitted_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows under which the events of items were counted, in any shape."""
        return rows if self.trained_rows is None else self.trained_rows[rows]

    def neighbour_ranges(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns first neighbour and number of neighbours per fitted row; later rows have none."""
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
        """Counts training events.

        Args:
            train: Training events.
            items: I items.
            vectors: [I, F] item vectors.
            long_items: Largest number of events in the long part of a prefix.
            recent_items: Largest number of events in the recent part.
            block: Events by which the split moves, 1..recent_items.

        Raises:
            ValueError: If sizes or windows do not fit each other.
        """
        num_items = len(items)
        counts = train.counts(num_items)
        sums = sum_by_row(train.item_rows, num_items, train.values).astype(np.float32)
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
        """Writes features.json and features.safetensors. Each file is replaced atomically."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        fitted = {name: np.ascontiguousarray(np.asarray(getattr(self, name))) for name in FITTED}
        with whole_file(folder / "features.safetensors") as new:
            save_file(fitted, new)
        with whole_file(folder / "features.json") as new:
            new.write_text(json.dumps(asdict(self.settings)), encoding="utf-8")

    @staticmethod
    def load(directory: str | Path, items: ItemTable, vectors: np.ndarray) -> RankingTables:
        """Loads saved tables for a catalogue, which may have more items than the fit.

        Args:
            directory: Folder of the tables.
            items: I items.
            vectors: [I, F] item vectors.

        Raises:
            ValueError: If a file is missing, damaged or does not fit the catalogue.
        """
        folder = Path(directory)
        try:
            settings = read_record(folder / "features.json", RankingSettings)
            fitted = read_arrays(folder / "features.safetensors", FITTED)
            _check_fitted(settings.num_items, fitted)
        except ValueError as error:
            raise ValueError(f"{folder} holds no usable ranking features: {error}") from error
        arrays = tuple(fitted[name] for name in FITTED)
        return _bind(settings, arrays, items, vectors)


def _check_fitted(num_items: int, fitted: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError if the counts of a file do not fit each other or the settings."""
    pairs = fitted["neighbours"].size
    expected = {
        "item_counts": ("f", num_items),
        "value_sums": ("f", num_items),
        "neighbour_offsets": ("i", num_items + 1),
        "neighbours": ("i", pairs),
        "neighbour_counts": ("f", pairs),
    }
    for name, (kind, size) in expected.items():
        if fitted[name].shape != (size,) or fitted[name].dtype.kind != kind:
            raise ValueError(
                f"{name} are {fitted[name].dtype} {fitted[name].shape}; expected "
                f"{'floats' if kind == 'f' else 'integers'} of shape ({size},)"
            )
    offsets, rows = fitted["neighbour_offsets"], fitted["neighbours"]
    if offsets[0] != 0 or offsets[-1] != pairs or (np.diff(offsets) < 0).any():
        raise ValueError(f"neighbour_offsets do not rise from 0 to {pairs}")
    if pairs and not 0 <= int(rows.min()) <= int(rows.max()) < num_items:
        raise ValueError(f"neighbours span {rows.min()}..{rows.max()}; there are {num_items} items")


def _bind(
    settings: RankingSettings,
    fitted: tuple[np.ndarray, ...],
    items: ItemTable,
    vectors: np.ndarray,
) -> RankingTables:
    """Pads fitted counts to the catalogue's rows and adds the catalogue's own columns."""
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
    """Standardises raw attributes [n, S], NaN if unknown.

    Returns:
        [n, S] float32 within -FARTHEST..FARTHEST, 0 if unknown.
    """
    with np.errstate(over="ignore"):
        scaled = (side - np.array(settings.side_means)) / np.array(settings.side_deviations)
    known: np.ndarray = np.nan_to_num(scaled.clip(-FARTHEST, FARTHEST)).astype(np.float32)
    return known


def _conversion_rule(train: EventLog, has_values: bool) -> tuple[tuple[str, ...], float | None]:
    """Returns the conversion types and the least conversion value of the training data.

    Types that are named like purchases are preferred. Otherwise a value above the median counts.
    Otherwise both are empty.
    """
    named = tuple(name for name in train.type_names if name.lower() in CONVERSION_TYPES)
    if named and len(named) < len(train.type_names):
        return named, None
    if has_values:
        levels = np.unique(train.values)
        above = levels[levels > np.median(train.values)]
        return (), float(above[0] if above.size else levels[-1])
    return (), None


def numeric_attributes(attributes: pa.Table) -> dict[str, np.ndarray]:
    """Returns numeric and boolean columns as float64, NaN for null. Other columns are skipped."""
    found = {}
    for name in attributes.column_names:
        kind = attributes.schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            values = pc.cast(attributes.column(name), pa.float64(), safe=False)
            found[name] = pc.fill_null(values, float("nan")).to_numpy()
    return found


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Returns rows of length 1.

    Wide vectors first pass a fixed random projection, which nearly preserves angles.
    """
    if vectors.shape[1] > MAX_VECTOR_SIZE:
        generator = np.random.default_rng(vectors.shape[1])
        vectors = vectors @ generator.standard_normal((vectors.shape[1], MAX_VECTOR_SIZE))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
