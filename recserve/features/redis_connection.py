"""Connections to Redis by redis-py's classes: one server, Sentinel, Cluster, TLS, unix sockets.

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]
    unix://[USER[:PASSWORD]@]/PATH[?db=DB]
    redis+sentinel://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DB]
    redis+cluster://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]...]

`rediss`, `rediss+sentinel` and `rediss+cluster` use TLS. User and password are percent-encoded. No
message of this module holds them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.cluster import REDIS_ALLOWED_KEYS, ClusterNode, RedisCluster
from redis.connection import SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import (
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

__all__ = [
    "FAILURES",
    "NoScriptError",
    "ResponseError",
    "call_many",
    "connect",
    "describe",
    "scanners",
]

FAILURES = (RedisError, RedisClusterException)  # the second is no RedisError
BACKOFF = ExponentialBackoff(cap=0.05, base=0.005)  # seconds
RETRIES = 2
NESTED_RETRIES = 1  # Sentinel and Cluster repeat the search for the primary and the command
SENTINEL, CLUSTER = "sentinel", "cluster"
SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)
PORTS = {SENTINEL: 26379}
FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
TLS_OPTIONS = (
    *FILES,
    *("ssl_ca_data", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname"),
    *("ssl_min_version", "ssl_ciphers"),
)
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
OPTIONS = (
    *("db", "username", "password", "client_name", "protocol", "max_connections"),
    *("health_check_interval", "socket_timeout", "socket_connect_timeout"),
    *("socket_keepalive", "socket_read_size", "retry_on_timeout"),
    *TLS_OPTIONS,
    *SENTINEL_OPTIONS,
)
ENCODE = "in user names and passwords write / ? # @ : as %2F %3F %23 %40 %3A"


def connect(url: str, *, timeout_s: float = 0.25) -> Any:
    """Returns a `redis.Redis` or a `RedisCluster`.

    The client repeats a call that lost its connection or found no primary. A cluster's client asks
    the cluster for its primaries at once; the others connect at their first call.

    Args:
        url: See the module.
        timeout_s: Time limit to connect, and of each reply, unless the URL sets another.

    Raises:
        ValueError: If the URL is malformed.
        RedisError, RedisClusterException: If no node of a cluster answers.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest:
        shown = scheme if re.fullmatch(r"[a-z+]{1,20}", scheme) else "none"
        raise ValueError(f"Redis URL: scheme is {shown}; expected {', '.join(SCHEMES)}")
    secure, _, kind = scheme.partition("+")
    place, _, query = rest.partition("?")
    address, _, path = place.partition("/")
    login, _, hosts = address.rpartition("@")
    if "@" in path or "#" in rest:
        raise ValueError(f"Redis URL: / ? # @ at a place where they cannot be; {ENCODE}")
    options = _options(query, scheme, kind)
    user, _, password = login.partition(":")
    options |= {"username": unquote(user)} if user else {}
    options |= {"password": unquote(password)} if password else {}
    limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options = limits | options
    if secure == "unix":
        if hosts or not path:
            raise ValueError("Redis URL: expected unix:///PATH, or unix://USER:PASSWORD@/PATH")
        return _single(options | {"path": "/" + unquote(path), "db": options.get("db", 0)}, secure)
    nodes = _nodes(hosts, kind)
    if kind == SENTINEL:
        return _by_sentinel(nodes, path, options, secure)
    db = options.pop("db", None)
    db = _db(path.strip("/")) if db is None else db
    if kind == CLUSTER:
        if db:
            raise ValueError(f"Redis URL: db is {db}; a cluster has database 0 only")
        return _cluster(nodes, options, secure)
    ((host, port),) = nodes
    return _single(options | {"host": host, "port": port, "db": db}, secure)


def describe(error: Exception) -> str:
    """Returns an error of FAILURES in words, without the settings of its connection."""
    text = str(error)
    if isinstance(error, MasterNotFoundError):
        text = text.partition(" : ")[0]  # redis-py goes on with all settings of the connection
    return f"{type(error).__name__}: {text}"


