"""A server without HTTP rules: a function answers each connection by hand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yields the address of a server that calls `serve` for each connection, on a thread.

    It closes the connection afterwards. The end of the client's patience is no error.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def answer(wire: socket.socket) -> None:
        with wire:
            try:
                serve(wire)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                wire, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=answer, args=(wire,), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(10)
        for thread in threads:
            thread.join(10)


def read_head(wire: socket.socket) -> None:
    """Reads a request up to its body."""
    head = b""
    while b"\r\n\r\n" not in head:
        part = wire.recv(1 << 12)
        if not part:
            raise ConnectionError
        head += part
