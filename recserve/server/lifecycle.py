"""The service of a server process: load, swap, roll back, drain, close.

    loading --+--> ready <---> swapping the bundle
              |      |
              |      +--> draining ---> closed
              +--> failed

`_load` and `_swap` run on threads of their own. Requests go on during a swap: each one belongs to a
generation and ends on the service on which it began.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import prometheus_client

from recserve.bundle.bundle import MANIFEST, Bundle, BundleError, Manifest
from recserve.files import UnreadableFile, read_bytes
from recserve.metrics import Gauges
from recserve.schemas.admin import BundleStatus, ServedBundle
from recserve.server.errors import AdminDisabled, NotReady, SwapConflict, UnknownBundle
from recserve.server.loader import ServiceLoader
from recserve.service import Service
from recserve.service.replacement import Predecessor, at_low_priority, hand_over, probe

log = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.0005  # while a bundle is loaded; Python's own value is 5 ms
# Their messages are for the operator. Any other exception is a bug and is logged with a traceback.
EXPECTED_ERRORS = (ValueError, LookupError, OSError, RuntimeError)
State = Literal["loading", "ready", "failed"]  # of the latest swap
# Share of a swap at the beginning of each stage.
VERIFY, OPEN, PROBE, SWITCH, CLOSE, DONE = 0.0, 0.3, 0.8, 0.85, 0.9, 1.0


@dataclass(frozen=True)
class BundleVersion:
    """A bundle as it was when it was loaded.

    Attributes:
        folder: Its folder, without symbolic links.
        digest: sha256 of the content of its manifest.
        shown: What the admin routes say of it.
    """

    folder: Path
    digest: str
    shown: ServedBundle

    @staticmethod
    def of(manifest: Manifest, folder: Path) -> BundleVersion:
        """Returns the version of a folder with this manifest."""
        folder = folder.resolve()
        shown = ServedBundle(
            path=folder.name,
            model_version=manifest.model_version,
            catalog_version=manifest.catalog_version,
        )
        return BundleVersion(folder, hashlib.sha256(manifest.to_json().encode()).hexdigest(), shown)

    @staticmethod
    def read(folder: Path) -> BundleVersion:
        """Reads the manifest of a folder. Raises BundleError."""
        try:
            return BundleVersion.of(Manifest.from_json(read_bytes(folder / MANIFEST)), folder)
        except UnreadableFile as error:
            raise BundleError(str(error)) from error


class Lifecycle:
    """Loads the service, holds it while it takes requests, replaces its bundle, and closes it.

    Attributes:
        loader: Opens services.
        configured: Folder that `reload` reads; it may be a symbolic link. None without a bundle.
        bundles_dir: Folder of the bundles that `load` accepts; None refuses every name.
        loaded: Set when loading has ended, with or without success.
        failure: The error that ended loading; None unless loading failed.
        draining: True once the server takes no new requests.
        predecessor: Holds the service that was replaced last.
    """

    def __init__(
        self,
        loader: ServiceLoader,
        count: prometheus_client.Counter,
        check: Callable[[Service], None] | None = None,
    ) -> None:
        """Loads nothing yet; `start` does.

        Args:
            loader: Opens services.
            count: Counts swaps by their result.
            check: Raises ValueError if an opened service must not answer, such as one whose models
                do not fit the arms of experiments. A forced swap logs the error instead.
        """
        self.loader = loader
        self.configured = loader.config.bundle
        self.bundles_dir = loader.config.bundles_dir
        self._count = count
        self._check = check
        self._service: Service | None = None
        self._loading: threading.Thread | None = None
        # A request belongs to the generation in which it began. An old service is put aside once
        # no request of its generation or of an earlier one is left.
        self._generation = 0
        self._unanswered: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._closing = False
        # Held from the moment when the next service is tested until the old one is put aside.
        self._switching = threading.Lock()
        self._lock = threading.Lock()  # of the next four attributes
        self._previous: BundleVersion | None = None
        self._state: State = "ready"
        self._message = "no replacement yet"
        self._progress = DONE
        self.loaded = threading.Event()
        self.failure: BaseException | None = None
        self.draining = False
        self.predecessor = Predecessor()

    # Requests.

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

    @property
    def in_flight(self) -> int:
        """Number of unanswered requests."""
        return self._unanswered.total()

    @property
    def engine_stopped(self) -> bool:
        """Whether the engine's thread has ended with an error."""
        return self._service is not None and self._service.engine.stopped_by is not None

    def gauges(self) -> Gauges | None:
        """Returns the metrics of the engine; None before it is loaded."""
        return None if self._service is None else self._service.gauges()

    # The first load.

    def start(self) -> None:
        """Starts loading on a thread, so that `live` answers meanwhile."""
        self._loading = threading.Thread(target=self._load, name="load", daemon=True)
        self._loading.start()

    def _load(self) -> None:
        began_s, service = time.monotonic(), None
        try:
            with background_loading():
                service = self.loader.first()
                if self._check is not None:
                    self._check(service)
                # Models and catalogue live as long as the process. Freezing them keeps full garbage
                # collections from traversing them during a request.
                gc.freeze()
            self._service = service
            log.info("ready after %.1f s", time.monotonic() - began_s)
        except BaseException as error:
            if service is not None:
                service.close()
            quiet = isinstance(error, EXPECTED_ERRORS) and not log.isEnabledFor(logging.DEBUG)
            trace = None if quiet else error
            log.error("the service could not be started: %s", error, exc_info=trace)
            self.failure = error
        finally:
            self.loaded.set()

    # Swaps, which an operator starts.

    def load(self, name: str, force: bool = False, digest: str | None = None) -> BundleStatus:
        """Starts to replace the bundle by another one of `bundles_dir`.

        Args:
            name: Name of a folder in `bundles_dir`. A symbolic link may lead to another folder in
                it, but not out of it.
            force: Accepts other items and missing models.
            digest: What the bundle's `BundleVersion` must have; None accepts any.

        Raises:
            AdminDisabled: If the server has no `bundles_dir`.
            UnknownBundle: If there is no such folder in it.
            SwapConflict: If a swap is in progress.
        """
        folder = self._find(name)
        if digest is not None and self.digest(name) != digest:
            raise UnknownBundle(f"bundles_dir has another bundle {name[:128]!r}")
        return self._start_swap(folder, force, rollback=False)

    def digest(self, name: str) -> str:
        """Returns the digest of a bundle of `bundles_dir`.

        Raises:
            AdminDisabled: If the server has no `bundles_dir`.
            UnknownBundle: If there is no such folder in it, or its manifest is damaged.
        """
        folder = self._find(name)
        try:
            return BundleVersion.read(folder).digest
        except BundleError as error:
            reason = str(error).replace(str(folder), folder.name)
            raise UnknownBundle(f"the bundle {name[:128]!r} cannot be read: {reason}") from error

    def _find(self, name: str) -> Path:
        """Returns the folder of a bundle. Raises as `load`."""
        if self.bundles_dir is None:
            raise AdminDisabled("loading is disabled; set bundles_dir to enable it")
        inside, folder = self.bundles_dir.resolve(), None
        with contextlib.suppress(OSError, RuntimeError):  # links in a circle, or no permission
            found = (inside / name).resolve()
            if found.parent == inside and (found / MANIFEST).is_file():
                folder = found
        if folder is None:
            raise UnknownBundle(f"bundles_dir has no bundle {name[:128]!r}")
        return folder

    def rollback(self) -> BundleStatus:
        """Starts to restore the previous bundle.

        Raises:
            SwapConflict: If there is none, if its folder has changed, or if a swap is in progress.
        """
        previous = self._previous
        if previous is None:
            raise SwapConflict("there is no previous bundle; load one first")
        try:
            found = BundleVersion.read(previous.folder)
        except (OSError, BundleError):
            found = None
        if found != previous:
            raise SwapConflict(f"the previous bundle {previous.shown.path} has changed or is gone")
        return self._start_swap(previous.folder, force=True, rollback=True)

    def reload(self) -> None:
        """Loads the configured folder again if its bundle has changed; logs the outcome."""
        try:
            if self.configured is None:
                raise SwapConflict("this server has no bundle")
            found = BundleVersion.read(self.configured)
            if found == _version_of(self.service):
                log.info("the bundle has not changed")
                return
            self._start_swap(found.folder, force=False, rollback=False)
        except EXPECTED_ERRORS as error:
            log.error("the bundle is not reloaded: %s", error)

    def status(self) -> BundleStatus:
        """Returns the served bundles and the latest swap."""
        try:
            current = _version_of(self.service).shown
        except (NotReady, LookupError):
            current = None
        with self._lock:
            return BundleStatus(
                current=current,
                previous=None if self._previous is None else self._previous.shown,
                state=self._state,
                message=self._message,
                progress=self._progress,
            )

    @property
    def current(self) -> BundleVersion:
        """The bundle that answers. Raises NotReady or UnknownModel if there is none."""
        return _version_of(self.service)

    @property
    def swapping(self) -> bool:
        """Whether a thread replaces the bundle."""
        return self._state == "loading"

    def _start_swap(self, folder: Path, force: bool, rollback: bool) -> BundleStatus:
        _ = self.service.bundle  # raises unless the server has one and takes requests
        with self._lock:
            if self.swapping:
                raise SwapConflict("a bundle is being loaded; wait for it")
            self._state, self._progress = "loading", VERIFY
            self._message = f"verifying {folder.name}"
        threading.Thread(
            target=self._swap, args=(folder, force, rollback), name="swap", daemon=True
        ).start()
        return self.status()

    def _swap(self, folder: Path, force: bool, rollback: bool) -> None:
        """Replaces the bundle and tells the result."""
        try:
            message = self._replace(folder, force, rollback)
        except BaseException as error:
            expected = isinstance(error, EXPECTED_ERRORS)
            reason = str(error).replace(str(folder), folder.name) if expected else "internal error"
            trace = None if expected else error
            log.error("%s is not loaded: %s", folder.name, error, exc_info=trace)
            self._count.labels("refused").inc()
            self._tell(DONE, f"{folder.name} is not loaded: {reason}", "failed")
        else:
            log.info("%s", message)
            self._count.labels("loaded").inc()
            self._tell(DONE, message, "ready")

    def _replace(self, folder: Path, force: bool, rollback: bool) -> str:
        """Replaces the service by one of another folder. Returns what the operator is told.

        The old service answers until the new one is published, and finishes its requests.

        Raises:
            NotReady: If the server drains before the new service is published.
            Exception: Why the folder cannot be served. The old service goes on answering.
        """
        name, old, new = folder.name, self.service, None
        try:
            with background_loading():
                if rollback:
                    new = self.predecessor.take()
                if new is None:
                    bundle = Bundle.open(folder)
                    at_low_priority(bundle.verify)
                    self.predecessor.drop()  # its memory and its journal are needed now
                    self.loader.check(old, bundle, force)
                    self._tell(OPEN, f"opening {name}")
                    new = self.loader.successor(old, bundle)
                    self._tell(PROBE, f"testing {name}")
                    probe(new)
                self._check_arms(new, force)
            with self._switching:
                if self.draining:
                    raise NotReady("the server is shutting down")
                self._tell(SWITCH, f"switching to {name}")
                previous = _version_of(old)
                carried = hand_over(old, new, partial(self._publish, new), override=rollback)
                with self._lock:
                    self._previous = previous
                done = f"{carried.put} items put, {carried.hidden} hidden"
                if carried.refused:
                    done += f", {len(carried.refused)} refused (see the log)"
                message = f"{name} answers; live changes carried over: {done}"
                self._tell(CLOSE, message)
                self._await_requests()
                self.predecessor.keep(old)
            return message
        except BaseException:
            if new is not None and new is not self._service:
                new.close()
            raise

    def _check_arms(self, new: Service, force: bool) -> None:
        try:
            if self._check is not None:
                self._check(new)
        except ValueError as error:
            if not force:
                raise
            log.warning("the bundle is loaded by force although it does not fit: %s", error)

    def _publish(self, service: Service) -> None:
        """Makes new requests go to another service."""
        gc.freeze()
        with self._changed:
            self._service = service
            self._generation += 1

    def _await_requests(self) -> None:
        """Waits until all requests of earlier generations have ended, or until `close`."""
        with self._changed:
            while any(g < self._generation for g in self._unanswered) and not self._closing:
                self._changed.wait(0.1)

    def _tell(self, progress: float, message: str, state: State = "loading") -> None:
        with self._lock:
            self._state, self._progress, self._message = state, progress, message

    # The end.

    def close(self) -> None:
        """Waits for the first load or for a switch in progress, then closes the service.

        A swap that still loads is not waited for. Its thread closes what it has opened.
        """
        self.draining = self._closing = True
        if self._loading is not None:
            self._loading.join()
        with self._switching:
            self.predecessor.drop()
            if self._service is not None:
                self._service.close()
                gc.unfreeze()


def _version_of(service: Service) -> BundleVersion:
    """Returns the version of a service's bundle. Raises UnknownModel without one."""
    return BundleVersion.of(service.bundle.manifest, service.bundle.root)


@contextmanager
def background_loading() -> Iterator[None]:
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
