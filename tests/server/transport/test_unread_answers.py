"""A client that does not take its answer cannot hold the connection."""

import asyncio
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from recserve.metrics import Metrics
from recserve.server.transport.connection import Connection
from recserve.server.transport.connection_limits import ConnectionLimits

needs_option = pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no TCP_USER_TIMEOUT"
)
SIZE = 32 << 20  # more than the buffers of both sides


async def large(scope, receive, send):
    headers = [(b"content-length", b"%d" % SIZE)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(SIZE)})


async def server_of(lost):
    """A server whose connections put their end into `lost`."""
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(large, log_config=None)
    limits = ConnectionLimits(unread_timeout_s=1.0)

    class Watched(Connection):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            if not lost.done():
                lost.set_result(exc)

    metrics = Metrics((), (), lambda: None)
    return await loop.create_server(
        lambda: Watched(config, ServerState(), {}, limits=limits, metrics=metrics), "127.0.0.1", 0
    )


@needs_option
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

    assert isinstance(asyncio.run(run()), TimeoutError)
