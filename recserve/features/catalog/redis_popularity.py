"""Decayed counts of events that several servers add to in Redis, so that they have one list.

Four keys of one hash slot, `recserve:popular:{NAME/HALF_LIFE}:` and

    counts     a hash: the count of each item with an event, as of the time `since`
    changed    a sorted set: each of these items with the version in which its count changed last
    meta       a hash: `since`, time of the newest event, version, and when each bundle began
    writers    a hash: the last sequence number of each server

Items are named by their keys, 8 bytes. An event counts `2 ** ((time - since) / half_life)`, as in
`popularity.py`. Each server sends a delta with its name, which is new at each start, and a sequence
number; a delta that is sent again has the number of the one before and is not added again. It reads
the counts that have changed, so all servers have the same numbers and the same order.

The training events of a bundle count as of the time when a server first served it.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np

from recserve.features.redis_connection import RENEW, call_script, connect, failures_as

PREFIX = "recserve:popular:"
KEYS = ("counts", "changed", "meta", "writers")
COUNT = np.dtype([("key", "<u8"), ("weight", "<f8")])
PAGE = 10_000  # items of one reply; those of one version are not divided
MAX_DOUBLINGS = 512
REPLY_S = 0.5
MAX_WRITERS, FORGET_MS = 1000, 30 * 86_400_000

# ARGV: writer, sequence number or 0, `since` of the delta, time of its newest event, half-life,
# counts, version that is known, most items of the reply, name of the bundle. Times are in
# microseconds. Returns server, version, `since`, newest event, begin of the bundle, version that is
# reached, and key and count of each item. It writes nothing if it meets a value that is no number.
EXCHANGE = (
    """
local COUNTS, CHANGED, META, WRITERS = unpack(KEYS)
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local half_life = tonumber(ARGV[5])
local function finite(key, field)
  local found = redis.call('HGET', key, field) or '0'
  local value = tonumber(found)
  if not value or not (value >= 0 and value < math.huge) then
    error({err = 'DAMAGED ' .. key .. ' has ' .. string.format('%q', string.sub(found, 1, 40))
      .. '; expected a finite number from 0 on; delete the four keys to count anew'})
  end
  return value
end
local function number(field) return finite(META, field) end
local function whole(value) return string.format('%.0f', value) end
redis.call('ZCARD', CHANGED)
redis.call('HLEN', COUNTS)
for _, field in ipairs({'since', 'latest', 'version', 'begin:' .. ARGV[9]}) do number(field) end
local counts = {}
for at = 1, #ARGV[6], 16 do
  local key = string.sub(ARGV[6], at, at + 7)
  counts[key] = finite(COUNTS, key)
end
redis.call('HSETNX', META, 'since', whole(now_us))
redis.call('HSETNX', META, 'begin:' .. ARGV[9], whole(now_us))
local since, latest, version = number('since'), number('latest'), number('version')
local entry = redis.call('HGET', WRITERS, ARGV[1])
if not entry and redis.call('HLEN', WRITERS) >= """
    + f"{MAX_WRITERS}"
    + """ then
  for _, name in ipairs(redis.call('HKEYS', WRITERS)) do
    local at = tonumber(string.match(redis.call('HGET', WRITERS, name), ' (%d+)$') or 0)
    if now_us - at > 1000 * """
    + f"{FORGET_MS}"
    + """ then redis.call('HDEL', WRITERS, name) end
  end
end
local sequence = tonumber(string.match(entry or '', '^(%d+) ') or 0)
local is_new = tonumber(ARGV[2]) > sequence
if is_new then latest = math.max(latest, tonumber(ARGV[4])) end
-- Before anything is added, so that no weight leaves the range of a float.
local passed = math.floor((math.max(latest, number('begin:' .. ARGV[9])) - since) / half_life)
if passed > """
    + f"{MAX_DOUBLINGS}"
    + """ then
  local all = redis.call('HGETALL', COUNTS)
  for at = 1, #all, 2 do finite(COUNTS, all[at]) end
  for at = 1, #all, 2 do
    local count = tonumber(all[at + 1]) * 2 ^ -passed
    if count > 1e-200 then
      redis.call('HSET', COUNTS, all[at], string.format('%.17g', count))
    else
      redis.call('HDEL', COUNTS, all[at])
      redis.call('ZREM', CHANGED, all[at])
      count = 0
    end
    if counts[all[at]] then counts[all[at]] = count end
  end
  since = since + passed * half_life
  redis.call('HSET', META, 'since', whole(since))
