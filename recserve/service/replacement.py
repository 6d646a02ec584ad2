"""Replaces the bundle of a service while it answers requests.

The steps, in the order of this file:

1. `check_successor` compares the new bundle with the current one before it is loaded.
2. `open_successor` opens it beside the old service, at a low priority. Both services share the
   history store, which LMDB allows to be opened only once per process.
3. `probe` answers one request of each kind.
4. `hand_over` carries the live item changes over and publishes the new service between two changes.
5. `Predecessor` holds the old service for a while, so that a rollback loads nothing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.bundle.bundle import CATALOG, Bundle
from recserve.engine.engine import Engine
from recserve.features.catalog.versions import difference
from recserve.schemas.items import (
    MAX_ITEMS,
    Candidate,
    ItemsRequest,
    RankRequest,
    RecommendRequest,
)
from recserve.service.carried_items import OtherChanges
from recserve.service.errors import UnknownModel
from recserve.service.live_catalog import LiveCatalog
from recserve.service.memory import SERVED, available_bytes, needed_bytes, release_freed
from recserve.service.model_loader import Device
from recserve.service.options import ServiceOptions
from recserve.service.service import Service

log = logging.getLogger(__name__)
T = TypeVar("T")
MIN_SHARED_ITEMS = 0.5  # share of the current items that a new bundle must have
PASSES = 3  # over item changes that arrive meanwhile, before changes have to wait
NICENESS = 10  # added to that of the process; the scheduler then gives a tenth of a busy core
# A load needs the memory of two bundles anyway; this is how much longer both of them stay.
KEPT_S = 600.0


class UnfitBundle(ValueError):
    """The bundle cannot replace the current one; the message says why."""


def check_successor(old: Service, bundle: Bundle, options: ServiceOptions, force: bool) -> None:
    """Checks a bundle before it is loaded.

    Args:
        old: The service that the bundle shall replace.
        bundle: The bundle.
        options: Options of the new service.
        force: Accepts other items and missing models.

    Raises:
        UnfitBundle: If the bundle needs more memory than is free, lacks a model of the current
            bundle, or lacks more than half of its items.
        BundleError: If the catalogue is damaged.
    """
    served = old.bundle
    needed, free = needed_bytes(bundle, options.engine, old.device), available_bytes(old.device)
    if free is not None and needed > free:
        raise UnfitBundle(
            f"the bundle needs about {needed / 1e6:,.0f} MB beside the current one, and "
            f"{free / 1e6:,.0f} MB are free; lower kv_bytes or restart the server with the bundle"
        )
    if force:
        return
    for name in SERVED:
        if served.has(name) and not bundle.has(name):
            raise UnfitBundle(f"the bundle has no {name}, which the current one has; train it")
    try:
        ids = pq.read_table(bundle.path(CATALOG), columns=["item_id"])[0].cast(pa.string())
    except (pa.ArrowException, OSError) as error:
        raise UnfitBundle(f"the catalogue of the bundle is damaged: {error}") from error
    current = pa.array(old.catalog.current.catalog.items.ids, pa.string())
    share = pc.sum(pc.is_in(current, ids)).as_py() / len(current)
    if share < MIN_SHARED_ITEMS:
        raise UnfitBundle(
            f"the bundle has {share:.0%} of the current items; expected at least "
            f"{MIN_SHARED_ITEMS:.0%}. Is it built from other item ids?"
        )


def open_successor(
    old: Service, bundle: Bundle, device: Device = "auto", options: ServiceOptions | None = None
) -> Service:
    """Opens a bundle beside a service. The new service shares its store and signing key.

    The new service owns no store until `hand_over`; closing it before leaves the old one intact.
    The work is done on a thread of low priority, because the old service answers requests.

    Args:
        old: The current service, which goes on answering.
        bundle: The new bundle. It is compared with its hashes unless that has been done.
        device: Device of the models.
        options: Options of the new service; None means the defaults. A language model must have
            drafters of its own.

    Raises:
        BundleError: If the bundle is damaged.
        UnknownModel: If the old service has no bundle.
        UnfitBundle: If the old service has a language model and the options have none.
        ValueError: If an option does not fit.
    """
    options = options or ServiceOptions()
    if options.text is None and "text" in old.engine.schedulers:
        raise UnfitBundle("the new service would have no language model; pass one in the options")
    new = at_low_priority(lambda: Service.open(bundle, None, device, options, replaced=old))
    new.engine.start()  # here, so that the engine's thread has the usual priority
    return new


def probe(service: Service) -> None:
    """Answers one request of each kind, so that a broken model is found before it serves.

    Raises:
        Exception: The error of the request.
    """
    item = service.catalog.current.items.item_id(0)  # whatever its times
    with contextlib.suppress(UnknownModel):  # the bundle has no such model
        service.recommend(RecommendRequest(history=[item], k=1))
    with contextlib.suppress(UnknownModel):
        service.rank(RankRequest(history=[item], candidates=[Candidate(item_id=item)]))


def at_low_priority(call: Callable[[], T]) -> T:
    """Runs a call on a thread of its own with a low priority, and returns its result.

    Linux has a priority for each thread; elsewhere the call has that of the process. A thread that
    the call starts inherits the low priority, so a thread that answers requests must be started
    somewhere else.

    Raises:
        Exception: The error of the call.
    """
    with ThreadPoolExecutor(1, "low-priority", initializer=_lower_priority) as pool:
        return pool.submit(call).result()


def _lower_priority() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


@dataclass(frozen=True)
class CarriedItems:
    """What one or more passes have changed in the new catalogue.

    Attributes:
        put: Number of inserted or updated items.
        hidden: Number of hidden items.
        refused: Reason by item id, for items that the new catalogue cannot hold.
    """

    put: int = 0
    hidden: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, later: CarriedItems) -> CarriedItems:
        refused = {**self.refused, **later.refused}
        return CarriedItems(self.put + later.put, self.hidden + later.hidden, refused)


def hand_over(
    old: Service, new: Service, publish: Callable[[], None], override: bool = False
) -> CarriedItems:
    """Carries live item changes over, publishes the new service, and passes the store to it.

    Changes of items wait for the last pass, which is short. Requests do not wait. A change that
    reaches the old service afterwards is applied to the new one.

    Args:
        old: The service that has answered so far. Close it when its requests have ended.
        new: Its successor, from `open_successor`, or a service that it has replaced and that has
            not been closed.
        publish: Makes new requests go to the new service. It must not fail.
        override: True if changes since the old service began win over the new bundle's own data.

    Returns:
        The changes that were carried over.

    Raises:
        JournalError: If the new journal cannot be written. The old service goes on then.
    """
    before, after = old.catalog, new.catalog
    carried, seen = CarriedItems(), None
    after.successor = new.histories.successor = None  # it may have been replaced before
    for _ in range(PASSES):
        if seen is before.current.items or after.follower is not None:
            break  # a shared log needs no carrying
        seen = before.current.items
        carried += _carry(before, after, override)
    if override and before.follower is not None:
        before.catch_up()
    with before.pause_changes():
        if after.follower is not None:
            after.catch_up()
            if override and before.current.catalog.version != after.current.catalog.version:
                carried += CarriedItems(after.take_back(before))
        elif seen is not before.current.items:
            carried += _carry(before, after, override)
        if after.journal is None:  # both catalogues have one journal file
            after.journal, before.journal = before.journal, None
        with before.counting:
            after.take_counts(before)
            before.successor = after
        after.recent.clear()
        old.histories.successor = new.engine
        old.histories.owns_store = False
        new.histories.owns_store = True
        publish()
    return carried


def _carry(old: LiveCatalog, new: LiveCatalog, override: bool) -> CarriedItems:
    """Makes the new catalogue hold what the old one holds now."""
    version = old.current.items
    if version.base.version != new.current.catalog.version:
        return carry_over(old, new, old.recent if override else ())
    new.adopt(version)
    return CarriedItems()


def carry_over(old: LiveCatalog, new: LiveCatalog, override: Collection[str] = ()) -> CarriedItems:
    """Applies the item changes of a live catalogue to the catalogue of another bundle.

    A second pass applies only what has changed since the first.

    The rules are those of `carried_items`. Ids in `override` (a rollback passes all changes since
    the old bundle was loaded) get their latest title, categories, attributes and times in any case.

    Args:
        old: The catalogue that has changed.
        new: The catalogue that gets the changes.
        override: Ids of items whose latest record replaces the record of the new bundle.

    Raises:
        JournalError: If the journal of the new catalogue cannot be written.
    """
    changed = difference(old.current.items)
    size = _embedding_size(old, new)
    wanted = OtherChanges(hidden=set(changed.hidden))
    for change in changed.changes:
        if change.record.item_id not in wanted.hidden:
            given = None if size is None or change.vector is None else change.vector[:size]
            wanted.put[change.record.item_id] = replace(change, embedding=given)
    puts = wanted.bodies(new.current.items, size, override)
    refused: dict[str, str] = {}
    for first in range(0, len(puts), MAX_ITEMS):
        part = puts[first : first + MAX_ITEMS]
        for rejection in new.put(ItemsRequest(items=part), wanted.added_at).rejected:
            refused[part[rejection.index]["item_id"]] = rejection.reason
    current = new.current.items
    num_hidden = sum(current.visible.get(item_id) >= 0 for item_id in changed.hidden)
    if to_hide := wanted.to_hide(current):
        new.hide(*to_hide, unknown=True)
    for item_id, reason in list(refused.items())[:10]:
        log.warning("item %s was not carried over to the new bundle: %s", item_id[:80], reason)
    return CarriedItems(len(puts) - len(refused), num_hidden, refused)


def _embedding_size(old: LiveCatalog, new: LiveCatalog) -> int | None:
    """Returns the length of the embeddings that both builds were given; None if they differ."""
    sizes = [items.embedding_size() for items in (old, new)]
    return sizes[0] if sizes[0] == sizes[1] else None


class Predecessor:
    """Holds at most one replaced service, so that a rollback loads nothing.

    The service keeps its models and its catalogue. It answers no requests and its prefix caches are
    empty, so the data of a user who is deleted meanwhile does not survive in it.
    """

    def __init__(self, kept_s: float = KEPT_S) -> None:
        """Holds nothing yet.

        Args:
            kept_s: Time after which a service is closed.
        """
        self._kept_s = kept_s
        self._service: Service | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def keep(self, service: Service) -> None:
        """Holds a service whose requests have ended, and closes the one that it held before."""
        with self._lock:
            self._close()
            service.engine.forget_all()
            self._service = service
            self._timer = threading.Timer(self._kept_s, self._expire, (weakref.ref(service),))
            self._timer.daemon = True
            self._timer.start()
        release_freed()  # what loading its successor needed meanwhile

    def take(self) -> Service | None:
        """Gives the service away, to answer again. Returns None without a working one."""
        with self._lock:
            if self._service is not None and self._service.alive:
                return self._release()
            self._close()
            return None

    def drop(self) -> None:
        """Closes the service and frees its memory. When it returns, its journal is free too."""
        with self._lock:
            self._close()

    def _release(self) -> Service | None:
        service, self._service = self._service, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return service

    def _close(self) -> None:
        service = self._release()
        if service is not None:
            references = weakref.ref(service), weakref.ref(service.engine)
            service.close()
            del service
            _free(references)

    def _expire(self, expected: weakref.ref[Service]) -> None:
        with self._lock:
            if self._service is not None and self._service is expected():
                self._close()


def _free(closed: tuple[weakref.ref[Service], weakref.ref[Engine]]) -> None:
    """Frees a closed service. Reference counts do most of it; a collection is the last resort."""
    if any(reference() is not None for reference in closed):
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    release_freed()
