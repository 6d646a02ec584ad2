"""Server-sent events: pieces of texts from the engine's thread to a client that may leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from recserve.core.request import DeadlineExceeded
from recserve.server.errors import ClientGone, error_answer, row_of
from recserve.server.exchange import GRACE_S, disconnected
from recserve.server.transport.trace import trace_of
from recserve.service.text.completions import PendingTexts
from recserve.service.text.stream import Piece

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ENCODER = msgspec.json.Encoder()


class Pieces:
    """A queue from the engine's thread to the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    def put(self, piece: Piece) -> None:
        """On the engine's thread, which may outlive the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    def fail(self, error: Exception) -> None:
        """Nobody waits for more, or may; on the event loop."""
        self._queue.put_nowait(error)

    async def next(self) -> Piece:
        """The next piece. Raises what came instead of it."""
        piece = await self._queue.get()
        error = piece if isinstance(piece, Exception) else piece.error
        if error is not None:
            raise error
        assert isinstance(piece, Piece)
        return piece


class EventStream(Response):
    """Texts as they are written. The answer begins with the first piece, so that whatever fails
    before it has an HTTP status of its own; a later failure is an event.
    """

    def __init__(
        self,
        request: Request,
        work: PendingTexts,
        pieces: Pieces,
        deadline_s: float,
        on_end: Callable[[], None],
    ) -> None:
        """on_end: called when nothing more is sent, whatever the reason."""
        super().__init__(None, 200, HEADERS, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self.request, self.work = request, work
        self.pieces, self.on_end = pieces, on_end
        self.gone = asyncio.ensure_future(disconnected(request))
        gone = ClientGone("the client closed the connection")
        self.gone.add_done_callback(lambda _: pieces.fail(gone))
        # The engine itself ends what is late; this is for the case that it cannot.
        left_s = max(0.0, deadline_s - time.monotonic()) + GRACE_S
        late = DeadlineExceeded("the deadline passed before the text was complete")
        self.timer = asyncio.get_running_loop().call_later(left_s, pieces.fail, late)
        self.first: Piece | None = None

    async def begin(self) -> EventStream:
        """Wait for the first piece. Raises what came instead of it."""
        try:
            self.first = await self.pieces.next()
        except BaseException:
            self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every piece as an event, then the counts and [DONE]."""
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            raise ClientGone("the client closed the connection") from None
        finally:
            self._close()

    async def _events(self) -> AsyncIterator[bytes]:
        left = len(self.work.streams)
        piece = self.first
        try:
            while left:
                piece = piece or await self.pieces.next()
                if self.gone.done():
                    raise ClientGone("the client closed the connection")
                left -= piece.ended
                yield _event(self.work.chunk(piece, last=not left))
                piece = None
            if self.work.include_usage:
                yield _event(self.work.counts())
        except ClientGone:
            raise
        except Exception as error:
            trace_of(self.request.scope).failure = row_of(error).reason
            yield _event(error_answer(error))
        yield DONE

    def _close(self) -> None:
        """Whatever of the texts is not done is not wanted."""
        self.gone.cancel()
        self.timer.cancel()
        self.work.cancel()
        self.on_end()


def _event(message: msgspec.Struct) -> bytes:
    return b"data: " + _ENCODER.encode(message) + b"\n\n"
