"""A client that does not take its answer cannot hold the connection."""

import asyncio
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from recserve.metrics import Metrics
from recserve.server.transport.connection import Connection
from recserve.server.transport.connection_limits import ConnectionLimits
from recserve.server.transport.flow_control import SlowReader

SIZE = 32 << 20  # more than the buffers of both sides


async def large(scope, receive, send):
    headers = [(b"content-length", b"%d" % SIZE)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(SIZE)})


async def streamed(scope, receive, send):
    """The same size, in events."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(SIZE >> 14):
        await send({"type": "http.response.body", "body": bytes(1 << 14), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def server_of(lost, app=large, limits=None):
    """A server whose connections put their end into `lost`."""
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(app, log_config=None)
    limits = limits or ConnectionLimits(unread_timeout_s=1.0)

    class Watched(Connection):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            if not lost.done():
                lost.set_result(exc)

    metrics = Metrics((), (), lambda: None)
    return await loop.create_server(
        lambda: Watched(config, ServerState(), {}, limits=limits, metrics=metrics), "127.0.0.1", 0
    )


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"], ids=["open", "closing"])
def test_a_client_that_takes_nothing_is_cut(header):
    async def run():
        lost = asyncio.get_running_loop().create_future()
        server = await server_of(lost)
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(server.sockets[0].getsockname())
            wire.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
            error = await asyncio.wait_for(lost, 60)
        server.close()
        return error

    error = asyncio.run(run())  # of the system's limit, or none after that of the server
    assert error is None or isinstance(error, TimeoutError)


@pytest.mark.parametrize("app", [large, streamed], ids=["whole", "stream"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("end", ["close", "keep-alive"])
def test_a_client_that_takes_little_is_cut(app, version, end):
    """It reads all the time, so that the system sees progress."""

    async def run():
        loop = asyncio.get_running_loop()
        lost = loop.create_future()
        # The system's own limit does not end it.
        limits = ConnectionLimits(unread_timeout_s=0.3, min_read_bytes_s=1 << 30)
        server = await server_of(lost, app, limits)
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(server.sockets[0].getsockname())
            wire.setblocking(False)
            head = f"GET / HTTP/{version}\r\nHost: x\r\nConnection: {end}\r\n\r\n"
            await loop.sock_sendall(wire, head.encode())
            num_read = 0
            while not lost.done() and num_read < SIZE:
                num_read += len(await loop.sock_recv(wire, 1024))
                await asyncio.sleep(0.005)
            await asyncio.wait_for(lost, 60)
        server.close()
        return num_read

    assert asyncio.run(run()) < SIZE


class SlowClock:
    """A loop whose time the test sets, with a transport whose buffer it sets too."""

    def __init__(self):
        self.now, self.timer, self.size, self.aborted = 0.0, None, 0, False

    def time(self):
        return self.now

    def call_later(self, seconds, call):
        self.timer = (self.now + seconds, call)
        return self

    def cancel(self):
        self.timer = None

    def get_write_buffer_size(self):
        return self.size

    def abort(self):
        self.aborted = True

    def spend(self, seconds):
        self.now += seconds
        while self.timer is not None and self.timer[0] <= self.now and not self.aborted:
            self.timer, (_, call) = None, self.timer
            call()


@pytest.mark.parametrize("episodes", [1, 3, 50], ids=["one answer", "some", "a stream"])
@pytest.mark.parametrize("rate", [0, 13_000, 80_000, 125_000, 10**7])
@pytest.mark.parametrize("idle_s", [0.0, 100.0], ids=["ready", "made slowly"])
def test_the_rate_counts_while_bytes_wait(episodes, rate, idle_s):
    """Also over the short pauses of a stream, and not while the server makes the next piece."""
    clock = SlowClock()
    reader = SlowReader(clock, clock, 30.0, 100_000.0)
    for _ in range(episodes):
        clock.size = 12_000_000 // episodes
        reader.pause()
        while clock.size and not clock.aborted:
            clock.size = max(0, clock.size - rate)
            clock.spend(1.0)
        reader.resume()
        clock.spend(idle_s)
        if clock.aborted:
            break
    assert clock.aborted == (rate < 100_000)
