"""A real redis-server on loopback."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

FIRST_PORT, NUM_PORTS = 16384, 16384


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
    """Returns a loopback port that was free at the time of the call.

    Systems take ports from 32768 on for connections and for port 0. This one is lower, so only
    another call of this function could take it before the caller does.
    """
    while True:
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
