"""Follows a log of changes that other servers write too, and knows how far this server is.

A thread waits for changes. `LiveCatalog.catch_up` reads and applies them, at the start of the
server and later alike. The thread also reads the log once a second, so that a loss of the log is
seen without a change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from recserve.features.catalog.catalog_log import JournalError, SharedLog
from recserve.features.catalog.versions import CatalogVersion, VersionName
from recserve.metrics import CatalogLogCounts
from recserve.service.errors import CatalogLost

log = logging.getLogger(__name__)
WAIT_S = 1.0  # of one wait for changes
PAUSE_S = 0.2  # after a failure
STALE = ("catalog_stale",)


@dataclass
class CatalogFollower:
    """Keeps a live catalogue up to a shared log.

    Attributes:
        log: The log.
        stale_s: Time without the log after which the catalogue counts as stale.
        catch_up: Reads the log and applies what it has.
        version: The version that requests get.
        done: Last position whose items this version has. Behind it are changes of other bundles
            that have no vectors and semantic ids of this one yet.
        losses: How often the log had lost positions that were applied here.
        conflicts: How often another server took the position of a change of this one.
    """

    log: SharedLog
    stale_s: float
    catch_up: Callable[[], object]
    version: CatalogVersion
    losses: int = 0
    conflicts: int = 0
    done: int = 0
    _read_at_s: float = field(default_factory=time.monotonic)
    _closing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of the next attribute
    _awaited: list[tuple[VersionName, Future[None]]] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to follow."""
        self._thread = threading.Thread(target=self._follow, name="follow-items", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, which may be in a wait of a second."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(3 * WAIT_S)

    @property
    def closing(self) -> bool:
        """Whether `close` has been called."""
        return self._closing.is_set()

    @property
    def lag_s(self) -> float:
        """Time since the log was last read to its end."""
        return time.monotonic() - self._read_at_s

    @property
    def stale(self) -> bool:
        """Whether the log has not been reached for too long."""
        return self.lag_s > self.stale_s

    @property
    def degraded(self) -> tuple[str, ...]:
        """What answers say about the catalogue."""
        return STALE if self.stale else ()

    def counts(self) -> CatalogLogCounts:
        """Returns the figures of the metrics."""
        return CatalogLogCounts(
            lag_s=self.lag_s,
            lag_positions=max(0, self.log.end - self.version.number),
            losses=self.losses,
            conflicts=self.conflicts,
        )

    def reached(self, version: CatalogVersion, done: int) -> None:
        """Says that the log was read to its end, which made a version, see `done`."""
        self._read_at_s = time.monotonic()
        with self._lock:
            self.version, self.done = version, done
            awaited, self._awaited = self._awaited, []
            self._awaited = [one for one in awaited if not self._settle(*one)]

    def wait_for(self, name: VersionName) -> Future[None] | None:
        """Returns what ends when the catalogue contains a version; None if it does now.

        Raises:
            CatalogLost: If the log has lost the version.
        """
        with self._lock:
            if self._contains(name):
                return None
            found = Future[None]()
            self._awaited = [one for one in self._awaited if not one[1].cancelled()]
            self._awaited.append((name, found))
            return found

    def _settle(self, name: VersionName, future: Future[None]) -> bool:
        """Ends a wait if the version is there or lost. Returns whether it has ended."""
        try:
            if not self._contains(name):
                return future.cancelled()
        except CatalogLost as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        return True

    def _contains(self, name: VersionName) -> bool:
        """Returns whether the catalogue contains a version. Raises CatalogLost.

        The versions of all bundles of a log have the same epochs and numbers.
        """
        if not name.number:
            return True
        for epoch, begin in self.log.begins.items():
            if epoch > name.epoch and name.number > begin:
                raise CatalogLost(
                    f"catalogue version {name} is lost: the log of changes went on from position "
                    f"{begin} in epoch {epoch}. Send its changes again"
                )
        return self.done >= name.number and self.version.epoch >= name.epoch

    def _follow(self) -> None:
        """Waits for changes and applies them until the catalogue is closed."""
        failed = False
        while not self._closing.is_set():
            try:
                self.log.wait(self.version.number + 1, WAIT_S)
                self.catch_up()
                if failed:
                    log.info("%s answers again", self.log.name)
                failed = False
            except JournalError as error:
                if not failed:
                    log.error("changes of items do not arrive: %s", error)
                failed = True
                self._closing.wait(PAUSE_S)
            except Exception:
                log.exception("changes of items do not arrive")
                failed = True
                self._closing.wait(WAIT_S)
