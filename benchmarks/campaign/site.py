"""Where a campaign works: its folder, its models, and the servers that it starts."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.bundle_shelf import shelf
from tests.support.paths import ROOT
from tests.support.redis_server import free_port
from tests.support.tiny_bundle import tiny_bundle
from tests.support.tiny_llm import tiny_llm

READY_S = 120.0
KEY, OTHER_KEY = "a-key-of-the-campaign", "another-key-of-the-campaign"
ADMIN_KEY = "an-admin-key-of-the-campaign"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
LLM_NAME = "drawn"
SERVE = ("-m", "recserve", "serve", "--config")
FAULTY = ("-m", "benchmarks.campaign.faulty_server")
STALLED = "the server did not become ready"


# Rows count drafts, so no clock decides which are made.
DRAFTS = {"load_aware": False}


class ServerProcess:
    """A running `recserve serve`.

    Attributes:
        process: The process; it leads a process group of its own.
        url: Its address.
        settings: Its settings.
        folder: Folder of its configuration and its log.
        program: Arguments of Python.
        log: File with its output.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], program: Sequence[str]) -> None:
        self.folder, self.program = folder, program
        self.settings = {"port": free_port(), "device": "cpu", "threads": 1, **DRAFTS, **settings}
        self.url = f"http://127.0.0.1:{self.settings['port']}"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "server.json"
        config.write_text(json.dumps(self.settings, default=str), encoding="utf-8")
        self.log = folder / "server.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RECSERVE_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(config)],
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def again(self) -> ServerProcess:
        """Starts a process with the same settings, store and port, after this one has ended."""
        return ServerProcess(self.folder, self.settings, self.program)

    def until_ready(self) -> float:
        """Waits until `ready` is 200. Returns the seconds that it took."""
        began = time.monotonic()
        while time.monotonic() < began + READY_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.tail()}")
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200:
                    return time.monotonic() - began
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"{STALLED}: {self.tail()}")

    def until_settled(self, seconds: float) -> int | None:
        """Waits until `ready` is 200 or the process has ended.

        Returns:
            None if it is ready, the status if it has ended, and -1 after `seconds` without either.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return self.process.returncode
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200:
                    return None
            time.sleep(0.02)
        return -1

    def client(self, **options: Any) -> httpx.Client:
        """Returns a client of the server."""
        return httpx.Client(base_url=self.url, **{"timeout": 60, **options})

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        """Sends one request on a connection of its own."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def metrics(self, **options: Any) -> dict[str, float]:
        """Returns every series by its name and labels, as in `name{label="value"}`."""
        text = httpx.get(f"{self.url}/metrics", timeout=60, **options).raise_for_status().text
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def resident_bytes(self, kind: str = "VmRSS") -> int:
        """Returns the resident memory.

        Args:
            kind: Its name in /proc/PID/status. RssAnon leaves out the pages of files.
        """
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))

    def num_files(self) -> int:
        """Returns the number of open files."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def num_threads(self) -> int:
        """Returns the number of threads."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def num_children(self) -> int:
        """Returns how many processes of its group run beside it."""
        found = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            alive = fields[0] != "Z"
            found += alive and int(fields[2]) == self.process.pid
        return found - (self.process.poll() is None)

    def tail(self, size: int = 400) -> str:
        """Returns the end of the log."""
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def stop(self) -> None:
        """Ends the process and its children."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Site:
    """The folder of a campaign and what lies in it.

    Attributes:
        folder: Scratch folder.
        seed: Seed of everything that is drawn.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self._name, self._count = "work", 0

    def begin(self, name: str) -> None:
        """Names the scratch folders after a check; several processes share the site's folder."""
        self._name, self._count = name, 0

    @functools.cached_property
    def bundle(self) -> Path:
        """A bundle of 500 items and 40 users with untrained models. It must not be changed."""
        return self._once("tiny", tiny_bundle) / "bundle"

    @functools.cached_property
    def llm(self) -> Path:
        """The folder of an untrained language model on bytes."""
        return self._once(LLM_NAME, lambda folder: tiny_llm(folder, self.seed))

    def _once(self, name: str, make: Callable[[Path], object]) -> Path:
        """Returns a folder that the first check that needs it makes."""
        folder, partial = self.folder / name, self.folder / f"{name}.partial"
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder)
        return folder

    def scratch(self) -> Path:
        """Returns a new folder."""
        self._count += 1
        folder = self.folder / f"{self._name}-{self._count}"
        folder.mkdir()
        return folder

    def shelf(self) -> Path:
        """Returns a new folder of the bundles of `bundle_shelf`."""
        return shelf(self.scratch())

    @contextmanager
    def server(self, program: Sequence[str] = SERVE, **settings: Any) -> Iterator[ServerProcess]:
        """Yields a ready server of the bundle, with an LMDB store, that ends with the context.

        Args:
            program: Arguments of Python; a configuration file follows.
            settings: Settings of the server, beside those and over them.
        """
        server = self.start(program, **settings)
        try:
            server.until_ready()
            yield server
        finally:
            server.stop()

    def start(self, program: Sequence[str] = SERVE, **settings: Any) -> ServerProcess:
        """Starts a server without waiting for it; as `server` otherwise."""
        folder = self.scratch()
        defaults = {
            "bundle": self.bundle,
            "store": f"lmdb:{folder / 'store'}",
            "journal": folder / "journal",
        }
        return ServerProcess(folder, {**defaults, **settings}, program)
