"""Tries mutants: small faults in the code of a promise, which the tests of the promise must notice.

    python -m tests.mutants [--only PROMISE ...] [--seed N] [--count N] [--minutes 45]

`promises.toml` lists the promises with their files and tests, `by_hand.toml` the mutants made by
hand, `survivors.toml` the reasons why a mutant may survive. Each result is a line of
`results.jsonl`; the next run leaves out what is known for the same files. `docs/results/mutants.md`
is written from these lines. The exit status is 1 if a mutant is untried or survives without a
reason, or if less than 95 % were killed.

With `--fresh SEED` the default tests are judged instead, by mutants of all rooms: see fresh.py.

- A mutant is one changed place: places are drawn first, then one change of each. Their order
  follows the seed and their lines, so most mutants of a seed stay when a file moves or changes.
- It is killed if a test fails, or if the tests take three times as long as without it and at least
  20 s. Tests that a signal ends run once more.
- No mutant is drawn where a change breaks no promise; `draw.excluded_spans` lists these places.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import queue
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.draw import Mutant, draw, make_mutant
from tests.mutants.fresh import judge
from tests.mutants.page import Survivors, write_page
from tests.mutants.trial import ROOT, Result, Scratch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
PAGE = ROOT / "docs" / "results" / "mutants.md"
LIMIT_S = 20.0
ENOUGH_S = 600.0  # for tests of unchanged code, on a machine that does other work too

Record = dict[str, Any]


@dataclass(frozen=True)
class Promise:
    """Code that promises something, and the tests that guard it.

    Attributes:
        name: Name of the promise.
        files: Paths of the code.
        tests: Arguments of pytest.
    """

    name: str
    files: list[str]
    tests: list[str]

    def __post_init__(self) -> None:
        """Computes all digests, before a file changes that the scratch copies have already."""
        for failed in ("", *self.tests):
            self.hash_tests(failed)
        self.hash_source()

    def hash_source(self) -> str:
        """Returns the digest of all files of the code."""
        return _digest(tuple(self.files))

    def hash_tests(self, failed: str) -> str:
        """Returns the digest of the file of the failed test, or of all tests without one.

        It is empty if the test is no longer one of the promise's.
        """
        if failed and not any(failed.startswith(test) for test in self.tests):
            return ""
        tests = [failed] if failed else self.tests
        return _digest(tuple(sorted({name.partition("::")[0] for name in tests})))


class Trials:
    """Results that are known, and the scratch copies in which new ones are found.

    Attributes:
        records: One record for each mutant that was tried on the present files.
    """

    def __init__(self, seed: int, promises: dict[str, Promise]) -> None:
        self.records: dict[tuple[str, str], Record] = {}
        self._unchanged_s: dict[str, float] = {}
        self._seed, self._promises = seed, promises
        self._lock = threading.Lock()
        self._free: queue.Queue[Scratch] = queue.Queue()

    def read(self) -> None:
        """Reads the results of earlier runs, as far as the files are the same."""
        for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []:
            record = json.loads(line)
            promise = self._promises.get(record["promise"])
            if promise is not None and (record["source"], record["tests"]) == (
                promise.hash_source(),
                promise.hash_tests(record["test"]),
            ):
                self.records[record["promise"], record["id"]] = record

    def write(self, mutants: Sequence[Mutant]) -> list[Record]:
        """Writes the known results of these mutants in their order, and returns them."""
        keys = [(mutant.promise, _id(mutant)) for mutant in mutants]
        records = [self.records[key] for key in keys if key in self.records]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        RESULTS.write_text("".join(lines), encoding="utf-8")
        return records

    def missing(self, mutants: Sequence[Mutant]) -> list[Mutant]:
        """Returns the mutants without a result."""
        return [one for one in mutants if (one.promise, _id(one)) not in self.records]

    def add_scratch(self, scratch: Scratch) -> None:
        """Adds a copy of the repository. So many mutants are tried at once."""
        self._free.put(scratch)

    def time_tests(self, promise: Promise) -> float:
        """Returns the seconds that a promise's tests take. Raises RuntimeError if they fail."""
        with self._scratch() as scratch:
            result = scratch.run(promise.tests, ENOUGH_S)
        times = f"{result.seconds} s, {result.cpu_s} s of a processor"
        print(f"{promise.name}: the tests take {times}", flush=True)
        if result.outcome != "survived":
            raise RuntimeError(
                f"the tests of {promise.name} fail without a mutant\n{result.output}"
            )
        self._unchanged_s[promise.name] = result.cpu_s
        return result.seconds

    def try_mutant(self, mutant: Mutant, limit_s: float, end_s: float) -> None:
        """Tries a mutant and notes its result, unless the time is over."""
        if time.monotonic() > end_s:
            return
        promise = self._promises[mutant.promise]
        with self._scratch() as scratch:
            result = scratch.try_mutant(mutant, promise.tests, limit_s)
        record = self._record(mutant, result)
        with self._lock:
            self.records[mutant.promise, record["id"]] = record
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            where = f"{mutant.file} {mutant.place}: {mutant.old}  ->  {mutant.new}"
            print(
                f"{result.outcome:8} {result.seconds:5.1f} s  {mutant.promise}: {where}", flush=True
            )

    def _record(self, mutant: Mutant, result: Result) -> Record:
        promise = self._promises[mutant.promise]
        return {
            "promise": mutant.promise,
            "name": mutant.name,
            "file": mutant.file,
            "place": mutant.place,
            "old": mutant.old,
            "new": mutant.new,
            "outcome": result.outcome,
            "test": result.test,
            "seconds": result.seconds,
            "cpu_s": result.cpu_s,
            "unchanged_cpu_s": self._unchanged_s[promise.name],
            "seed": self._seed,
            "id": _id(mutant),
            "source": promise.hash_source(),
            "tests": promise.hash_tests(result.test),
        }

    @contextmanager
    def _scratch(self) -> Iterator[Scratch]:
        scratch = self._free.get()
        try:
            yield scratch
        finally:
            self._free.put(scratch)


