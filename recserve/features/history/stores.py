"""The registry of history stores, which maps a URL's scheme to the class that opens it.

Other packages register a class in the entry-point group `recserve.stores`, under its scheme:

    [project.entry-points."recserve.stores"]
    cassandra = "my_package.store:CassandraStore"
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from recserve.features.history.history import MAX_CAP, HistoryStore, StoreOptions

GROUP = "recserve.stores"
_REDIS = "recserve.features.history.redis_store:RedisStore"
BUILT_IN = (
    EntryPoint("lmdb", "recserve.features.history.lmdb_store:LmdbStore", GROUP),
    *(EntryPoint(scheme, _REDIS, GROUP) for scheme in ("redis", "rediss", "unix")),
)


def open_store(url: str, options: StoreOptions | None = None) -> HistoryStore:
    """Opens the store of a URL.

    Args:
        url: `lmdb:PATH`, `redis://...`, `rediss://...`, `unix://...`, or a URL with the scheme of
            an installed package.
        options: Options of the store, or None for the defaults.

    Raises:
        ValueError: If no store has the scheme, or an option is out of range.
        StoreUnavailable: If the store cannot be opened.
    """
    options = options or StoreOptions()
    if not 1 <= options.cap <= MAX_CAP:
        raise ValueError(f"cap is {options.cap}; expected 1..{MAX_CAP}")
    return store_class(url).open(url, options)


def store_class(url: str) -> type[HistoryStore]:
    """Returns the class that opens a URL. Raises ValueError if no store has its scheme."""
    scheme, _, rest = url.partition(":")
    # Built-in stores come last, so a package cannot replace them.
    registered = {entry.name: entry for entry in (*entry_points(group=GROUP), *BUILT_IN)}
    if scheme not in registered or not rest:
        known = ", ".join(sorted(registered))
        raise ValueError(
            f"store scheme is {scheme[:20]!r}; expected lmdb:PATH, redis://... or unix://... "
            f"(known schemes: {known})"
        )
    store: type[HistoryStore] = registered[scheme].load()
    return store
