"""A server that answers at once, for measuring the load generator itself.

    python -m recserve.load.calibration_server

It prints its port, answers every request with an empty slate, and ends when its input closes.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

BODY = b'{"items":[],"timing_ms":{"total":0.0}}'
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(BODY)).encode()
    + b"\r\n\r\n"
    + BODY
)
LENGTH = b"content-length:"


class Responder(asyncio.Protocol):
    """Reads requests with a stated length and answers each of them."""

    def __init__(self) -> None:
        self.buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answers every request that is complete."""
        self.buffer += data
        while (head_end := self.buffer.find(b"\r\n\r\n")) >= 0:
            end = head_end + 4 + body_length(self.buffer[:head_end])
            if len(self.buffer) < end or self.transport is None:
                return
            self.buffer = self.buffer[end:]
            self.transport.write(ANSWER)


def body_length(head: bytes) -> int:
    """Returns the stated length of the body; 0 if none is stated."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(LENGTH):
            return int(line[len(LENGTH) :])
    return 0


async def serve() -> None:
    """Serves on a free loopback port until standard input closes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Responder, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
