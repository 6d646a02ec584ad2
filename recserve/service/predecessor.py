"""The service that was replaced last: it waits beside the current one, for a rollback."""

from __future__ import annotations

import gc
import threading
import weakref

from recserve.engine.engine import Engine
from recserve.service.memory import release_freed
from recserve.service.service import Service

# A load needs the memory of two bundles anyway; this is how much longer both of them stay.
KEPT_S = 600.0


class Predecessor:
    """Holds at most one replaced service, so that a rollback loads nothing.

    The service keeps its models and its catalogue. It answers no requests and its prefix caches are
    empty, so the data of a user who is deleted meanwhile does not survive in it.
    """

    def __init__(self, kept_s: float = KEPT_S) -> None:
        """Holds nothing yet.

        Args:
            kept_s: Time after which a service is closed.
        """
        self._kept_s = kept_s
        self._service: Service | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def keep(self, service: Service) -> None:
        """Holds a service whose requests have ended, and closes the one that it held before."""
        with self._lock:
            self._close()
            service.engine.forget_all()
            self._service = service
            self._timer = threading.Timer(self._kept_s, self._expire, (weakref.ref(service),))
            self._timer.daemon = True
            self._timer.start()
        release_freed()  # what loading its successor needed meanwhile

    def take(self) -> Service | None:
        """Gives the service away, to answer again. Returns None without a working one."""
        with self._lock:
            if self._service is not None and self._service.alive:
                return self._release()
            self._close()
            return None

    def drop(self) -> None:
        """Closes the service and frees its memory. When it returns, its journal is free too."""
        with self._lock:
            self._close()

    def _release(self) -> Service | None:
        service, self._service = self._service, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return service

    def _close(self) -> None:
        service = self._release()
        if service is not None:
            references = weakref.ref(service), weakref.ref(service.engine)
            service.close()
            del service
            _collect(references)

    def _expire(self, expected: weakref.ref[Service]) -> None:
        with self._lock:
            if self._service is not None and self._service is expected():
                self._close()


def _collect(closed: tuple[weakref.ref[Service], weakref.ref[Engine]]) -> None:
    """Frees a closed service. Reference counts do most of it; a collection is the last resort."""
    if any(reference() is not None for reference in closed):
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    release_freed()
