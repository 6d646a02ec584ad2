"""Measures how a server refuses a burst: the liveness probe meanwhile, and the first 429.

    python -m benchmarks.server.burst [--requests 3000] [--max-queue 1024] [--json F]

Builds a bundle of synthetic items with untrained models and serves it in a process of its own.
Opens all connections, then sends one /v1/recommend on each at once. A third process asks for
/health/live on a new connection every 20 ms. Prints the statuses, the time from a request to the
first 429 and to the last answer, and the latency of the probe before and during the burst.

The longest probe waits for one turn of the event loop. In that turn uvloop reads all sockets, at
about 30 us each, before it runs any task.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.runs import machine, write_json
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from tests.support.redis_server import free_port
from tests.support.tiny_bundle import built, with_models

PROBE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PROBE_EVERY_S = 0.02
QUIET_S = 1.0
MOST_S = 120.0


def probe(port: int, results: Connection) -> None:
    """Asks for /health/live until something arrives on the pipe, then sends (time, seconds).

    It sends None before its first request, because a new process takes a while to start.
    """
    taken: list[tuple[float, float]] = []
    results.send(None)
    while not results.poll():
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(PROBE)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        taken.append((began, time.monotonic() - began))
        time.sleep(max(0.0, began + PROBE_EVERY_S - time.monotonic()))
    results.send(taken)


def request(number: int, num_items: int) -> bytes:
    """Returns a recommendation for a history of eight items."""
    history = [f"item{(number * 7 + i) % num_items:06d}" for i in range(8)]
    body = json.dumps({"history": history, "k": 10, "timeout_ms": 60_000}).encode()
    head = (
        "POST /v1/recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def burst(port: int, num_requests: int, num_items: int) -> dict[str, Any]:
    """Sends all requests at once and waits for all answers.

    Returns:
        Statuses, `began` and `ended` (time.monotonic()), and milliseconds of the first 429 since
        the start of the burst and since that request was sent.
    """
    waiting = selectors.DefaultSelector()
    connections = [
        socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(num_requests)
    ]
    messages = [request(number, num_items) for number in range(num_requests)]
    sent_s: dict[int, float] = {}
    for connection in connections:
        connection.setblocking(False)
        waiting.register(connection, selectors.EVENT_READ)
    time.sleep(QUIET_S)  # the server has accepted all of them
    began = time.monotonic()
    for connection, message in zip(connections, messages, strict=True):
        sent_s[connection.fileno()] = time.monotonic()
        connection.send(message)
    sent = time.monotonic()
    statuses: Counter[str] = Counter()
    first: dict[str, float] = {}
    left = num_requests
    while left and time.monotonic() < began + MOST_S:
        for key, _ in waiting.select(1.0):
            now, answer = time.monotonic(), key.fileobj.recv(65536)  # type: ignore[union-attr]
            status = answer[9:12].decode() or "closed"
            statuses[status] += 1
            if status == "429" and not first:
                first = {"since_start": now - began, "since_sent": now - sent_s[key.fd]}
            waiting.unregister(key.fileobj)
            left -= 1
    ended = time.monotonic()
    for connection in connections:
        connection.close()
    return {
        "statuses": dict(statuses),
        "began": began,
        "ended": ended,
        "sending_ms": round((sent - began) * 1e3, 1),
        "first_429_ms": {name: round(value * 1e3, 1) for name, value in first.items()},
        "last_answer_ms": round((ended - began) * 1e3, 1),
    }


def served(bundle: Path, port: int, max_queue: int) -> subprocess.Popen[bytes]:
    """Starts a server process and waits until it is ready."""
    settings = {"RECSERVE_MAX_QUEUE": str(max_queue), "RECSERVE_QUEUE_SHARE": "1"}  # one address
    settings["RECSERVE_STORE"] = f"lmdb:{bundle}.store"
    command = ["serve", "--bundle", str(bundle), "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from recserve.cli import main; main()", *command],
        env={**os.environ, **settings},
    )
    ready = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for _ in range(1200):
        time.sleep(0.1)
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(ready)
                if connection.recv(65536).startswith(b"HTTP/1.1 200"):
                    return process
        except OSError:
            continue
    process.kill()
    raise RuntimeError("the server is not ready after 120 s")


def latency_ms(taken: list[tuple[float, float]]) -> dict[str, float]:
    """Returns p50 and maximum of probes in milliseconds, and their number."""
    seconds = [each for _, each in taken]
    if not seconds:
        return {"probes": 0}
    p50, most = float(np.median(seconds)), max(seconds)
    return {"p50": round(p50 * 1e3, 1), "max": round(most * 1e3, 1), "probes": len(seconds)}


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Builds, serves and measures."""
    files = write_synthetic(folder / ".data", SyntheticOptions(options.items, 200, 12, seed=3))
    built(files, folder / "bundle")
    with_models(folder / "bundle")
    port = free_port()
    server = served(folder / "bundle", port, options.max_queue)
    results, theirs = multiprocessing.Pipe()
    prober = multiprocessing.get_context("spawn").Process(target=probe, args=(port, theirs))
    try:
        prober.start()
        assert results.recv() is None
        burst(port, 50, options.items)  # warms up
        found = burst(port, options.requests, options.items)
        results.send(None)
        taken: list[tuple[float, float]] = results.recv()
    finally:
        server.terminate()
        server.wait(60)
        prober.join(60)
    began, ended = found.pop("began"), found.pop("ended")
    quiet = [one for one in taken if began - QUIET_S < one[0] < began - 0.2]
    during = [one for one in taken if began - PROBE_EVERY_S < one[0] < ended]
    return {**found, "live_quiet_ms": latency_ms(quiet), "live_burst_ms": latency_ms(during)}


def main(arguments: list[str] | None = None) -> int:
    """Parses the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000, help="requests of the burst")
    parser.add_argument("--max-queue", type=int, default=1024, help="setting of the server")
    parser.add_argument("--items", type=int, default=2000, help="items of the catalogue")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), options)
    print(json.dumps(found, indent=1))
    if options.json is not None:
        write_json(options.json, {"machine": machine(), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
