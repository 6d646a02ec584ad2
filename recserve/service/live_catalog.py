"""The live catalogue: items change while the server answers requests.

One writer at a time creates versions. A reader uses one immutable snapshot from start to end.

A change takes this way:

    put       PutRequest validates the items and gives them vectors and semantic ids
    commit    the journal stores the change set, then it makes the next version
    publish   the models get the new rows, then requests get the new snapshot
    fold      a thread makes new bases once many items have been inserted

Several servers may share one log of changes. Then a change goes behind all that the log has. If
another server was faster, this one applies its change and makes its own anew. What comes from the
log is applied by `catch_up`, at the start and later.

Servers of several bundles may share a log. Vectors and semantic ids of a change belong to one
bundle, so a server passes over what another bundle's server has stored: only the number moves.
Then it applies the rules of `carried_items`, and stores the result as an assignment, a change set
of its own bundle. All its servers apply that one, or one of them has stored it before. The items
of a bundle come from its own change sets only, in the order of the log. A server stores no other
change while something of another bundle is left to carry over (`_assign`).

Time changes the catalogue too. A snapshot knows until when it holds, and the first request after
that publishes the next one (`current`).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from msgspec import UNSET

from recserve.bundle.bundle import Bundle
from recserve.engine.build import EngineModels
from recserve.engine.engine import Engine
from recserve.features.catalog.catalog import item_keys
from recserve.features.catalog.catalog_log import (
    Appended,
    AppendUncertain,
    CatalogLog,
    JournalError,
    LogUnavailable,
    PositionLost,
    PositionTaken,
    SharedLog,
)
from recserve.features.catalog.new_items import IdAssigner, NewVectors
from recserve.features.catalog.popularity import SavedCounts
from recserve.features.catalog.versions import (
    CatalogVersion,
    ChangeSet,
    ItemChange,
    VersionName,
    apply_changes,
    compact_log,
    difference,
    restore_changes,
    restore_version,
)
from recserve.features.ranking.live_ranking import LiveRanking
from recserve.features.tables.items import TIME_USE
from recserve.features.vectors.vector_index import VersionIndex
from recserve.features.words import fold
from recserve.files import UnreadableFile, set_aside
from recserve.kernels.trie.trie import Trie
from recserve.models.dense_retriever import item_vectors
from recserve.schemas.browse import DEFAULT_LISTED, ItemPage, ItemsQuery, ListedItem
from recserve.schemas.items import (
    HideItemResponse,
    InvalidRequest,
    ItemResponse,
    ItemsRequest,
    ItemsResponse,
    RollbackRequest,
    RollbackResponse,
)
from recserve.search.device_index import DeviceIndex
from recserve.service.carried_items import OtherChanges
from recserve.service.catalog_follower import CatalogFollower
from recserve.service.errors import CatalogBehind, CatalogConflict, UnknownItem
from recserve.service.history import History
from recserve.service.put_request import MadeVector, PutRequest
from recserve.service.snapshot import POPULAR, Snapshot
from recserve.service.version_archive import VersionArchive

if TYPE_CHECKING:
    from recserve.service.shared_popularity import SharedPopularity

log = logging.getLogger(__name__)
T = TypeVar("T")

# The cost of a change grows with the insertions, so this many are folded into a new base.
MAX_INSERTED = 8_192
# A page looks at this many items, which takes about 20 ms. Larger catalogues need several calls.
MAX_SCANNED = 20_000
# A change takes the next position of a shared log so often, until other servers were always faster.
MAX_ATTEMPTS = 16
SETTLE_S, SETTLE_PAUSE_S = 2.0, 0.05  # to find out whether a change is stored
MAX_ASSIGNED = 1000  # changes of other bundles that one assignment carries over, or one change set
MIN_LOGGED = 1000  # changes in a shared log before a snapshot replaces some
MAX_LOGGED = 100_000  # from so many on, only the newest versions stay in the log
SAVE_COUNTS_S = 60.0  # a crash loses the counts of events of so many seconds
MIN_VERSION = "min_catalog_version"
UNKNOWN_REPLICAS = (
    "Redis has the change, but its reply was lost. It is not known whether a replica of Redis has "
    "the change too; if none has, a failover can lose it"
)


class LiveCatalog:
    """Creates catalogue versions and publishes them.

    To publish a version means to replace `current`. Existing snapshots never change.

    Attributes:
        clock: Returns the present time in microseconds since 1970.
        models: Networks that get a row for every new item.
        journal: Log of the changes; None keeps the changes in memory only.
        follower: Follows the log, if other servers write it too; else None.
        successor: Live catalogue of the service that replaces this one. It gets the changes that
            arrive after the replacement. None before that.
        recent: Ids of the items that have changed since this service began to answer. Of a log of
            several bundles, those whose latest change is of this one.
        counts_file: File of the live counts of events; None keeps them in memory only.
        shared_counts: Counts events together with other servers; None counts them here.
        counting: Held while events are counted, and while another catalogue takes the counts.
    """

    def __init__(
        self,
        bundle: Bundle,
        models: EngineModels,
        engine: Engine,
        snapshot: Snapshot,
        journal: CatalogLog | None,
        stale_s: float = 5.0,
    ) -> None:
        """Starts with the items of the bundle.

        Args:
            bundle: The open bundle.
            models: Its networks.
            engine: Captures searches over a new base trie, if it uses CUDA graphs.
            snapshot: The bundle's own catalogue.
            journal: Log of the changes; None keeps the changes in memory only.
            stale_s: Time without a log of several servers after which answers say so.
        """
        self.clock: Callable[[], int] = lambda: time.time_ns() // 1000
        self.models = models
        self.journal = journal
        self.successor: LiveCatalog | None = None
        self.recent: set[str] = set()
        self.counts_file: Path | None = None
        self.shared_counts: SharedPopularity | None = None
        self.counting = threading.Lock()
        self._bundle, self._engine = bundle, engine
        self._ranking = None if snapshot.ranking is None else LiveRanking(snapshot.ranking)
        self._tools: tuple[NewVectors, IdAssigner] | None = None
        self._lock = threading.Lock()  # of changes
        self._swap_lock = threading.RLock()  # of `_current`
        self._current = snapshot.at(
            snapshot.items, snapshot.ranking, snapshot.base_trie, self.clock()
        )
        self._saved_at_s, self._saving = time.monotonic(), threading.Lock()
        self._counts_changed = False
        self._archive = VersionArchive(snapshot.items, snapshot.base_trie)
        self._folding: threading.Thread | None = None
        self._condensing: threading.Thread | None = None
        self._lineage = 0
        self._shared: SharedLog | None = None
        self._pending: list[ChangeSet] = []  # of other bundles, not carried over yet
        self._assigned = 0  # last position of other bundles that was carried over
        self._made: dict[str, MadeVector] = {}  # vectors of `_pending`
        self.follower: CatalogFollower | None = None
        if journal is not None and journal.shared:
            self._shared = cast(SharedLog, journal)
            items = self._current.items
            self.follower = CatalogFollower(self._shared, stale_s, self.catch_up, items)

    @property
    def current(self) -> Snapshot:
        """The snapshot that new requests use."""
        snapshot = self._current
        if snapshot.until_us is None or self.clock() < snapshot.until_us:
            return snapshot
        with self._swap_lock:
            snapshot, now_us = self._current, self.clock()
            if snapshot.until_us is not None and now_us >= snapshot.until_us:
                snapshot = snapshot.at(snapshot.items, snapshot.ranking, snapshot.base_trie, now_us)
                self._current = snapshot
            return snapshot

    def replay(self) -> None:
        """Applies the change sets of the log, and follows a shared one. Raises JournalError."""
        if self.follower is not None:
            self.catch_up()
            while self._pending:  # servers of this bundle have been faster too often
                self.catch_up()
            self.recent.clear()
            self.follower.start()
            return
        change_sets = [] if self.journal is None else self.journal.read()
        if change_sets:
            self._apply(change_sets)
            log.info("replayed %d change sets of items", len(change_sets))

    def catch_up(self) -> None:
        """Applies what other servers have stored in a shared log, also those of other bundles.

        Raises:
            JournalError: If the log is damaged or cannot be read.
        """
        with self._lock:
            if self.follower is not None and not self.follower.closing:
                self._catch_up()
                self._carry_over()

    def reaches(self, name: str) -> Future[None] | None:
        """Returns what ends when the catalogue contains a version; None if it does now.

        Args:
            name: The version, as a response names it. One of another bundle is compared by epoch
                and number if the log is shared; else it counts as contained.

        Raises:
            InvalidRequest: If it is no name of a version.
            CatalogBehind: If the version is later, and no other server could store it.
            CatalogLost: If a shared log has lost it.
        """
        version = VersionName.parse(name)
        if version is None:
            raise InvalidRequest(
                MIN_VERSION, f"expected a catalog_version of a response, got {name[:80]!r}"
            )
        if self.follower is not None:
            return self.follower.wait_for(version)
        items = self.current.items
        if version.bundle == items.base.version and version.number > items.number:
            raise CatalogBehind(
                f"this server has catalogue version {items.name}, not {name[:80]}; other servers' "
                "changes come with catalog_log=redis"
            )
        return None

    def await_version(self, name: str, deadline_s: float | None) -> None:
        """Waits until the catalogue contains a version.

        Args:
            name: The version, as in `reaches`.
            deadline_s: time.monotonic() value of the deadline; None means no deadline.

        Raises:
            CatalogBehind: If the deadline passes before.
            Exception: As in `reaches`.
        """
        reached = self.reaches(name)
        if reached is not None:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                reached.result(left_s)
            except TimeoutError:
                reached.cancel()
                raise self.behind(name) from None

    def behind(self, name: str) -> CatalogBehind:
        """Returns the error of a request that has waited for a version in vain."""
        return CatalogBehind(
            f"this server has catalogue version {self.current.items.name}, and {name[:80]} has not "
            "arrived within the deadline"
        )

    def get(self, item_id: str) -> ItemResponse:
        """Returns one item of the current version, whatever its times. Raises UnknownItem."""
        snapshot = self.current
        items = snapshot.items
        row = items.visible.get(item_id)
        if row < 0:
            raise UnknownItem(f"no item {item_id[:80]!r} in the catalogue")
        return ItemResponse(**_all_fields(snapshot, row), catalog_version=items.name)

    def page(self, query: ItemsQuery) -> ItemPage:
        """Returns the items of `ids`, or a page of items whose title or id contains the query.

        A page begins with the most popular items. An unknown id of `ids` is reported, and the other
        items are returned.

        The item whose id equals the query comes before all others. If the catalogue changes between
        two calls, an item can be on both pages or on none.

        Raises:
            InvalidRequest: If the query has both `ids` and another field.
        """
        snapshot = self.current
        items = snapshot.items
        if query.ids is not UNSET:
            return _find_items(snapshot, query, query.ids)
        limit = DEFAULT_LISTED if query.limit is UNSET else query.limit
        text = fold(query.query.strip())
        exact = items.visible.get(query.query.strip()) if text else -1
        matching: list[int] = [exact] if exact >= 0 and not query.after else []
        place, stop = query.after, query.after + MAX_SCANNED
        rows = snapshot.read_list(POPULAR, stop + 1)[place:].tolist()
        for row in rows[:MAX_SCANNED]:
            if len(matching) >= limit:
                break
            place += 1
            if row != exact and _contains(items, row, text):
                matching.append(row)
        more = place - query.after < len(rows)
        return ItemPage(
            items=[ListedItem(**_item_fields(snapshot, row)) for row in matching],
            next=place if more else None,
            num_items=_num_items(items),
            catalog_version=items.name,
        )

    def put(
        self, body: ItemsRequest, added_at: Mapping[str, int | None] | None = None
    ) -> ItemsResponse:
        """Inserts and updates items; an invalid item does not affect the others.

        Args:
            body: The items.
            added_at: Times of addition of items that another catalogue had before, by id.

        Raises:
            JournalError: If the journal cannot be written.
        """
        return self._write(lambda catalog: catalog._put(body, added_at or {}))

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
        return self._write(lambda catalog: catalog._hide(item_ids, unknown))[0]

    def hide_item(self, item_id: str) -> HideItemResponse:
        """Removes an item from all answers. Raises as `hide`."""
        name, warning = self._write(lambda catalog: catalog._hide((item_id,), False))
        return HideItemResponse(item_id=item_id, catalog_version=name, warning=warning or UNSET)

    def rollback(self, body: RollbackRequest) -> RollbackResponse:
        """Publishes a new version with the items of an earlier one.

        Args:
            body: The request, with the name of the earlier version.

        Raises:
            UnknownVersion: If the archive does not have the version.
            JournalError: If the journal cannot be written.
        """
        return self._write(lambda catalog: catalog._roll_back(body.catalog_version))

    def has_changed_rows(self, history: History) -> bool:
        """Returns True if an earlier version may have mapped this history to other rows.

        This is possible if an item of the history has had more than one row, or if the current
        version does not know it.
        """
        items = self.current.items
        if not items.tail.ids:
            return False
        names = {items.item_id(row) for row in set(history.rows.tolist())}
        rows = Counter(name for name in items.tail.ids if name in names)
        rows.update(names & items.visible.base.keys())
        return history.num_events > history.rows.size or max(rows.values(), default=0) > 1

    def embedding_size(self) -> int | None:
        """Returns the length of the user's embeddings; None if the build made the vectors."""
        build = self._bundle.manifest.build
        return self._content_size() if build.get("own_vectors") else None

    @contextmanager
    def pause_changes(self) -> Iterator[None]:
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
            bundle, current = self._archive.bundle, self.current.items
            number = max(version.number, current.number + (current.number > version.number))
            items = restore_version(bundle.items, current, number)
            for part in replace(difference(version), number=number).split():
                items = apply_changes(items, part)
            self._restore(items, bundle.base_trie)

    def open_tools(self) -> tuple[NewVectors, IdAssigner] | None:
        """Returns what makes vectors and semantic ids of new items; the first call reads them.

        It is None for an imported bundle.

        Raises:
            BundleError: If the quantiser or the text encoder is damaged.
        """
        if self._tools is None and self._bundle.manifest.has_quantizer:
            bundle, catalog = self._bundle, self.current.catalog
            raw = self.embedding_size() == int(catalog.vectors.shape[1])
            quantizer, encoder = bundle.encoders(catalog)
            vectors = NewVectors(catalog, encoder, self._content_size(), raw)
            self._tools = vectors, IdAssigner(catalog.semantic_ids, quantizer)
        return self._tools

    def close(self) -> None:
        """Waits for a fold, saves the counts, then releases the log for other processes."""
        if self.follower is not None:
            self.follower.close()
        for thread in (self._folding, self._condensing):
            if thread is not None:
                thread.join()
        if self.shared_counts is not None:
            self.shared_counts.close()
        self._save_counts()
        if self.journal is not None:
            self.journal.close()

    def count_events(
        self, keys: Sequence[int], times_us: Sequence[int], weights: np.ndarray | None = None
    ) -> None:
        """Counts events for the list `popular`.

        Args:
            keys: [n] key of each event's item.
            times_us: [n] times in microseconds since 1970.
            weights: [n] how much each event counts; None: 1 each.
        """
        with self.counting:
            successor = self.successor
            if successor is None and self.shared_counts is not None:
                self.shared_counts.add(keys, times_us, weights)
                return
            if successor is None:
                items = self._current.items
                rows = items.rows_of_keys(np.array(keys, np.uint64))
                known = rows >= 0
                first = items.first_rows(rows[known])
                own = None if weights is None else weights[known]
                self._current.popularity.count(first, np.array(times_us, np.int64)[known], own)
                self._counts_changed = True
        if successor is not None:
            successor.count_events(keys, times_us, weights)
            return
        due = time.monotonic() - self._saved_at_s > SAVE_COUNTS_S
        if due and self.counts_file is not None and not self._saving.locked():
            threading.Thread(target=self._save_counts, name="save-counts", daemon=True).start()

    def read_counts(self) -> SavedCounts:
        """Returns the live counts of events by item."""
        items = self._current.items
        counts, since_us = self._current.popularity.read()
        counts = counts[: items.num_rows]
        rows = np.flatnonzero((counts > 0) | (np.arange(counts.size) < len(items.base)))
        tail = rows[rows >= len(items.base)].tolist()
        keys = [items.base.keys, item_keys([items.item_id(row) for row in tail])]
        return SavedCounts(np.concatenate(keys), counts[rows], since_us)

    def set_counts(self, saved: SavedCounts) -> None:
        """Replaces the counts of the items that the saved ones name and this catalogue has."""
        items = self._current.items
        rows = items.rows_of_keys(saved.keys)
        known = rows >= 0
        first = items.first_rows(rows[known])
        self._current.popularity.load(saved.counts[known], first, saved.since_us)

    def take_counts(self, other: LiveCatalog) -> None:
        """Continues the counts of another catalogue, and their file; shared ones are in Redis."""
        if self.shared_counts is not None:
            return
        self.set_counts(other.read_counts())
        self.counts_file, other.counts_file = other.counts_file, None
        self._counts_changed = True

    def load_counts(self, path: Path) -> None:
        """Reads and continues a file of counts.

        One that is damaged or of another version is set aside. If that fails, it stays, and the
        counts of this process are not saved.
        """
        try:
            if path.exists():
                self.set_counts(SavedCounts.load(path))
        except UnreadableFile as error:
            log.error("the list popular starts with the training events: %s", error)
            try:
                log.error("%s is now %s", path, set_aside(path))
            except OSError as failure:
                log.error("%s stays, and no counts are saved: %s", path, failure)
                return
        self.counts_file = path

    def _save_counts(self) -> None:
        """Writes the counts to their file if events have changed them. A failure is logged."""
        with self._saving:
            path, self._saved_at_s = self.counts_file, time.monotonic()
            if path is None or not self._counts_changed:
                return
            self._counts_changed = False
            try:
                self.read_counts().save(path)
            except OSError as error:
                log.error("the counts of events are not saved: %s: %s", path, error)

    def _content_size(self) -> int:
        """Returns the number of columns of a vector that are not collaborative."""
        collaborative = self._bundle.manifest.collaborative_dim
        return int(self.current.catalog.vectors.shape[1]) - collaborative

    def _write(self, change: Callable[[LiveCatalog], T]) -> T:
        """Makes a change here, or in the successor after a replacement; one change at a time."""
        with self._lock:
            if self.successor is None:
                return change(self)
        return self.successor._write(change)

    def _put(self, body: ItemsRequest, added_at: Mapping[str, int | None]) -> ItemsResponse:
        tools, now_us = self.open_tools(), self.clock()
        made: dict[str, MadeVector] = {}
        request, changes, before = None, list[ItemChange](), self.current

        def make(current: Snapshot) -> ChangeSet | None:
            nonlocal request, changes, before
            before = current
            request = PutRequest(current, tools, now_us, added_at, made)
            changes = request.read(body.items)
            own = self._with_embeddings(changes, current.items)
            return ChangeSet(current.items.number + 1, changes=own) if changes else None

        name, warning = self._commit(make)
        assert request is not None
        updated = sum(row >= 0 for row in before.rows.get_many(c.record.item_id for c in changes))
        return ItemsResponse(
            catalog_version=name,
            inserted=len(changes) - updated,
            updated=updated,
            rejected=sorted(request.rejected, key=lambda one: one.index),
            degraded=sorted(request.degraded, key=lambda one: one.index),
            warning=warning or UNSET,
        )

    def _hide(self, item_ids: tuple[str, ...], unknown: bool) -> tuple[str, str]:
        """Returns the name of the version without the items, and the warning of the log."""

        def make(current: Snapshot) -> ChangeSet:
            items = current.items
            for item_id in item_ids:
                if items.visible.get(item_id) < 0 and not unknown:
                    raise UnknownItem(f"no item {item_id[:80]!r} in the catalogue")
            return ChangeSet(items.number + 1, hidden=item_ids)

        return self._commit(make)

    def _roll_back(self, name: str) -> RollbackResponse:
        if self._shared is not None:
            return self._roll_back_all(name)
        archived, current = self._archive.get(name), self.current.items
        items = restore_version(archived.items, current, current.number + 1)
        self.recent |= difference(current).item_ids | difference(items).item_ids
        self._restore(items, archived.base_trie)
        return RollbackResponse(catalog_version=items.name, restored=name)

    def _roll_back_all(self, name: str) -> RollbackResponse:
        """Stores the difference of an earlier version to the bundle, which all servers apply."""

        def make(current: Snapshot) -> ChangeSet:
            archived = self._archive.get(name).items
            changed = difference(archived)
            return ChangeSet(
                current.items.number + 1,
                self._with_embeddings(changed.changes, archived),
                changed.hidden,
                whole=True,
                restored=tuple(sorted(difference(current.items).item_ids - changed.item_ids)),
            )

        made, warning = self._commit(make)
        return RollbackResponse(catalog_version=made, restored=name, warning=warning or UNSET)

    def _commit(self, make: Callable[[Snapshot], ChangeSet | None]) -> tuple[str, str]:
        """Writes a change set to the log, then publishes it.

        Args:
            make: Returns the change set for the current snapshot, or None if there is no change.
                It is called again after each change of another server that came before.

        Returns:
            The name of the version that the change set makes, and the log's warning or "". Without
            a change it is the current version.

        Raises:
            CatalogConflict: If other servers were faster each time.
            JournalError: If the log cannot be written.
            Exception: What `make` raises.
        """
        shared = self._shared
        if shared is None:
            change_set = make(self.current)
            if change_set is None:
                return self.current.items.name, ""
            if self.journal is not None:
                self.journal.append(change_set)
            self.recent |= change_set.item_ids
            self._apply([change_set])
            return self.current.items.name, ""
        assert self.follower is not None
        if self.follower.stale:
            self._catch_up()
        writer = secrets.token_hex(8)
        for _ in range(MAX_ATTEMPTS):
            self._carry_over()
            if self._pending:
                break
            try:
                change_set = make(self.current)
            except LookupError:  # another server may have stored what this one does not know
                if not self._catch_up():
                    raise
                continue
            if change_set is None:
                return self.current.items.name, ""
            try:
                stored = shared.append(replace(change_set, writer=writer))
            except PositionTaken:
                self.follower.conflicts += 1
                self._catch_up()
            except AppendUncertain as error:
                for each in self._settle(error):
                    if each.writer == writer:  # others may stand behind it
                        version = self.current.items.base.version
                        name = str(VersionName(version, each.epoch, each.number))
                        return name, UNKNOWN_REPLICAS if shared.wait_replicas else ""
            else:
                self._apply_appended(stored)
                return self.current.items.name, stored.warning
        raise _conflict()

    def _apply_appended(self, stored: Appended) -> None:
        """Applies what this server has stored in a shared log."""
        assert self.follower is not None
        self._apply([stored.change_set])
        self._tell_follower()
        self._condense_if_long()

    def _tell_follower(self) -> None:
        """Says that the log was read to its end."""
        items = self.current.items
        assert self.follower is not None
        self.follower.reached(items, self._pending[0].number - 1 if self._pending else items.number)

    def _carry_over(self) -> None:
        """Carries over what servers of other bundles have stored.

        Something is left if other servers were faster each time.

        Raises:
            JournalError: If the log cannot be written.
        """
        attempts = 0
        while self._pending and attempts < MAX_ATTEMPTS:
            attempts += not self._assign()

    def _assign(self) -> bool:
        """Stores what the first pending changes of other bundles mean for this one.

        If another server is faster, the changes of that one are applied instead.

        Returns:
            Whether they are stored.

        Raises:
            JournalError: If the log cannot be written.
        """
        items = self.current.items
        size, pending = 0, list[ChangeSet]()
        for each in self._pending:
            if pending and size + len(each) > MAX_ASSIGNED:
                break
            pending.append(each)
            size += len(each)
        last = pending[-1].number
        return self._take_over(OtherChanges.of(pending, items.log.schema), last)

    def take_back(self, other: LiveCatalog) -> int:
        """Gives items the fields that they have in another bundle of a shared log.

        These are the items that have changed there since it began to answer, `recent`.

        Args:
            other: The catalogue that this one replaces again.

        Returns:
            Their number.

        Raises:
            CatalogConflict: If other servers were faster each time.
            JournalError: If the log cannot be written.
        """
        with self._lock:
            for _ in range(MAX_ATTEMPTS):
                self._carry_over()
                if self._pending:
                    continue
                schema = self.current.items.log.schema
                puts = OtherChanges.of([difference(other.current.items)], schema).put
                recent = {each: puts[each] for each in puts.keys() & other.recent}
                if not recent or self._take_over(OtherChanges(recent), self._assigned, recent):
                    return len(recent)
        raise _conflict()

    def _take_over(self, wanted: OtherChanges, last: int, override: Collection[str] = ()) -> bool:
        """Stores what changes of other bundles mean for this one.

        Args:
            wanted: The changes.
            last: Position of other bundles up to which all is carried over afterwards.
            override: Ids of items whose latest record replaces that of the bundle.

        Returns:
            False if another server was faster. Then the changes of that one are applied.

        Raises:
            JournalError: If the log cannot be written.
        """
        follower, items = self.follower, self.current.items
        assert follower is not None
        tools, bodies = self.open_tools(), wanted.bodies(items, self.embedding_size(), override)
        request = PutRequest(self.current, tools, self.clock(), wanted.added_at, self._made)
        changes, hidden = tuple(request.read(bodies)), wanted.to_hide(items)
        if override and not changes and not hidden:
            return True
        try:
            while len(changes) > MAX_ASSIGNED:  # of one large change set
                part, changes = changes[:MAX_ASSIGNED], changes[MAX_ASSIGNED:]
                self._store_assignment(part, (), self._assigned)
            self._store_assignment(changes, hidden, last)
        except PositionTaken:
            follower.conflicts += 1
            self._catch_up()
            return False
        except AppendUncertain as error:
            self._settle(error)
            return False
        for rejection in request.rejected[:10]:
            log.warning(
                "item %s of another bundle is not carried over: %s",
                bodies[rejection.index]["item_id"][:80],
                rejection.reason,
            )
        return True

    def _store_assignment(
        self, changes: tuple[ItemChange, ...], hidden: tuple[str, ...], assigned: int
    ) -> None:
        """Stores and applies an assignment. Raises as `append` of the log."""
        assert self._shared is not None
        number, writer = self.current.items.number + 1, secrets.token_hex(8)
        part = ChangeSet(number, changes, hidden, writer=writer, assigned=assigned)
        self._apply_appended(self._shared.append(part))

    def _with_embeddings(
        self, changes: Sequence[ItemChange], items: CatalogVersion
    ) -> tuple[ItemChange, ...]:
        """Returns changes with the user's embeddings, for other bundles of a shared log.

        Args:
            changes: The changes.
            items: A version that has the items without a new vector.
        """
        size = self.embedding_size()
        if self._shared is None or size is None:
            return tuple(changes)
        rows = items.rows_by_key([change.record.item_id for change in changes])
        return tuple(
            replace(
                change,
                embedding=(items.vectors[row] if change.vector is None else change.vector)[:size],
            )
            for change, row in zip(changes, rows, strict=True)
        )

    def _settle(self, uncertain: AppendUncertain) -> list[ChangeSet]:
        """Reads a shared log that has not answered to a change. Raises the error if it cannot."""
        until_s = time.monotonic() + SETTLE_S
        while True:
            try:
                return self._catch_up()
            except LogUnavailable:
                if time.monotonic() > until_s:
                    raise uncertain from None
                time.sleep(SETTLE_PAUSE_S)

    def _catch_up(self) -> list[ChangeSet]:
        """Applies and returns what a shared log has behind the current version."""
        shared, follower, items = self._shared, self.follower, self.current.items
        assert shared is not None and follower is not None
        lost = False
        try:
            found = shared.read(items.number + 1, items.epoch)
        except PositionLost as error:
            found, lost = shared.read(), True
            follower.losses += 1
            log.error(
                "%s; the catalogue goes on from position %d",
                error,
                found[-1].number if found else 0,
            )
        if lost:
            self._archive.clear()
            self._assigned = 0
            found.insert(0, ChangeSet(0, whole=True))  # nothing of the old log stays
        if found:
            self._apply(found)
            log.debug("applied %d change sets of items", len(found))
        self._archive.start_at(shared.start)
        self._tell_follower()
        return found

    def _apply(self, change_sets: Sequence[ChangeSet]) -> None:
        """Applies stored change sets in order, then publishes the last version.

        Raises:
            JournalError: If one does not fit the version before it. Those before it are applied.
        """
        first, bundle = self.current, self._archive.bundle
        items, base_trie, lineage = first.items, first.base_trie, self._lineage
        applied, damage = items, None
        for change_set in change_sets:
            if change_set.remains:
                self._await_assignment(change_set)
                continue
            parts: Sequence[ChangeSet] = (change_set,)
            base = base_trie
            self._note_recent(change_set)
            if change_set.made_for not in ("", items.base.version):
                if change_set.assigned is None:
                    self._await_assignment(change_set)
                change_set = replace(change_set, whole=False)
                parts = (replace(change_set, changes=(), hidden=()),)
            elif change_set.whole or change_set.assigned is not None:
                self._end_assignments(change_set)
            if change_set.whole:
                items = restore_version(bundle.items, items, change_set.number)
                parts, base = change_set.split(), bundle.base_trie
            try:
                for part in parts:
                    items = apply_changes(items, restore_changes(part, items.log.schema))
            except ValueError as error:
                where = "memory" if self.journal is None else self.journal.name
                damage = JournalError(f"{where}: position {change_set.number} is damaged ({error})")
                items = restore_version(applied, items, applied.number)
                break
            lineage += change_set.whole
            applied, base_trie = items, base
            self._archive.add(items, base_trie)
        self._lineage = lineage
        self._publish(items, base_trie)
        self._fold_if_large()
        if damage is not None:
            raise damage

    def _note_recent(self, change_set: ChangeSet) -> None:
        """Remembers which items the change of a client in a shared log has changed."""
        if change_set.writer and change_set.assigned is None:
            ids = change_set.item_ids.union(change_set.restored)
            if change_set.made_for == self.current.items.base.version:
                self.recent |= ids
            else:
                self.recent -= ids

    def _await_assignment(self, change_set: ChangeSet) -> None:
        """Remembers what another bundle has changed, unless it was carried over."""
        own = change_set.made_for == self.current.items.base.version
        if not own and change_set.number > self._assigned:
            self._pending.append(change_set)
            self._pending.sort(key=lambda each: each.number)  # a snapshot may be older

    def _end_assignments(self, change_set: ChangeSet) -> None:
        """Forgets what a change set of this bundle has carried over.

        A rollback is stored while nothing is left to carry over.
        """
        done = change_set.assigned
        if done is not None:
            self._assigned = done
        self._pending = [each for each in self._pending if done is not None and each.number > done]
        if not self._pending:
            self._made.clear()

    def _condense_if_long(self) -> None:
        """Lets a thread replace the beginning of a shared log by a snapshot, if it pays."""
        shared, items = self._shared, self.current.items
        assert shared is not None
        held = len(items.record_rows) + items.removed_rows.size
        busy = self._condensing is not None and self._condensing.is_alive()
        if busy or shared.num_changes <= MIN_LOGGED + held:
            return
        version = self._archive.oldest(recent=shared.num_changes > MAX_LOGGED + held)
        if version.number <= shared.start:
            return
        self._condensing = threading.Thread(
            target=self._condense, args=(version,), name="condense-log", daemon=True
        )
        self._condensing.start()

    def _condense(self, version: CatalogVersion) -> None:
        """Replaces a shared log up to a version by its difference to the bundle."""
        assert self._shared is not None
        try:
            self._shared.replace(difference(version).split())
        except JournalError as error:
            log.warning("the log of changes is not shortened: %s", error)

    def _restore(self, items: CatalogVersion, base_trie: Trie) -> None:
        """Publishes a version that does not descend from the current one."""
        self._condense_journal(items)
        self._lineage += 1
        self._publish(items, base_trie)
        self._capture_on_a_thread()

    def _condense_journal(self, items: CatalogVersion) -> None:
        """Rewrites the journal as the difference between the bundle and this version."""
        if self.journal is not None:
            self.journal.replace(difference(items).split())

    def _publish(
        self,
        items: CatalogVersion,
        base_trie: Trie,
        index: VersionIndex | DeviceIndex | None = None,
    ) -> None:
        """Updates the models, then publishes the version that needs them.

        Args:
            items: The version.
            base_trie: Base trie of this version or of an earlier one.
            index: New retriever index of the version; None means the present one, if there is one.
        """
        index = self._current.index if index is None else index
        self._append_rows(items)
        ranking = None if self._ranking is None else self._ranking.at(items)
        if index is not None:
            index = index.at(items.num_rows, items.removed_rows, self._item_vectors)
        self._archive.add(items, base_trie)
        with self._swap_lock:  # a request may publish another time meanwhile
            snapshot = self._current.at(items, ranking, base_trie, self.clock())
            self._current = replace(snapshot, index=index)

    def _append_rows(self, items: CatalogVersion) -> None:
        """Appends the rows of the version that the models do not have yet."""
        recommender, ranker = self.models.recommender, self.models.ranker

        def read_tail(first: int) -> tuple[torch.Tensor, torch.Tensor]:
            vectors, trained_rows = items.vectors.tail[first:], items.trained_rows[first:]
            return torch.from_numpy(vectors), torch.from_numpy(trained_rows)

        # The arrays of the tail begin after the bundle's own rows.
        tables = None if recommender is None else recommender.items
        if tables is not None and tables.num_bound_items < items.num_rows:
            first = tables.num_bound_items - len(items.base)
            codes = torch.from_numpy(items.codes.tail[first:].astype("int64"))
            tables.append_items(codes, *read_tail(first))
        if ranker is not None and ranker.num_bound_items < items.num_rows:
            ranker.append_items(*read_tail(ranker.num_bound_items - len(items.base)))

    def _item_vectors(self, rows: np.ndarray) -> np.ndarray:
        """Returns the retriever's vectors [n, E] of the item rows [n]."""
        retriever, recommender = self.models.heads.retriever, self.models.recommender
        assert retriever is not None and recommender is not None
        return item_vectors(retriever, recommender, torch.from_numpy(rows)).numpy()

    def _capture_on_a_thread(self) -> None:
        """Captures searches over the current base trie again, if the engine uses CUDA graphs."""
        base = self.current.base_trie
        if self._engine.searches is not None:
            threading.Thread(target=self._engine.capture, args=(base,), daemon=True).start()

    def _fold_if_large(self) -> None:
        """Starts a thread that folds many insertions into new bases; changes continue meanwhile."""
        snapshot = self.current
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
        trie, index = snapshot.compact_trie(), snapshot.index
        if index is not None:
            index = index.fold(snapshot.items.removed_rows, self._item_vectors)
        self._engine.capture(trie)
        with self._lock:
            if self._lineage != lineage:
                self._capture_on_a_thread()
                return
            items = self.current.items
            if items.num_records > len(items.record_rows):
                items = compact_log(items)
            self._publish(items, trie, index)
            held = len(items.record_rows) + items.removed_rows.size
            if self.journal is None or self.journal.shared:
                return
            if self.journal.num_changes > 2 * held:
                self._condense_journal(items)


