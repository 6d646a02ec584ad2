"""The registry of history stores, which maps a URL's scheme to the class that opens it.

Other packages register a class in the entry-point group `recserve.stores`, under its scheme:

    [project.entry-points."recserve.stores"]
    cassandra = "my_package.store:CassandraStore"
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from urllib.parse import parse_qsl, urlencode

from recserve.features.history.expiring_store import ExpiringStore
from recserve.features.history.history import MAX_CAP, HistoryStore, StoreOptions

GROUP = "recserve.stores"
TTL = "ttl_s"  # option of every store's URL
_REDIS = "recserve.features.history.redis_store:RedisStore"
BUILT_IN = (
    EntryPoint("lmdb", "recserve.features.history.lmdb_store:LmdbStore", GROUP),
    *(EntryPoint(scheme, _REDIS, GROUP) for scheme in ("redis", "rediss", "unix")),
)


def open_store(url: str, options: StoreOptions | None = None) -> HistoryStore:
    """Opens the store of a URL.

    Args:
        url: `lmdb:PATH`, `redis://...`, `rediss://...`, `unix://...`, or a URL with the scheme of
            an installed package. Each may end with `?ttl_s=SECONDS`, which goes before the
            option of that name.
        options: Options of the store, or None for the defaults.

    Raises:
        ValueError: If no store has the scheme, or an option is out of range.
        StoreUnavailable: If the store cannot be opened.
    """
    options = options or StoreOptions()
    if not 1 <= options.cap <= MAX_CAP:
        raise ValueError(f"cap is {options.cap}; expected 1..{MAX_CAP}")
    url, ttl_s = split_ttl(url)
    if ttl_s is None:
        ttl_s = options.ttl_s
    if ttl_s is not None and not ttl_s > 0:
        raise ValueError(f"ttl_s is {ttl_s}; expected a number of seconds above 0")
    store = store_class(url).open(url, replace(options, ttl_s=ttl_s))
    return store if ttl_s is None else ExpiringStore(store, ttl_s)


def split_ttl(url: str) -> tuple[str, float | None]:
    """Returns a store's URL without its option `ttl_s`, and the option's value.

    Raises:
        ValueError: If the value is no number.
    """
    place, _, query = url.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    values = [value for name, value in pairs if name == TTL]
    if not values:
        return url, None
    try:
        ttl_s = float(values[-1])
    except ValueError:
        raise ValueError(f"{TTL} is {values[-1]!r}; expected a number of seconds") from None
    left = urlencode([(name, value) for name, value in pairs if name != TTL])
    return f"{place}?{left}" if left else place, ttl_s


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
