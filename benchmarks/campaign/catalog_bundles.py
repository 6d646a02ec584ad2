"""What the log in Redis says of replicas of several bundles, while one is rolled out.

A change of one bundle has its position in the log. A replica of another bundle shows it once one of
them has appended an assignment behind it. Before that, the number of its version is higher than
what it shows. So a read is judged by the last position whose items it must have, and the positions
of assignments are those of no client.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import redis

from benchmarks.campaign.catalog_histories import Operation, SharedLog, Version

POLL_S = 0.02


@dataclass(frozen=True)
class Entry:
    """A change set of the log.

    Attributes:
        bundle: Version of the bundle's catalogue for which it was made.
        assigned: Last position of other bundles that its bundle shows from here on; None for the
            change of a client.
        rollback: Whether it is one.
    """

    bundle: str
    assigned: int | None = None
    rollback: bool = False


class LogWatch(threading.Thread):
    """Reads the log beside the replicas, on a connection that no fault touches.

    Attributes:
        entries: Entries by position.
    """

    def __init__(self, port: int, name: str = "items") -> None:
        super().__init__(daemon=True, name="watch-log")
        self.entries: dict[int, Entry] = {}
        self._client = redis.Redis(port=port, socket_timeout=2.0)
        self._key, self._last = f"recserve:items:{{{name}}}:log", "0-0"
        self._stopped = threading.Event()

    def run(self) -> None:
        """Reads until it is stopped."""
        while not self._stopped.is_set():
            with suppress(redis.RedisError):
                self.read()
            self._stopped.wait(POLL_S)

    def read(self) -> None:
        """Reads what is new. Raises RedisError."""
        for entry_id, fields in self._client.xrange(self._key, f"({self._last}"):
            said = json.loads(fields[b"line"][9:])
            self._last = entry_id.decode()
            position = int(self._last.partition("-")[0])
            self.entries[position] = Entry(
                said["made_for"], said.get("assigned"), bool(said.get("whole"))
            )

    def close(self) -> None:
        """Ends the thread and reads the rest."""
        self._stopped.set()
        self.join()
        for _ in range(100):
            try:
                self.read()
                break
            except redis.RedisError:
                time.sleep(0.1)
        self._client.close()


@dataclass
class _Shown:
    """What one bundle shows while its log is read in order."""

    by_number: dict[int, int] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)


def judged_by_items(
    operations: Sequence[Operation], entries: dict[int, Entry]
) -> tuple[list[Operation], SharedLog]:
    """Returns operations whose reads name the last position that they must show.

    Rollbacks name what they restore in the same way.

    Args:
        operations: All operations.
        entries: All entries of the log, by position.

    Returns:
        The operations, and what the log tells beside them.
    """
    bundles = {one.bundle for one in entries.values()}
    bundles |= {one.version.bundle for one in operations if one.version is not None}
    shown = {bundle: _Shown() for bundle in bundles}
    for position in range(1, max(entries, default=0) + 1):
        entry = entries.get(position)
        for bundle, state in shown.items():
            if entry is not None and entry.bundle == bundle and entry.assigned is not None:
                state.pending = [one for one in state.pending if one > entry.assigned]
            elif entry is not None and entry.bundle != bundle and entry.assigned is None:
                state.pending.append(position)
            state.by_number[position] = state.pending[0] - 1 if state.pending else position
    assigned = frozenset(at for at, entry in entries.items() if entry.assigned is not None)

    def of(version: Version | None) -> Version | None:
        if version is None:
            return None
        number = shown[version.bundle].by_number.get(version.number, version.number)
        return version._replace(number=number)

    judged = [
        replace(
            one,
            version=one.version if one.changes else of(one.version),
            restores=of(one.restores),
        )
        for one in operations
    ]
    return judged, SharedLog(assigned, [at for at in sorted(entries) if entries[at].rollback])