end
if is_new then
  local scale = 2 ^ ((tonumber(ARGV[3]) - since) / half_life)
  version = version + 1
  for at = 1, #ARGV[6], 16 do
    local key = string.sub(ARGV[6], at, at + 7)
    local count = counts[key] + scale * struct.unpack('<d', ARGV[6], at + 8)
    redis.call('HSET', COUNTS, key, string.format('%.17g', count))
    redis.call('ZADD', CHANGED, version, key)
  end
  redis.call('HSET', META, 'version', version, 'latest', whole(latest))
  redis.call('HSET', WRITERS, ARGV[1], ARGV[2] .. ' ' .. whole(now_us))
end
"""
    + RENEW
    + """
local keys = redis.call(
  'ZRANGEBYSCORE', CHANGED, '(' .. ARGV[7], '+inf', 'LIMIT', 0, ARGV[8])
local reached = version
if #keys == tonumber(ARGV[8]) then
  reached = tonumber(redis.call('ZSCORE', CHANGED, keys[#keys]))
  keys = redis.call('ZRANGEBYSCORE', CHANGED, '(' .. ARGV[7], whole(reached))
end
local server = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
local found = {
  server, version, whole(since), whole(latest), whole(number('begin:' .. ARGV[9])), reached}
for _, key in ipairs(keys) do
  found[#found + 1] = key
  found[#found + 1] = string.format('%.17g', finite(COUNTS, key))
end
return found
"""
)


class PopularityUnavailable(ConnectionError):
    """Redis does not answer, or its keys are damaged."""


@dataclass(frozen=True)
class Changes:
    """Counts that have changed.

    Attributes:
        server: Name of the Redis that answers. Another one may have lost counts.
        version: Present version of the counts.
        since_us: Time as of which they are stored, in microseconds since 1970.
        latest_us: Time of the newest event; 0 without one.
        begin_us: When a server first served the bundle.
        reached: Version up to which `keys` has all changes.
        keys: [n] uint64 keys of the items.
        counts: [n] float64 counts.
    """

    server: str
    version: int
    since_us: int
    latest_us: int
    begin_us: int
    reached: int
    keys: np.ndarray
    counts: np.ndarray


class RedisPopularity:
    """The counts of one catalogue in Redis."""

    def __init__(
        self, client: Any, name: str, half_life_s: float, bundle: str, writer: str
    ) -> None:
        """Calls nothing yet.

        Args:
            client: A client of `redis_connection.connect`. It may repeat a call that failed.
            name: Servers that use one name and one half-life have one list.
            half_life_s: Time in which a count halves.
            bundle: Name of the catalogue whose training events count.
            writer: Name of this process, which is new at each start.
        """
        slot = f"{PREFIX}{{{name}/{half_life_s:g}}}"
        self.name = f"redis {slot}"
        self._client, self._keys = client, [f"{slot}:{key}" for key in KEYS]
        self._half_life_us, self._bundle, self._writer = half_life_s * 1e6, bundle, writer

    def exchange(
        self, sequence: int, since_us: int, latest_us: int, counts: bytes, known: int
    ) -> Changes:
        """Adds a delta, unless it was added before, and returns what has changed.

        Args:
            sequence: Number of the delta, from 1 on; 0 adds nothing.
            since_us: Time as of which its weights are, in microseconds since 1970.
            latest_us: Time of its newest event.
            counts: [n] COUNT array.
            known: Version up to which this process has read the counts.

        Raises:
            PopularityUnavailable: If Redis does not answer. The delta may be added. Or if a key is
                damaged. Then nothing is added.
        """
        arguments: list[Any] = [self._writer, sequence, since_us, latest_us]
        arguments += [repr(self._half_life_us), counts, known, PAGE, self._bundle]
        with failures_as(PopularityUnavailable, self.name):
            server, version, since, latest, begin, reached, *found = call_script(
                self._client, EXCHANGE, self._keys, arguments
            )
        pairs = [pair for pair in zip(found[::2], found[1::2], strict=True) if len(pair[0]) == 8]
        return Changes(
            server.decode("latin-1"),
            int(version),
            int(since),
            int(latest),
            int(begin),
            int(reached),
            np.frombuffer(b"".join(key for key, _ in pairs), "<u8").astype(np.uint64),
            np.array([float(count) for _, count in pairs], np.float64),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def open_popularity(url: str, name: str, half_life_s: float, bundle: str) -> RedisPopularity:
    """Returns the counts of a URL of `redis_connection`.

    Args:
        url: The URL.
        name: Name of the log of item changes, whose servers have one list.
        half_life_s: Time in which a count halves.
        bundle: Name of the bundle's catalogue.

    Raises:
        PopularityUnavailable: If no node of a cluster answers.
    """
    writer = f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"
    with failures_as(PopularityUnavailable, "catalog_log"):
        client = connect(url, timeout_s=REPLY_S)
    return RedisPopularity(client, name, half_life_s, bundle, writer)
