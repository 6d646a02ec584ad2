"""Builds on an older bundle: items keep their vectors and semantic ids, new items get them as live.

So ids in logs, drafts and caches of clients stay what they were. Vectors and codes of all items are
comparable, because text encoder and quantiser are those of the older bundle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from recserve.bundle.bundle import Bundle, BundleError
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.catalog.item_records import record_table
from recserve.features.catalog.new_items import IdAssigner, NewVectors
from recserve.features.catalog.semantic_ids import SemanticIds
from recserve.features.catalog.versions import (
    CatalogVersion,
    ChangeSet,
    apply_changes,
    difference,
    first_version,
    restore_changes,
)
from recserve.features.tables.items import ItemTable
from recserve.features.vectors.quantizer import Quantizer
from recserve.features.vectors.text_encoder import TextEncoder


@dataclass(frozen=True)
class KeptIds:
    """The I items of a new bundle with what they have from an older one.

    Attributes:
        encoder: Text encoder of the older bundle; None if its vectors are the user's own.
        quantizer: Quantiser of the older bundle.
        vectors: [I, F] float32 item vectors.
        index: Semantic ids of the items.
        num_new: Items that the older bundle does not have.
    """

    encoder: TextEncoder | None
    quantizer: Quantizer
    vectors: np.ndarray
    index: SemanticIds
    num_new: int

    @property
    def stems(self) -> np.ndarray:
        """[I, L] the codes without the level that separates items with equal ones."""
        codes = self.index.codes
        return codes[:, :-1] if self.index.has_disambiguation else codes


def open_version(bundle: Bundle, journal: Path | None) -> CatalogVersion:
    """Returns the catalogue of a bundle with the changes of a journal.

    Args:
        bundle: The bundle.
        journal: Folder of item changes; None for the bundle's own catalogue.

    Raises:
        JournalError: If the journal is damaged.
    """
    return version_of(bundle, () if journal is None else _journal(bundle, journal).read())


def _journal(bundle: Bundle, folder: Path) -> ItemJournal:
    """Returns the journal of a bundle's catalogue in a folder."""
    return ItemJournal(folder / f"{bundle.manifest.catalog_version}.jsonl")


def freeze_changes(bundle: Bundle, change_sets: Iterable[ChangeSet], journal: Path) -> int:
    """Writes what change sets make of a bundle's catalogue as a journal.

    Args:
        bundle: The bundle.
        change_sets: All of a log, in order.
        journal: Folder of the journal, whose file is replaced.

    Returns:
        Number of items that were put or hidden.
    """
    file, changes = _journal(bundle, journal), difference(version_of(bundle, change_sets))
    try:
        file.replace(changes.split())
    finally:
        file.close()
    return len(changes)


def version_of(bundle: Bundle, change_sets: Iterable[ChangeSet]) -> CatalogVersion:
    """Returns the catalogue of a bundle after the change sets of a log.

    Those of other bundles in a shared log are skipped: the servers of this bundle carry them over.

    Args:
        bundle: The bundle.
        change_sets: All of the log, in order.
    """
    catalog = bundle.catalog()
    base = first_version(catalog, {item: row for row, item in enumerate(catalog.items.ids)})
    version, schema = base, catalog.items.attributes.schema
    for written in change_sets:
        if written.remains or written.made_for not in ("", catalog.version):
            continue
        change_set = restore_changes(written, schema)
        if change_set.whole:
            inserted, hidden = change_set.split()
            version = apply_changes(apply_changes(base, inserted), hidden)
        else:
            version = apply_changes(version, change_set)
    return version


def with_live_items(items: ItemTable, version: CatalogVersion) -> ItemTable:
    """Returns items with those that a live catalogue has got and the table lacks.

    Hidden ones are among them: users have had events with them.
    """
    there, base = set(items.ids), len(version.base)
    live = dict.fromkeys(version.item_id(row) for row in range(base, version.num_rows))
    known = set(version.base.items.ids)
    missing = [item for item in live if item not in there and item not in known]
    if not missing:
        return items
    records = [version.record(row) for row in version.known_rows(missing)]
    new = record_table(records, items.attributes.schema)
    names = items.times.column_names
    times = pa.concat_tables([items.times, new.times.select(names)]) if names else items.times
    return ItemTable(
        [*items.ids, *new.ids],
        [*items.titles, *new.titles],
        [*items.categories, *new.categories],
        pa.concat_tables([items.attributes, new.attributes.cast(items.attributes.schema)])
        if items.attributes.num_columns
        else items.attributes,
        times,
    )


def keep_ids(
    old: Bundle, version: CatalogVersion, items: ItemTable, content: np.ndarray | None
) -> KeptIds:
    """Returns vectors and semantic ids of items: those of a version, and new ones.

    Args:
        old: The older bundle.
        version: Its catalogue, with the changes since it was built.
        items: The I items of the new bundle.
        content: [n, E] the user's own vectors of the first n items; None if there are none.

    Raises:
        BundleError: If the older bundle was imported, has no free semantic id for a new item, or
            has vectors of the user's own and the new items have none.
    """
    if not old.manifest.has_quantizer:
        raise BundleError(f"{old.root}: was imported, so new items cannot get ids of its kind")
    catalog = version.base
    quantizer, encoder = old.encoders(catalog)
    rows = np.array(version.known_rows(items.ids), np.int64)
    # A new item may have taken the id of a hidden one, which gets another.
    rows[[row >= 0 and version.has_lost_id(row) for row in rows.tolist()]] = -1
    vectors = np.zeros((len(items), catalog.vectors.shape[1]), np.float32)
    codes = np.zeros((len(items), catalog.semantic_ids.num_levels), np.uint16)
    known, new = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
    for place in known.tolist():
        row = int(rows[place])
        vectors[place], codes[place] = version.vectors[row], version.codes[row]
    if new.size:
        width = int(catalog.vectors.shape[1])
        size = width - old.manifest.collaborative_dim
        if content is None and encoder is None:
            raise BundleError(
                f"{old.root}: its vectors are your own, and {new.size} items are new, such as "
                f"{items.ids[new[0]][:80]!r}; give their vectors with --embeddings"
            )
        made = encoder.encode(items) if content is None and encoder is not None else content
        assert made is not None
        if made.shape[1] != size:
            raise BundleError(
                f"{old.root}: its vectors have {size} numbers of content, the given ones "
                f"{made.shape[1]}; use the same vectors, or build without --ids-from"
            )
        own = bool(old.manifest.build.get("own_vectors")) and size == width
        maker = NewVectors(catalog, encoder, size, own)
        vectors[new] = made[new] if own else maker.of_content(made[new])
        assigner = IdAssigner(catalog.semantic_ids, quantizer)
        # Hidden items keep their ids, because the new bundle has them.
        nothing = np.zeros(0, version.removed_rows.dtype)
        shown = replace(version, removed_rows=nothing, successors=nothing)
        found = assigner.assign(shown, vectors[new], [-1] * new.size)
        for place, made_id in zip(new.tolist(), found, strict=True):
            if made_id is None:
                raise BundleError(
                    f"{old.root}: has no free semantic id for item {items.ids[place][:80]!r}; "
                    "build without --ids-from, which makes all ids anew"
                )
            codes[place] = made_id.codes
    index = SemanticIds(
        items.ids,
        codes,
        catalog.semantic_ids.codebook_sizes,
        catalog.semantic_ids.has_disambiguation,
    )
    return KeptIds(encoder, quantizer, vectors, index, int(new.size))
