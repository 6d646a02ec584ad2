"""The log of a live catalogue in Redis, which many processes write and follow.

Three keys, all in one hash slot:

    log        a stream; the change set of position N has the id N-0, an epoch and a time
    snapshot   a hash: what replaces all positions up to its own, for each bundle (`log_contents`)
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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.catalog_log import (
    Appended,
    AppendUncertain,
    JournalError,
    LogUnavailable,
    PositionLost,
    PositionTaken,
)
from recserve.features.catalog.change_lines import check_change_set, format_line, parse_line
from recserve.features.catalog.log_contents import LogContents
from recserve.features.catalog.versions import ChangeSet
from recserve.features.redis_connection import call_and_wait, connect, failures_as
from recserve.files import UnreadableFile

PREFIX = "recserve:items:"
MAX_ENTRY_BYTES = 64 << 20
MAX_SNAPSHOT_BYTES = 256 << 20
PAGE_BYTES, PAGE = 16 << 20, 1000  # of one reply, which has one entry at least
WAIT_REPLICAS_MS = 500
REPLY_S, LONGEST_WAIT_S = 1.5, 2.0  # to wait for a reply, and for a change

# KEYS: log, snapshot, epochs. The time of Redis in milliseconds makes epochs grow even after all
# keys were lost.
COMMON = """
local function last()
  local entry = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
  if entry then return tonumber(string.match(entry[1], '^%d+')) end
  return tonumber(redis.call('HGET', KEYS[2], 'position') or 0)
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
if there and field(there, 'writer') == ARGV[3] then
  return {field(there, 'epoch'), field(there, 'time')}
end
if ARGV[1] ~= now or last() + 1 ~= tonumber(ARGV[2]) then return false end
local time = redis.call('TIME')
local ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call(
  'XADD', KEYS[1], id, 'epoch', now, 'time', ms, 'writer', ARGV[3], 'line', ARGV[4])
return {now, ms}
"""
)
# ARGV: known epoch or '', last applied position, most bytes of an entry, of a reply, most entries.
# Returns epoch, position and size of the snapshot if it is needed, {id, epoch, time, writer, line
# or size} of each entry, position of the snapshot, and of the last entry.
READ = (
    COMMON
    + """
local now, position = epoch(), tonumber(ARGV[2])
if ARGV[1] ~= '' and is_lost(ARGV[1], position, now) then return {now} end
local start = tonumber(redis.call('HGET', KEYS[2], 'position') or 0)
local snapshot, size = start, 0
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
  entries[#entries + 1] = {
    entry[1], field(entry, 'epoch') or '', field(entry, 'time') or '',
    field(entry, 'writer') or '', kept}
  from = '(' .. entry[1]
end
return {now, snapshot, size, entries, start, last()}
"""
)
# ARGV: epoch and number of the position, its time, lines. The entry of the position stays: the
# stream needs an end.
SNAPSHOT = (
    COMMON
    + """
