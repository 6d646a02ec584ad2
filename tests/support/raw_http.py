"""Hand-written HTTP, for clients that send less, more or later than a library would."""

from __future__ import annotations

import asyncio
import socket

import httpx


def connect(client: httpx.Client) -> socket.socket:
    """Opens a separate connection to the server of a client."""
    return socket.create_connection((client.base_url.host, client.base_url.port), 30)


def all_of(wire: socket.socket) -> bytes:
    """Returns everything that the server sends until it closes the connection."""
    said = b""
    while part := wire.recv(1 << 16):
        said += part
    return said


def one_of(wire: socket.socket) -> tuple[bytes, bytes]:
    """Returns head and body of one response that has a Content-Length."""
    said = b""
    while b"\r\n\r\n" not in said:
        part = wire.recv(1 << 16)
        assert part, said
        said += part
    head, _, body = said.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += wire.recv(1 << 16)
    return head, body


class Wire(asyncio.Transport):
    """A transport without a network that records calls."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
