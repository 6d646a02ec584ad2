"""Judges the tests by mutants: the code with one small fault.

    make mutants MUTANTS_ARGS="--seed 2611 --count 200 --minutes 90"

Mutants are drawn from all Python files of the package. A marked copy of the code shows which
default tests run each changed line. Those are run against the mutant in a copy of the repository,
the quickest first, up to the first failure: first a few seconds of them against all mutants, then
the others against the mutants that survived. The slow tests follow for those that survive all,
again on the lines that they run: a mutant that only they kill is a hole of `make test`.
A place that no test runs is left out and counted. No mutant is begun after `--minutes`.

The results are lines of `default.jsonl` and `slow.jsonl` in `build/mutants`; the next run goes on
from there. The exit status is 1 if the default tests kill less than 95 % of what all tests kill.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from tests.mutants import marks
from tests.mutants.draw import OPERATORS, Mutant, draw

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
FIRST_S = 15.0  # of the tests that meet all mutants; the quickest come first
MOST_S = 150.0  # of the tests of a mutant that survives the first
LIMIT_S = 60.0  # beside three times the duration of the tests
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Suite:
    """Tests that ran in the marked copy.

    Attributes:
        name: `default` or `slow`.
        marker: What pytest selects by.
        seconds: Duration of each test that passed.
        ran: The tests that ran each mutant's line.
    """

    name: str
    marker: str
    seconds: Mapping[str, float]
    ran: Mapping[int, set[str]]

    def choose(self, number: int) -> tuple[list[str], list[str]]:
        """Returns the tests to run first, and the rest for a mutant that survives these.

        One test of each function comes first, and the quickest first. What is run by a fixture or
        by another process counts for all tests of the file.
        """
        noted = self.ran.get(number, set())
        files = tuple(name for name in noted if name.endswith("::"))
        own = [t for t in self.seconds if t in noted or (files and t.startswith(files))]
        own.sort(key=lambda test: self.seconds[test])
        first = {test.partition("[")[0]: test for test in reversed(own)}
        early: list[str] = []
        late: list[str] = []
        total_s = 0.0
        for test in sorted(own, key=lambda t: first[t.partition("[")[0]] != t):
            total_s += self.seconds[test]
            if total_s <= FIRST_S or not early:
                early.append(test)
            elif total_s <= MOST_S:
                late.append(test)
        return _by_file(early), _by_file(late)


class Scratch:
    """A copy of the repository in which one mutant at a time is tried.

    Attributes:
        folder: The copy.
    """

    def __init__(self, folder: Path) -> None:
        """Copies all files that git knows or would add."""
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = ROOT / name, folder / name
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        data = folder.parent / "shared"  # tests find the reference data beside the repository
        if (ROOT.parent / "shared").is_dir() and not data.exists():
            data.symlink_to(ROOT.parent / "shared")

    def try_mutant(
        self, mutant: Mutant, tests: Sequence[str], limit_s: float, marker: str
    ) -> tuple[str, str]:
        """Runs tests against a mutant up to the first failure, and restores the file.

        Returns:
            `killed`, `timeout` or `survived`, and the first test that failed.
        """
        path = self.folder / mutant.file
        before, stat = path.read_bytes(), path.stat()
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line"]
        command = [sys.executable, "-m", "pytest", *options, "-m", marker, *tests]
        try:
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()
            path.write_text(mutant.text, encoding="utf-8")
            # A file, because a server that outlives the tests would hold a pipe open.
            with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
                process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    outcome = "killed" if process.wait(limit_s) else "survived"
                except subprocess.TimeoutExpired:
                    outcome = "timeout"
                finally:  # with the servers that the tests have started
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                output.seek(0)
                failed = FAILED.search(output.read())
            return outcome, failed[1] if failed else ""
        finally:
            path.write_bytes(before)
            # Python trusts compiled files by the second and the size of the source.
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns the variables of a process that uses the copy."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "",  # the tests start hundreds of processes
            "XDG_CACHE_HOME": str(WORK / "cache"),
            "OMP_NUM_THREADS": "1",
            **(more or {}),
        }


def main() -> int:
    """Tries mutants and prints how many are killed. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--count", type=int, default=100, help="number of mutants")
    parser.add_argument("--minutes", type=float, default=45.0, help="begin no mutant after these")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="tests to judge")
    parser.add_argument("--workers", type=int, default=2, help="mutants that are tried at once")
    parser.add_argument("--list", action="store_true", help="print the mutants, try none")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the tests too
    WORK.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(given.count, given.seed)
    if given.list:
        for one in drawn:
            print(f"{one.file}:{one.line} {one.place}: {one.old}  ->  {one.new}")
        return 0
    mutants = {n: one for n, one in enumerate(drawn) if one.place != "module"}
    end_s = time.monotonic() + 60 * given.minutes
    default = run_marked("default", "not slow", mutants, given.workers, given.tests)
    results = try_mutants(default, mutants, given.workers, end_s)
    untried = {n for n in mutants if any(default.choose(n)) and n not in results}
    left = {
        n: one
        for n, one in mutants.items()
        if n not in untried and results.get(n, ("survived", ""))[0] == "survived"
    }
    late = None
    if time.monotonic() < end_s:
        chosen = given.tests if given.tests != ["tests"] else slow_tests(left.values())
        slow = run_marked("slow", "slow", left, given.workers, chosen)
        late = try_mutants(slow, left, given.workers, end_s)
    return report(mutants, untried, results, late)


