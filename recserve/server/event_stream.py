"""Server-sent events: streams pieces of text from the engine's thread to the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from recserve.server.context import GONE, RequestContext
from recserve.server.errors import ClientGone, error_answer, row_of
from recserve.service.text.pending_texts import PendingTexts
from recserve.service.text.stream import Piece

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ENCODER = msgspec.json.Encoder()


class PieceQueue:
    """A queue of text pieces from the engine's thread to the event loop that created it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    def put(self, piece: Piece) -> None:
        """Adds a piece; called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop may have closed before the engine
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    def fail(self, error: Exception) -> None:
        """Ends the queue with an error; called on the event loop."""
        self._queue.put_nowait(error)

    async def next(self) -> Piece:
        """Waits for the next piece. Raises the error that ended the queue or the text."""
        piece = await self._queue.get()
        error = piece if isinstance(piece, Exception) else piece.error
        if error is not None:
            raise error
        assert isinstance(piece, Piece)
        return piece


class EventStream(Response):
    """A response that streams texts while the engine generates them.

    The response starts with the first piece. An error before that gets its own HTTP status; a later
    error is sent as an event.

    Attributes:
        context: The request.
        work: The texts in progress.
        pieces: Queue of text pieces.
        on_end: Called once nothing more will be sent, with the error that ended the texts.
        watch: Ends the stream when the client is gone, or after the deadline.
        first: The first piece; None until it has arrived.
        error: Error that ended the texts; None so far.
    """

    def __init__(
        self,
        context: RequestContext,
        work: PendingTexts,
        pieces: PieceQueue,
        deadline_s: float,
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Watches the connection and the deadline.

        Args:
            context: The request.
            work: The texts in progress.
            pieces: Queue that the engine fills.
            deadline_s: time.monotonic() value of the deadline.
            on_end: Called once nothing more will be sent, with the error that ended the texts or
                None.
        """
        super().__init__(None, 200, HEADERS, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self.context, self.work = context, work
        self.pieces, self.on_end = pieces, on_end
        self.watch = context.watch(deadline_s, "the text was complete", pieces.fail)
        self.first: Piece | None = None
        self.error: Exception | None = None

    async def wait_for_first(self) -> EventStream:
        """Waits for the first piece. Raises the error if the text fails before it."""
        try:
            self.first = await self.pieces.next()
        except BaseException as error:
            self.error = error if isinstance(error, Exception) else None
            self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends every piece as an event, then the token counts and [DONE]."""
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            self.error = ClientGone(GONE)
            raise self.error from None
        finally:
            self._close()

    async def _events(self) -> AsyncIterator[bytes]:
        left = len(self.work.streams)
        piece = self.first
        try:
            while left:
                piece = piece or await self.pieces.next()
                if self.watch.gone:
                    raise ClientGone(GONE)
                left -= piece.ended
                yield _event(self.work.chunk(piece, last=not left))
                piece = None
            if self.work.include_usage:
                yield _event(self.work.counts())
        except ClientGone as error:
            self.error = error
            raise
        except Exception as error:
            self.error = error
            trace, row = self.context.trace, row_of(error)
            trace.failure, trace.error_code = row.reason, row.code
            yield _event(error_answer(error))
        yield DONE

    def _close(self) -> None:
        """Stops the watch and cancels the unfinished texts."""
        self.watch.close()
        self.work.cancel()
        self.on_end(self.error)


def _event(message: msgspec.Struct) -> bytes:
    return b"data: " + _ENCODER.encode(message) + b"\n\n"
