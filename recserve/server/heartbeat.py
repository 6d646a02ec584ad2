"""Tells the other servers of a shared catalogue what this one does, every few seconds.

Each report also brings the load of a bundle that all servers make (`fleet_load`).

Only a server whose log of item changes is in Redis imports this. Requests pay nothing for it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time

from msgspec.structs import replace

from recserve.config import ServerConfig
from recserve.features.catalog.fleet import MAX_ID, FleetDirectory, FleetUnavailable, Replica
from recserve.features.history.stores import split_ttl
from recserve.features.redis_connection import FAILURES, connect, describe
from recserve.schemas.admin import FleetLoad
from recserve.server.errors import FleetSilent, NotReady
from recserve.server.fleet_load import FleetMember
from recserve.server.lifecycle import Lifecycle

log = logging.getLogger(__name__)
EVERY_S = 3.0


class Heartbeat:
    """Reports the state of a server to Redis from a thread of its own.

    Attributes:
        member: The part of the server in loads of all servers.
    """

    def __init__(self, config: ServerConfig, lifecycle: Lifecycle) -> None:
        """Calls nothing yet.

        Args:
            config: Settings of a server whose log of item changes is in Redis.
            lifecycle: State of its service.
        """
        assert config.catalog_url is not None
        self._url, self._name = split_ttl(config.catalog_url)[0], config.catalog_name
        self._lifecycle = lifecycle
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[: MAX_ID - 20]
        self._last = Replica(
            id=f"{host}:{os.getpid()}:{config.port}",
            address=f"{host}:{config.port}",
            bundle="" if config.bundle is None else config.bundle.name[:128],
            started_at=time.time(),
        )
        self.member = FleetMember(lifecycle, self._last.id)
        self._directory: FleetDirectory | None = None
        self._failed = False
        self._ended = threading.Event()
        self._reporting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def load_all(self, name: str, force: bool) -> FleetLoad:
        """Makes all servers load a bundle.

        Raises:
            FleetSilent: If Redis does not answer.
            Exception: As `FleetMember.begin`.
        """
        try:
            with self._reporting:  # a report reads the load before or after this
                return self.member.begin(self._open(), name, force)
        except FleetUnavailable as error:
            raise FleetSilent(str(error)) from error
        except FAILURES as error:  # of `connect`
            raise FleetSilent(f"redis: {describe(error)}") from error

    def close(self) -> None:
        """Ends the thread, which takes the report back."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._report()
                if self._failed:
                    log.info("this server is listed in Redis again")
                self._failed = False
            except (FleetUnavailable, ValueError) as error:
                self._warn(str(error))
            except FAILURES as error:  # of `connect`
                self._warn(f"redis: {describe(error)}")
            except Exception:  # a report is lost, not the thread
                log.exception("this server is not listed in Redis")
            if self._ended.wait(EVERY_S):
                break
        if self._directory is not None:
            try:
                self._directory.leave(self._last.id)
            except FleetUnavailable as error:
                log.info("this server stays listed for some seconds: %s", error)
            self._directory.close()

    def _warn(self, reason: str) -> None:
        if not self._failed:
            log.warning("this server is not listed in Redis: %s", reason)
        self._failed = True

    def _open(self) -> FleetDirectory:
        if self._directory is None:
            self._directory = FleetDirectory(connect(self._url), self._name)
        return self._directory

    def _report(self) -> None:
        changed = True
        while changed:
            with self._reporting:
                directory, self._last = self._open(), self._state()
                changed = self.member.step(directory, directory.report(self._last))

    def _state(self) -> Replica:
        """Returns what to report; a server that loads or drains keeps its last versions."""
        lifecycle = self._lifecycle
        self._last = replace(self._last, rollout=self.member.done)
        if lifecycle.draining:
            return replace(self._last, state="draining")
        try:
            service = lifecycle.service
        except NotReady:
            return replace(self._last, state="loading")
        gauges, shown = service.gauges(), lifecycle.status().current
        lag = gauges.catalog_log
        return replace(
            self._last,
            state="swapping" if lifecycle.swapping else "ready",
            bundle=self._last.bundle if shown is None else shown.path[:128],
            model_version=service.bundle.manifest.model_version[:128],
            catalog_version=service.catalog.current.items.name[:128],
            lag_s=0.0 if lag is None else lag.lag_s,
            lag_positions=0 if lag is None else lag.lag_positions,
            queue_depth=gauges.queue_depth,
        )