def draw_all(count: int, seed: int) -> list[Mutant]:
    """Draws mutants of all files once; a draw takes half a minute."""
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("recserve/**/*.py"))]
    about = "\n".join([f"{seed} {count}", *OPERATORS, *files]).encode()
    digest = hashlib.sha256(about + b"".join((ROOT / file).read_bytes() for file in files))
    path = WORK / f"drawn-{digest.hexdigest()[:12]}.json"
    if not path.exists():
        drawn = draw(ROOT, files, count, seed)
        path.write_text(json.dumps([asdict(one) for one in drawn]), encoding="utf-8")
    return [Mutant(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def slow_tests(mutants: Iterable[Mutant]) -> list[str]:
    """Returns the folders of tests in which the rooms of mutants have theirs."""
    rooms = {one.file.split("/")[1] for one in mutants}
    folders = [f"tests/{room}" for room in sorted(rooms) if (ROOT / "tests" / room).is_dir()]
    return [*folders, "tests/integration"]


def run_marked(
    name: str, marker: str, mutants: Mapping[int, Mutant], workers: int, tests: Sequence[str]
) -> Suite:
    """Runs tests in a copy of the code that notes who runs the lines of mutants."""
    key = hashlib.sha256("".join(f"{n} {m.text}" for n, m in mutants.items()).encode()).hexdigest()
    folder = WORK / f"{name}-{key[:12]}"
    notes, times = folder / "notes", folder / "seconds.txt"
    if not times.exists():
        shutil.rmtree(folder, ignore_errors=True)
        scratch = Scratch(folder / "copy")
        places = {n: (one.file, one.line) for n, one in mutants.items()}
        marks.add_marks(scratch.folder, notes, places)
        options = ["-q", "-n", str(workers), "--dist", "worksteal", "-m", marker]
        command = [sys.executable, "-m", "pytest", *options, "-p", "tests.mutants.marks", *tests]
        seconds = folder / "seconds.part"
        environment = scratch.environment({"MARKS_SECONDS": str(seconds)})
        subprocess.run(command, cwd=scratch.folder, env=environment, check=False)
        seconds.rename(times)
        shutil.rmtree(scratch.folder)
    seconds_of = dict(line.rsplit("\t", 1) for line in times.read_text().splitlines())
    return Suite(
        name, marker, {test: float(s) for test, s in seconds_of.items()}, marks.read_marks(notes)
    )


def try_mutants(
    suite: Suite, mutants: Mapping[int, Mutant], workers: int, end_s: float
) -> dict[int, tuple[str, str]]:
    """Returns the outcome of each mutant whose line the suite runs, and the test that failed.

    A mutant that has met a part of its tests only, because the time was over, has no outcome.
    """
    path = WORK / f"{suite.name}.jsonl"
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        record = json.loads(line)
        known[record["id"]] = record["outcome"], record["test"]
    parts = {n: [tests for tests in suite.choose(n) if tests] for n in mutants}
    scratches: Queue[Scratch] = Queue()
    for number in range(workers):
        scratches.put(Scratch(WORK / f"copy-{number}"))

    def run(number: int, tests: list[str]) -> None:
        mutant, key = mutants[number], _id(mutants[number], tests)
        if key in known or time.monotonic() > end_s:
            return
        scratch = scratches.get()
        try:
            limit_s = LIMIT_S + 3 * sum(suite.seconds[test] for test in tests)
            known[key] = scratch.try_mutant(mutant, tests, limit_s, suite.marker)
        finally:
            scratches.put(scratch)
        outcome, test = known[key]
        about = {key: value for key, value in asdict(mutant).items() if key != "text"}
        record = {"id": key, "number": number, **about, "outcome": outcome, "test": test}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{suite.name} {outcome:8} {mutant.file}:{mutant.line} {mutant.new}", flush=True)

    def outcome_of(number: int) -> tuple[str, str] | None:
        """Returns the outcome so far, None if a part has none."""
        found = [known.get(_id(mutants[number], tests)) for tests in parts[number]]
        killed = [one for one in found if one is not None and one[0] != "survived"]
        return killed[0] if killed else None if None in found else ("survived", "")

    with ThreadPoolExecutor(workers) as threads:
        for late in (False, True):
            left = {n: part[late] for n, part in parts.items() if part[late:] and not outcome_of(n)}
            list(threads.map(run, left.keys(), left.values()))
    return {n: one for n, part in parts.items() if part and (one := outcome_of(n)) is not None}


def report(
    mutants: Mapping[int, Mutant],
    untried: Collection[int],
    results: Mapping[int, tuple[str, str]],
    late: Mapping[int, tuple[str, str]] | None,
) -> int:
    """Prints how many are killed and what survived. Returns the exit status.

    Args:
        mutants: All mutants of the draw.
        untried: Numbers of those for which the time was not enough.
        results: Outcomes of the default tests.
        late: Outcomes of the slow tests; None if they have not been run.
    """
    not_run, late = late is None, late or {}
    killed = {n for n, (outcome, _) in results.items() if outcome != "survived"}
    only_slow = {n for n, (outcome, _) in late.items() if outcome != "survived"}
    run = set(results) | set(late)
    share = len(killed) / max(1, len(killed) + len(only_slow))
    for n in sorted(run - killed):
        one = mutants[n]
        end = f"killed by {late[n][1]} only" if n in only_slow else "survived"
        print(f"{end}: {one.file}:{one.line} {one.place}: {one.old}  ->  {one.new}")
    print(
        f"{len(mutants) - len(untried)} of {len(mutants)} tried, "
        f"{len(mutants) - len(untried) - len(run)} of them on lines that no test runs. "
        f"`make test` kills {len(killed)} of {len(run)}"
    )
    if not_run:
        print("The time was over before the slow tests.")
        return 1
    print(f"The slow tests kill {len(only_slow)} more: {share:.1%} of what all kill.")
    return 0 if share >= 0.95 else 1


def _by_file(tests: Sequence[str]) -> list[str]:
    """Returns tests in the order of their files, so that each fixture of a file is made once."""
    places = {test.partition("::")[0]: -number for number, test in enumerate(reversed(tests))}
    return sorted(tests, key=lambda test: places[test.partition("::")[0]])


def _id(mutant: Mutant, tests: Sequence[str]) -> str:
    files = sorted({test.partition("::")[0] for test in tests})
    content = b"".join((ROOT / file).read_bytes() for file in files)
    about = "\n".join([mutant.file, mutant.text, *sorted(tests)])
    return hashlib.sha256(about.encode() + content).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
