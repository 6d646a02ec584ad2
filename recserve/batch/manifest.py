"""The output folder of a job: what is done, by which job, and whether the job is whole.

| file | content |
|---|---|
| `_job.json` | everything that determines the bytes of the output |
| `_manifest.jsonl` | one line per finished part |
| `_SUCCESS` | empty; present when all parts are there |

A process that is killed at any point leaves a folder that the same job continues.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from recserve.batch.part import ERRORS_FOLDER, PART_NAME, JobPart, hash_file
from recserve.batch.source import Partition
from recserve.files import TEMPORARY, UnreadableFile, check_format, whole_file

log = logging.getLogger(__name__)

MANIFEST = "_manifest.jsonl"
JOB = "_job.json"
SUCCESS = "_SUCCESS"
FORMAT, VERSION = "recserve-batch", 1  # `_job.json` has the number
LOCK_WAIT_S = 10.0  # a killed job's workers end within this time

Facts = Mapping[str, Any]
T = TypeVar("T")


class OutputExists(ValueError):
    """The output folder holds something that this job can neither continue nor replace."""


class OutputFolder:
    """The output folder of a running job; a second process cannot open it at the same time.

    Attributes:
        path: The folder.
        done: Finished parts by file name; empty before `check_parts`.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        """Creates the folder where necessary, locks it and reads which job it belongs to.

        Args:
            path: The folder.
            overwrite: True removes the output of an earlier job, and no other files.

        Raises:
            OutputExists: If the folder holds files that no job wrote, if `_job.json` is damaged,
                or if another process has the folder.
        """
        check_output(path, overwrite)
        self.path, self.done = path, dict[str, JobPart]()
        path.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(path, os.O_RDONLY)
        try:
            _lock(self.lock, path)
            self.remove_temporary()
            if overwrite:
                self._remove_output()
            self._facts = _read_facts(path)
        except BaseException:
            os.close(self.lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_temporary()
        os.close(self.lock)

    @property
    def whole(self) -> bool:
        """True if the job of this folder is finished."""
        return (self.path / SUCCESS).is_file()

    def claim(self, facts: Facts) -> None:
        """Checks that the folder belongs to this job, and writes `_job.json` into a new folder.

        Args:
            facts: What is known about the job. Facts that the folder does not name yet are added.

        Raises:
            OutputExists: If the folder belongs to another job. The message names the differences.
        """
        facts = json.loads(json.dumps(facts))
        before = self._facts
        different = [
            f"{name} was {before[name]!r} and is {value!r}"
            for name, value in facts.items()
            if name in before and before[name] != value
        ]
        if different:
            raise OutputExists(
                f"{self.path} holds the output of another job: {'; '.join(different)}. "
                "Choose another folder, or replace that output with --overwrite"
            )
        if facts.keys() - before.keys():
            self._facts = {**before, **facts}
            self._write(JOB, json.dumps(self._facts, indent=1) + "\n")

    def check_parts(self) -> Iterator[JobPart]:
        """Compares each part of the manifest with its hash, and yields those that are whole.

        A part whose file is missing or damaged leaves the manifest, so that it is computed again.

        Raises:
            OutputExists: If a line of the manifest does not describe a part.
        """
        path = self.path / MANIFEST
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
        # After the last line end: nothing, or a line that was cut short.
        listed = [
            _decode(line, JobPart, f"{path}, line {number}")
            for number, line in enumerate(lines[:-1], 1)
        ]
        for part in {part.part: part for part in listed}.values():
            flaw = _find_flaw(self.path / part.part, part)
            if flaw is None:
                self.done[part.part] = part
                yield part
            else:
                log.warning("%s is computed again: %s", part.part, flaw)
        text = "".join(map(_line, self.done.values()))
        if text.encode() != b"\n".join(lines):
            (self.path / SUCCESS).unlink(missing_ok=True)
            self._write(MANIFEST, text)

    def add(self, part: JobPart) -> None:
        """Appends a finished part to the manifest and syncs it."""
        self.done[part.part] = part
        with (self.path / MANIFEST).open("a", encoding="utf-8") as file:
            file.write(_line(part))
            file.flush()
            os.fsync(file.fileno())

    def finish(self, partitions: Sequence[Partition], suffix: str) -> list[JobPart]:
        """Puts the manifest into input order and marks the job as finished.

        Args:
            partitions: All partitions of the job, in input order.
            suffix: Suffix of the output files.

        Returns:
            All parts in input order.
        """
        parts = [self.done[partition.name + suffix] for partition in partitions]
        text = "".join(map(_line, parts))
        if (self.path / MANIFEST).read_text(encoding="utf-8") != text:
            self._write(MANIFEST, text)
        self.remove_temporary()
        self._write(SUCCESS, "")
        return parts

    def remove_temporary(self) -> None:
        """Removes files that a killed process left unfinished."""
        for folder in (self.path, self.path / ERRORS_FOLDER):
            for path in folder.glob(f"{TEMPORARY}*"):
                path.unlink(missing_ok=True)

    def _remove_output(self) -> None:
        """Removes the parts of an earlier job and forgets that job; other files stay.

        The folder has a `_job.json` at every moment. Without one, a killed job could not continue
        beside files that no job wrote.
        """
        (self.path / SUCCESS).unlink(missing_ok=True)
        errors = self.path / ERRORS_FOLDER
        for folder in (self.path, errors):
            if folder.is_dir() and not folder.is_symlink():
                for path in folder.glob("part-*"):
                    if re.fullmatch(PART_NAME, path.name) and not path.is_dir():
                        path.unlink()
        if errors.is_dir() and not errors.is_symlink() and not any(errors.iterdir()):
            errors.rmdir()
        self._write(JOB, "{}\n")
        (self.path / MANIFEST).unlink(missing_ok=True)
        names = sorted({path.name for path in self.path.iterdir()} - {JOB})
        if names:
            log.warning("%s keeps files that no job wrote: %s", self.path, ", ".join(names)[:200])

    def _write(self, name: str, text: str) -> None:
        """Replaces a file of the folder, which then is complete or unchanged."""
        with whole_file(self.path / name) as new:
            new.write_text(text, encoding="utf-8")


def check_output(path: Path, overwrite: bool) -> None:
    """Checks that a job may write into a folder. Call it before a model is loaded.

    Raises:
        OutputExists: If the folder holds files that no job wrote, or `_job.json` is damaged.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if path.is_dir() and overwrite and (path / MANIFEST).is_file():
        return
    if (path / JOB).is_file():
        _read_facts(path)
        return
    if path.is_dir() and all(each.name.startswith(TEMPORARY) for each in path.iterdir()):
        return  # killed before the first file had its name
    hint = (
        f"--overwrite needs a folder with a {MANIFEST}"
        if overwrite
        else "--overwrite replaces the output of an earlier job"
    )
    raise OutputExists(f"{path} is not empty; choose another folder ({hint})")


def _lock(handle: int, path: Path) -> None:
    """Locks a folder. The lock ends with the last process that has the handle open."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OutputExists(f"another job is writing into {path}") from None
            time.sleep(0.1)


def _find_flaw(path: Path, part: JobPart) -> str | None:
    """Returns how a part's file differs from its line of the manifest; None if it does not."""
    if not path.is_file():
        return "there is no such file"
    size = path.stat().st_size
    if size != part.bytes:
        return f"it has {size} bytes; the manifest says {part.bytes}"
    found = hash_file(path)
    return None if found == part.sha256 else f"its sha256 is {found}, not {part.sha256}"


def _read_facts(folder: Path) -> Facts:
    """Returns the facts of a folder's job, empty without one.

    Raises:
        OutputExists: If they are damaged, or another version of recserve wrote them.
    """
    path = folder / JOB
    if not path.is_file():
        return {}
    facts = _decode(path.read_bytes(), dict[str, Any], path)
    if facts:  # none: an output that was being replaced
        number = facts.get("format")
        given = None if number is None else f"{FORMAT}/{number}"
        try:
            check_format(given, f"{FORMAT}/{VERSION}", path)
        except UnreadableFile as error:
            raise OutputExists(f"{error}. Choose another folder, or delete this one") from None
    return facts


def _decode(text: bytes, type: type[T], place: object) -> T:
    """Returns a JSON value of a type. Raises OutputExists naming the place."""
    try:
        return msgspec.json.decode(text, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OutputExists(f"{place}: {error}; choose another folder, or delete this one") from None


def _line(part: JobPart) -> str:
    return json.dumps(asdict(part)) + "\n"
