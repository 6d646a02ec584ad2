"""A Redis server that fails on demand: its network, or the server itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import redis

from benchmarks.campaign.check import NotRun
from benchmarks.campaign.fault_proxy import FaultProxy
from benchmarks.campaign.site import Site
from recserve.features.history.redis_store import PREFIX
from recserve.service.histories import IMPORT_MARKER
from tests.support.redis_server import start_redis

NETWORK = ("down", "refuse", "hang", "latency", "loss", "reset", "half", "garbage")
STORE = ("wrong type", "out of memory", "read-only", "no password")
MARKER = PREFIX + IMPORT_MARKER.encode()


@dataclass(frozen=True)
class Faults:
    """A Redis server that fails on demand, behind a proxy that does.

    Attributes:
        direct: A connection past the proxy.
        proxy: The proxy.
    """

    direct: redis.Redis
    proxy: FaultProxy

    @property
    def url(self) -> str:
        """The store's URL, through the proxy."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Fails inside."""
        if name in NETWORK:
            with self.proxy.fault(name):
                yield
        else:
            keys = list(self.direct.scan_iter(b"recserve:history:stored*"))
            with store_fault(name, self.direct, keys or [MARKER]):
                yield


@contextmanager
def failing_redis(site: Site) -> Iterator[Faults]:
    """Yields a Redis server with its proxy. Raises NotRun without Redis."""
    try:
        process, port = start_redis(site.scratch())
    except BaseException as why:  # pytest's skip and fail are no Exceptions
        if isinstance(why, KeyboardInterrupt):
            raise
        raise NotRun("no redis-server on this machine") from None
    try:
        with redis.Redis(port=port) as direct, FaultProxy(port, site.seed) as proxy:
            yield Faults(direct, proxy)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


@contextmanager
def store_fault(name: str, direct: redis.Redis, keys: list[bytes]) -> Iterator[None]:
    """Makes the Redis server itself fail."""
    kept = {key: direct.get(key) for key in keys} if name == "wrong type" else {}
    undo: Callable[[], object]
    match name:
        case "wrong type":
            for key in keys:
                direct.delete(key)
                direct.lpush(key, "not a history")
            undo = lambda: [direct.delete(k) and direct.set(k, v) for k, v in kept.items() if v]  # noqa: E731
        case "out of memory":
            direct.config_set("maxmemory", 1)
            undo = lambda: direct.config_set("maxmemory", 0)  # noqa: E731
        case "read-only":
            direct.config_set("min-replicas-to-write", 3)
            undo = lambda: direct.config_set("min-replicas-to-write", 0)  # noqa: E731
        case _:
            direct.config_set("requirepass", "another-password")
            direct.client_kill_filter(_type="normal", skipme=True)
            undo = lambda: direct.config_set("requirepass", "")  # noqa: E731
    try:
        yield
    finally:
        undo()
