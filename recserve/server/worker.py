"""The service inside a server process: loading, ready, draining, closed."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable

from recserve.metrics import Gauges
from recserve.server.errors import NotReady
from recserve.service import Service

log = logging.getLogger(__name__)


class Worker:
    """Holds the service while it lives.

    load: makes the service; it runs on its own thread, so that the server answers `live` meanwhile.
    in_flight: requests being answered; touched on the event loop only.
    """

    def __init__(self, load: Callable[[], Service]) -> None:
        self._load = load
        self._service: Service | None = None
        self._thread: threading.Thread | None = None
        self.loaded = threading.Event()
        self.failure: BaseException | None = None
        self.draining = False
        self.in_flight = 0

    def start(self) -> None:
        """Begin to load."""
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            service = self._load()
            # Models and catalogue live as long as the process: out of the collector's sight, or
            # every full collection walks them in the middle of a request.
            gc.collect()
            gc.freeze()
            self._service = service
        except BaseException as error:
            log.exception("the service could not be started")
            self.failure = error
        finally:
            self.loaded.set()

    @property
    def service(self) -> Service:
        """The service, if it takes requests now. Raises NotReady."""
        if self.draining:
            raise NotReady("the server is shutting down")
        if self.failure is not None:
            raise NotReady("the server could not start")
        if self._service is None:
            raise NotReady("the server is loading")
        if not self._service.alive:
            raise NotReady("the engine has stopped")
        return self._service

    def gauges(self) -> Gauges | None:
        """Figures of the engine, None while there is none."""
        return None if self._service is None else self._service.gauges()

    def close(self) -> None:
        """Wait for a load under way, then close the service."""
        self.draining = True
        if self._thread is not None:
            self._thread.join()
        if self._service is not None:
            self._service.close()
            gc.unfreeze()
