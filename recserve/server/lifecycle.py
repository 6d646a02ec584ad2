"""The state of a server process: loading, ready, draining, closed."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable

from recserve.metrics import Gauges
from recserve.server.errors import NotReady
from recserve.service import Service

log = logging.getLogger(__name__)
# Their messages are for the operator. Any other exception is a bug and is logged with a traceback.
EXPECTED_ERRORS = (ValueError, LookupError, OSError, RuntimeError)


class Lifecycle:
    """Loads the service, holds it while it takes requests, and closes it.

    Attributes:
        loaded: Set when loading has ended, with or without success.
        failure: The error that ended loading; None unless loading failed.
        draining: True once the server takes no new requests.
        in_flight: Number of unanswered requests; only the event loop changes it.
    """

    def __init__(self, load: Callable[[], Service]) -> None:
        """Stores the loader; `start` calls it.

        Args:
            load: Opens the service. It runs on a thread, so that `live` answers meanwhile.
        """
        self._load = load
        self._service: Service | None = None
        self._thread: threading.Thread | None = None
        self.loaded = threading.Event()
        self.failure: BaseException | None = None
        self.draining = False
        self.in_flight = 0

    def start(self) -> None:
        """Starts loading on a thread."""
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            service = self._load()
            # Models and catalogue live as long as the process. Freezing them keeps full garbage
            # collections from traversing them during a request.
            gc.collect()
            gc.freeze()
            self._service = service
            log.info("ready after %.1f s", time.monotonic() - began_s)
        except BaseException as error:
            quiet = isinstance(error, EXPECTED_ERRORS) and not log.isEnabledFor(logging.DEBUG)
            trace = None if quiet else error
            log.error("the service could not be started: %s", error, exc_info=trace)
            self.failure = error
        finally:
            self.loaded.set()

    @property
    def service(self) -> Service:
        """The service. Raises NotReady unless it takes requests."""
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
        """Returns the metrics of the engine; None before it is loaded."""
        return None if self._service is None else self._service.gauges()

    def close(self) -> None:
        """Waits for a load in progress, then closes the service."""
        self.draining = True
        if self._thread is not None:
            self._thread.join()
        if self._service is not None:
            self._service.close()
            gc.unfreeze()