local now = epoch()
if is_lost(ARGV[1], tonumber(ARGV[2]), now) then return -1 end
if tonumber(redis.call('HGET', KEYS[2], 'position') or 0) >= tonumber(ARGV[2]) then return 0 end
redis.call(
  'HSET', KEYS[2], 'position', ARGV[2], 'epoch', ARGV[1], 'time', ARGV[3], 'lines', ARGV[4])
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2] .. '-0')
return 1
"""
)


class RedisCatalogLog:
    """The log of one catalogue in Redis, for one of the bundles that share it.

    One thread reads and appends; another one may wait, and another one may replace.

    Attributes:
        name: Name of the log in messages.
        url: URL of its Redis; empty if it was not opened by one.
        num_changes: Changed items behind the snapshot, as far as this process knows.
        start: Position of the snapshot; 0 without one.
        end: Last position.
        begins: Last position before each epoch.
        wait_replicas: Replicas of Redis that shall have a change before it is acknowledged.
        shared: Always true.
    """

    shared: ClassVar[bool] = True

    def __init__(
        self,
        client: Any,
        catalog: Catalog,
        name: str = "items",
        *,
        waiting: Any = None,
        wait_replicas: int = 0,
    ) -> None:
        """Calls nothing yet.

        Args:
            client: A client of `redis_connection.connect`. It may repeat a call that failed.
            catalog: The bundle's catalogue, which its change sets must fit.
            name: Name of the log. Processes that use one name have one log.
            waiting: Another client for `wait`, whose time limit of a reply is longer than these
                waits; None uses the first one.
            wait_replicas: Replicas of Redis that shall have a change before it is acknowledged.
        """
        self.num_changes = self.start = self.end = 0
        self.begins: dict[int, int] = {}
        self._client, self._catalog = client, catalog
        self._waiting = client if waiting is None else waiting
        self.wait_replicas, self.url = wait_replicas, ""
        slot = f"{PREFIX}{{{name}}}"
        self.name = f"redis {slot}"
        self._keys = [f"{slot}:log", f"{slot}:snapshot", f"{slot}:epochs"]
        self._append = client.register_script(APPEND)
        self._read = client.register_script(READ)
        self._snapshot = client.register_script(SNAPSHOT)
        self._everything = False  # whether a read returns other bundles' parts of the snapshot
        self._epoch = ""  # of the log when it was read last; empty before
        self._sizes: dict[int, int] = {}  # changed items by position, behind the snapshot

    def read(self, first: int = 0, epoch: int = 0) -> list[ChangeSet]:
        """Returns the change sets from a position on, in order.

        Change sets of other bundles name them in `made_for`. If a snapshot has replaced the
        position, what it has left of the others comes first, then a `whole` one of this bundle.

        Args:
            first: The position. After `PositionLost` it is 0.
            epoch: Epoch of the position before, which this process has applied.

        Raises:
            PositionLost: If the log has lost a position before `first`.
            JournalError: If a change set is damaged, or Redis does not answer.
        """
        found, position = list[ChangeSet](), max(first - 1, 0)
        if not position:
            self._sizes, self.num_changes = {}, 0
        while page := self._page(epoch, position):
            epoch, position = page[-1].epoch, page[-1].number
            found += page
        return found

    def append(self, change_set: ChangeSet) -> Appended:
        """Stores a change set behind the position before its own.

        Args:
            change_set: The change set. Its `writer` is the same if it is sent again.

        Raises:
            PositionTaken: If this process has not read all change sets before it.
            AppendUncertain: If Redis does not answer. Read the log before the next one.
            JournalError: If the change set is too large, or no process could read it.
        """
        number = change_set.number
        if not self._epoch:
            raise PositionTaken(f"{self.name}: read the log before a change")
        line = format_line(replace(change_set, made_for=self._catalog.version))
        if len(line) > MAX_ENTRY_BYTES:
            raise JournalError(
                f"{self.name}: a change of {len(line)} bytes; expected at most {MAX_ENTRY_BYTES}. "
                "Change fewer items in one call"
            )
        writer = change_set.writer or secrets.token_hex(8)
        stored = self._parse(line, number, b"0", b"0", writer.encode())
        arguments = [self._epoch, number, writer, line]
        try:
            with failures_as(LogUnavailable, self.name):
                reply, warning = self._store(arguments)
        except LogUnavailable as error:
            raise AppendUncertain(f"{error}; the change may be stored") from error
        if reply is None:
            raise PositionTaken(f"{self.name}: position {number} is taken")
        self._count([stored])
        self.end = number
        return Appended(replace(stored, epoch=int(reply[0]), time_ms=int(reply[1])), warning)

    def wait(self, first: int, timeout_s: float) -> bool:
        """Waits for a change set at a position or behind it. Returns whether there is one."""
        block_ms = max(1, int(1e3 * timeout_s))
        with failures_as(LogUnavailable, self.name):
            found = self._waiting.xread({self._keys[0]: f"{max(first - 1, 0)}-0"}, 1, block_ms)
        return bool(found)

    def replace(self, change_sets: Sequence[ChangeSet]) -> None:
        """Replaces all change sets up to a position, unless a later snapshot has done so.

        The log is read for what the other bundles have there.

        Raises:
            PositionLost: If the log has lost the position.
            JournalError: If the snapshot is too large, or Redis does not answer.
        """
        last, version = change_sets[-1], self._catalog.version
        contents = LogContents()
        for each in RedisCatalogLog(self._client, self._catalog)._read_all(self._keys):
            if each.number <= last.number:
                contents.add(each)
        parts = contents.snapshot(last.number, version, change_sets)
        lines = b"".join(map(format_line, parts))
        if len(lines) > MAX_SNAPSHOT_BYTES:
            raise JournalError(
                f"{self.name}: a snapshot of {len(lines)} bytes; expected at most "
                f"{MAX_SNAPSHOT_BYTES}"
            )
        arguments = [last.epoch, last.number, last.time_ms, lines]
        with failures_as(LogUnavailable, self.name):
            done = self._snapshot(self._keys, arguments)
        if int(done) < 0:
            raise PositionLost(f"{self.name}: position {last.number} is lost")

    def _read_all(self, keys: list[str]) -> list[ChangeSet]:
        """Returns all change sets of other keys, with all of the snapshot."""
        self._keys, self._everything = keys, True
        return self.read()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
        self._waiting.close()

    def _store(self, arguments: list[Any]) -> tuple[Any, str]:
        """Runs the script that appends. Returns its reply, and a warning about replicas or ""."""
        wanted = self.wait_replicas
        if not wanted:
            return self._append(self._keys, arguments), ""
        reply, num_stored = call_and_wait(
            self._client, self._append, self._keys, arguments, wanted, WAIT_REPLICAS_MS
        )
        if reply is None or num_stored >= wanted:
            return reply, ""
        return reply, (
            f"{num_stored} of {wanted} replicas of Redis have the change after "
            f"{WAIT_REPLICAS_MS} ms, so a failover can lose it"
        )

    def _page(self, epoch: int, position: int) -> list[ChangeSet]:
        """Returns change sets behind a position that was applied in an epoch; empty at the end."""
        limits = [MAX_ENTRY_BYTES, PAGE_BYTES, PAGE]
        with failures_as(LogUnavailable, self.name):
            reply = self._read(self._keys, [epoch if position else "", position, *limits])
        if len(reply) == 1:
            self._epoch = ""
            self._read_epochs()
            raise PositionLost(f"{self.name}: position {position} of epoch {epoch} is lost")
        now = reply[0].decode()
        if now != self._epoch:
            self._read_epochs()
        page = self._read_snapshot(int(reply[1]), int(reply[2])) if reply[1] else []
        if reply[1] and not page:  # another one has replaced it meanwhile
            return self._page(epoch, position)
        expected = page[-1].number if page else position
        for entry_id, made_in, time_ms, writer, line in reply[3]:
            expected += 1
            if entry_id != b"%d-0" % expected:
                shown = ascii(entry_id[:40].decode("latin-1"))
                raise JournalError(f"{self.name}: expected position {expected}, got {shown}")
            if isinstance(line, int):
                raise JournalError(
                    f"{self.name}: position {expected} has {line} bytes; expected at most "
                    f"{MAX_ENTRY_BYTES}"
                )
            page.append(self._parse(line, expected, made_in, time_ms, writer))
        self._epoch, self.start, self.end = now, int(reply[4]), int(reply[5])
        self._count(page)
        return page

    def _count(self, change_sets: Sequence[ChangeSet]) -> None:
        """Counts change sets, without those up to the snapshot."""
        for each in change_sets:
            if each.number > self.start:
                self._sizes[each.number] = len(each)
                self.num_changes += len(each)
        while self._sizes and (first := next(iter(self._sizes))) <= self.start:
            self.num_changes -= self._sizes.pop(first)

    def _read_epochs(self) -> None:
        """Reads where each epoch began."""
        with failures_as(LogUnavailable, self.name):
            fields = self._client.hgetall(self._keys[2])
        since = b"since:"
        self.begins = {
            int(name.removeprefix(since)): int(position)
            for name, position in fields.items()
            if name.startswith(since)
        }

    def _read_snapshot(self, position: int, size: int) -> list[ChangeSet]:
        """Returns the snapshot of a position for this bundle; nothing if there is a later one."""
        if size > MAX_SNAPSHOT_BYTES:
            raise JournalError(
                f"{self.name}: the snapshot of position {position} has {size} bytes; expected at "
                f"most {MAX_SNAPSHOT_BYTES}"
            )
        with failures_as(LogUnavailable, self.name):
            number, made_in, time_ms, lines = self._client.hmget(
                self._keys[1], ("position", "epoch", "time", "lines")
            )
        if number != b"%d" % position:
            return []
        stored = (lines or b"").removesuffix(b"\n").split(b"\n")
        parts = [self._parse(line, position, made_in, time_ms or b"0") for line in stored]
        if self._everything:
            return sorted(parts, key=lambda part: part.number)
        version = self._catalog.version
        remains = [part for part in parts if part.remains and part.made_for != version]
        own = [part for part in parts if part.made_for == version and not part.remains]
        if not own:  # no server of this bundle has written yet
            epoch = parts[0].epoch
            none = ChangeSet(position, epoch=epoch, time_ms=parts[0].time_ms, made_for=version)
            own = [replace(none, assigned=0)]
        return remains + [replace(part, whole=not at) for at, part in enumerate(own)]

    def _parse(
        self,
        line: bytes,
        position: int,
        epoch: bytes | None,
        time_ms: bytes,
        writer: bytes = b"",
    ) -> ChangeSet:
        """Parses and checks the change set of a position. Raises JournalError."""
        try:
            change_set = parse_line(line.removesuffix(b"\n"))
            number = change_set.number
            if number != position and not (change_set.remains and 0 < number < position):
                raise ValueError(f"it says that it is {number}")
            own = change_set.made_for in ("", self._catalog.version) and not change_set.remains
            check_change_set(change_set, self._catalog if own else None)
            return replace(
                change_set,
                made_for=change_set.made_for or self._catalog.version,
                epoch=int(epoch or b""),
                time_ms=int(time_ms),
                writer=writer.decode("latin-1"),
            )
        except UnreadableFile as error:
            raise JournalError(f"{self.name}: position {position}: {error}") from error
        except ValueError as error:
            raise JournalError(f"{self.name}: position {position} is damaged ({error})") from error


def open_log(
    url: str, catalog: Catalog, name: str, wait_replicas: int | None = None
) -> RedisCatalogLog:
    """Returns the log of a URL of `redis_connection`.

    Args:
        url: The URL.
        catalog: The bundle's catalogue.
        name: Name of the log.
        wait_replicas: Replicas of Redis that shall have a change before it is acknowledged; None
            means 1 for Sentinel and Cluster, where a failover happens by itself, else 0.

    Raises:
        ValueError: If the URL is malformed.
        LogUnavailable: If no node of a cluster answers.
    """
    if wait_replicas is None:
        wait_replicas = int("+" in url.partition("://")[0])
    with failures_as(LogUnavailable, "catalog_log"):
        client = connect(url, timeout_s=REPLY_S)
        waiting = connect(url, timeout_s=REPLY_S, wait_s=LONGEST_WAIT_S)
    log = RedisCatalogLog(client, catalog, name, waiting=waiting, wait_replicas=wait_replicas)
    log.url = url
    return log
