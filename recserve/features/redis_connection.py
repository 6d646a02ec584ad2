"""Connections to Redis by redis-py's classes: one server, Sentinel, Cluster, TLS, unix sockets.

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]
    unix://[USER[:PASSWORD]@]/PATH[?db=DB]
    redis+sentinel://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DB]
    redis+cluster://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]...]

`rediss`, `rediss+sentinel` and `rediss+cluster` use TLS. User and password are percent-encoded. No
message of this module holds them. An ACL user needs RIGHTS, and in a cluster CLUSTER_RIGHTS too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.cluster import REDIS_ALLOWED_KEYS, ClusterNode, RedisCluster
from redis.connection import SSLConnection, UnixDomainSocketConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as ReplyTimeout
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from recserve.features.redis_urls import SCHEMES

__all__ = [
    "CLUSTER_RIGHTS",
    "FAILURES",
    "RENEW",
    "RIGHTS",
    "ResponseError",
    "call_and_wait",
    "call_many",
    "call_script",
    "call_scripts",
    "connect",
    "describe",
    "failures_as",
    "load_script",
    "scanners",
    "server_of",
]

FAILURES = (RedisError, RedisClusterException)  # the second is no RedisError
# What an ACL user needs; the scripts of a catalogue's log call INFO and TIME.
RIGHTS = ("~recserve:*", "+@read", "+@write", "+@scripting", "+@connection", "+info", "+time")
CLUSTER_RIGHTS = ("+cluster|slots",)
# The cluster has another primary for the key by now, or will have one.
MOVED_ON = (ConnectionLost, ReplyTimeout, ReadOnlyError, MovedError, ClusterDownError)
BACKOFF = ExponentialBackoff(cap=0.05, base=0.005)  # seconds
RETRIES = 2
NESTED_RETRIES = 1  # Sentinel and Cluster repeat the search for the primary and the command
SENTINEL, CLUSTER = "sentinel", "cluster"
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
# Lua by which a script renews its keys: they go 90 days after its last call. A call without news
# writes nothing but this, at most once an hour.
KEEP_MS, RENEW_MS = 90 * 86_400_000, 3_600_000
RENEW = f"""
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < {KEEP_MS - RENEW_MS} then redis.call('PEXPIRE', key, {KEEP_MS}) end
end
"""
NO_PERMISSION = re.compile(r"no permissions to|can't run this command|can't access")
ENCODE = "in user names and passwords write / ? # @ : as %2F %3F %23 %40 %3A"


def connect(url: str, *, timeout_s: float = 0.25, wait_s: float = 0.0) -> Any:
    """Returns a `redis.Redis` or a `RedisCluster`.

    The client repeats a call that lost its connection or found no primary. A cluster's client asks
    the cluster for its primaries at once; the others connect at their first call.

    Args:
        url: See the module.
        timeout_s: Time limit to connect, and of each reply, unless the URL sets another.
        wait_s: Longest time for which a command of this client makes Redis wait. A reply may take
            that much longer.

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
        options |= {"path": "/" + unquote(path), "db": options.get("db", 0)}
        return _single(_with_wait(options, wait_s), secure)
    nodes = _nodes(hosts, kind)
    if kind == SENTINEL:
        return _by_sentinel(nodes, path, options, secure, wait_s)
    options = _with_wait(options, wait_s)
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
    cause: BaseException | None = error
    while cause is not None and not NO_PERMISSION.search(str(cause)):
        cause = cause.__cause__ or cause.__context__  # a cluster's client hides what Redis said
    if cause is not None:
        return (
            f"{cause}. The ACL user of the Redis URL needs {' '.join(RIGHTS)}, and in a cluster "
            f"also {' '.join(CLUSTER_RIGHTS)}; set them with ACL SETUSER"
        )
    return f"{type(error).__name__}: {text}"


@contextmanager
def failures_as(kind: type[Exception], name: str) -> Iterator[None]:
    """Turns errors of FAILURES into a kind of error, in words that begin with a name."""
    try:
        yield
    except FAILURES as error:
        raise kind(f"{name}: {describe(error)}") from error


