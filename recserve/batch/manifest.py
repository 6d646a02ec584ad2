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
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from recserve.batch.part import ERRORS_FOLDER, TEMPORARY, JobPart, sync
from recserve.batch.source import Partition

MANIFEST = "_manifest.jsonl"
JOB = "_job.json"
SUCCESS = "_SUCCESS"
LOCK_WAIT_S = 10.0  # a killed job's workers end within this time

Facts = Mapping[str, Any]


class OutputExists(ValueError):
    """The output folder belongs to something else and may not be replaced."""


class OutputFolder:
    """The output folder of a running job; a second process cannot open it at the same time.

    Attributes:
        path: The folder.
        done: Finished parts by file name.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        """Creates the folder where necessary, locks it and reads what is there.

        Args:
            path: The folder.
            overwrite: True removes the output of an earlier job.

        Raises:
            OutputExists: If the folder holds files that no job wrote, or another process has it.
        """
        check_output(path, overwrite)
        self.path, self.done = path, dict[str, JobPart]()
        path.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(path, os.O_RDONLY)
        try:
            _lock(self.lock, path)
            if overwrite:
                _empty(path)
            self.remove_temporary()
            self._facts: Facts | None = None
            if (path / JOB).is_file():
                self._facts = json.loads((path / JOB).read_text(encoding="utf-8"))
                self._read_parts()
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
        before = self._facts or {}
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

    def _read_parts(self) -> None:
        """Reads the manifest; parts whose file is missing or has another size are left out."""
        path = self.path / MANIFEST
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        for line in lines[:-1]:  # after the last line end: nothing, or a line that was cut short
            part = JobPart(**json.loads(line))
            file = self.path / part.part
            if file.is_file() and file.stat().st_size == part.bytes:
                self.done[part.part] = part
        text = "".join(map(_line, self.done.values()))
        if text != "\n".join(lines):
            (self.path / SUCCESS).unlink(missing_ok=True)
            self._write(MANIFEST, text)

    def _write(self, name: str, text: str) -> None:
        """Replaces a file of the folder, which then is complete or unchanged."""
        temporary = self.path / f"{TEMPORARY}{name}"
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(self.path / name)
        sync(self.path)


def check_output(path: Path, overwrite: bool) -> None:
    """Checks that a job may write into a folder. Call it before a model is loaded.

    Raises:
        OutputExists: If the folder holds files that no job wrote.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if path.is_dir() and ((path / JOB).is_file() or (overwrite and (path / MANIFEST).is_file())):
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


def _empty(path: Path) -> None:
    """Removes everything in a folder, and last the file that shows that a job wrote it."""
    kept_to_the_end = (MANIFEST, JOB)
    (path / SUCCESS).unlink(missing_ok=True)
    for each in path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name not in kept_to_the_end:
            each.unlink()
    for name in kept_to_the_end:
        (path / name).unlink(missing_ok=True)


def _line(part: JobPart) -> str:
    return json.dumps(asdict(part)) + "\n"
