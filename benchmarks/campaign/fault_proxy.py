"""A TCP proxy in front of a server on loopback that can fail in many ways."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.support.redis_server import free_port

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
LATENCY_S, RESENT_S = 1.0, 0.2


class FaultProxy:
    """Passes bytes between clients and a server, on a thread of its own.

    Faults: `down` closes the port, `refuse` resets each new connection, `hang` passes nothing,
    `latency` delays each reply by a second, `loss` loses half of the packets (each is sent again
    after 200 ms, or the connection breaks), `reset` breaks connections within a reply, `half`
    passes half of a reply and then nothing, `garbage` replies with random bytes.

    Attributes:
        port: Port of the proxy.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target, self.port = target, free_port()
        self._fault = ""
        self._draw = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Fails inside; connections that a fault has spoilt break at its end."""
        self._fault = name
        if name in ("down", "refuse"):
            self._run(self._close() if name == "down" else self._break())
        try:
            yield
        finally:
            self._fault = ""
            self._run(self._break())
            if name == "down":
                self._run(self._listen())

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)  # type: ignore[arg-type]

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None
        await self._break()

    async def _break(self) -> None:
        for writer in list(self._writers):
            abort(writer)
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fault == "refuse":
            abort(writer)
            return
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            abort(writer)
            return
        self._writers |= {writer, outer}
        try:
            await asyncio.gather(
                self._pass(reader, outer, reply=False), self._pass(inner, writer, reply=True)
            )
        finally:
            self._writers -= {writer, outer}

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bool
    ) -> None:
        """Passes bytes in one direction until one end closes."""
        with suppress(ConnectionError, RuntimeError):
            while data := await reader.read(1 << 16):
                match self._fault if reply else "":
                    case "hang":
                        continue
                    case "latency":
                        await asyncio.sleep(LATENCY_S)
                    case "loss" if self._draw.random() < 0.5:
                        if self._draw.random() < 0.2:
                            abort(writer)
                            return
                        await asyncio.sleep(RESENT_S)
                    case "reset":
                        writer.write(data[: len(data) // 2])
                        abort(writer)
                        return
                    case "half":
                        data = data[: len(data) // 2]
                    case "garbage":
                        data = self._draw.randbytes(len(data))
                writer.write(data)
                await writer.drain()
        abort(writer)


def abort(writer: asyncio.StreamWriter) -> None:
    """Resets a connection."""
    with suppress(OSError, AttributeError):
        kept = writer.get_extra_info("socket")
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
