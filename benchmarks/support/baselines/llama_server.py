"""llama.cpp's own HTTP server, where its program `llama-server` is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.redis_server import free_port

START_S = 60.0
TRIES = 5


def find_llama_server() -> str | None:
    """Returns the path in LLAMA_SERVER, else `llama-server` on PATH; None without either."""
    return os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")


@contextmanager
def running(command: list[str], health: str, log: Path) -> Iterator[str]:
    """Starts a server with `--port` and a free port, and stops it at the end.

    Args:
        command: Program and options, without the port.
        health: Path that answers 200 once the model is loaded.
        log: File for what the server prints.

    Yields:
        The address.

    Raises:
        RuntimeError: If the server does not start.
    """
    for _ in range(TRIES):  # another process may take the port in between
        port = str(free_port())
        url = f"http://127.0.0.1:{port}"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [*command, "--port", port], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            if _is_up(server, url + health):
                yield url
                return
        finally:
            server.kill()
            server.wait()
    raise RuntimeError(f"{command[0]} did not start: {log.read_text(errors='replace')[-2000:]}")


def _is_up(server: subprocess.Popen[bytes], url: str) -> bool:
    """Waits for the answer 200; False if the process ends or does not answer in time."""
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    return False


@contextmanager
def llama_server(model: Path, *options: str, slots: int = 4, context: int = 512) -> Iterator[str]:
    """Serves a GGUF file with one thread and caches in float32; yields the address.

    Args:
        model: The file; what the server prints goes beside it.
        options: Further options of the program.
        slots: Texts that are written at once.
        context: Positions of each slot.

    Raises:
        RuntimeError: If there is no program, or it does not start.
    """
    program = find_llama_server()
    if program is None:
        raise RuntimeError("no llama-server on PATH or in LLAMA_SERVER")
    command = [program, "--model", str(model), "--alias", model.stem, "--host", "127.0.0.1"]
    command += ["--threads", "1", "--parallel", str(slots), "--ctx-size", str(slots * context)]
    command += ["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    with running([*command, *options], "/health", model.with_suffix(".log")) as url:
        yield url
