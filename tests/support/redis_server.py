"""A real redis-server on loopback."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest


def start_redis(folder: Path, port: int = 0) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a redis-server without persistence on loopback; port 0 takes a free one."""
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
    """Returns a loopback port that was free at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