def main() -> int:
    """Tries the mutants without a result, and writes the page. Returns the exit status."""
    table = tomllib.loads((HERE / "promises.toml").read_text(encoding="utf-8"))
    given = options(table)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the tests too
    if given.fresh is not None:
        return judge(given, table["draw"]["operators"])
    promises = {name: Promise(name, **fields) for name, fields in table["promise"].items()}
    mutants = all_mutants(given, promises, table["draw"]["operators"])
    if given.list:
        for one in mutants:
            print(describe(one))
        return 0
    trials = Trials(given.seed, promises)
    trials.read()
    chosen = [one for one in mutants if not given.only or one.promise in given.only]
    try_all(trials, promises, trials.missing(chosen), given)
    survivors = Survivors(HERE / "survivors.toml")
    records = trials.write(mutants)
    whole = write_page(PAGE, records, len(mutants), survivors)
    return 0 if whole else 1


def options(table: Record) -> argparse.Namespace:
    """Parses the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=table["promise"], help="only these promises")
    parser.add_argument("--seed", type=int, default=table["draw"]["seed"], help="seed of the draw")
    parser.add_argument(
        "--count", type=int, default=table["draw"]["count"], help="drawn mutants of each promise"
    )
    parser.add_argument("--minutes", type=float, default=45.0, help="begin no mutant after these")
    parser.add_argument(
        "--fresh", type=int, metavar="SEED", help="judge the default tests by mutants of all rooms"
    )
    parser.add_argument("--tests", nargs="+", default=["tests"], help="tests to judge by --fresh")
    parser.add_argument("--workers", type=int, default=2, help="mutants that are tried at once")
    parser.add_argument("--list", action="store_true", help="print the mutants, try none")
    parser.add_argument(
        "--limit-s",
        type=float,
        help="seconds for a mutant's tests; default: 3 times what they take unchanged, at least 20",
    )
    return parser.parse_args()


def all_mutants(
    given: argparse.Namespace, promises: dict[str, Promise], operators: Sequence[str]
) -> list[Mutant]:
    """Returns the mutants made by hand and the drawn ones."""
    mutants = list(by_hand(promises))
    for promise in promises.values():
        files = [file for file in promise.files if file.endswith(".py")]
        mutants += draw(ROOT, promise.name, files, given.count, given.seed, operators)
    return mutants


def describe(mutant: Mutant) -> str:
    """Returns a mutant as one line."""
    name = mutant.name or f"{mutant.old}  ->  {mutant.new}"
    return f"{mutant.promise}: {mutant.file} {mutant.place}: {name}"


def by_hand(promises: dict[str, Promise]) -> Iterator[Mutant]:
    """Yields the mutants of `by_hand.toml`.

    Raises:
        ValueError: If a promise or file is unknown, or the old text does not occur exactly once.
    """
    table = tomllib.loads((HERE / "by_hand.toml").read_text(encoding="utf-8"))
    for one in table["mutant"]:
        name, promise, file = one["name"], one["promise"], one["file"]
        if file not in promises[promise].files:
            raise ValueError(f"{name}: {file} is no file of the promise {promise}")
        text = changed = (ROOT / file).read_text(encoding="utf-8")
        for old, new in zip(one["old"], one["new"], strict=True):
            if (count := text.count(old)) != 1:
                raise ValueError(f"{name}: {file} has {count} times, not once: {old!r}")
            changed = changed.replace(old, new)
        yield make_mutant(promise, name, file, text, changed)


def try_all(
    trials: Trials,
    promises: dict[str, Promise],
    mutants: Sequence[Mutant],
    given: argparse.Namespace,
) -> None:
    """Tries mutants in scratch copies, several at once."""
    if not mutants:
        return
    end_s = time.monotonic() + given.minutes * 60
    names = list(dict.fromkeys(mutant.promise for mutant in mutants))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        cache = Path(folder) / "cache"
        scratches = [Scratch(Path(folder) / str(n), cache) for n in range(given.workers)]
        for scratch in scratches:
            trials.add_scratch(scratch)
        threads = ThreadPoolExecutor(given.workers)
        try:
            times = list(threads.map(trials.time_tests, [promises[name] for name in names]))
            limits = {
                name: given.limit_s or max(LIMIT_S, 3 * taken)
                for name, taken in zip(names, times, strict=True)
            }
            tries = [
                threads.submit(trials.try_mutant, mutant, limits[mutant.promise], end_s)
                for mutant in mutants
            ]
            for one in tries:
                one.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for scratch in scratches:
                scratch.stop()
            threads.shutdown()


def _id(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.file}\n{mutant.text}".encode()).hexdigest()[:12]


@functools.cache
def _digest(files: tuple[str, ...]) -> str:
    """Returns the digest of the content of files and folders; a missing one counts as empty."""
    digest = hashlib.sha256()
    for name in files:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
