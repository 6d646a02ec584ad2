"""Runs tests against a changed file, in a copy of the repository. The checkout stays as it is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants.draw import Mutant

ROOT = Path(__file__).resolve().parents[2]
FORK_SERVER = Path(__file__).with_name("fork_server.py")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
LOAD = """
import pathlib, sys
import recserve
from recserve.kernels.native import native
assert pathlib.Path(recserve.__file__).is_relative_to(pathlib.Path.cwd()), recserve.__file__
assert len(sys.argv) == 1 or native.library() is not None, "the C sources do not compile"
"""


@dataclass(frozen=True)
class Result:
    """How the tests ended.

    Attributes:
        outcome: `killed` if a test failed, `timeout`, or `survived`.
        test: The first test that failed; empty if none did.
        seconds: Duration.
        cpu_s: Processor time of all processes, about the duration on an idle core.
        output: End of the output.
    """

    outcome: str
    test: str
    seconds: float
    cpu_s: float
    output: str


class Scratch:
    """A copy of the repository in which one mutant at a time is tried.

    Attributes:
        folder: The copy.
        cache: Folder of the compiled C sources.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        """Copies all files that git knows or would add.

        Raises:
            RuntimeError: If Python would import another package than the copy's.
        """
        self.folder, self.cache = folder, cache
        self._server: subprocess.Popen[bytes] | None = None
        self._fork: int | None = None
        self._stopped = False
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
        self.load(compiled=False)

    def load(self, compiled: bool) -> None:
        """Imports the package once.

        Args:
            compiled: Whether the C sources are compiled too.

        Raises:
            RuntimeError: If that fails.
        """
        command = [sys.executable, "-c", LOAD, *(["compiled"] if compiled else [])]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{self.folder} cannot be used: {done.stderr[-2000:]}")

    def run(self, tests: Sequence[str], limit_s: float, marker: str = "not slow") -> Result:
        """Runs tests up to the first failure. Tests that a signal ends are run once more.

        Args:
            tests: Arguments of pytest.
            limit_s: Time after which the tests count as failed.
            marker: What pytest selects by.
        """
        result = self._run_once(tests, limit_s, marker)
        if result.outcome == "signal":
            print(f"{self.folder.name}: {result.output[-500:]}\nended by a signal, once more")
            result = self._run_once(tests, limit_s, marker)
        return replace(result, outcome="killed") if result.outcome == "signal" else result

    def _run_once(self, tests: Sequence[str], limit_s: float, marker: str) -> Result:
        options = "-x -q -p no:cacheprovider --hypothesis-seed=0 --tb=line"
        began_s = time.monotonic()
        # A file, because a server that outlives the tests would hold a pipe open.
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as file:
            arguments = [file.name, *shlex.split(options), "-m", marker, *tests]
            status, cpu_s = self._wait(arguments, began_s + limit_s)
            output = file.read()
        if self._stopped:
            raise RuntimeError("the tests were stopped")
        if status is None:
            outcome = "timeout"
        elif status < 0:
            outcome = "signal"
            output += f"\nsignal {-status}"
        else:
            outcome = "killed" if status else "survived"
        failed = FAILED.search(output)
        seconds = round(time.monotonic() - began_s, 1)
        return Result(outcome, failed[1] if failed else "", seconds, cpu_s, output[-3000:])

    def _wait(self, arguments: Sequence[str], end_s: float) -> tuple[int | None, float]:
        """Runs pytest in a fork, and ends what is left of it and of the servers that it started.

        Returns:
            The exit status, None if the time was over, and the processor time in seconds.
        """
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-P", str(FORK_SERVER)],
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # `select` sees no line that a buffer holds
            )
        given, answers = self._server.stdin, self._server.stdout
        assert given is not None and answers is not None
        given.write(json.dumps(arguments).encode() + b"\n")
        self._fork = int(answers.readline())
        in_time, _, _ = select.select([answers], [], [], max(0.0, end_s - time.monotonic()))
        _kill(self._fork)
        status, cpu_s = answers.readline().split()
        self._fork = None
        return os.waitstatus_to_exitcode(int(status)) if in_time else None, float(cpu_s)

    def try_mutant(
        self, mutant: Mutant, tests: Sequence[str], limit_s: float, marker: str = "not slow"
    ) -> Result:
        """Runs tests against a mutant, and restores the file."""
        path = self.folder / mutant.file
        before, stat = path.read_bytes(), path.stat()
        try:
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()
            path.write_text(mutant.text, encoding="utf-8")
            if path.suffix != ".py":
                self.load(compiled=True)  # the compiler's time is not the tests'
            return self.run(tests, limit_s, marker=marker)
        finally:
            path.write_bytes(before)
            # Python trusts compiled files by the second and the size of the source.
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def stop(self) -> None:
        """Ends the process of the tests. Tests that run now have no result then."""
        self._stopped = True
        if self._fork is not None:
            _kill(self._fork)
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """Returns the variables of a process that uses the copy."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "",  # the tests start hundreds of processes
            "XDG_CACHE_HOME": str(self.cache),
            "OMP_NUM_THREADS": "1",
            **(more or {}),
        }


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
