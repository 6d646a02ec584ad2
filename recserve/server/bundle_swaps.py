"""Replaces the served bundle on an operator's request: load, rollback, reload, status."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prometheus_client import Counter

from recserve.bundle.bundle import MANIFEST, Bundle, BundleError, Manifest
from recserve.files import UnreadableFile, read_bytes
from recserve.schemas.admin import BundleStatus, ServedBundle
from recserve.server.errors import AdminDisabled, NotReady, SwapConflict, UnknownBundle
from recserve.server.lifecycle import EXPECTED_ERRORS, Lifecycle
from recserve.service import Service
from recserve.service.replacement import at_low_priority, hand_over, probe

log = logging.getLogger(__name__)
# Share of the whole at the beginning of each stage.
VERIFY, OPEN, PROBE, SWITCH, CLOSE, DONE = 0.0, 0.3, 0.8, 0.85, 0.9, 1.0


class SuccessorLoader(Protocol):
    """Opens the services of a server; `loader.ServiceLoader` implements it."""

    def check(self, old: Service, bundle: Bundle, force: bool) -> None:
        """Raises UnfitBundle if the bundle cannot replace that of the service."""

    def successor(self, old: Service, bundle: Bundle) -> Service:
        """Opens a bundle beside a service."""


@dataclass(frozen=True)
class BundleVersion:
    """A bundle as it was when it was loaded.

    Attributes:
        folder: Its folder, without symbolic links.
        digest: sha256 of the content of its manifest.
    """

    folder: Path
    digest: str

    @staticmethod
    def of(folder: Path) -> BundleVersion:
        """Reads the manifest of a folder. Raises BundleError."""
        try:
            manifest = Manifest.from_json(read_bytes(folder / MANIFEST))
        except UnreadableFile as error:
            raise BundleError(str(error)) from error
        return BundleVersion(folder.resolve(), _digest(manifest))


@dataclass(frozen=True)
class _Served:
    version: BundleVersion
    shown: ServedBundle

    @staticmethod
    def of(service: Service) -> _Served:
        manifest, folder = service.bundle.manifest, service.bundle.root.resolve()
        shown = ServedBundle(
            path=folder.name,
            model_version=manifest.model_version,
            catalog_version=manifest.catalog_version,
        )
        return _Served(BundleVersion(folder, _digest(manifest)), shown)


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


class BundleSwaps:
    """Replaces the bundle of a running server, one replacement at a time.

    Attributes:
        lifecycle: Holds the service.
        loader: Opens services.
        configured: Folder that `reload` reads; it may be a symbolic link. None without a bundle.
        bundles_dir: Folder of the bundles that `load` accepts; None refuses every name.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        loader: SuccessorLoader,
        configured: Path | None,
        bundles_dir: Path | None,
        count: Counter,
        check: Callable[[Service], None],
    ) -> None:
        """Replaces nothing yet.

        Args:
            lifecycle: Holds the service.
            loader: Opens services.
            configured: Folder that `reload` reads.
            bundles_dir: Folder of the bundles that `load` accepts.
            count: Counts replacements by their result.
            check: Raises ValueError if an opened service must not answer, such as one whose models
                do not fit the arms of experiments. A forced replacement logs the error instead.
        """
        self.lifecycle = lifecycle
        self.loader = loader
        self.configured = configured
        self.bundles_dir = bundles_dir
        self._count = count
        self._check = check
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._previous: _Served | None = None
        self._state: str = "ready"
        self._message = "no replacement yet"
        self._progress = DONE

    def load(self, name: str, force: bool = False) -> BundleStatus:
        """Starts to replace the bundle by another one of `bundles_dir`.

        Args:
            name: Name of a folder in `bundles_dir`. A symbolic link may lead to another folder in
                it, but not out of it.
            force: Accepts other items and missing models.

        Raises:
            AdminDisabled: If the server has no `bundles_dir`.
            UnknownBundle: If there is no such folder in it.
            SwapConflict: If a replacement is in progress.
        """
        if self.bundles_dir is None:
            raise AdminDisabled("loading is disabled; set bundles_dir to enable it")
        inside, folder = self.bundles_dir.resolve(), None
        with contextlib.suppress(OSError, RuntimeError):  # links in a circle, or no permission
            found = (inside / name).resolve()
            if found.parent == inside and (found / MANIFEST).is_file():
                folder = found
        if folder is None:
            raise UnknownBundle(f"bundles_dir has no bundle {name[:128]!r}")
        return self._start(folder, force, rollback=False)

    def rollback(self) -> BundleStatus:
        """Starts to restore the previous bundle.

        Raises:
            SwapConflict: If there is none, if its folder has changed, or if a replacement is in
                progress.
        """
        previous = self._previous
        if previous is None:
            raise SwapConflict("there is no previous bundle; load one first")
        try:
            found = BundleVersion.of(previous.version.folder)
        except (OSError, BundleError):
            found = None
        if found != previous.version:
            raise SwapConflict(f"the previous bundle {previous.shown.path} has changed or is gone")
        return self._start(previous.version.folder, force=True, rollback=True)

    def reload(self) -> None:
        """Loads the configured folder again if its bundle has changed; logs the outcome."""
        try:
            if self.configured is None:
                raise SwapConflict("this server has no bundle")
            found = BundleVersion.of(self.configured)
            if found == _Served.of(self.lifecycle.service).version:
                log.info("the bundle has not changed")
                return
            self._start(found.folder, force=False, rollback=False)
        except (*EXPECTED_ERRORS, NotReady) as error:
            log.error("the bundle is not reloaded: %s", error)

    def status(self) -> BundleStatus:
        """Returns the served bundles and the latest replacement."""
        try:
            current = _Served.of(self.lifecycle.service).shown
        except (NotReady, LookupError):
            current = None
        with self._lock:
            return BundleStatus(
                current=current,
                previous=None if self._previous is None else self._previous.shown,
                state=self._state,  # type: ignore[arg-type]
                message=self._message,
                progress=self._progress,
            )

    def _start(self, folder: Path, force: bool, rollback: bool) -> BundleStatus:
        _ = self.lifecycle.service.bundle  # raises unless the server has one and takes requests
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise SwapConflict("a bundle is being loaded; wait for it")
            self._state, self._progress = "loading", VERIFY
            self._message = f"verifying {folder.name}"
            self._thread = threading.Thread(
                target=self._run, args=(folder, force, rollback), name="swap", daemon=True
            )
            self._thread.start()
        return self.status()

    def _run(self, folder: Path, force: bool, rollback: bool) -> None:
        name = folder.name

        def load(old: Service) -> Service:
            kept = self.lifecycle.predecessor.take() if rollback else None
            new = self._opened(old, folder, force) if kept is None else kept
            try:
                if kept is None:
                    self._tell(PROBE, f"testing {name}")
                    probe(new)
                self._fits(new, force)
            except BaseException:
                new.close()
                raise
            return new

        def switch(old: Service, new: Service, publish: Callable[[], None]) -> None:
            self._tell(SWITCH, f"switching to {name}")
            served = _Served.of(old)
            carried = hand_over(old, new, publish, override=rollback)
            with self._lock:
                self._previous = served
            words = f"{carried.put} items put, {carried.hidden} hidden"
            if carried.refused:
                words += f", {len(carried.refused)} refused (see the log)"
            self._tell(CLOSE, f"{name} answers; live changes carried over: {words}")

        try:
            self.lifecycle.swap(load, switch)
        except Exception as error:
            expected = isinstance(error, EXPECTED_ERRORS)
            message = str(error).replace(str(folder), name) if expected else "internal error"
            log.error("%s is not loaded: %s", name, error, exc_info=None if expected else error)
            self._end("failed", "refused", f"{name} is not loaded: {message}")
        else:
            log.info("%s", self._message)
            self._end("ready", "loaded", self._message)

    def _opened(self, old: Service, folder: Path, force: bool) -> Service:
        bundle = Bundle.open(folder)
        at_low_priority(bundle.verify)
        self.lifecycle.predecessor.drop()  # its memory and its journal are needed now
        self.loader.check(old, bundle, force)
        self._tell(OPEN, f"opening {folder.name}")
        return self.loader.successor(old, bundle)

    def _fits(self, new: Service, force: bool) -> None:
        try:
            self._check(new)
        except ValueError as error:
            if not force:
                raise
            log.warning("the bundle is loaded by force although it does not fit: %s", error)

    def _tell(self, progress: float, message: str) -> None:
        with self._lock:
            self._progress, self._message = progress, message

    def _end(self, state: str, result: str, message: str) -> None:
        self._count.labels(result).inc()
        with self._lock:
            self._state, self._message, self._progress = state, message, DONE
