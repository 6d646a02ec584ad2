"""Opening the history store that a URL names."""

from __future__ import annotations

from recserve.features.history.history import DEFAULT_CAP, MAX_CAP, HistoryStore


def open_store(
    url: str,
    *,
    cap: int = DEFAULT_CAP,
    timeout_s: float = 0.25,
    map_size_bytes: int = 8 << 30,
) -> HistoryStore:
    """The store at `lmdb:PATH`, `redis://...`, `rediss://...` or `unix://...`.

    cap: events kept per user; a history is trimmed to it when it reaches twice that. timeout_s:
    of a Redis call. map_size_bytes: the most an LMDB file may grow to.
    Raises ValueError for the URL or an option, StoreUnavailable if the store cannot be opened.
    """
    if not 1 <= cap <= MAX_CAP:
        raise ValueError(f"cap is {cap}; expected 1..{MAX_CAP}")
    scheme, _, rest = url.partition(":")
    if scheme == "lmdb" and rest:
        from recserve.features.history.lmdb_store import LmdbStore

        return LmdbStore(rest, cap=cap, map_size_bytes=map_size_bytes)
    if scheme in ("redis", "rediss", "unix") and rest:
        from recserve.features.history.redis_store import RedisStore

        return RedisStore(url, cap=cap, timeout_s=timeout_s)
    raise ValueError(
        f"store scheme is {scheme[:20]!r}; expected lmdb:PATH, redis://... or unix://..."
    )
