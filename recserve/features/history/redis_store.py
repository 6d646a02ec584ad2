"""Stores histories in Redis: one value per user, one round trip per batch, one script per append.

The marks of a kind are a list, `recserve:marks:KIND`.


The script checks the stored value, applies the same changes as `history.merge`, and writes
the value with a new checksum. It takes one round trip and is atomic. The marks of a kind are a
list, `recserve:marks:KIND`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from recserve.bounds import MIN_TIME_US
from recserve.features.history.history import (
    DEFAULT_CAP,
    EVENT_DTYPE,
    HEADER,
    Applied,
    Change,
    Correction,
    CorruptHistory,
    Expiry,
    HistoryStore,
    Removal,
    Stored,
    StoredEvent,
    StoredUsers,
    StoreOptions,
    StoreUnavailable,
    merge,
    read_stored,
    records,
    runs,
    user_key,
)
from recserve.features.redis_connection import (
    FAILURES,
    ResponseError,
    call_many,
    call_script,
    call_scripts,
    connect,
    describe,
    load_script,
    scanners,
    server_of,
)

PREFIX = b"recserve:history:"
MARKS = "recserve:marks:"
# KEYS: the list. ARGV: its expected length, and more marks.
ADD_MARKS = """
if redis.call('LLEN', KEYS[1]) == tonumber(ARGV[1]) then
  for at = 2, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[at]) end
end
"""
SCANS, SCANNED = 20, 1000  # SCAN calls of one listing, and about how many keys each looks at
CURSOR = re.compile(r"(?:([0-9a-f]{8})-)?(\d{1,20})(?:\.(\d{1,20})\.([0-9a-f]{32}))?")
CORRUPT = "RECSERVE_CORRUPT"

ADD, REPLACE, REPLACE_IN_PLACE, REMOVE, EXPIRE = b"+", b"=", b"~", b"-", b"<"

# ARGV[1] is the cap. Each further argument is one run of changes: one of the letters above, then
# either distinct new records in order of time, or the record of one correction. A removal uses only
# the event_key of its record, and an expiry only the time.
# Returns "0" or "1" per record. If more was done than adding at the end, the script returns that
# string together with the old value.
# Record layout: item_key 1-8, event_key 9-16, time 17-24, value 25-28, type 29 (EVENT_DTYPE).
APPEND = """
local SIZE, HEAD = 29, 16
local function checksum(head, body)
  local digest = redis.sha1hex(head .. body)
  return (string.sub(digest, 1, 16):gsub('..', function(hex) return string.char(tonumber(hex, 16))
  end))
end
local stored = redis.pcall('GET', KEYS[1])
if type(stored) == 'table' then
  if not string.find(stored.err, 'WRONGTYPE', 1, true) then return stored end
  return redis.error_reply('RECSERVE_CORRUPT not a string')
end
local body = ''
if stored then
  body = string.sub(stored, HEAD + 1)
  local head = string.sub(stored, 1, 8)
  if #stored >= HEAD and string.sub(head, 1, 2) == 'RH' and string.sub(head, 3, 4) ~= '\\1\\1' then
    return redis.error_reply('RECSERVE_CORRUPT version')
  end
  if #stored < HEAD or string.sub(head, 1, 4) ~= 'RH\\1\\1'
      or struct.unpack('<I4', head, 5) * SIZE ~= #body
      or checksum(head, body) ~= string.sub(stored, 9, HEAD) then
    return redis.error_reply('RECSERVE_CORRUPT checksum')
  end
end
local function time_at(text, start) return struct.unpack('<i8', text, start + 16) end
local function find(key)
  local from = 1
  while true do
    local at = string.find(body, key, from, true)
    if not at then return nil end
    if (at - 9) % SIZE == 0 then return (at - 9) / SIZE end
    from = at + 1
  end
end
local function place(time, high)
  local low = 0
  if high > 0 and time_at(body, (high - 1) * SIZE + 1) <= time then low = high end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if time_at(body, middle * SIZE + 1) <= time then low = middle + 1 else high = middle end
  end
  return low
