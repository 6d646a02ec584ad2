"""Replaces the bundle of a service while it answers requests.

`open_successor` opens the new bundle beside the old service. `hand_over` carries the live item
changes over and publishes the new service between two changes. Both services share the history
store, which LMDB allows to be opened only once per process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.bundle.bundle import CATALOG, Bundle
from recserve.schemas.items import Candidate, RankRequest, RecommendRequest
from recserve.service.catalog.carry_over import CarriedItems, carry_over
from recserve.service.catalog.live_items import LiveItems
from recserve.service.low_priority import at_low_priority
from recserve.service.memory import SERVED, available_bytes, needed_bytes
from recserve.service.model_loader import Device
from recserve.service.options import ServiceOptions
from recserve.service.parts import ItemParts, open_parts
from recserve.service.service import Service

MIN_SHARED_ITEMS = 0.5  # share of the current items that a new bundle must have
PASSES = 3  # over item changes that arrive meanwhile, before changes have to wait
NOTHING = CarriedItems(0, 0, {})


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
    parts = _parts(old)
    needed, free = needed_bytes(bundle, options.engine), available_bytes(parts.runtime.device)
    if free is not None and needed > free:
        raise UnfitBundle(
            f"the bundle needs about {needed / 1e6:,.0f} MB beside the current one, and "
            f"{free / 1e6:,.0f} MB are free; lower kv_bytes or restart the server with the bundle"
        )
    if force:
        return
    for name in SERVED:
        if parts.bundle.has(name) and not bundle.has(name):
            raise UnfitBundle(f"the bundle has no {name}, which the current one has; train it")
    try:
        ids = pq.read_table(bundle.path(CATALOG), columns=["item_id"])[0].cast(pa.string())
    except (pa.ArrowException, OSError) as error:
        raise UnfitBundle(f"the catalogue of the bundle is damaged: {error}") from error
    current = pa.array(parts.runtime.snapshot.catalog.items.ids, pa.string())
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
    parts = at_low_priority(lambda: open_parts(bundle, None, device, options, _parts(old)))
    parts.runtime.engine.start()  # here, so that the engine's thread has the usual priority
    text = None if options.text is None else options.text.model
    return Service(parts.runtime.engine, parts, text)


def probe(service: Service) -> None:
    """Answers one request of each kind, so that a broken model is found before it serves.

    Raises:
        Exception: The error of the request.
    """
    parts = _parts(service)
    (item,) = service.samples(0, 1)["items"]
    if parts.recommendations is not None:
        service.recommend(RecommendRequest(history=[item], k=1))
    if parts.rankings is not None:
        service.rank(RankRequest(history=[item], candidates=[Candidate(item_id=item)]))


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
    before, after = _parts(old), _parts(new)
    carried, seen = NOTHING, None
    # It may have been replaced before.
    after.items.successor = after.runtime.histories.successor = None
    for _ in range(PASSES):
        if seen is before.runtime.snapshot.items:
            break
        seen = before.runtime.snapshot.items
        carried = _sum(carried, _carry(before.items, after.items, override))
    with before.items.frozen():
        if seen is not before.runtime.snapshot.items:
            carried = _sum(carried, _carry(before.items, after.items, override))
        if after.items.journal is None:  # both catalogues have one journal file
            after.items.journal, before.items.journal = before.items.journal, None
        after.items.recent.clear()
        before.items.successor = after.items
        before.runtime.histories.successor = after.runtime.engine
        before.runtime.histories.owns_store = False
        after.runtime.histories.owns_store = True
        publish()
    return carried


def _carry(old: LiveItems, new: LiveItems, override: bool) -> CarriedItems:
    version = old.runtime.snapshot.items
    if version.base.version != new.runtime.snapshot.catalog.version:
        return carry_over(old, new, old.recent if override else ())
    new.adopt(version)
    return NOTHING


def _sum(one: CarriedItems, other: CarriedItems) -> CarriedItems:
    refused: Mapping[str, str] = {**one.refused, **other.refused}
    return dataclasses.replace(
        one, put=one.put + other.put, hidden=one.hidden + other.hidden, refused=refused
    )


def _parts(service: Service) -> ItemParts:
    """Returns the parts of the bundle. Raises UnknownModel without one."""
    _ = service.bundle
    assert service.item_parts is not None
    return service.item_parts
