"""Schemes of Redis URLs, for those who must not import redis-py; see `redis_connection`."""

from __future__ import annotations

SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)
