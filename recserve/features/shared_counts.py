"""Counts that several servers add to in Redis, and a switch that all of them follow.

Seven keys of one hash slot, `recserve:counts:{NAME}:` and

    sums       a string: the vector of the counts, int64 big-endian
    before     a string: the same as it was at the last restart of the switch
    window     a string: the first counts once more, in a ring of slices of time
    seen       a sorted set: hashes of the events that are counted, in their order
    members    a set: hashes of what is counted as different
    meta       a hash: version and state of the switch, numbers of the slices, notes
    writers    a hash: for each server the last sequence number that it has sent, its time, and
               numbers of requests

A server collects its counts and sends them as one delta with its name, which is new at each start,
and a sequence number. A delta whose call is repeated has the number of the one before and is not
added again. An event is added with the hash of its key in one script, so it counts once, whichever
server gets it and however often.

Each writer says how many requests Redis has acknowledged to it. If Redis has fewer, it has lost
some, and that is counted. What a killed server had not sent is taken for its largest delta.

Other processes write these keys. So Redis bounds the size of what a read returns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recserve.features.redis_connection import RENEW, call_and_wait, call_script, failures_as

log = logging.getLogger(__name__)
Ints = NDArray[np.int64]
PREFIX = "recserve:counts:"
KEYS = ("sums", "before", "window", "seen", "members", "meta", "writers")
MAX_SEEN = MAX_MEMBERS = 100_000
MAX_STATE_BYTES = 4096
CALL_MS = 3000  # and that the writer is there
SILENT_MS = 15_000  # of a writer that counts as ended
MAX_WRITERS, FORGET_MS = 1000, 30 * 86_400_000
WAIT_REPLICAS_MS = 500

COMMON = """
local SUMS, BEFORE, WINDOW, SEEN, MEMBERS, META, WRITERS = unpack(KEYS)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function damaged(key, found)
  error({err = 'DAMAGED ' .. key .. ' has ' .. string.format('%q', string.sub(found, 1, 40))
    .. '; delete the keys of this experiment to count anew'})
end
-- Before anything is written.
local kinds = {
  [SUMS] = 'string', [BEFORE] = 'string', [WINDOW] = 'string', [SEEN] = 'zset', [MEMBERS] = 'set',
  [META] = 'hash', [WRITERS] = 'hash'}
for key, kind in pairs(kinds) do
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then damaged(key, 'a ' .. found) end
end
local function number(field)
  local found = redis.call('HGET', META, field) or '0'
  return string.match(found, '^%d+$') and tonumber(found) or damaged(META, found)
end
for _, field in ipairs({'version', 'lost', 'seen'}) do number(field) end
local function add(key, place, amount)
  redis.call('BITFIELD', key, 'INCRBY', 'i64', string.format('#%.0f', place), amount)
end
local function head_of(key, count) return redis.call('GETRANGE', key, 0, 8 * count - 1) end
local function writer(entry)
  local sequence, at, largest, total, closed = string.match(
    entry or '', '^(%d+) (%d+) (%d+) (%d+) (%d)$')
  return {
    sequence = tonumber(sequence or 0), at = tonumber(at or 0), largest = tonumber(largest or 0),
    total = tonumber(total or 0), closed = closed or '0'}
end
"""
# ARGV: length of the head, of a slice, time of a slice in milliseconds, slices, name of the writer,
# sequence number of the delta or 0, its requests, acknowledged requests before it, whether it is
# the last, known version and state of the switch, first slice that is wanted, increments, members.
# Returns time, version, state, head, and number and content of each slice.
EXCHANGE = (
    COMMON
    + """
local HEAD, LENGTH, SLICES = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local slice = math.floor(now / tonumber(ARGV[3]))
local function begin(slice)
  local place = slice % SLICES
  if number('slice:' .. place) ~= slice then
    redis.call('SETRANGE', WINDOW, 8 * LENGTH * place, string.rep('\\0', 8 * LENGTH))
    redis.call('HSET', META, 'slice:' .. place, string.format('%.0f', slice))
  end
  return LENGTH * place
