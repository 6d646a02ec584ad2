"""The live catalogue: items change while the server answers requests.

One writer at a time creates versions. A reader uses one immutable snapshot from start to end.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from recserve.bundle.bundle import Bundle
from recserve.features.catalog.catalog_version import CatalogVersion
from recserve.features.catalog.id_assignment import IdAssigner
from recserve.features.catalog.item_journal import ItemJournal, JournalEntry, JournalError
from recserve.features.catalog.live_catalog import (
    changed,
    difference,
    restored,
    restored_change,
    with_short_log,
)
from recserve.features.ranking.live_ranking import LiveRanking
from recserve.features.vectors.grown_index import GrownIndex
from recserve.features.vectors.new_vectors import NewVectors
from recserve.kernels.trie.trie import Trie
from recserve.models.dense_retriever import item_vectors
from recserve.schemas.browse import ItemPage, ItemsQuery
from recserve.schemas.items import ItemResponse, ItemsRequest, ItemsResponse, RollbackResponse
from recserve.service.catalog.item_changes import ItemChanges
from recserve.service.catalog.item_page import item_page, item_response
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.catalog.version_archive import VersionArchive
from recserve.service.errors import UnknownItem
from recserve.service.history import History
from recserve.service.model_loader import Models
from recserve.service.runtime import Runtime

log = logging.getLogger(__name__)

# The cost of a change grows with the insertions, so this many are folded into a new base.
MAX_INSERTED = 8_192


class LiveItems:
    """Creates catalogue versions and publishes them.

    To publish a version means to replace `runtime.snapshot`. Existing snapshots never change.

    Attributes:
        runtime: Holds the snapshot that new requests use.
        models: Networks that get a row for every new item.
        journal: Journal of the changes; None keeps the changes in memory only.
        ranking: The ranker's item tables; None without a ranker.
        successor: Live catalogue of the service that replaces this one. It gets the changes that
            arrive after the replacement. None before that.
        recent: Ids of the items that have changed since this service began to answer.
    """

    def __init__(
        self,
        runtime: Runtime,
        models: Models,
        bundle: Bundle,
        journal: ItemJournal | None,
        ranking: LiveRanking | None,
    ) -> None:
        self.runtime = runtime
        self.models = models
        self.journal = journal
        self.ranking = ranking
        self.successor: LiveItems | None = None
        self.recent: set[str] = set()
        self._bundle = bundle
        self._tools: tuple[NewVectors, IdAssigner] | None = None
        self._lock = threading.Lock()
        self._archive = VersionArchive(runtime.snapshot.items, runtime.snapshot.base_trie)
        self._folding: threading.Thread | None = None
        self._lineage = 0

    def replay(self) -> None:
        """Applies the change sets of the journal. Raises JournalError."""
        if self.journal is None:
            return
        entries = self.journal.read()
        first = self.runtime.snapshot
        for entry in entries:
            items = self.runtime.snapshot.items
            try:
                changes = [restored_change(change, items.log.schema) for change in entry.changes]
                items = changed(items, entry.number, changes, entry.hidden)
            except ValueError as error:
                raise JournalError(f"{self.journal.path}: {error}") from error
            self.runtime.snapshot = replace(first, items=items)
            self._archive.add(items, first.base_trie)
        if not entries:
            return
        items, self.runtime.snapshot = self.runtime.snapshot.items, first
        self._publish(items, first.base_trie, first.index)
        log.info("replayed %d change sets of items", len(entries))
        self._fold_if_large()

    def get(self, item_id: str) -> ItemResponse:
        """Returns one item of the current version. Raises UnknownItem."""
        return item_response(self.runtime.snapshot.items, item_id)

    def listed(self, query: ItemsQuery) -> ItemPage:
        """Returns a page of the current version, most popular items first."""
        return item_page(self.runtime.snapshot.items, query)

    def put(self, body: ItemsRequest) -> ItemsResponse:
        """Inserts and updates items; an invalid item does not affect the others.

        Raises:
            JournalError: If the journal cannot be written.
        """
        with self._lock:
            if self.successor is None:
                return self._put(body)
        return self.successor.put(body)

    def hide(self, *item_ids: str, unknown: bool = False) -> str:
        """Removes items from all answers and returns the name of the version without them.

        Args:
            item_ids: Ids of the items.
            unknown: Accepts ids that the catalogue does not have, and remembers them for bundles
                that have them.

        Raises:
            UnknownItem: If the catalogue does not have one of them, without `unknown`.
            JournalError: If the journal cannot be written.
        """
        with self._lock:
            if self.successor is None:
                items = self.runtime.snapshot.items
                for item_id in item_ids:
                    if items.visible.get(item_id) < 0 and not unknown:
                        raise UnknownItem(f"no item {item_id[:80]!r} in the catalogue")
                self._commit(JournalEntry(items.number + 1, hidden=item_ids))
                return self.runtime.snapshot.items.name
        return self.successor.hide(*item_ids, unknown=unknown)

    def rollback(self, name: str) -> RollbackResponse:
        """Publishes a new version with the items of an earlier one.

        Args:
            name: Name of the earlier version.

        Raises:
            UnknownVersion: If the archive does not have the version.
            JournalError: If the journal cannot be written.
        """
        with self._lock:
            if self.successor is None:
                there = self._archive.get(name)
                current = self.runtime.snapshot.items
                items = restored(there.items, current, current.number + 1)
                self.recent |= difference(current).item_ids | difference(items).item_ids
                self._restore(items, there.base_trie)
                return RollbackResponse(catalog_version=items.name, restored=name)
        return self.successor.rollback(name)

    def own_embedding_size(self) -> int | None:
        """Returns the length of the user's embeddings; None if the build made the vectors."""
        build, catalog = self._bundle.manifest.build, self.runtime.snapshot.catalog
        content = int(catalog.vectors.shape[1]) - int(build.get("collaborative_dim", 0))
        return content if build.get("own_vectors") else None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Makes changes wait until the block ends; requests are answered meanwhile."""
        with self._lock:
            yield

    def adopt(self, version: CatalogVersion) -> None:
        """Takes over the content of another live catalogue of the same bundle catalogue.

        The content keeps its version name, unless this catalogue has used a later one.

        Args:
            version: A version of the other catalogue.

        Raises:
            JournalError: If the journal cannot be written.
        """
        with self._lock:
            bundle = self._archive.bundle
            current, said = self.runtime.snapshot.items, difference(version)
            number = max(version.number, current.number + (current.number > version.number))
            items = restored(bundle.items, current, number)
            # Insertions first: the item that a change puts may be hidden in this version.
            for changes, hidden in ((said.changes, ()), ((), said.hidden)):
                if changes or hidden:
                    items = changed(items, number, changes, hidden)
            self._restore(items, bundle.base_trie)

    def open_tools(self) -> None:
        """Reads the quantiser and the text encoder. Raises BundleError if one is damaged."""
        self._tools_of_bundle()

    def close(self) -> None:
        """Waits for a fold in progress, then releases the journal for other processes."""
        if self._folding is not None:
            self._folding.join()
        if self.journal is not None:
            self.journal.close()

    def _restore(self, items: CatalogVersion, base_trie: Trie) -> None:
        """Publishes a version that does not descend from the current one."""
        self._condense_journal(items)
        self._lineage += 1
        self._publish(items, base_trie, self.runtime.snapshot.index)
        self._record_on_a_thread()

    def _put(self, body: ItemsRequest) -> ItemsResponse:
        before = self.runtime.snapshot
        incoming = ItemChanges(before, *self._tools_of_bundle())
        incoming.take(body.items)
        changes = incoming.finish()
        if changes:
            self._commit(JournalEntry(before.items.number + 1, tuple(changes)))
        updated = sum(row >= 0 for row in before.rows_of(c.record.item_id for c in changes))
        return ItemsResponse(
            catalog_version=self.runtime.snapshot.items.name,
            inserted=len(changes) - updated,
            updated=updated,
            rejected=sorted(incoming.rejected, key=lambda one: one.index),
            degraded=sorted(incoming.degraded, key=lambda one: one.index),
        )

    def has_changed_rows(self, history: History) -> bool:
        """Returns True if an earlier version may have mapped this history to other rows.

        This is possible if an item of the history has had more than one row, or if the current
        version does not know it.
        """
        items = self.runtime.snapshot.items
        if not items.tail.ids:
            return False
        names = {items.item_id(row) for row in set(history.rows.tolist())}
        rows = Counter(name for name in items.tail.ids if name in names)
        rows.update(names & items.visible.base.keys())
        return history.num_events > history.rows.size or max(rows.values(), default=0) > 1

    def _commit(self, entry: JournalEntry) -> None:
        """Writes a change set to the journal, then publishes it."""
        if self.journal is not None:
            self.journal.append(entry)
        current = self.runtime.snapshot
        items = changed(current.items, entry.number, entry.changes, entry.hidden)
        self.recent.update(change.record.item_id for change in entry.changes)
        self.recent.update(entry.hidden)
        self._publish(items, current.base_trie, current.index)
        self._fold_if_large()

    def _condense_journal(self, items: CatalogVersion) -> None:
        """Rewrites the journal as the difference between the bundle and this version."""
        if self.journal is not None:
            said = difference(items)
            # Two entries with one number: insertions first, then the hidden items.
            put = JournalEntry(items.number, said.changes)
            self.journal.replace([put, JournalEntry(items.number, hidden=said.hidden)])

    def _publish(self, items: CatalogVersion, base_trie: Trie, index: GrownIndex | None) -> None:
        """Updates the models, then publishes the version that needs them.

        Args:
            items: The version.
            base_trie: Base trie of this version or of an earlier one.
            index: Retriever index of this version or of an earlier one; None without a retriever.
        """
        self._follow(items)
        ranking = None if self.ranking is None else self.ranking.at(items)
        snapshot = self.runtime.snapshot.at(items, ranking, base_trie)
        if index is not None:
            index = index.at(items.num_rows, items.gone, self._item_vectors)
            snapshot = replace(snapshot, index=index)
        self._archive.add(items, base_trie)
        self.runtime.snapshot = snapshot

    def _follow(self, items: CatalogVersion) -> None:
        """Appends the rows of the version that the models do not have yet."""
        first_tail = len(items.base)  # `tail` arrays hold the rows after the bundle's own
        for model in (self.models.recommender, self.models.ranker):
            if model is None or model.num_bound_items >= items.num_rows:
                continue
            first = model.num_bound_items - first_tail
            vectors = torch.from_numpy(items.vectors.tail[first:])
            learned = torch.from_numpy(items.learned[first:])
            if model is self.models.recommender:
                codes = torch.from_numpy(items.codes.tail[first:].astype("int64"))
                self.models.recommender.append_items(codes, vectors, learned)
            elif self.models.ranker is not None:
                self.models.ranker.append_items(vectors, learned)

    def _item_vectors(self, rows: np.ndarray) -> np.ndarray:
        """Returns the retriever's vectors [n, E] of the item rows [n]."""
        retriever, recommender = self.models.heads.retriever, self.models.recommender
        assert retriever is not None and recommender is not None
        return item_vectors(retriever, recommender, torch.from_numpy(rows)).numpy()

    def _record_on_a_thread(self) -> None:
        """Captures searches over the current base trie again, if the engine uses CUDA graphs."""
        engine, base = self.runtime.engine, self.runtime.snapshot.base_trie
        if engine.searches is not None:
            threading.Thread(target=engine.record, args=(base,), daemon=True).start()

    def _tools_of_bundle(self) -> tuple[NewVectors, IdAssigner]:
        """Returns the tools for new items; the first call reads them."""
        if self._tools is None:
            bundle, catalog = self._bundle, self.runtime.snapshot.catalog
            size, dim = self.own_embedding_size(), int(catalog.vectors.shape[1])
            content = dim - int(bundle.manifest.build.get("collaborative_dim", 0))
            vectors = NewVectors(catalog, bundle.text_encoder(), content, size == dim)
            self._tools = vectors, IdAssigner(catalog.index, bundle.quantizer())
        return self._tools

    def _fold_if_large(self) -> None:
        """Starts a thread that folds many insertions into new bases; changes continue meanwhile."""
        snapshot = self.runtime.snapshot
        size = snapshot.trie.num_rows - snapshot.base_trie.num_rows
        busy = self._folding is not None and self._folding.is_alive()
        stale = snapshot.items.num_records - len(snapshot.items.record_rows)
        if max(size, stale) < MAX_INSERTED or busy:
            return
        self._folding = threading.Thread(
            target=self._fold, args=(snapshot, self._lineage), name="fold-items", daemon=True
        )
        self._folding.start()

    def _fold(self, snapshot: Snapshot, lineage: int) -> None:
        """Folds trie and index of a snapshot into new bases and publishes them.

        Args:
            snapshot: The snapshot to fold.
            lineage: Number of rollbacks before the fold. A rollback during the fold discards the
                new bases, because later versions do not descend from the snapshot.
        """
        trie, index = snapshot.compacted_trie(), snapshot.index
        if index is not None:
            index = index.folded(snapshot.items.gone, self._item_vectors)
        self.runtime.engine.record(trie)
        with self._lock:
            if self._lineage != lineage:
                self._record_on_a_thread()
                return
            items = self.runtime.snapshot.items
            if items.num_records > len(items.record_rows):
                items = with_short_log(items)
            self._publish(items, trie, index)
            held = len(items.record_rows) + items.gone.size
            if self.journal is not None and self.journal.num_changes > 2 * held:
                self._condense_journal(items)
