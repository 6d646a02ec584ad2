"""R3: clients that go away at any time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time

import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import LLM_NAME, ServerProcess, Site
from benchmarks.campaign.traffic import history, percentile

AT_ONCE = 24
MOMENTS = ("in the headers", "in the body", "after the request", "while it streams")
BUSY = ("recserve_requests_running", "recserve_queue_depth", 'recserve_kv_pages{state="used"}')
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


def wire(path: str, body: object) -> bytes:
    """Returns the bytes of a POST."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def request(random: np.random.Generator) -> bytes:
    """Returns a slate, or a text that streams."""
    if random.random() < 0.5:
        slate = {"history": history(random), "k": 10, "strategy": "beam", "beam_width": 100}
        return wire("/v1/recommend", slate)
    prompt = "".join(chr(97 + n) for n in random.integers(0, 26, random.integers(1, 60)))
    text = {"model": LLM_NAME, "prompt": prompt, "max_tokens": 64, "stream": True}
    return wire("/v1/completions", text)


async def leave(port: int, random: np.random.Generator, moment: int) -> None:
    """Sends a part of a request, or all of it and reads a part of the answer; then goes away."""
    said = request(random)
    head = said.index(b"\r\n\r\n") + 4
    ends = (random.integers(1, head), random.integers(head, len(said)), len(said), len(said))
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said[: int(ends[moment])])
        await writer.drain()
        if moment == 2:
            await asyncio.sleep(float(random.exponential(0.01)))
        elif moment == 3:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(400), 5)
        if random.random() < 0.5:
            kept = writer.get_extra_info("socket")
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()
        await writer.wait_closed()


async def leave_all(port: int, random: np.random.Generator, count: int) -> None:
    """Lets clients leave, AT_ONCE at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            await leave(port, random, number % len(MOMENTS))

    await asyncio.gather(*(one(number) for number in range(count)))


def until_idle(server: ServerProcess, most_s: float = 10.0) -> tuple[float, float]:
    """Returns the seconds until the engine is idle, and what is still busy at the end."""
    began = time.monotonic()
    while True:
        found = server.metrics()
        left = sum(found[name] for name in BUSY)
        seconds = time.monotonic() - began
        if not left or seconds > most_s:
            return seconds, left
        time.sleep(0.005)


@check(
    "R3",
    "disconnects",
    "clients that leave before, in and after a request, and in a stream",
    cases=100_000,
    minimum_s=10,
    weight=2,
)
def disconnects(site: Site, budget: Budget) -> Finding:
    """Counts what clients that went away leave behind."""
    random = np.random.default_rng(site.seed)
    with site.server(llm=site.llm) as server:
        port = int(server.url.rpartition(":")[2])
        asyncio.run(leave_all(port, random, 4 * AT_ONCE))
        until_idle(server)
        files, threads = server.num_files(), server.num_threads()
        gone, idle_s, left = 0, [], 0.0
        for _ in budget.cases(100_000 // (4 * AT_ONCE), 0.95, 5):
            asyncio.run(leave_all(port, random, 4 * AT_ONCE))
            gone += 4 * AT_ONCE
            seconds, busy = until_idle(server)
            idle_s.append(seconds)
            left = max(left, busy)
        time.sleep(0.2)
        broken = server.metrics()['recserve_requests_failed_total{reason="internal"}']
        return Finding(
            gone,
            (
                Figure("requests or pages not given back", left, 0),
                Figure("open files more than before", server.num_files() - files, 0),
                Figure("threads more than before (pools fill)", server.num_threads() - threads, 8),
                Figure("internal errors", broken, 0),
                Figure("p99 until idle in s", percentile(idle_s, 99), 1),
            ),
            f"moments: {', '.join(MOMENTS)}; half of the clients reset the connection",
        )
