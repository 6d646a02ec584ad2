"""What later commits must do with recorded files: resume jobs, read logs, show histories."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from recserve.cli import main
from recserve.kernels import backend
from recserve.service.slate_log.reader import shown_items
from tests.recorded.cases import ANSWERS
from tests.recorded.compare import differences, stable
from tests.recorded.worlds import FILES

RECORDED = "files.json"


@dataclass(frozen=True)
class BatchJob:
    """A batch job that was interrupted.

    Attributes:
        output: Folder of its output.
        arguments: Arguments of `recserve batch`; paths are relative to a copy of the files.
    """

    output: str
    arguments: tuple[str, ...]


SLATES_JOB = BatchJob(
    "slates",
    (
        *("--bundle", "bundles/items", "--input", "batch/users.parquet", "-k", "4"),
        *("--rows-per-part", "8", "--in-flight", "4"),
    ),
)
TEXTS_JOB = BatchJob(
    "texts",
    (
        "--llm",
        "llm",
        "--llm-name",
        "tiny",
        "--input",
        "batch/prompts.jsonl",
        "--rows-per-part",
        "8",
    ),
)


JOBS = (SLATES_JOB, TEXTS_JOB)


def run_job(job: BatchJob, files: Path, folder: Path) -> Path:
    """Copies what a job reads to a folder, runs it there, and returns its output folder."""
    copy_files(files, folder)
    output = folder / "output"
    if (folder / "batch" / job.output).is_dir():
        shutil.copytree(folder / "batch" / job.output, output)
    more = ("--output", "output", "--device", "cpu", "--progress", "json")
    # A job continues with the kernels that it began with only; without a compiler C is left out.
    workers = mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "RECSERVE_KERNELS": "c"})
    with contextlib.chdir(folder), workers, mock.patch.object(backend, "FORCED", "c"):
        printed("batch", *job.arguments, *more)
    return output


def copy_files(files: Path, folder: Path) -> None:
    """Copies the files to a folder, histories and item changes to their default places."""
    for name in ("bundles", "llm", "batch"):
        shutil.copytree(files / name, folder / name)
    for name, place in (("history", "items.history"), ("journal", "items.items")):
        shutil.copytree(files / "state" / "items" / name, folder / "bundles" / place)


def job_rows(output: Path) -> dict[str, Any]:
    """Returns the rows of a finished job by file, without its hashes."""
    found: dict[str, Any] = {}
    for path in sorted(output.rglob("part-*")):
        if path.suffix == ".parquet":
            rows = pq.read_table(path).to_pylist()
        else:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[path.relative_to(output).as_posix()] = stable(rows, {})
    return found


def answers_of_files(jobs: Sequence[BatchJob] = JOBS) -> dict[str, Any]:
    """Returns what the commands and readers make of the recorded files.

    Args:
        jobs: Batch jobs to resume.

    Raises:
        RuntimeError: If a command fails, or a resumed job changes a finished part.
    """
    found: dict[str, Any] = {}
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            output = run_job(job, FILES, Path(folder))
            check_kept_parts(FILES / "batch" / job.output, output)
            found[f"batch {job.output}"] = job_rows(output)
    table = shown_items(FILES / "state" / "items" / "slates", ["click"])
    found["slate log"] = stable(json.loads(json.dumps(table.to_pylist(), default=str)), {})
    with tempfile.TemporaryDirectory() as copied, contextlib.chdir(copied):
        copy_files(FILES, Path())
        whose = ("--bundle", "bundles/items", "--user", "user003", "--device", "cpu")
        candidates = ("--item", "item001,item002,item003")
        for arguments in (
            *(("bundle", "verify", f"bundles/{n}") for n in ("items", "codes", "product", "next")),
            ("history", "show", "user003", "--bundle", "bundles/items"),
            ("recommend", *whose, "-k", "3", "--strategy", "beam", "--json"),
            ("rank", *whose, *candidates, "--json"),
        ):
            text = printed(*arguments)
            as_json = "--json" in arguments
            shown: Any = json.loads(text) if as_json else text.splitlines()
            found[" ".join(arguments)] = stable(shown, {})
    return found


def printed(*arguments: str) -> str:
    """Runs a command in this process and returns what it prints."""
    output = io.StringIO()
    argv = mock.patch.object(sys, "argv", ["recserve", *arguments])
    width = mock.patch.dict(os.environ, {"COLUMNS": "80"})
    with argv, width, contextlib.redirect_stdout(output):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{arguments} ended with {end.code}") from None
    return output.getvalue()


def check_kept_parts(before: Path, after: Path) -> None:
    """Raises RuntimeError if a finished part has changed, or the job is not whole."""
    lines = (before / "_manifest.jsonl").read_text().splitlines()[:2]
    kept = (after / "_manifest.jsonl").read_text().splitlines()
    if kept[:2] != lines or not (after / "_SUCCESS").is_file():
        raise RuntimeError(f"{after.name}: the job did not continue from its manifest")
    for line in kept:
        part = json.loads(line)
        data = (after / part["part"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != part["sha256"]:
            raise RuntimeError(f"{part['part']} differs from its line in the manifest")


def check_files(folder: Path = ANSWERS, jobs: Sequence[BatchJob] = JOBS) -> list[str]:
    """Returns the differences to what was recorded, one line each."""
    recorded = json.loads((folder / RECORDED).read_text(encoding="utf-8"))
    for job in set(JOBS) - set(jobs):
        del recorded[f"batch {job.output}"]
    return [f"files {difference}" for difference in differences(recorded, answers_of_files(jobs))]


def record_files(folder: Path = ANSWERS) -> None:
    """Stores the answers of this commit."""
    text = json.dumps(answers_of_files(), ensure_ascii=False, indent=1)
    (folder / RECORDED).write_text(text + "\n", encoding="utf-8")
