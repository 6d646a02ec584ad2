"""What is served inside a server process: loading, ready, draining, closed."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable

from recserve.metrics import Gauges
from recserve.server.errors import NotReady
from recserve.service import Service
from recserve.service.served import Served

log = logging.getLogger(__name__)
# Their words are for whoever started the server; anything else is a bug of ours and has a trace.
TOLD = (ValueError, LookupError, OSError, RuntimeError)


class Worker:
    """Holds what is served while it lives.

    load: makes it; it runs on its own thread, so that the server answers `live` meanwhile.
    in_flight: requests being answered; touched on the event loop only.
    """

    def __init__(self, load: Callable[[], Served]) -> None:
        self._load = load
        self._served: Served | None = None
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
        began_s = time.monotonic()
        try:
            served = self._load()
            # Models and catalogue live as long as the process: out of the collector's sight, or
            # every full collection walks them in the middle of a request.
            gc.collect()
            gc.freeze()
            self._served = served
            log.info("ready after %.1f s", time.monotonic() - began_s)
        except BaseException as error:
            quiet = isinstance(error, TOLD) and not log.isEnabledFor(logging.DEBUG)
            trace = None if quiet else error
            log.error("the service could not be started: %s", error, exc_info=trace)
            self.failure = error
        finally:
            self.loaded.set()

    @property
    def served(self) -> Served:
        """What is served, if it takes requests now. Raises NotReady."""
        if self.draining:
            raise NotReady("the server is shutting down")
        if self.failure is not None:
            raise NotReady("the server could not start")
        if self._served is None:
            raise NotReady("the server is loading")
        if not self._served.alive:
            raise NotReady("the engine has stopped")
        return self._served

    @property
    def service(self) -> Service:
        """The bundle's side. Raises NotReady, or UnknownModel where there is no bundle."""
        return self.served.items

    def gauges(self) -> Gauges | None:
        """Figures of the engine, None while there is none."""
        return None if self._served is None else self._served.gauges()

    def close(self) -> None:
        """Wait for a load under way, then close the service."""
        self.draining = True
        if self._thread is not None:
            self._thread.join()
        if self._served is not None:
            self._served.close()
            gc.unfreeze()
