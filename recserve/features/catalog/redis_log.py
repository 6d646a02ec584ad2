"""The log of a live catalogue in Redis, which many processes write and follow.

Three keys, all in one hash slot:

    log        a stream; the change set of position N has the id N-0
    snapshot   a hash: the change sets that replace all positions up to its own
    epochs     a hash: the server that has the log, the epoch, and where each epoch began

Two writers cannot take one position: a script checks in one step that the log ends just before it
and that the writer knows the epoch.

A Redis that takes over from another one, or that starts again, may lack the last change sets. So a
script that finds another server than the last time begins a new epoch at the end of the log. A
process that has applied a position behind this end, in an earlier epoch, gets `PositionLost`.

Other processes write the log. So Redis bounds the size of what a read returns, and the reader
checks all of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.catalog_log import JournalError, PositionLost, PositionTaken
from recserve.features.catalog.change_lines import check_change_set, format_line, parse_line
from recserve.features.catalog.versions import ChangeSet
from recserve.features.redis_connection import FAILURES, describe

PREFIX = "recserve:items:"
MAX_ENTRY_BYTES = 64 << 20
MAX_SNAPSHOT_BYTES = 256 << 20
PAGE_BYTES, PAGE = 16 << 20, 1000  # of one reply, which has one entry at least

# KEYS: log, snapshot, epochs. The time of Redis in milliseconds makes epochs grow even after all
# keys were lost.
COMMON = """
local function last()
  local entry = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
  return entry and tonumber(string.match(entry[1], '^%d+')) or 0
end
local function epoch()
  local server = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
  local now = redis.call('HGET', KEYS[3], 'epoch')
  if redis.call('HGET', KEYS[3], 'server') ~= server then
    local time = redis.call('TIME')
    local next = math.max((tonumber(now) or 0) + 1, time[1] * 1000 + math.floor(time[2] / 1000))
    now = string.format('%.0f', next)
    redis.call('HSET', KEYS[3], 'server', server, 'epoch', now, 'since:' .. now, last())
  end
  return now
end
local function is_lost(known, position, now)
  if position > last() then return true end
  if known == now then return false end
  if redis.call('HEXISTS', KEYS[3], 'since:' .. known) == 0 then return true end
  local all = redis.call('HGETALL', KEYS[3])
  for at = 1, #all, 2 do
    local later = tonumber(string.match(all[at], '^since:(%d+)$'))
    if later and later > tonumber(known) and position > tonumber(all[at + 1]) then return true end
  end
  return false
end
local function field(entry, name)
  for at = 1, #entry[2], 2 do if entry[2][at] == name then return entry[2][at + 1] end end
end
"""
# ARGV: known epoch, position, writer, line. The writer is new for each change set, so a call that
# is repeated after its reply was lost finds its own entry.
APPEND = (
    COMMON
    + """
local now, id = epoch(), ARGV[2] .. '-0'
local there = redis.call('XRANGE', KEYS[1], id, id)[1]
if there and field(there, 'writer') == ARGV[3] then return now end
if ARGV[1] ~= now or last() + 1 ~= tonumber(ARGV[2]) then return false end
redis.call('XADD', KEYS[1], id, 'epoch', now, 'writer', ARGV[3], 'line', ARGV[4])
return now
"""
)
# ARGV: known epoch or '', last applied position, most bytes of an entry, of a reply, most entries.
# Returns epoch, position and size of the snapshot if it is needed, and {id, epoch, line or size}.
READ = (
    COMMON
    + """
local now, position = epoch(), tonumber(ARGV[2])
if ARGV[1] ~= '' and is_lost(ARGV[1], position, now) then return {now} end
local snapshot = tonumber(redis.call('HGET', KEYS[2], 'position') or 0)
local size = 0
if snapshot > position then
  position, size = snapshot, redis.call('HSTRLEN', KEYS[2], 'lines')
else
  snapshot = 0