end
local known = redis.call('HGET', WRITERS, ARGV[5])
if not known and redis.call('HLEN', WRITERS) >= """
    + f"{MAX_WRITERS}"
    + """ then
  for _, name in ipairs(redis.call('HKEYS', WRITERS)) do
    local one = writer(redis.call('HGET', WRITERS, name))
    if now - one.at > """
    + f"{FORGET_MS}"
    + """ then redis.call('HDEL', WRITERS, name) end
  end
end
local mine, sequence = writer(known), tonumber(ARGV[6])
local told = mine.sequence
if sequence > mine.sequence then
  local from = begin(slice)
  for at = 1, #ARGV[13], 12 do
    local place = struct.unpack('<i4', ARGV[13], at)
    local amount = string.format('%.0f', struct.unpack('<i8', ARGV[13], at + 4))
    add(SUMS, place, amount)
    if place < LENGTH then add(WINDOW, from + place, amount) end
  end
  for at = 1, #ARGV[14], 12 do
    local left = redis.call('SCARD', MEMBERS) < """
    + f"{MAX_MEMBERS}"
    + """
    if left and redis.call('SADD', MEMBERS, string.sub(ARGV[14], at + 4, at + 11)) == 1 then
      add(SUMS, struct.unpack('<i4', ARGV[14], at), 1)
    end
  end
  local lost = tonumber(ARGV[8]) - mine.total
  if lost > 0 then redis.call('HINCRBY', META, 'lost', string.format('%.0f', lost)) end
  mine.sequence, mine.total = sequence, tonumber(ARGV[8]) + tonumber(ARGV[7])
  mine.largest = math.max(mine.largest, tonumber(ARGV[7]))
end
if not known or sequence > told or ARGV[9] ~= mine.closed or now - mine.at > """
    + f"{CALL_MS}"
    + """ then
  redis.call('HSET', WRITERS, ARGV[5], string.format(
    '%.0f %.0f %.0f %.0f %s', mine.sequence, now, mine.largest, mine.total, ARGV[9]))
end
if tonumber(ARGV[10]) > number('version') then
  redis.call('HSET', META, 'version', ARGV[10], 'state', ARGV[11])
end
"""
    + RENEW
    + """
local state = ''
if redis.call('HSTRLEN', META, 'state') <= """
    + f"{MAX_STATE_BYTES}"
    + """ then state = redis.call('HGET', META, 'state') or '' end
