"""The counts of experiments in a folder, so that they survive a restart."""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Protocol

import msgspec

from recserve.files import UnreadableFile, check_format, read_bytes, set_aside, whole_file
from recserve.schemas.experiments import FirstVerdict, Status

log = logging.getLogger(__name__)

FORMAT = "recserve-experiment/1"
SAVE_S = 10.0
SUFFIX = ".counts"
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class SavedArm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of one arm.

    Attributes:
        name: Name of the arm.
        requests: Requests since the start of the experiment.
        errors: Failed requests.
        empty: Empty answers.
        answers: Answers by group of users, as int64 little-endian.
        events: By goal, events by group of users.
        other_events: Attributed events of other types.
        before: Requests, errors and empty answers before the last start.
        latencies: Answered requests by latency, as `answers`.
        before_latencies: Likewise, of those before the last start.
    """

    name: str
    requests: Count
    errors: Count
    empty: Count
    answers: bytes
    events: dict[str, bytes]
    other_events: Count
    before: tuple[Count, Count, Count]
    latencies: bytes
    before_latencies: bytes


class _Version(msgspec.Struct):
    """The version that a file names."""

    format: str | None = None


class SavedExperiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of one experiment.

    Attributes:
        settings: Hash of the settings that the counts belong to.
        ran_s: Seconds for which it has been running.
        arms: The arms.
        seen: Hashes of the events that are counted.
        status: Whether it runs.
        reason: Why it does not run; None if it runs.
        breach: The arm that made it fall back, and why; None if none did.
        started_us: When it began to count, in microseconds since 1970; 0 if unknown.
        first_verdicts: The first verdict on each arm that has one.
        format: Name and version of the format.
    """

    settings: str
    ran_s: Seconds
    arms: list[SavedArm]
    seen: list[int]
    status: Status = "running"
    reason: str | None = None
    breach: tuple[str, str] | None = None
    started_us: Count = 0
    first_verdicts: dict[str, FirstVerdict] = {}
    format: str = FORMAT


class OtherSettings(ValueError):
    """The counts belong to an experiment with other settings."""


class Saves(Protocol):
    """An experiment whose state is saved.

    Attributes:
        keep: Writes a state so that it survives a crash, and raises OSError if it cannot. None
            keeps the state in memory.
    """

    keep: Callable[[SavedExperiment], None] | None

    @property
    def name(self) -> str:
        """Name of the experiment, also that of its file."""

    def save(self) -> None:
        """Looks for a first verdict, and passes the present state to `keep`. Raises OSError."""

    def restore(self, saved: SavedExperiment) -> None:
        """Continues counts.

        Raises:
            OtherSettings: If they belong to other settings.
            ValueError: If they are damaged.
        """


class SavedCounts:
    """Restores experiments at start, and writes them every SAVE_S seconds and at the end.

    A crash loses the counts of the last SAVE_S seconds, of all arms alike. It loses no stop, start
    or fall-back: an experiment writes these itself, by the `keep` that it gets here. One process
    writes a folder; another one that has the same folder keeps its experiments in memory.

    Attributes:
        folder: The folder, with one file per experiment; None keeps all in memory.
    """

    def __init__(self, folder: Path | None, experiments: Iterable[Saves]) -> None:
        """Opens the folder and restores the experiments.

        Args:
            folder: The folder; it is created. None keeps all in memory.
            experiments: The experiments of the server.

        Raises:
            OSError: If the folder or a file in it cannot be used.
            UnreadableFile: If a file is damaged, or another version of recserve wrote it. An
                experiment that was stopped does not begin again for that.
        """
        self.folder = folder
        self._experiments = list(experiments)
        self._written: dict[str, SavedExperiment] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: IO[bytes] | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / ".lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("%s belongs to another process; experiments count in memory here", folder)
            return
        for one in self._experiments:
            path = folder / f"{one.name}{SUFFIX}"
            self._restore(one, path)
            one.keep = partial(self._write, path)

    def start(self) -> None:
        """Starts the thread that writes."""
        self._thread = threading.Thread(target=self._run, name="experiment-counts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the last counts and gives the folder back."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._lock is not None:
            self._lock.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(SAVE_S)
            for one in self._experiments:
                try:
                    one.save()
                except OSError as error:
                    log.error("counts of experiment %s are not saved: %s", one.name, error)

    def _restore(self, one: Saves, path: Path) -> None:
        if not path.exists():
            return
        content = read_bytes(path)
        try:
            check_format(msgspec.msgpack.decode(content, type=_Version).format, FORMAT, path)
            one.restore(msgspec.msgpack.decode(content, type=SavedExperiment))
        except UnreadableFile:
            raise
        except OtherSettings as error:
            log.warning(
                "experiment %s counts from zero: %s: %s; they are now in %s",
                one.name, path, error, set_aside(path),
            )  # fmt: skip
        except (msgspec.DecodeError, ValueError) as error:
            raise UnreadableFile(
                f"{path} is damaged: {error}; put back a copy of it, or move it away so that the "
                f"experiment {one.name} runs and counts from zero"
            ) from None
        else:
            log.info("experiment %s continues the counts of %s", one.name, path)

    def _write(self, path: Path, saved: SavedExperiment) -> None:
        """Writes aside, syncs and renames, so that a crash leaves the old state or the new one."""
        last = self._written.get(path.name)
        idle = last is not None and msgspec.structs.replace(saved, ran_s=last.ran_s) == last
        if idle and not self._closing.is_set():
            return
        with whole_file(path) as new:
            new.write_bytes(msgspec.msgpack.encode(saved))
        self._written[path.name] = saved