def call_many(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Sends commands in one pipeline and returns the replies, with errors in place.

    A command that met a primary which had become a replica is sent again on new connections. Each
    command touches one key, so a cluster's client can send each to its node.
    """
    replies: list[Any] = [None] * len(commands)
    left = list(range(len(commands)))
    for again in (True, False):
        with client.pipeline(transaction=False) as pipeline:
            for number in left:
                pipeline.execute_command(*commands[number])
            for number, reply in zip(left, pipeline.execute(raise_on_error=False), strict=True):
                replies[number] = reply
        left = [number for number in left if isinstance(replies[number], ReadOnlyError)]
        if not left or not again:
            break
        if isinstance(client, RedisCluster):
            client.nodes_manager.initialize()
        else:
            client.connection_pool.disconnect(inuse_connections=False)
    return replies


def scanners(client: Any) -> list[tuple[str, Callable[..., tuple[int, list[bytes]]]]]:
    """Returns a name and the SCAN of each server that holds keys, in order of the names.

    A cursor is of use to its own server only. The one server of a plain URL has the name "".
    """
    if isinstance(client, RedisCluster):
        primaries = client.get_primaries()  # type: ignore[no-untyped-call]
        nodes = [(_name(node.name), node) for node in primaries]
        return [(name, _scan_of(client, node)) for name, node in sorted(nodes, key=lambda n: n[0])]
    find = getattr(client.connection_pool, "get_master_address", None)
    return [("" if find is None else _name("{}:{}".format(*find())), client.scan)]


def _name(address: str) -> str:
    return hashlib.blake2b(address.encode(), digest_size=4).hexdigest()


def _scan_of(client: Any, node: ClusterNode) -> Callable[..., tuple[int, list[bytes]]]:
    def scan(cursor: int, **arguments: Any) -> tuple[int, list[bytes]]:
        cursors, keys = client.scan(cursor, target_nodes=node, **arguments)
        return cursors[node.name], keys

    return scan


def _single(options: dict[str, Any], secure: str) -> Any:
    classes = {"rediss": SSLConnection, "unix": UnixDomainSocketConnection}
    if secure in classes:
        options = options | {"connection_class": classes[secure]}
    return redis.Redis.from_pool(redis.ConnectionPool(**options, retry=Retry(BACKOFF, RETRIES)))


def _by_sentinel(
    nodes: list[tuple[str, int]], path: str, options: dict[str, Any], secure: str
) -> Any:
    """Returns the client of the primary that the Sentinels name at each new connection."""
    service, _, db = path.partition("/")
    if not service:
        raise ValueError(
            "Redis URL: service is missing; expected redis+sentinel://HOST:PORT,.../SERVICE/DB "
            "with the name from `sentinel monitor`"
        )
    options = {"db": _db(db)} | options
    own = {
        name.removeprefix("sentinel_"): options.pop(name)
        for name in SENTINEL_OPTIONS
        if name in options
    }
    if secure == "rediss":
        options["ssl"] = True
    shared = ("ssl", "socket_timeout", "socket_connect_timeout", *TLS_OPTIONS)
    own |= {name: options[name] for name in shared if name in options}
    once = {"retry": Retry(NoBackoff(), 0)}
    sentinels = Sentinel(nodes, sentinel_kwargs=own | once)  # type: ignore[no-untyped-call]
    options["retry"] = Retry(BACKOFF, NESTED_RETRIES)
    return sentinels.master_for(unquote(service), **options)  # type: ignore[no-untyped-call]


def _cluster(nodes: list[tuple[str, int]], options: dict[str, Any], secure: str) -> Any:
    if secure == "rediss":
        options = options | {"ssl": True}
    startup = [ClusterNode(*node) for node in nodes]  # type: ignore[no-untyped-call]
    return RedisCluster(startup_nodes=startup, retry=Retry(BACKOFF, NESTED_RETRIES), **options)


def _options(query: str, scheme: str, kind: str) -> dict[str, Any]:
    """Parses the options of a URL by redis-py's rules. Raises ValueError."""
    pairs = parse_qsl(query, keep_blank_values=True)
    for name, value in pairs:
        if name not in OPTIONS:
            if "@" in query or not re.fullmatch(r"\w{1,40}", name):
                raise ValueError(f"Redis URL: an option has no valid name; {ENCODE}")
            raise ValueError(f"Redis URL: option {name} is unknown; expected {', '.join(OPTIONS)}")
        if not value:
            raise ValueError(f"Redis URL: option {name} is empty")
        if name in TLS_OPTIONS and not scheme.startswith("rediss"):
            raise ValueError(f"Redis URL: option {name} needs TLS; the scheme is {scheme}")
        if name in SENTINEL_OPTIONS and kind != SENTINEL:
            raise ValueError(f"Redis URL: option {name} needs Sentinel; the scheme is {scheme}")
        if kind == CLUSTER and name not in REDIS_ALLOWED_KEYS:
            raise ValueError(f"Redis URL: option {name} does not apply to a cluster")
        if name in FILES and not Path(value).exists():
            raise ValueError(f"Redis URL: {name} is {value}, which does not exist")
        if name == "ssl_cert_reqs" and value not in ("none", "optional", "required"):
            raise ValueError(f"Redis URL: {name} is {value}; expected none, optional or required")
        if name == "db":
            _db(value)
    try:
        # redis-py's own parser; without a host it returns the options only.
        parsed: dict[str, Any] = parse_url(  # type: ignore[no-untyped-call]
            f"redis://?{urlencode(pairs)}"
        )
    except ValueError as error:
        raise ValueError(f"Redis URL: {error}") from None
    return parsed


def _db(text: str) -> int:
    if text and not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"Redis URL: db is {text[:20]!r}; expected a number")
    return int(text or 0)


def _nodes(hosts: str, kind: str) -> list[tuple[str, int]]:
    """Returns host and port of each address. Raises ValueError."""
    nodes = []
    for one in hosts.split(","):
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]*)(?::([0-9]{1,5}))?", one)
        port = PORTS.get(kind, 6379) if match is None or match[2] is None else int(match[2])
        if match is None or not 1 <= port <= 65535:
            # It may be a part of a password, so it is not shown.
            raise ValueError(
                f"Redis URL: host and port are malformed; expected HOST:PORT; {ENCODE}"
            )
        if not match[1] and kind:
            raise ValueError("Redis URL: a host is missing; expected HOST:PORT,HOST:PORT")
        nodes.append((unquote(match[1].strip("[]")) or "localhost", port))
    if len(nodes) > 1 and not kind:
        raise ValueError(
            f"Redis URL: {len(nodes)} hosts came; expected one, or redis+sentinel:// or "
            "redis+cluster://"
        )
    return nodes