def _item_fields(snapshot: Snapshot, row: int) -> dict[str, Any]:
    """Returns the fields that an item has on a page and on its own."""
    items = snapshot.items
    record = items.record(row)
    return {
        "item_id": items.item_id(row),
        "title": record.title or None,
        "categories": record.categories,
        "semantic_id": items.codes[row].tolist(),
        "popularity": snapshot.item_popularity(row),
    }


def _all_fields(snapshot: Snapshot, row: int) -> dict[str, Any]:
    """Returns the fields of an item that was asked for by its id."""
    record = snapshot.items.record(row)
    return {
        **_item_fields(snapshot, row),
        **{name: UNSET if record.value(name) is None else record.value(name) for name in TIME_USE},
        "attributes": snapshot.items.attributes(row),
    }


def _find_items(snapshot: Snapshot, query: ItemsQuery, ids: Sequence[str]) -> ItemPage:
    """Returns the items of these ids in their order; unknown ones are in `missing_item_ids`."""
    items = snapshot.items
    given = {"query": query.query, "limit": query.limit, "after": query.after}
    if others := [name for name, value in given.items() if value not in ("", UNSET, 0)]:
        raise InvalidRequest("ids", f"expected no other parameter with it, got {others[0]}")
    rows = items.visible.get_many(ids)
    found = [ListedItem(**_all_fields(snapshot, row)) for row in rows if row >= 0]
    missing = dict.fromkeys(name for name, row in zip(ids, rows, strict=True) if row < 0)
    return ItemPage(
        items=found,
        next=None,
        num_items=_num_items(items),
        catalog_version=items.name,
        missing_item_ids=list(missing),
    )


def _num_items(items: CatalogVersion) -> int:
    return int(items.num_rows - items.removed_rows.size)


def _contains(items: CatalogVersion, row: int, text: str) -> bool:
    """Returns True if the title or the id of an item contains a folded text."""
    if not text:
        return True
    title = items.record(row).title if items.num_records else items.base.items.titles[row]
    return text in fold(title) or text in fold(items.item_id(row))


def _conflict() -> CatalogConflict:
    return CatalogConflict(
        f"other servers changed items {MAX_ATTEMPTS} times meanwhile; send the change again"
    )