def call_many(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Sends commands in one pipeline and returns the replies, with errors in place.

    A command that met a primary which had become a replica is sent again on new connections. Each
    command touches one hash slot. Its key is its first argument, or the first key of EVAL and
    EVALSHA. A cluster's nodes get their commands at the same time, and a node that fails fails its
    own commands only.
    """
    if isinstance(client, RedisCluster):
        return _call_nodes(client, commands)
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
        client.connection_pool.disconnect(inuse_connections=False)
    return replies


def load_script(client: Any, source: str) -> str:
    """Returns the name of a script for `call_scripts`, and sees that Redis answers.

    The nodes of a cluster get the script with their first call, so one that is down does not
    matter.
    """
    if isinstance(client, RedisCluster):
        return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return str(client.script_load(source))


def call_scripts(
    client: Any, source: str, name: str, calls: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Runs a script once per call and returns the replies, with errors in place.

    A server that does not know the script gets it with the call. A call that was made is not made
    again.

    Args:
        client: A client of `connect`.
        source: The script.
        name: Its name from `load_script`.
        calls: Number of keys, keys and arguments of each call.
    """
    replies = call_many(client, [("EVALSHA", name, *call) for call in calls])
    missing = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    if missing:
        again = call_many(client, [("EVAL", source, *calls[number]) for number in missing])
        for number, reply in zip(missing, again, strict=True):
            replies[number] = reply
    return replies


def call_script(client: Any, source: str, keys: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """Runs a script on keys of one slot. Raises what is in FAILURES."""
    name = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    (reply,) = call_scripts(client, source, name, [(len(keys), *keys, *arguments)])
    if isinstance(reply, Exception):
        raise reply
    return reply


def server_of(client: Any, key: bytes) -> str:
    """Returns the name of the server that has a key; an empty string where there is one only."""
    if not isinstance(client, RedisCluster):
        return ""
    try:
        return str(client.nodes_manager.get_node_from_slot(key_slot(key)).name)
    except FAILURES:
        return ""


def _call_nodes(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Does `call_many` in a cluster: twice at most, with the nodes' new places in between."""
    replies: list[Any] = [None] * len(commands)
    left: list[int] = list(range(len(commands)))
    for again in (True, False):
        _call_each_node(client, commands, left, replies)
        left = [number for number in left if isinstance(replies[number], MOVED_ON)]
        left = [number for number in left if not isinstance(replies[number], AskError)]
        if not left or not again:
            break
        try:
            client.nodes_manager.initialize()
        except FAILURES:
            break
    for number, reply in enumerate(replies):
        if isinstance(reply, AskError | TryAgainError):  # its slot is on the way to another node
            try:
                replies[number] = client.execute_command(*commands[number])
            except FAILURES as error:
                replies[number] = error
    return replies


def _call_each_node(
    client: Any, commands: Sequence[tuple[Any, ...]], numbers: Sequence[int], replies: list[Any]
) -> None:
    """Sends the commands of these numbers to all nodes, then reads all replies."""
    groups: dict[str, tuple[ClusterNode, list[int]]] = {}
    for number in numbers:
        command = commands[number]
        key = command[3] if command[0] in ("EVAL", "EVALSHA") else command[1]
        try:
            node = client.nodes_manager.get_node_from_slot(client.keyslot(key))
            groups.setdefault(node.name, (node, []))[1].append(number)
        except FAILURES as error:  # no node has the slot
            replies[number] = error
    open_calls: list[tuple[Any, Any, list[int]]] = []
    try:
        for node, own in groups.values():
            server = client.get_redis_connection(node)
            try:
                connection = server.connection_pool.get_connection()
                open_calls.append((server, connection, own))
                packed = connection.pack_commands([commands[number] for number in own])
                connection.send_packed_command(packed)
            except FAILURES as error:
                _fail(own, error, replies)
                if open_calls and open_calls[-1][2] is own:
                    _give_back(*open_calls.pop()[:2], dirty=True)
        while open_calls:
            server, connection, own = open_calls[-1]
            lost = False
            for at, number in enumerate(own):
                try:
                    replies[number] = server.parse_response(connection, commands[number][0])
                except (ConnectionLost, ReplyTimeout) as error:
                    _fail(own[at:], error, replies)
                    lost = True
                    break
                except FAILURES as error:
                    replies[number] = error
            open_calls.pop()
            _give_back(server, connection, dirty=lost)
    finally:  # replies that were not read must not reach the next caller
        for server, connection, _ in open_calls:
            _give_back(server, connection, dirty=True)


def _fail(numbers: Sequence[int], error: Exception, replies: list[Any]) -> None:
    for number in numbers:
        replies[number] = error


def _give_back(server: Any, connection: Any, dirty: bool) -> None:
    if dirty:
        connection.disconnect()
    server.connection_pool.release(connection)


def call_and_wait(
    client: Any,
    script: Any,
    keys: Sequence[str],
    arguments: Sequence[Any],
    num_replicas: int,
    timeout_ms: int,
) -> tuple[Any, int]:
    """Runs a script, and waits until replicas of its server have what it has written.

    Both commands go over one connection, since WAIT is about the writes of its own.

    Args:
        client: A client of `connect`.
        script: The script, of `register_script`.
        keys: Its keys, in one slot.
        arguments: Its arguments.
        num_replicas: Replicas to wait for.
        timeout_ms: Longest wait.

    Returns:
        The reply of the script, and the number of replicas that have its writes.
    """
    if isinstance(client, RedisCluster):
        node = client.get_node_from_key(keys[0])  # type: ignore[no-untyped-call]
        client = client.get_redis_connection(node)
    for again in (True, False):
        with client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
            pipeline.execute_command("WAIT", num_replicas, timeout_ms)
            reply, found = pipeline.execute(raise_on_error=False)
        if isinstance(reply, NoScriptError) and again:
            client.script_load(script.script)
            continue
        break
    if isinstance(reply, Exception):
        raise reply
    return reply, 0 if isinstance(found, Exception) else int(found)


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


def _with_wait(options: dict[str, Any], wait_s: float) -> dict[str, Any]:
    return options | {"socket_timeout": options["socket_timeout"] + wait_s}


def _by_sentinel(
    nodes: list[tuple[str, int]], path: str, options: dict[str, Any], secure: str, wait_s: float
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
    options = _with_wait(options, wait_s) | {"retry": Retry(BACKOFF, NESTED_RETRIES)}
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
