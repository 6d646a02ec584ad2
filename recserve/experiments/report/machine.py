"""The machine, versions and server that a result belongs to."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

PACKAGES = ("recserve", "aiohttp", "numpy", "scipy")
CPU_INFO = Path("/proc/cpuinfo")
PROBE_S = 5.0
PATIENCE_S = 30.0


@dataclass(frozen=True)
class MachineInfo:
    """Where the load generator ran.

    Attributes:
        time: Start of the run, UTC, ISO 8601.
        processor: Model of the processor.
        num_cores: Cores that this process may use.
        load_average: Runnable processes over the last minute, at the start.
        system: Operating system.
        python: Version of Python.
        packages: Version by package.
    """

    time: str
    processor: str
    num_cores: int
    load_average: float
    system: str
    python: str
    packages: dict[str, str]


def this_machine() -> MachineInfo:
    """Returns the machine that this process runs on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return MachineInfo(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=_processor(),
        num_cores=cores or 1,
        load_average=os.getloadavg()[0],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages=versions,
    )


def _processor() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


async def wait_ready(url: str, headers: dict[str, str], patience_s: float = PATIENCE_S) -> None:
    """Waits until a server answers, and until it is ready if it says that it is not (503).

    Raises:
        ConnectionError: If it does not within the given time.
    """
    end = time.monotonic() + patience_s
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        while True:
            try:
                async with session.get(url + "/health/ready") as response:
                    if response.status != 503:
                        return
                    state = "is not ready"
            except (aiohttp.ClientError, TimeoutError) as error:
                state = f"does not answer ({error})"
            if time.monotonic() > end:
                raise ConnectionError(f"{url} {state}, after {patience_s:.0f} s")
            await asyncio.sleep(0.2)


async def server_facts(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """Returns what a server says of itself: /version, and the first of /v1/models.

    Facts that the server does not give are left out.
    """
    facts: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        for name, path in (("version", "/version"), ("models", "/v1/models")):
            try:
                async with session.get(url + path) as response:
                    if response.status == 200:
                        facts[name] = msgspec.json.decode(await response.read())
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
                continue
    return facts