end
local from = string.format('%.0f-0', position + 1)
local entries, bytes = {}, 0
while #entries < tonumber(ARGV[5]) and bytes < tonumber(ARGV[4]) do
  local entry = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 1)[1]
  if not entry then break end
  local line = field(entry, 'line') or ''
  bytes = bytes + #line
  local kept = #line <= tonumber(ARGV[3]) and line or #line
  entries[#entries + 1] = {entry[1], field(entry, 'epoch') or '', kept}
  from = '(' .. entry[1]
end
return {now, snapshot, size, entries}
"""
)
# ARGV: known epoch, position, lines. The entry of the position stays: the stream needs an end.
SNAPSHOT = (
    COMMON
    + """
local now = epoch()
if is_lost(ARGV[1], tonumber(ARGV[2]), now) then return -1 end
if tonumber(redis.call('HGET', KEYS[2], 'position') or 0) >= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], 'position', ARGV[2], 'epoch', ARGV[1], 'lines', ARGV[3])
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2] .. '-0')
return 1
"""
)


class RedisCatalogLog:
    """The log of one catalogue in Redis.

    One thread reads and appends; another one may wait.

    Attributes:
        name: Name of the log in messages.
        num_changes: Changed items in the part that this process has read or written.
    """

    def __init__(self, client: Any, catalog: Catalog) -> None:
        """Calls nothing yet.

        Args:
            client: A client of `redis_connection.connect`. It may repeat a call that failed.
                Its time limit of a reply is longer than the waits of `wait`.
            catalog: The bundle's catalogue, which the change sets must fit.
        """
        self.num_changes = 0
        self._client, self._catalog = client, catalog
        slot = f"{PREFIX}{{{catalog.version}}}"
        self.name = f"redis {slot}"
        self._keys = [f"{slot}:log", f"{slot}:snapshot", f"{slot}:epochs"]
        self._append = client.register_script(APPEND)
        self._read = client.register_script(READ)
        self._snapshot = client.register_script(SNAPSHOT)
        self._epoch = ""  # of the last position that was read or appended; empty before

    def read(self, first: int = 0) -> list[ChangeSet]:
        """Returns the change sets from a position on, in order.

        The first one is `whole` if a snapshot has replaced the position.

        Args:
            first: The position. All positions before it have been read or appended before; after
                `PositionLost` it is 0.

        Raises:
            PositionLost: If the log has lost a position before `first`.
            JournalError: If a change set is damaged, or Redis does not answer.
        """
        found, position = list[ChangeSet](), max(first - 1, 0)
        epoch = self._epoch if position else ""
        while page := self._page(epoch, position):
            epoch = str(page[-1].epoch)
            position = page[-1].number
            found += page
        self.num_changes = sum(map(len, found)) + (self.num_changes if first > 1 else 0)
        return found

    def append(self, change_set: ChangeSet) -> None:
        """Stores a change set behind the position before its own.

        Raises:
            PositionTaken: If this process has not read all change sets before it.
            JournalError: If the change set is too large, or Redis does not answer. In the second
                case it may be stored: read the log before the next one.
        """
        if not self._epoch:
            raise PositionTaken(f"{self.name}: read the log before a change")
        line = format_line(change_set)
        if len(line) > MAX_ENTRY_BYTES:
            raise JournalError(
                f"{self.name}: a change of {len(line)} bytes; expected at most {MAX_ENTRY_BYTES}. "
                "Change fewer items in one call"
            )
        writer = secrets.token_hex(8)
        with self._failures():
            reply = self._append(self._keys, [self._epoch, change_set.number, writer, line])
        if reply is None:
            raise PositionTaken(f"{self.name}: position {change_set.number} is taken")
        self.num_changes += len(change_set)

    def wait(self, first: int, timeout_s: float) -> bool:
        """Waits for a change set at a position or behind it. Returns whether there is one."""
        block_ms = max(1, int(1e3 * timeout_s))
        with self._failures():
            found = self._client.xread({self._keys[0]: f"{max(first - 1, 0)}-0"}, 1, block_ms)
        return bool(found)

    def replace(self, change_sets: Sequence[ChangeSet]) -> None:
        """Replaces all change sets up to a position, unless a later snapshot has done so.

        Raises:
            PositionLost: If the log has lost the position.
            JournalError: If the snapshot is too large, or Redis does not answer.
        """
        lines = b"".join(map(format_line, change_sets))
        if len(lines) > MAX_SNAPSHOT_BYTES:
            raise JournalError(
                f"{self.name}: a snapshot of {len(lines)} bytes; expected at most "
                f"{MAX_SNAPSHOT_BYTES}"
            )
        last = change_sets[-1]
        with self._failures():
            done = self._snapshot(self._keys, [self._epoch, last.number, lines])
        if int(done) < 0:
            raise PositionLost(f"{self.name}: position {last.number} is lost")
        if int(done):
            self.num_changes = sum(map(len, change_sets))

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _page(self, epoch: str, position: int) -> list[ChangeSet]:
        """Returns change sets behind a position that was applied in an epoch; empty at the end."""
        limits = [MAX_ENTRY_BYTES, PAGE_BYTES, PAGE]
        with self._failures():
            reply = self._read(self._keys, [epoch, position, *limits])
        if len(reply) == 1:
            self._epoch = ""
            raise PositionLost(f"{self.name}: position {position} of epoch {epoch} is lost")
        self._epoch = reply[0].decode()
        page = self._read_snapshot(int(reply[1]), int(reply[2])) if reply[1] else []
        if reply[1] and not page:  # another one has replaced it meanwhile
            return self._page(epoch, position)
        expected = page[-1].number if page else position
        for entry_id, made_in, line in reply[3]:
            expected += 1
            if entry_id != b"%d-0" % expected:
                shown = ascii(entry_id[:40].decode("latin-1"))
                raise JournalError(f"{self.name}: expected position {expected}, got {shown}")
            if isinstance(line, int):
                raise JournalError(
                    f"{self.name}: position {expected} has {line} bytes; expected at most "
                    f"{MAX_ENTRY_BYTES}"
                )
            page.append(self._parse(line, expected, made_in))
        return page

    def _read_snapshot(self, position: int, size: int) -> list[ChangeSet]:
        """Returns the parts of the snapshot of a position; none if there is a later one."""
        if size > MAX_SNAPSHOT_BYTES:
            raise JournalError(
                f"{self.name}: the snapshot of position {position} has {size} bytes; expected at "
                f"most {MAX_SNAPSHOT_BYTES}"
            )
        with self._failures():
            number, made_in, lines = self._client.hmget(
                self._keys[1], ("position", "epoch", "lines")
            )
        if number != b"%d" % position:
            return []
        stored = (lines or b"").removesuffix(b"\n").split(b"\n")
        parts = [self._parse(line, position, made_in) for line in stored]
        return [replace(part, whole=not at) for at, part in enumerate(parts)]

    def _parse(self, line: bytes, position: int, epoch: bytes | None) -> ChangeSet:
        """Parses and checks the change set of a position. Raises JournalError."""
        try:
            change_set = parse_line(line.removesuffix(b"\n"))
            if change_set.number != position:
                raise ValueError(f"it says that it is {change_set.number}")
            check_change_set(change_set, self._catalog)
            return replace(change_set, epoch=int(epoch or b""))
        except ValueError as error:
            raise JournalError(f"{self.name}: position {position} is damaged ({error})") from error

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns Redis' errors into JournalError."""
        try:
            yield
        except FAILURES as error:
            raise JournalError(f"{self.name}: {describe(error)}") from error
