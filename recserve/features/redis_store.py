"""Histories in Redis: one value per user, one MGET for a batch of users, one script per append.

The script checks the stored value, leaves out duplicates, inserts in order of time, trims, and
writes the
value with its new checksum: one round trip, and no other client can come between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.retry import Retry

from recserve.features.history import (
    DEFAULT_CAP,
    EVENT_DTYPE,
    HEADER,
    CorruptHistory,
    HistoryStore,
    StoredEvent,
    StoreUnavailable,
    read_stored,
    records,
    user_key,
)

PREFIX = b"recserve:history:"
RETRIES = 2
CORRUPT = "RECSERVE_CORRUPT"

# ARGV[1]: cap. ARGV[2]: new records, distinct, in order of time. Returns "0" or "1" per record.
# Record layout: item_key 1-8, event_key 9-16, time 17-24, value 25-28, type 29 (EVENT_DTYPE).
APPEND = """
local SIZE, HEAD = 29, 16
local function checksum(head, body)
  local digest = redis.sha1hex(head .. body)
  return (string.sub(digest, 1, 16):gsub('..', function(hex) return string.char(tonumber(hex, 16))
  end))
end
local stored = redis.pcall('GET', KEYS[1])
if type(stored) == 'table' then return redis.error_reply('RECSERVE_CORRUPT not a string') end
local body = ''
if stored then
  body = string.sub(stored, HEAD + 1)
  local head = string.sub(stored, 1, 8)
  if #stored < HEAD or string.sub(head, 1, 4) ~= 'RH\\1\\1'
      or struct.unpack('<I4', head, 5) * SIZE ~= #body
      or checksum(head, body) ~= string.sub(stored, 9, HEAD) then
    return redis.error_reply('RECSERVE_CORRUPT checksum')
  end
end
local function time_at(text, start) return struct.unpack('<i8', text, start + 16) end
local function has(key)
  local from = 1
  while true do
    local at = string.find(body, key, from, true)
    if not at then return false end
    if (at - 9) % SIZE == 0 then return true end
    from = at + 1
  end
end
local flags, fresh = {}, {}
local new = ARGV[2]
for start = 1, #new, SIZE do
  local accepted = not has(string.sub(new, start + 8, start + 15))
  flags[#flags + 1] = accepted and '1' or '0'
  if accepted then fresh[#fresh + 1] = string.sub(new, start, start + SIZE - 1) end
end
if #fresh > 0 then
  local parts, left = {}, #body / SIZE
  for index = #fresh, 1, -1 do
    local time = time_at(fresh[index], 1)
    local low, high = 0, left
    if high > 0 and time_at(body, (high - 1) * SIZE + 1) <= time then low = high end
    while low < high do
      local middle = math.floor((low + high) / 2)
      if time_at(body, middle * SIZE + 1) <= time then low = middle + 1 else high = middle end
    end
    table.insert(parts, 1, fresh[index] .. string.sub(body, low * SIZE + 1, left * SIZE))
    left = low
  end
  body = string.sub(body, 1, left * SIZE) .. table.concat(parts)
  local cap = tonumber(ARGV[1])
  if #body > 2 * cap * SIZE then body = string.sub(body, -cap * SIZE) end
  local head = 'RH\\1\\1' .. struct.pack('<I4', #body / SIZE)
  redis.call('SET', KEYS[1], head .. checksum(head, body) .. body)
end
return table.concat(flags)
"""
assert HEADER.size == 16 and EVENT_DTYPE.itemsize == 29, "the script spells these sizes out"


class RedisStore(HistoryStore):
    """A HistoryStore in the Redis at `url`.

    timeout_s: to connect and for each answer; a failed call is tried twice more, which is safe
    because an event that did arrive is then a duplicate. Raises StoreUnavailable if the server
    does not answer, ValueError for a malformed URL.
    """

    def __init__(self, url: str, *, cap: int = DEFAULT_CAP, timeout_s: float = 0.25) -> None:
        self.cap = cap
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(ExponentialBackoff(cap=0.05, base=0.005), RETRIES),
        )
        with self._failures():
            self._script = self._client.script_load(APPEND)

    def get_many(self, user_ids: Sequence[str]) -> list[np.ndarray | CorruptHistory]:
        """Events of each user by one MGET; a damaged value is reported in its place."""
        if not user_ids:
            return []
        keys = [PREFIX + user_key(user_id) for user_id in user_ids]
        with self._failures():
            values = self._client.mget(keys)
        return [read_stored(value) for value in values]

    def append_many(
        self, events: Mapping[str, Sequence[StoredEvent]]
    ) -> dict[str, list[bool] | CorruptHistory]:
        """Add events of several users in one round trip; each user's append is atomic."""
        calls, orders = [], []
        for user_id, added in events.items():
            new = records(added)
            first = np.unique(new["event_key"], return_index=True)[1]
            order = first[np.lexsort((first, new["time_us"][first]))]
            orders.append(order)
            calls.append((PREFIX + user_key(user_id), new[order].tobytes()))
        with self._failures():
            replies = self._run(calls)
        answers: dict[str, list[bool] | CorruptHistory] = {}
        for user_id, order, reply in zip(events, orders, replies, strict=True):
            if isinstance(reply, ResponseError) and CORRUPT in str(reply):
                answers[user_id] = CorruptHistory("stored history is damaged; nothing was appended")
                continue
            if isinstance(reply, Exception):
                raise StoreUnavailable(f"redis: {reply}") from reply
            flags = np.zeros(len(events[user_id]), dtype=bool)
            flags[order] = np.frombuffer(reply, dtype=np.uint8) == ord("1")
            answers[user_id] = flags.tolist()
        return answers

    def delete(self, user_id: str) -> bool:
        """Forget a user; whether anything was stored."""
        key = PREFIX + user_key(user_id)
        with self._failures():
            return bool(self._client.delete(key))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _run(self, calls: list[tuple[bytes, bytes]]) -> list[Any]:
        """Replies of the script, errors in place; loads it again where the server forgot it."""
        for _ in range(2):
            with self._client.pipeline(transaction=False) as pipeline:
                for key, new in calls:
                    pipeline.evalsha(self._script, 1, key, self.cap, new)
                replies: list[Any] = pipeline.execute(raise_on_error=False)
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                break
            self._client.script_load(APPEND)
        return replies

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except RedisError as error:
            raise StoreUnavailable(f"redis: {type(error).__name__}: {error}") from error