end
local flags, changed, revised = {}, false, false
local function add(new)
  local fresh = {}
  for start = 1, #new, SIZE do
    local accepted = not find(string.sub(new, start + 8, start + 15))
    flags[#flags + 1] = accepted and '1' or '0'
    if accepted then fresh[#fresh + 1] = string.sub(new, start, start + SIZE - 1) end
  end
  if #fresh == 0 then return end
  local parts, left = {}, #body / SIZE
  for index = #fresh, 1, -1 do
    local low = place(time_at(fresh[index], 1), left)
    table.insert(parts, 1, fresh[index] .. string.sub(body, low * SIZE + 1, left * SIZE))
    left = low
  end
  changed, revised = true, revised or left * SIZE < #body
  body = string.sub(body, 1, left * SIZE) .. table.concat(parts)
end
local function correct(kind, record)
  local index = find(string.sub(record, 9, 16))
  flags[#flags + 1] = index and '1' or '0'
  if not index then return end
  changed, revised = true, true
  local time = string.sub(body, index * SIZE + 17, index * SIZE + 24)
  body = string.sub(body, 1, index * SIZE) .. string.sub(body, (index + 1) * SIZE + 1)
  if kind == '-' then return end
  if kind == '~' then record = string.sub(record, 1, 16) .. time .. string.sub(record, 25) end
  if string.sub(record, 17, 24) ~= time then index = place(time_at(record, 1), #body / SIZE) end
  body = string.sub(body, 1, index * SIZE) .. record .. string.sub(body, index * SIZE + 1)
end
local function expire(record)
  local dated = place(1e12 - 1, #body / SIZE)
  local kept = place(time_at(record, 1) - 1, #body / SIZE)
  flags[#flags + 1] = kept > dated and '1' or '0'
  if kept <= dated then return end
  changed, revised = true, true
  body = string.sub(body, 1, dated * SIZE) .. string.sub(body, kept * SIZE + 1)
end
for number = 2, #ARGV do
  local kind, run = string.sub(ARGV[number], 1, 1), string.sub(ARGV[number], 2)
  if kind == '+' then add(run) elseif kind == '<' then expire(run) else correct(kind, run) end
end
if changed and #body == 0 then
  redis.call('DEL', KEYS[1])
elseif changed then
  local cap = tonumber(ARGV[1])
  if #body > 2 * cap * SIZE then
    body = string.sub(body, -cap * SIZE)
    revised = stored ~= false
  end
  local head = 'RH\\1\\1' .. struct.pack('<I4', #body / SIZE)
  redis.call('SET', KEYS[1], head .. checksum(head, body) .. body)
end
if revised then return {table.concat(flags), stored} end
return table.concat(flags)
"""
SIZES = (HEADER.size, EVENT_DTYPE.itemsize, MIN_TIME_US)
assert SIZES == (16, 29, 10**12), "the script hard-codes these numbers"


class RedisStore(HistoryStore):
    """A history store in Redis: one server, or what Sentinel or a cluster names as the primary.

    A user's history is one key, so each call of a pipeline touches one slot of a cluster. A failed
    call is repeated. That is safe: an event that did arrive is then a duplicate, and
    a replacement can be repeated. Only a removal that did arrive is then reported as not stored.

    Raises:
        StoreUnavailable: If the server does not answer.
        ValueError: If the URL is malformed.
    """

    @classmethod
    def open(cls, url: str, options: StoreOptions) -> RedisStore:
        """Returns the store of a URL of `redis_connection`."""
        return cls(url, cap=options.cap, timeout_s=options.timeout_s)

    def __init__(self, url: str, *, cap: int = DEFAULT_CAP, timeout_s: float = 0.25) -> None:
        """Connects and loads the script.

        Args:
            url: URL of the server.
            cap: Events per user.
            timeout_s: Time limit to connect, and of each reply.
        """
        self.cap = cap
        with self._failures():
            self._client: Any = connect(url, timeout_s=timeout_s)
            self._script = load_script(self._client, APPEND)

    def server(self, user_id: str) -> str:
        """Returns the name of the node that has a user's history; empty outside a cluster."""
        return server_of(self._client, PREFIX + user_key(user_id))

    def get_many(self, user_ids: Sequence[str]) -> list[Stored]:
        """Returns the events of each user in one round trip.

        A damaged value, or a key of another type, is returned as a CorruptHistory in its place. So
        is StoreUnavailable for the users of a cluster's node that fails, unless all fail.
        """
        # MGET would return nothing for a key of another type, as for an unknown user.
        gets = [("GET", PREFIX + user_key(user_id)) for user_id in user_ids]
        with self._failures():
            values = call_many(self._client, gets)
        found: list[Stored] = []
        for value in values:
            if isinstance(value, ResponseError) and str(value).startswith("WRONGTYPE"):
                found.append(CorruptHistory("stored history is of another Redis type"))
            elif isinstance(value, Exception):
                found.append(_unavailable(value))
            else:
                found.append(read_stored(value))
        if found and all(isinstance(one, StoreUnavailable) for one in found):
            raise StoreUnavailable(str(found[0]))
        return found

    def append_many(
        self, changes: Mapping[str, Sequence[Change]]
    ) -> dict[str, Applied | CorruptHistory]:
        """Changes the histories of several users in one round trip, atomically per user."""
        calls = [_call(user_id, made) for user_id, made in changes.items()]
        given = [(1, call.key, self.cap, *call.runs) for call in calls]
        with self._failures():
            replies = call_scripts(self._client, APPEND, self._script, given)
        answers: dict[str, Applied | CorruptHistory] = {}
        for user_id, call, reply in zip(changes, calls, replies, strict=True):
            if isinstance(reply, ResponseError) and CORRUPT in str(reply):
                why = "damaged"
                if "version" in str(reply):
                    why = "of another version of recserve"
                answers[user_id] = CorruptHistory(f"stored history is {why}; nothing was appended")
                continue
            if isinstance(reply, Exception):
                raise _unavailable(reply) from reply
            answers[user_id] = self._parse_reply(changes[user_id], call, reply)
        return answers

    def delete(self, user_id: str) -> bool:
        """Deletes a user's history. Returns whether there was one."""
        key = PREFIX + user_key(user_id)
        with self._failures():
            (reply,) = call_many(self._client, [("DEL", key)])
            if isinstance(reply, Exception):
                raise reply
        return bool(reply)

    def users(self, prefix: str, limit: int, after: str | None) -> StoredUsers:
        """Returns a page of users in no particular order.

        A call scans at most SCANS * SCANNED keys of the database. `next` names a place between two
        replies of Redis' SCAN, or a place within one, and with Sentinel or a cluster its server. A
        page may repeat ids of the page before it after Redis resized its hash table. A user who is
        there all the time is listed, unless a cluster moves the user to another server.
        """
        match = CURSOR.fullmatch(after or "0")
        if match is None:
            raise ValueError(f"after is {str(after)[:40]!r}; expected `next` of an earlier page")
        place, inside = int(match[2]), match[3] is not None
        end, last = (int(match[3]), bytes.fromhex(match[4])) if inside else (0, b"")
        pattern = PREFIX + re.sub(rb"([*?\[\]^\\-])", rb"\\\1", prefix.encode()) + b"*"
        ids: list[str] = []
        with self._failures():
            servers = scanners(self._client)
            names = [name for name, _ in servers]
            if after is not None and (match[1] or "") not in names:
                raise ValueError(
                    f"after is {after[:40]!r}, of a Redis server that is no primary now; list from "
                    "the start"
                )
            number = names.index(match[1] or "") if after is not None else 0

            def at(place: str) -> str:
                return f"{names[number]}-{place}" if names[number] else place

            for _ in range(SCANS):
                # Two replies for the same place may hold different keys in a different order: a
                # resized table has other buckets. So a place within a reply is the digest of the
                # last id that was returned, and the reply counts up to the nearer end.
                reached, keys = servers[number][1](place, match=pattern, count=SCANNED)
                end = min(int(reached), end, key=_scan_order) if inside else int(reached)
                new = sorted((_digest(key), key) for key in keys)
                new = [one for one in new if one[0] > last]
                room = limit - len(ids)
                ids += [key[len(PREFIX) :].decode() for _, key in new[:room]]
                if len(new) > room:
                    inner = f".{end}.{new[room - 1][0].hex()}" if room else ""
                    return StoredUsers(ids, at(f"{place}{inner}"))
                place, inside, last = end, False, b""
                if not end:
                    number += 1
                    if number == len(servers):
                        return StoredUsers(ids, None)
        return StoredUsers(ids, at(f"{place}"))

    def marks(self, kind: str) -> list[str]:
        """Returns the marks of a kind."""
        with self._failures():
            (reply,) = call_many(self._client, [("LRANGE", MARKS + kind, 0, -1)])
        if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
            raise CorruptHistory(f"the marks {kind} in the history store are damaged")
        if isinstance(reply, Exception):
            raise _unavailable(reply) from reply
        try:
            return [mark.decode() for mark in reply]
        except UnicodeDecodeError as error:
            raise CorruptHistory(f"the marks {kind} in the history store are damaged") from error

    def add_marks(self, kind: str, first: int, marks: Sequence[str]) -> None:
        """Adds marks in one script, unless there are more than the first ones."""
        with self._failures():
            call_script(self._client, ADD_MARKS, [MARKS + kind], [first, *marks])

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _parse_reply(self, changes: Sequence[Change], call: _Call, reply: Any) -> Applied:
        """Converts a script's reply; the revised history is recomputed from the old value."""
        flags, stored = (reply, None) if isinstance(reply, bytes) else reply
        taken = np.zeros(len(changes), dtype=bool)
        taken[call.order] = np.frombuffer(flags, dtype=np.uint8) == ord("1")
        if stored is None:
            return Applied(taken.tolist())
        before = read_stored(stored)
        assert isinstance(before, np.ndarray), "the script has checked it"
        return Applied(taken.tolist(), merge(before, changes, self.cap).applied.revised)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns Redis' errors into StoreUnavailable."""
        try:
            yield
        except FAILURES as error:
            raise _unavailable(error) from error


@dataclass(frozen=True)
class _Call:
    """Arguments of the script for one user.

    Attributes:
        key: Redis key of the user.
        runs: One argument per run of changes.
        order: int64 index of the change that each returned flag belongs to.
    """

    key: bytes
    runs: list[bytes]
    order: np.ndarray


def _call(user_id: str, changes: Sequence[Change]) -> _Call:
    """Encodes the changes of one user as script arguments."""
    written: list[bytes] = []
    orders: list[np.ndarray] = [np.zeros(0, np.int64)]
    count = 0
    for run in runs(changes):
        if isinstance(run, list):
            new = records(run)
            # The script expects distinct keys in order of time, ties in the given order.
            first = np.unique(new["event_key"], return_index=True)[1]
            order = first[np.lexsort((first, new["time_us"][first]))]
            written.append(ADD + new[order].tobytes())
        else:
            order = np.zeros(1, np.int64)
            written.append(_correction(run))
        orders.append(count + order)
        count += len(run) if isinstance(run, list) else 1
    return _Call(PREFIX + user_key(user_id), written, np.concatenate(orders))


def _correction(change: Correction) -> bytes:
    """Encodes a correction as a letter and a record."""
    if isinstance(change, Expiry):
        return EXPIRE + records([StoredEvent(0, change.before_us, 0)]).tobytes()
    if isinstance(change, Removal):
        return REMOVE + records([StoredEvent(0, 0, change.event_key)]).tobytes()
    kind = REPLACE_IN_PLACE if change.keeps_time else REPLACE
    return kind + records([change.event]).tobytes()


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"redis: {describe(error)}")


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()


def _scan_order(cursor: int) -> int:
    """Returns the rank of a SCAN cursor; Redis counts from its highest bit, and 0 is the end."""
    return int(f"{cursor:064b}"[::-1], 2) if cursor else 2**64
