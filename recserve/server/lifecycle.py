"""The state of a server process: loading, ready, replacing the service, draining, closed."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recserve.metrics import Gauges
from recserve.server.errors import NotReady
from recserve.service import Service
from recserve.service.replacement import Predecessor

log = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.0005  # while a bundle is loaded; Python's own value is 5 ms
# Their messages are for the operator. Any other exception is a bug and is logged with a traceback.
EXPECTED_ERRORS = (ValueError, LookupError, OSError, RuntimeError)


class Lifecycle:
    """Loads the service, holds it while it takes requests, replaces it, and closes it.

    Attributes:
        loaded: Set when loading has ended, with or without success.
        failure: The error that ended loading; None unless loading failed.
        draining: True once the server takes no new requests.
        predecessor: Holds the service that was replaced last.
    """

    def __init__(self, load: Callable[[], Service]) -> None:
        """Stores the loader; `start` calls it.

        Args:
            load: Opens the service. It runs on a thread, so that `live` answers meanwhile.
        """
        self._load = load
        self._service: Service | None = None
        self._thread: threading.Thread | None = None
        self._replacing = threading.Lock()
        # Held from the moment when the next service is open until the old one is put aside.
        self._switching = threading.Lock()
        # A request belongs to the generation in which it began. An old service is put aside once
        # no request of its generation or of an earlier one is left.
        self._generation = 0
        self._unanswered: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._closing = False
        self.loaded = threading.Event()
        self.failure: BaseException | None = None
        self.draining = False
        self.predecessor = Predecessor()

    @property
    def in_flight(self) -> int:
        """Number of unanswered requests."""
        return self._unanswered.total()

    def enter(self) -> int:
        """Counts a request that begins. Returns its generation, for `leave`."""
        with self._changed:
            self._unanswered[self._generation] += 1
            return self._generation

    def leave(self, generation: int) -> None:
        """Counts a request that ends."""
        with self._changed:
            self._unanswered[generation] -= 1
            if not self._unanswered[generation]:
                del self._unanswered[generation]
                self._changed.notify_all()

    def start(self) -> None:
        """Starts loading on a thread."""
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            with _undisturbed():
                service = self._load()
                # Models and catalogue live as long as the process. Freezing them keeps full garbage
                # collections from traversing them during a request.
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

    @property
    def engine_stopped(self) -> bool:
        """Whether the engine's thread has ended with an error."""
        return self._service is not None and self._service.engine.stopped_by is not None

    def gauges(self) -> Gauges | None:
        """Returns the metrics of the engine; None before it is loaded."""
        return None if self._service is None else self._service.gauges()

    def swap(
        self,
        load: Callable[[Service], Service],
        hand_over: Callable[[Service, Service, Callable[[], None]], None],
    ) -> None:
        """Replaces the service; the old one answers until then, and finishes its requests.

        It returns when those have ended, so it runs on a thread of its own. The old service is
        the predecessor then.

        Args:
            load: Opens the new service beside the old one.
            hand_over: Called with the old service, the new one, and a function that publishes the
                new one.

        Raises:
            NotReady: If the server does not take requests.
            Exception: An error of `load` or `hand_over`; the old service goes on answering.
        """
        with self._replacing:
            old = self.service
            with _undisturbed():
                new = load(old)
            with self._switching:
                try:
                    if self._closing:
                        raise NotReady("the server is shutting down")
                    hand_over(old, new, lambda: self._publish(new))
                except BaseException:
                    new.close()
                    raise
                self._await_requests()
                self.predecessor.keep(old)

    @property
    def replacing(self) -> bool:
        """Whether a thread replaces the service."""
        return self._replacing.locked()

    def close(self) -> None:
        """Waits for the first load or for a switch in progress, then closes the service.

        A replacement that still loads is not waited for. Its thread closes what it has opened.
        """
        self.draining = self._closing = True
        if self._thread is not None:
            self._thread.join()
        with self._switching:
            self.predecessor.drop()
            if self._service is not None:
                self._service.close()
                gc.unfreeze()

    def _publish(self, service: Service) -> None:
        """Makes new requests go to another service. Raises NotReady while draining."""
        if self.draining:
            raise NotReady("the server is shutting down")
        gc.freeze()
        with self._changed:
            self._service = service
            self._generation += 1

    def _await_requests(self) -> None:
        """Waits until all requests of earlier generations have ended, or until `close`."""
        with self._changed:
            while any(g < self._generation for g in self._unanswered) and not self._closing:
                self._changed.wait(0.1)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps requests fast while the block loads a bundle on another thread.

    - The interpreter switches threads more often, because a request crosses several of them.
    - No garbage collection traverses the objects that are being loaded.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sys.setswitchinterval(interval_s)
