"""Builds a bundle from input files: vectors, semantic ids, catalogue and events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recserve.bundle import bundle as names
from recserve.bundle.bundle import Bundle, BundleError
from recserve.bundle.kept_ids import KeptIds, keep_ids, open_version, with_live_items
from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.filters import ItemFilters
from recserve.features.catalog.semantic_ids import CodeReport, SemanticIds, build_semantic_ids
from recserve.features.history.event_kinds import KINDS, EventKinds
from recserve.features.history.event_weights import EventWeights
from recserve.features.history.type_names import check_type_names
from recserve.features.tables.column_names import check_columns, rename_columns
from recserve.features.tables.event_rows import COLUMNS
from recserve.features.tables.event_table import find_problems, read_events
from recserve.features.tables.events import EventLog
from recserve.features.tables.input_table import SHARED
from recserve.features.tables.items import ATTRIBUTE, RESERVED, ItemTable, read_items
from recserve.features.tables.mapped_arrays import blocks
from recserve.features.tables.parquet import BadRowError, BadRows, OnBadRows, SchemaError
from recserve.features.vectors.faiss_gpu import FaissGpu, faiss_gpu, has_gpu
from recserve.features.vectors.quantizer import check_sizes, fit_quantizer, reconstruction_error
from recserve.features.vectors.text_encoder import TextEncoder, unit
from recserve.features.vectors.vectors import (
    VECTORS,
    collaborative_vectors,
    fit_text_encoder,
    join_vectors,
    read_vectors,
)
from recserve.files import new_folder

LEVELS = 4
CODES = 256
ITEMS_PER_FIRST_CODE = 4
MAX_FIRST_CODES = 4096


@dataclass(frozen=True)
class BuildOptions:
    """Options of `recserve build`.

    Attributes:
        items: File of items: Parquet, CSV or JSON lines; or a folder with the parts of one.
        events: File of events in any of these formats, a folder with the parts of one,
            the folder of a server's event log, or several of them, whose events are joined.
        out: Folder of the new bundle.
        embeddings: File of the user's own item vectors, or a folder with the Parquet parts of one.
            None makes vectors from the items' text.
        quantizer: `residual` or `product`.
        levels: Quantiser levels, without the disambiguation level. None: 4, or as many as `codes`
            names.
        codes: Codes of each quantiser level: one number for all, or one per level. None: 256, but
            more on the first level of residual ids if there are many items (`first_level`).
        text_dim: Size of the text part of an item vector. 0 leaves the part out. Without effect if
            `embeddings` is given.
        collaborative_dim: Size of the collaborative part. 0 leaves the part out.
        collaborative_weight: Weight of the collaborative part relative to the other part.
        seed: Seed of all random choices.
        device: Where vectors are clustered. `auto` takes a GPU where faiss is built for it. The
            bundle records which it was, because codes may differ between devices.
        on_bad_rows: `error` stops if a row is invalid, `skip` drops and counts it.
        split: Separators by name of a text column of the items, which becomes a list of texts.
        columns: Names of columns in the files by our name, such as `item_id`. `TABLE.NAME` is that
            of one file alone: `items`, `events` or `embeddings`.
        event_kinds: Kinds of the event types. Only positive events train and count.
        event_weights: How much events count. Without entries each positive event counts 1.
        ids_from: Older bundle whose items keep vectors and semantic ids. Its quantiser and text
            encoder make those of new items. None makes all anew.
        journal: Folder of item changes of that bundle. Items that only it has become items of the
            new bundle.
        holdout_users: Most users whose last two events are held out of training, for validation and
            test. A hash of the id chooses them. None holds out those of all users.

    Raises:
        ValueError: If an option is out of range. The message names option, bound and value.
    """

    items: Path
    events: Path | tuple[Path, ...]
    out: Path
    embeddings: Path | None = None
    quantizer: Literal["residual", "product"] = "residual"
    levels: int | None = None
    codes: int | tuple[int, ...] | None = None
    text_dim: int = 128
    collaborative_dim: int = 128
    collaborative_weight: float = 1.0
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    on_bad_rows: OnBadRows = "error"
    split: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    event_kinds: EventKinds = EventKinds()
    ids_from: Path | None = None
    journal: Path | None = None
    event_weights: EventWeights = EventWeights()
    holdout_users: int | None = None

    def __post_init__(self) -> None:
        sizes = self.codebook_sizes(0)
        check_sizes(self.quantizer, sizes)
        if self.levels not in (None, len(sizes)):
            raise ValueError(f"codes names {len(sizes)} levels; levels is {self.levels}")
        for name, low, high in (
            ("text_dim", 0, names.MAX_DIM),
            ("collaborative_dim", 0, names.MAX_DIM),
            ("seed", 0, names.MAX_SEED),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; expected {low}..{high}")
        if self.holdout_users is not None and self.holdout_users < 1:
            raise ValueError(f"holdout_users is {self.holdout_users}; hold out at least 1")
        if not 0 < self.collaborative_weight <= names.MAX_COLLABORATIVE_WEIGHT:
            raise ValueError(
                f"collaborative_weight is {self.collaborative_weight}; expected 0..100"
            )
        for name, separator in self.split.items():
            if not separator:
                raise ValueError(f"split of {name} is empty; expected a separator")
        if self.device == "cuda":
            _gpu(self.device)
        tables = {"items": RESERVED, "events": COLUMNS}
        check_columns(
            self.columns, tables if self.embeddings is None else tables | {"embeddings": VECTORS}
        )
        self.event_weights.check_kinds(self.event_kinds)
        if self.journal is not None and self.ids_from is None:
            raise ValueError("journal has item changes of an older bundle; set ids_from to it")
        if self.embeddings is None and not self.text_dim and not self.collaborative_dim:
            raise ValueError("text_dim and collaborative_dim are both 0: an item needs a vector")

    def codebook_sizes(self, num_items: int) -> tuple[int, ...]:
        """Returns the codes of each quantiser level for a catalogue of `num_items` items."""
        if isinstance(self.codes, tuple):
            return self.codes
        levels = LEVELS if self.levels is None else self.levels
        sizes = (CODES if self.codes is None else self.codes,) * levels
        if sizes and self.codes is None and self.quantizer == "residual":
            return (first_level(num_items), *sizes[1:])
        return sizes


def first_level(num_items: int) -> int:
    """Returns the default number of codes of the first level of residual ids.

    The codes of deeper levels are shared by all prefixes. So the model knows an item best by its
    first code, and a larger first level makes beam search more accurate (docs/results/quality.md).
    It is the largest power of two with at least ITEMS_PER_FIRST_CODE items per code, from 256 to
    4096.
    """
    most = num_items // ITEMS_PER_FIRST_CODE
    return min(max(1 << max(most.bit_length() - 1, 0), CODES), MAX_FIRST_CODES)


@dataclass(frozen=True)
class BuildReport:
    """Result of a build.

    Attributes:
        out: Folder of the bundle.
        catalog_version: Version of the catalogue, derived from its content.
        num_items: Number of items.
        num_users: Number of users.
        num_events: Number of events.
        vector_dim: Size of an item vector.
        codebook_sizes: Codes per level, disambiguation level included.
        codes: Collisions and codebook use.
        reconstruction_error: Share of the vectors' variance that quantisation loses.
        bad_items: Rejected or changed rows of the item file.
        bad_events: Rejected or changed rows of the event file.
        seconds: Duration of the build.
    """

    out: Path
    catalog_version: str
    num_items: int
    num_users: int
    num_events: int
    vector_dim: int
    codebook_sizes: tuple[int, ...]
    codes: CodeReport
    reconstruction_error: float
    bad_items: BadRows
    bad_events: BadRows
    seconds: float


def build_bundle(options: BuildOptions, log: Callable[[str], None] = print) -> BuildReport:
    """Builds a bundle.

    The build writes into a hidden folder next to `out` and renames it when complete. A failed build
    leaves nothing behind.

    Args:
        options: Inputs, output and quantiser settings.
        log: Called with each line of progress.

    Raises:
        SchemaError: If an input file is unreadable or has wrong columns.
        BadRowError: If a row is invalid and `on_bad_rows` is "error".
        BundleError: If `out` is not empty.
        ValueError: If an option does not fit the data.
    """
    started = time.monotonic()
    out = Path(options.out)
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise BundleError(f"{out}: not empty; choose another folder or delete this one")
    try:
        items, bad_items = read_items(
            options.items, options.on_bad_rows, options.split, options.columns
        )
    except (SchemaError, BadRowError) as wrong:
        # One run names the problems of both files.
        others = find_problems(options.events, options.columns)
        raise type(wrong)("\n".join([str(wrong), *others])) from wrong
    for line in (*_column_lines(bad_items, ItemFilters(items).fields), *bad_items.lines()):
        log(line)
    old = version = None
    if options.ids_from is not None:
        old = Bundle.open(options.ids_from)
        options = replace(options, **_kept_options(old))
        version, num_items = open_version(old, options.journal), len(items)
        items = with_live_items(items, version)
        if len(items) > num_items:
            log(f"{options.journal}: {len(items) - num_items} items that {options.items} lacks")
    events, bad_events = read_events(
        options.events,
        items,
        options.on_bad_rows,
        options.columns,
        {*options.event_kinds.below(), *options.event_weights.valued},
    )
    _check_shared(options, bad_items, bad_events)
    try:
        named = (*options.event_kinds.named, *options.event_weights.named)
        check_type_names({*events.type_names, *named})
    except ValueError as fault:
        raise SchemaError(f"{bad_events.file}: column type: {fault}") from None
    for line in (*_column_lines(bad_events, ()), *bad_events.lines()):
        log(line)
    log(f"{len(items)} items, {events.num_users} users, {events.num_events} events")
    for line in (*_type_lines(options.event_kinds, events), *_weight_lines(options, events)):
        log(line)
    wanted = _positive_events(options, events)
    if events.num_events and not wanted.num_events:
        raise SchemaError(
            f"{bad_events.file}: no event is positive, so there is nothing to train on; name the "
            "types that say that a user wants an item with --positive TYPE"
        )

    # Held-out events must influence neither vectors nor popularity.
    train = wanted.leave_one_out().train
    if train.num_events and train.weights is not None and not train.weights.any():
        raise SchemaError(
            f"{options.events}: all training events have the weight 0, so there is nothing to "
            "train on; give a type a higher one with --weight TYPE=WEIGHT"
        )
    kept = None
    if old is not None and version is not None:
        content = None
        if options.embeddings is not None:
            known = items.ids[: bad_items.kept_rows.size]
            content = read_vectors(options.embeddings, known, bad_items, options.columns)
        kept = keep_ids(old, version, items, content)
        log(f"{len(items) - kept.num_new} items keep their ids, {kept.num_new} are new")
        encoder, vectors = kept.encoder, kept.vectors
    else:
        encoder, vectors = _vectors(options, items, bad_items, train)
    for line in () if encoder is None else _unknown_lines(bad_items.file, items, encoder):
        log(line)
    bundle, index, codes_report, lost = _write(
        options, items, events, train, encoder, vectors, log, kept
    )
    report = BuildReport(
        out,
        bundle.manifest.catalog_version,
        len(items),
        events.num_users,
        events.num_events,
        vectors.shape[1],
        index.codebook_sizes,
        codes_report,
        lost,
        bad_items,
        bad_events,
        time.monotonic() - started,
    )
    log(f"catalogue {report.catalog_version} in {out}, {report.seconds:.1f} s")
    return report


def rebuild_bundle(
    bundle: Bundle, events: EventLog, out: Path, log: Callable[[str], None] = print
) -> Bundle:
    """Builds a bundle from the items and options of another one, and from other events.

    The part of the vectors that comes from events, the codes and the popularity are made anew. The
    last events of all users are held out.

    Args:
        bundle: The bundle with items and options.
        events: The new events, of the same items.
        out: Folder of the new bundle.
        log: Called with each line of progress.
    """
    if not bundle.manifest.has_quantizer:
        raise BundleError(
            f"{bundle.root}: was imported, so it cannot be built again from other events"
        )
    recorded = {
        **bundle.manifest.build,
        "event_kinds": bundle.manifest.event_kinds,
        "event_weights": bundle.manifest.event_weights,
    }
    if isinstance(recorded.get("codes"), list):
        recorded = {**recorded, "codes": tuple(recorded["codes"])}
    events = replace(events, held_out=None)
    # A rebuild runs anywhere, so it clusters on the CPU.
    left_out = {"device", "holdout_users"}
    known = {one.name for one in fields(BuildOptions)} & recorded.keys() - left_out
    own = bundle.path(names.VECTORS) if recorded.get("own_vectors") else None
    options = BuildOptions(bundle.path(names.CATALOG), bundle.path(names.EVENTS), out, own)
    options = replace(options, **{name: recorded[name] for name in known})
    catalog = bundle.catalog()
    vectors, size = catalog.vectors, options.collaborative_dim
    train = _positive_events(options, events).leave_one_out().train
    if size:
        new = collaborative_vectors(train, len(catalog), size, options.seed)
        content = unit(vectors[:, : vectors.shape[1] - size])
        vectors = join_vectors(content, new, options.collaborative_weight)
    return _write(options, catalog.items, events, train, bundle.text_encoder(), vectors, log)[0]


def _write(
    options: BuildOptions,
    items: ItemTable,
    events: EventLog,
    train: EventLog,
    encoder: TextEncoder | None,
    vectors: np.ndarray,
    log: Callable[[str], None],
    kept: KeptIds | None = None,
) -> tuple[Bundle, SemanticIds, CodeReport, float]:
    """Quantises the vectors, unless ids are kept, and writes the bundle.

    Returns:
        The bundle, its semantic ids, the report on them, and the share of the variance that they
        lose.
    """
    popularity = train.popularity(len(items))
    sizes = options.codebook_sizes(len(items))
    gpu = _gpu(options.device)
    if kept is None:
        quantizer = fit_quantizer(options.quantizer, vectors, sizes, options.seed, gpu)
        codes = quantizer.encode(vectors, gpu)
    else:
        quantizer, codes = kept.quantizer, kept.stems
    lost = reconstruction_error(vectors, quantizer.decode(codes))
    index, report = build_semantic_ids(items.ids, codes, quantizer.codebook_sizes, popularity)
    if kept is not None:
        index = kept.index
    log(f"vectors of {vectors.shape[1]} dimensions, {lost:.1%} of their variance lost in the codes")
    for line in report.lines():
        log(line)
    with new_folder(Path(options.out)) as folder:
        bundle = Bundle.create(folder)
        catalog = Catalog("", items, index, popularity, vectors)
        catalog.save(folder / names.CATALOG, folder / names.VECTORS)
        quantizer.save(folder / names.QUANTIZER)
        if encoder is not None:
            encoder.save(folder / names.TEXT)
        events.write(folder / names.EVENTS, items.ids)
        bundle.commit("build", _record(options, events, report, lost))
    return Bundle.open(options.out), index, report, lost


def _kept_options(old: Bundle) -> dict[str, Any]:
    """Returns the options that belong to vectors and ids, as an older bundle was built."""
    recorded = old.manifest.build
    codes = recorded.get("codes")
    wanted = ("quantizer", "levels", "text_dim", "collaborative_dim", "collaborative_weight")
    kept = {name: recorded[name] for name in wanted if name in recorded}
    return kept | {"codes": tuple(codes) if isinstance(codes, list) else codes}


def _positive_events(options: BuildOptions, events: EventLog) -> EventLog:
    """Returns the positive events with their weights, and whose last ones are held out."""
    positive = events.positive(options.event_kinds).weighted(options.event_weights)
    return positive.holding_out(options.holdout_users)


def _gpu(device: str) -> FaissGpu | None:
    """Returns faiss on the GPU; None for the CPU. Raises ValueError for `cuda` without a GPU."""
    return faiss_gpu() if device == "cuda" or (device == "auto" and has_gpu()) else None


def _check_shared(options: BuildOptions, *reports: BadRows) -> None:
    """Raises SchemaError if no file has the column that --column names for all of them."""
    there = [column.name for report in reports for column in report.columns]
    for ours in SHARED:
        theirs = options.columns.get(ours)
        if theirs is not None and theirs not in there:
            try:
                rename_columns(there, {ours: theirs})
            except ValueError as error:
                files = " and ".join(report.file for report in reports)
                raise SchemaError(f"{files}: {error}") from None


def _column_lines(report: BadRows, filterable: Sequence[str]) -> list[str]:
    """Returns a line for each column of a file, which says what it became.

    Args:
        report: Report of the file.
        filterable: Names of the attributes that filters read.
    """
    lines = []
    for column in report.columns:
        use = column.use
        if use.startswith(ATTRIBUTE):
            if column.name in filterable:
                note = ", filterable"
            else:
                note = ", not filterable: filters read texts, lists of them, numbers and times"
            use = ATTRIBUTE + note + use.removeprefix(ATTRIBUTE)
        lines.append(f"{report.file}: column {column.name} ({column.type}): {use}")
    return lines


def _unknown_lines(file: str, items: ItemTable, encoder: TextEncoder) -> list[str]:
    """Returns a line that counts the titles without a word for vectors; none without such a one."""
    titled = [row for row, title in enumerate(items.titles) if title.strip()]
    unknown = [row for row in titled if not encoder.knows(items.titles[row])]
    if not unknown:
        return []
    example = f"{items.titles[unknown[0]][:40]!r} of item {items.ids[unknown[0]][:40]!r}"
    return [
        f"{file}: {len(unknown)} of {len(titled)} titles have no usable word, such as {example}; "
        "these items get their vectors from keywords, categories and events only"
    ]


def _type_lines(kinds: EventKinds, events: EventLog) -> list[str]:
    """Returns a line for each type of events: how many there are, and their kind."""
    names = events.type_names
    counts = np.zeros((len(names), len(KINDS)), np.int64)
    lows = np.full(len(names), np.inf, np.float32)
    highs = -lows
    for part in blocks(events.num_events):
        types, given = events.types[part], events.values[part]
        cells = types.astype(np.int64) * len(KINDS) + kinds.of_events(names, types, given)
        counts += np.bincount(cells, minlength=counts.size).reshape(counts.shape)
        np.minimum.at(lows, types, given)
        np.maximum.at(highs, types, given)
    lines = []
    for name, row, low, high in zip(names, counts.tolist(), lows, highs, strict=True):
        parts = [f"{count} {kind}" for count, kind in zip(row, KINDS, strict=True) if count]
        values = "" if low == high else f", values {low:g} to {high:g}"
        lines.append(f"event type {name}: {', '.join(parts)}{values}")
    absent = [name for name in kinds.named if name not in events.type_names]
    return lines + [f"event type {name}: no event, {kinds.kind(name)}" for name in absent]


def _weight_lines(options: BuildOptions, events: EventLog) -> list[str]:
    """Returns a line for each type with weights: how many events have each of them."""
    lines = []
    names = events.type_names
    named = options.event_weights.named
    counts: dict[str, Counter[float]] = {name: Counter() for name in named}
    for part in blocks(events.num_events if named else 0):
        types = events.types[part]
        weights = options.event_weights.of_events(names, types, events.values[part])
        for name in set(named).intersection(names):
            found, times = np.unique(weights[types == names.index(name)], return_counts=True)
            counts[name].update(dict(zip(found.tolist(), times.tolist(), strict=True)))
    for name in named:
        parts = [f"{count} count {weight:g}" for weight, count in sorted(counts[name].items())]
        lines.append(f"event type {name}: {', '.join(parts) or 'no event has its weight'}")
    return lines


def _vectors(
    options: BuildOptions, items: ItemTable, bad_items: BadRows, train: EventLog
) -> tuple[TextEncoder | None, np.ndarray]:
    """Returns the fitted text encoder, or None without one, and [I, F] float32 item vectors."""
    encoder = None
    if options.embeddings is not None:
        content = read_vectors(options.embeddings, items.ids, bad_items, options.columns)
    else:
        content = np.zeros((len(items), 0), dtype=np.float32)
        if options.text_dim:
            encoder = fit_text_encoder(items, options.text_dim, options.seed)
            content = encoder.encode(items)
    if not options.collaborative_dim:
        return encoder, content
    collaborative = collaborative_vectors(
        train, len(items), options.collaborative_dim, options.seed
    )
    return encoder, join_vectors(unit(content), collaborative, options.collaborative_weight)


def _record(
    options: BuildOptions, events: EventLog, codes: CodeReport, error: float
) -> dict[str, Any]:
    """Returns the manifest's build section: options without local paths, and figures."""
    recorded = {
        name: value
        for name, value in asdict(options).items()
        if name not in ("items", "events", "out", "embeddings", "columns", "event_kinds")
        and name not in ("event_weights", "ids_from", "journal", "holdout_users")
    }
    recorded["device"] = "cpu" if _gpu(options.device) is None else "cuda"
    # A bundle without other kinds is the same as before there were kinds.
    kinds = options.event_kinds.record(events.type_names)
    recorded |= {"event_kinds": kinds} if kinds else {}
    weights = options.event_weights.record()
    recorded |= {"event_weights": weights} if weights else {}
    if options.holdout_users is not None:
        recorded["holdout_users"] = options.holdout_users
    return recorded | {
        "own_vectors": options.embeddings is not None,
        "num_users": events.num_users,
        "num_events": events.num_events,
        "type_names": list(events.type_names),
        "has_timestamps": events.has_timestamps,
        "collision_share": codes.collision_share,
        "reconstruction_error": error,
    }