local found = {string.format('%.0f', now), number('version'), state, head_of(SUMS, HEAD)}
for each = math.max(tonumber(ARGV[12]), slice - SLICES + 1), slice do
  local place = each % SLICES
  if number('slice:' .. place) == each then
    found[#found + 1] = string.format('%.0f', each)
    found[#found + 1] = redis.call(
      'GETRANGE', WINDOW, 8 * LENGTH * place, 8 * LENGTH * (place + 1) - 1)
  end
end
return found
"""
)
# ARGV: hash and place of each event.
COUNT = (
    COMMON
    + """
for at = 1, #ARGV, 2 do
  if not redis.call('ZSCORE', SEEN, ARGV[at]) then
    redis.call('ZADD', SEEN, redis.call('HINCRBY', META, 'seen', 1), ARGV[at])
    if redis.call('ZCARD', SEEN) > """
    + f"{MAX_SEEN}"
    + """ then redis.call('ZPOPMIN', SEEN) end
    add(SUMS, tonumber(ARGV[at + 1]), 1)
  end
end
"""
)
# ARGV: expected version, state, whether it restarts. Returns whether the state is the present one:
# that of a call which is repeated is.
SWITCH = (
    COMMON
    + """
local version = number('version')
if version ~= tonumber(ARGV[1]) then
  local same = redis.call('HGET', META, 'state') == ARGV[2]
  return version == tonumber(ARGV[1]) + 1 and same and 1 or 0
end
if ARGV[3] == '1' then
  redis.call('SET', BEFORE, redis.call('GET', SUMS) or '')
  redis.call('DEL', WINDOW)
  for _, field in ipairs(redis.call('HKEYS', META)) do
    if string.sub(field, 1, 6) == 'slice:' then redis.call('HDEL', META, field) end
  end
end
redis.call('HSET', META, 'version', version + 1, 'state', ARGV[2])
return 1
"""
)
# ARGV: length of the vector, name and content of each new note, and names of notes without.
# Returns both vectors, lost requests, those of killed writers, writers, and the notes.
READ = (
    COMMON
    + """
local size = tonumber(ARGV[1])
local killed, num_writers = 0, 0
for _, name in ipairs(redis.call('HKEYS', WRITERS)) do
  local one = writer(redis.call('HGET', WRITERS, name))
  if one.closed == '0' and now - one.at > """
    + f"{SILENT_MS}"
    + """ then killed = killed + one.largest end
  if one.closed == '0' and now - one.at <= """
    + f"{SILENT_MS}"
    + """ then num_writers = num_writers + 1 end
end
local found = {head_of(SUMS, size), head_of(BEFORE, size), number('lost'), killed, num_writers}
for at = 2, #ARGV, 2 do
  local field = 'note:' .. ARGV[at]
  if ARGV[at + 1] ~= '' then redis.call('HSETNX', META, field, ARGV[at + 1]) end
  local fits = redis.call('HSTRLEN', META, field) <= """
    + f"{MAX_STATE_BYTES}"
    + """
  found[#found + 1] = fits and redis.call('HGET', META, field) or ''
end
return found
"""
)


class CountsUnavailable(ConnectionError):
    """Redis does not answer, or its keys are damaged: then nothing is added."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a vector of counts.

    Attributes:
        size: Numbers of the vector.
        num_head: The first numbers, which each exchange returns.
        num_window: The first numbers, which the window counts too.
        slice_ms: Time of a slice of the window.
        num_slices: Slices of the window.
    """

    size: int
    num_head: int
    num_window: int
    slice_ms: int
    num_slices: int


@dataclass(frozen=True)
class Exchanged:
    """What an exchange returns.

    Attributes:
        time_ms: Time of Redis.
        version: Version of the switch; 0 if nobody has set it.
        state: Its state.
        head: The first numbers of the vector.
        slices: By number of the slice, the first numbers that it counts.
    """

    time_ms: int
    version: int
    state: bytes
    head: Ints
    slices: dict[int, Ints]


@dataclass(frozen=True)
class Sums:
    """What all servers have counted.

    Attributes:
        now: The vector.
        before: The vector at the last restart of the switch.
        lost: Requests that Redis has lost after it had acknowledged them.
        killed: About how many requests servers had not sent when they were killed: the largest
            delta of each.
        num_writers: Servers that have called of late.
        notes: Content of each note; empty if there is none.
    """

    now: Ints
    before: Ints
    lost: int
    killed: int
    num_writers: int
    notes: dict[str, bytes]


class SharedCounts:
    """One vector of counts in Redis, and its switch. Threads may share it."""

    def __init__(
        self, client: Any, name: str, layout: Layout, writer: str, wait_replicas: int = 0
    ) -> None:
        """Calls nothing yet.

        Args:
            client: A client of `redis_connection.connect`. It may repeat a call that failed.
            name: Servers that use one name have one vector, which has one layout.
            layout: Sizes of the vector.
            writer: Name of this process, which is new at each start.
            wait_replicas: Replicas of Redis that shall have a new state of the switch.
        """
        self.layout, self.writer, self.wait_replicas = layout, writer, wait_replicas
        self.name = f"redis {PREFIX}{{{name}}}"
        self._client = client
        self._keys = [f"{PREFIX}{{{name}}}:{key}" for key in KEYS]
        self._switch = client.register_script(SWITCH)

    def exchange(
        self,
        *,
        sequence: int,
        weight: int,
        acknowledged: int,
        increments: bytes,
        members: bytes,
        version: int,
        state: bytes,
        first_slice: int,
        last: bool,
    ) -> Exchanged:
        """Adds a delta, unless it was added before, and returns what the servers know.

        Args:
            sequence: Number of the delta, from 1 on; 0 adds nothing.
            weight: Requests in it.
            acknowledged: Requests in the deltas before it, which Redis has acknowledged.
            increments: Place (int32) and amount (int64) of each increment, little-endian.
            members: Place (int32) and hash (8 bytes) of what is counted as different: adds 1 at
                the place if the hash is not there yet.
            version: Version of the switch that this server knows; 0 for none. A Redis that has
                lost it gets it back.
            state: Its state.
            first_slice: First slice of the window that this server needs.
            last: Whether this server ends.

        Raises:
            CountsUnavailable: If Redis does not answer. The delta may be added.
        """
        sizes = self.layout
        arguments: list[Any] = [sizes.num_head, sizes.num_window, sizes.slice_ms, sizes.num_slices]
        arguments += [self.writer, sequence, weight, acknowledged, int(last)]
        arguments += [version, state, first_slice, increments, members]
        with failures_as(CountsUnavailable, self.name):
            time_ms, found, now, head, *slices = call_script(
                self._client, EXCHANGE, self._keys, arguments
            )
        numbers, contents = slices[::2], slices[1::2]
        return Exchanged(
            int(time_ms),
            int(found),
            now,
            _numbers(head, sizes.num_head),
            {
                int(number): _numbers(content, sizes.num_window)
                for number, content in zip(numbers, contents, strict=True)
            },
        )

    def count(self, events: Iterable[tuple[bytes, int]]) -> None:
        """Adds 1 at the place of each event whose hash is not among the latest ones.

        Raises:
            CountsUnavailable: If Redis does not answer. The same call may be sent again.
        """
        arguments = [part for event in events for part in event]
        with failures_as(CountsUnavailable, self.name):
            call_script(self._client, COUNT, self._keys, arguments)

    def switch(self, expected: int, state: bytes, restarts: bool = False) -> bool:
        """Sets the switch, if its version is the expected one. Returns whether it is set.

        Args:
            expected: Version before. The next version is one higher.
            state: State that no other call sets.
            restarts: Keeps the present sums as `before`, and empties the window.

        Raises:
            CountsUnavailable: If Redis does not answer. The switch may be set.
        """
        arguments = [expected, state, int(restarts)]
        with failures_as(CountsUnavailable, self.name):
            if not self.wait_replicas:
                return bool(self._switch(self._keys, arguments))
            reply, num_stored = call_and_wait(
                self._client,
                self._switch,
                self._keys,
                arguments,
                self.wait_replicas,
                WAIT_REPLICAS_MS,
            )
        if reply and num_stored < self.wait_replicas:
            log.warning(  # servers that know the state give it back to a Redis that has lost it
                "%s: %d of %d replicas of Redis have the new state of the switch after %d ms",
                self.name,
                num_stored,
                self.wait_replicas,
                WAIT_REPLICAS_MS,
            )
        return bool(reply)

    def read(self, names: Sequence[str], new: dict[str, bytes] | None = None) -> Sums:
        """Returns the sums and the notes of some names.

        Args:
            names: Names of notes.
            new: Notes to write, each of them unless there is one of its name.

        Raises:
            CountsUnavailable: If Redis does not answer.
        """
        given = new or {}
        arguments: list[Any] = [self.layout.size]
        for name in names:
            arguments += [name, given.get(name, b"")]
        with failures_as(CountsUnavailable, self.name):
            now, before, lost, killed, writers, *notes = call_script(
                self._client, READ, self._keys, arguments
            )
        size = self.layout.size
        return Sums(
            _numbers(now, size),
            _numbers(before, size),
            int(lost),
            int(killed),
            int(writers),
            dict(zip(names, notes, strict=True)),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def _numbers(content: bytes, size: int) -> Ints:
    """Returns a vector; what Redis does not have is 0."""
    found = np.zeros(size, np.int64)
    given = np.frombuffer(content[: len(content) // 8 * 8], ">i8")[:size]
    found[: given.size] = given
    return found
