"""What tests share: the reference data, a real redis-server, small Parquet files."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

# Triton decides when it is first imported, by whatever library, whether kernels are interpreted.
os.environ["TRITON_INTERPRET"] = "1"

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def reference(name: str) -> Path:
    """A folder of the reference data; skips where it is not beside the repository."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"NO REFERENCE DATA at {folder}: this test did not run")
    return folder


@pytest.fixture(scope="session")
def beauty() -> Path:
    """Folder of the Amazon Beauty set; skips where it is not beside the repository."""
    return reference("amazon-beauty")


def start_redis(folder: Path, port: int = 0) -> tuple[subprocess.Popen[bytes], int]:
    """A redis-server without persistence on loopback; port 0 takes a free one."""
    if shutil.which("redis-server") is None:
        message = "NO redis-server on this machine: the Redis tests did not run"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    for _ in range(5):
        chosen = port or free_port()
        arguments = [
            "--port",
            str(chosen),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(folder),
        ]
        server = subprocess.Popen(
            ["redis-server", *arguments, "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(200):
            if server.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", chosen), timeout=0.2).close()
                return server, chosen
            except OSError:
                time.sleep(0.02)
        server.kill()
        server.wait()
    raise RuntimeError("redis-server did not start")


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real redis-server that lives as long as the tests; flush it before use."""
    server, port = start_redis(tmp_path_factory.mktemp("redis"))
    yield f"redis://127.0.0.1:{port}/0"
    server.kill()
    server.wait()
