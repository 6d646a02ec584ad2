"""What the servers that share a catalogue's log in Redis say of themselves every few seconds.

One hash beside the log, `recserve:items:{NAME}:replicas`, has a field per server: the time of Redis
in milliseconds, a space, and a report as JSON. A server that is silent for TTL_S is no longer
listed, and the hash is gone when all are.

Another hash, `recserve:items:{NAME}:rollout`, has the load of a bundle that one of them was asked
for on behalf of all (`Rollout`). Each reads it with its report. The server in `turn` loads, and no
other one meanwhile, unless it is silent. A server that has loaded says so in its report. Scripts
change the hash only as long as its `id` and its `state` are what the server knows.

Other processes write it. So Redis bounds what a read returns, and the reader checks all of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from recserve.features.catalog.redis_log import PREFIX
from recserve.features.redis_connection import call_many, call_script, failures_as

log = logging.getLogger(__name__)
TTL_S = 15.0
MAX_REPLICAS = 1000
MAX_ID = 128
MAX_REPORT_BYTES = 4096
MAX_WORDS = 1000
ROLLOUT_TTL_S = 60.0  # of a load in progress, after the last report of any server
ENDED_TTL_S = 86_400.0
LOADING, RETURNING, READY, FAILED = "loading", "returning", "ready", "failed"

COMMON = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# KEYS: replicas, rollout. ARGV: id, report, time until it is silent in milliseconds, most servers,
# time after which a load in progress is forgotten. Returns the fields of the load in the order of
# ROLLOUT, each as a text of at most MAX_WORDS bytes.
ROLLOUT = ("id", "path", "digest", "force", "state", "message")
BEAT = (
    COMMON
    + """
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then redis.call('DEL', KEYS[1]) end
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  local at = string.match(redis.call('HGET', KEYS[1], id), '^(%d+) ')
  if not at or now - tonumber(at) > tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], id) end
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local state = redis.call('HGET', KEYS[2], 'state')
if not state then return {} end
if state == 'loading' or state == 'returning' then redis.call('PEXPIRE', KEYS[2], ARGV[5]) end
local found = {}
for _, name in ipairs({'id', 'path', 'digest', 'force', 'state', 'message'}) do
  found[#found + 1] = string.sub(redis.call('HGET', KEYS[2], name) or '', 1, 1000)
end
return found
"""
)
# KEYS: rollout. ARGV: time after which it is forgotten, fields and values. Returns 0 if another
# one is in progress.
BEGIN = """
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'loading' or state == 'returning' then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
# KEYS: replicas, rollout. ARGV: id and state of the load, id of the server, time until another one
# is silent in milliseconds. Returns whether it is the turn of the server.
TAKE_TURN = (
    COMMON
    + """
local known = redis.call('HMGET', KEYS[2], 'id', 'state', 'turn')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] then return 0 end
if known[3] and known[3] ~= '' and known[3] ~= ARGV[3] then
  local report = redis.call('HGET', KEYS[1], known[3])
  local at = report and tonumber(string.match(report, '^(%d+) '))
  if at and now - at <= tonumber(ARGV[4]) then return 0 end
end
redis.call('HSET', KEYS[2], 'turn', ARGV[3])
return 1
"""
)
# KEYS: rollout. ARGV: id and state of the load, id of the server, next state, message, time after
# which it is forgotten. An empty message leaves the present one.
ADVANCE = """
local known = redis.call('HMGET', KEYS[1], 'id', 'state', 'turn')
if known[1] ~= ARGV[1] then return 0 end
if known[3] == ARGV[3] then redis.call('HSET', KEYS[1], 'turn', '') end
if known[2] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[4])
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'message', ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return 1
"""
# ARGV: time until a server is silent, most servers, most bytes of an id, of a report.
# Returns the number of servers if there are too many, or {id, age in milliseconds, report or size}.
READ = (
    COMMON
    + """
local size = redis.call('HLEN', KEYS[1])
if size > tonumber(ARGV[2]) then return size end
local found = {}
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  local bytes, report, age = redis.call('HSTRLEN', KEYS[1], id), nil, -1
  if #id <= tonumber(ARGV[3]) and bytes <= tonumber(ARGV[4]) then
    local at, rest = string.match(redis.call('HGET', KEYS[1], id), '^(%d+) (.*)$')
    report = rest
    age = at and now - tonumber(at) or -1
  end
  if age <= tonumber(ARGV[1]) then
    found[#found + 1] = {string.sub(id, 1, ARGV[3]), age, report or bytes}
  end
end
return found
"""
)
Text = Annotated[str, Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself.

    Attributes:
        id: Its name among the servers of a catalogue.
        address: Host and port.
        state: `loading` until it takes requests, `swapping` while it loads another bundle too, and
            `draining` while it ends.
        bundle: Folder of the bundle.
        model_version: Version of its models.
        catalog_version: Version of the catalogue that requests get.
        lag_s: Time since it last read the log to its end.
        lag_positions: Change sets of the log that it knows of and has not applied.
        queue_depth: Requests waiting for the engine.
        started_at: Unix time of its start.
        rollout: Load of the whole fleet whose bundle it has; empty before it has it, and after it
            has gone back.
    """

    id: Annotated[str, Meta(min_length=1, max_length=MAX_ID, pattern=r"^[A-Za-z0-9._:-]+\Z")]
    address: Text = ""
    state: Literal["loading", "ready", "swapping", "draining"] = "loading"
    bundle: Text = ""
    model_version: Text = ""
    catalog_version: Text = ""
    lag_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    lag_positions: Annotated[int, Meta(ge=0, le=2**53)] = 0
    queue_depth: Annotated[int, Meta(ge=0, le=2**53)] = 0
    started_at: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    rollout: Text = ""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a bundle by all servers, one after another.

    Attributes:
        id: Names it.
        path: Folder of the bundle in `bundles_dir`, which each server has.
        digest: sha256 of the bundle's manifest, so that all servers load the same bundle.
        force: Whether a bundle with other items or fewer models is accepted.
        state: `loading`; `returning` to the previous bundle after a server has refused it; `ready`
            or `failed` at the end.
        message: Why it is refused.
    """

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    path: Annotated[str, Meta(min_length=1, max_length=128)]
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    force: bool = False
    state: Literal["loading", "returning", "ready", "failed"] = "loading"
    message: Annotated[str, Meta(max_length=MAX_WORDS, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")] = ""

    @property
    def active(self) -> bool:
        """Whether it has not ended."""
        return self.state in (LOADING, RETURNING)


@dataclass(frozen=True)
class Fleet:
    """The servers that have reported of late.

    Attributes:
        replicas: Their reports, in order of their ids.
        ages_s: Time since each report.
        malformed: What is wrong with each report that cannot be read.
    """

    replicas: tuple[Replica, ...]
    ages_s: tuple[float, ...]
    malformed: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all that take requests have one bundle and one version of the catalogue."""
        serving = [one for one in self.replicas if one.state in ("ready", "swapping")]
        versions = {(one.bundle, one.model_version, one.catalog_version) for one in serving}
        return len(versions) == 1 and not self.malformed


class FleetUnavailable(ConnectionError):
    """Redis does not answer, or what it has is not a list of servers."""


class FleetDirectory:
    """The reports of the servers of one catalogue."""

    def __init__(self, client: Any, name: str) -> None:
        """Calls nothing yet.

        Args:
            client: A client of `redis_connection.connect`.
            name: Name of the catalogue's log.
        """
        self._client, self._key = client, f"{PREFIX}{{{name}}}:replicas"
        self._rollout = f"{PREFIX}{{{name}}}:rollout"

    def report(self, replica: Replica) -> Rollout | None:
        """Stores a report for TTL_S, and deletes those that are older.

        Returns:
            The latest load of the whole fleet; None if there is none, or if it cannot be read.

        Raises:
            FleetUnavailable: If Redis does not answer.
        """
        limits = [round(1e3 * TTL_S), MAX_REPLICAS, round(1e3 * ROLLOUT_TTL_S)]
        arguments = [replica.id, msgspec.json.encode(replica), *limits]
        with failures_as(FleetUnavailable, f"redis {self._key}"):
            found = call_script(self._client, BEAT, [self._key, self._rollout], arguments)
        fields = dict(zip(ROLLOUT, (raw.decode("utf-8", "replace") for raw in found), strict=False))
        try:
            return msgspec.convert(fields, Rollout, strict=False) if fields else None
        except msgspec.ValidationError as error:
            log.error("redis %s cannot be read: %s", self._rollout, error)
            return None

    def begin(self, rollout: Rollout) -> bool:
        """Stores a load of the whole fleet.

        Returns:
            False if another one is in progress.

        Raises:
            FleetUnavailable: If Redis does not answer.
        """
        fields = {**msgspec.structs.asdict(rollout), "force": str(int(rollout.force))}
        values = [each for pair in fields.items() for each in pair]
        with failures_as(FleetUnavailable, f"redis {self._key}"):
            arguments = [round(1e3 * ROLLOUT_TTL_S), *values]
            return bool(call_script(self._client, BEGIN, [self._rollout], arguments))

    def take_turn(self, rollout: Rollout, replica_id: str) -> bool:
        """Returns whether a server may load now; no other one may then. Raises FleetUnavailable."""
        arguments = [rollout.id, rollout.state, replica_id, round(1e3 * TTL_S)]
        with failures_as(FleetUnavailable, f"redis {self._key}"):
            return bool(call_script(self._client, TAKE_TURN, [self._key, self._rollout], arguments))

    def advance(self, rollout: Rollout, replica_id: str, state: str, message: str = "") -> None:
        """Ends a server's turn, and changes the state of a load unless another server has.

        Raises:
            FleetUnavailable: If Redis does not answer.
        """
        kept_s = ROLLOUT_TTL_S if state in (LOADING, RETURNING) else ENDED_TTL_S
        message = "".join(each if each.isprintable() else " " for each in message)
        shown = message.encode()[: MAX_WORDS - 4].decode(errors="ignore")
        arguments = [rollout.id, rollout.state, replica_id, state, shown, round(1e3 * kept_s)]
        with failures_as(FleetUnavailable, f"redis {self._key}"):
            call_script(self._client, ADVANCE, [self._rollout], arguments)

    def leave(self, replica_id: str) -> None:
        """Deletes a server's report. Raises FleetUnavailable."""
        with failures_as(FleetUnavailable, f"redis {self._key}"):
            (reply,) = call_many(self._client, [("HDEL", self._key, replica_id)])
            if isinstance(reply, Exception):
                raise reply

    def read(self) -> Fleet:
        """Returns the latest reports. Raises FleetUnavailable."""
        limits = [round(1e3 * TTL_S), MAX_REPLICAS, MAX_ID, MAX_REPORT_BYTES]
        with failures_as(FleetUnavailable, f"redis {self._key}"):
            reply = call_script(self._client, READ, [self._key], limits)
        if isinstance(reply, int):
            raise FleetUnavailable(
                f"redis {self._key}: {reply} servers; expected at most {MAX_REPLICAS}"
            )
        found: list[tuple[Replica, float]] = []
        malformed: list[str] = []
        for raw, age_ms, report in sorted(reply, key=lambda one: bytes(one[0])):
            try:
                found.append((_parse(raw, report), age_ms / 1e3))
            except ValueError as error:
                malformed.append(f"report of {ascii(raw.decode('latin-1'))[1:-1]}: {error}")
        replicas, ages_s = [one for one, _ in found], [age_s for _, age_s in found]
        return Fleet(tuple(replicas), tuple(ages_s), tuple(malformed))

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def _parse(raw_id: bytes, report: bytes | int) -> Replica:
    """Parses a report. Raises ValueError."""
    if isinstance(report, int):
        raise ValueError(f"it has {report} bytes or no time; expected at most {MAX_REPORT_BYTES}")
    try:
        replica = msgspec.json.decode(report, type=Replica)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if replica.id.encode() != raw_id:
        raise ValueError(f"it says that it is of {replica.id}")
    return replica
