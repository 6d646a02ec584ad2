"""The synchronous and the asynchronous client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import httpx

from recserve.client.attempts import Attempts, ClientOptions, OwnChanges
from recserve.client.deadline import use_deadlines
from recserve.client.operations import AsyncOperations, Request, SyncOperations

A = TypeVar("A")


class Client(SyncOperations):
    """Calls a recserve server. It may be used from several threads.

    Each operation of the HTTP API has a method of the same name. Bodies and answers are the classes
    of `recserve.schemas`. Every method takes `deadline_s`, the time for its whole answer with all
    attempts; the server is told a little less as `X-Deadline-Ms`. Answers 429 and 503 are retried.

    Raises:
        ApiError: If the server answers with an error.
        AnswerTooLarge: If the answer is longer than `max_answer_bytes`.
        DeadlinePassed: If the answer is not complete within the deadline.
        httpx.TransportError: If the connection fails.
    """

    def __init__(
        self,
        url: str,
        options: ClientOptions | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Opens no connection yet.

        Args:
            url: Address of the server, such as `http://127.0.0.1:8080`.
            options: Keys, deadlines and retries; None means the defaults.
            transport: Transport of httpx, for proxies and tests.
        """
        self.options = options or ClientOptions()
        self._changes = OwnChanges.of(self.options)
        limits = httpx.Limits(max_connections=self.options.connections)
        self._http = httpx.Client(base_url=url, limits=limits, transport=transport)
        use_deadlines(self._http)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request: Request[A], deadline_s: float | None = None) -> A:
        """Sends any request and returns its answer."""
        (answer,) = self.stream(request, deadline_s)
        if self._changes is not None:
            self._changes.add(answer)
        return answer

    def stream(self, request: Request[A], deadline_s: float | None = None) -> Iterator[A]:
        """Sends a request with a stream as its answer, and yields the chunks."""
        attempts = Attempts(request, self.options, deadline_s, self._changes)
        while True:
            try:
                with self._http.stream(**attempts.arguments()) as response:
                    reader = attempts.reader(response)
                    parts = response.iter_raw() if reader.whole is None else (reader.whole,)
                    for part in parts:
                        yield from reader.add(part)
                        attempts.left_s()
                    yield from reader.end()
                if response.is_success:
                    return
                wait_s = attempts.delay_after(response, reader.content)
            except httpx.ConnectError as error:
                wait_s = attempts.unreachable(error)
            except httpx.TimeoutException:
                raise attempts.late() from None
            time.sleep(wait_s)


class AsyncClient(AsyncOperations):
    """Calls a recserve server from an event loop, with the methods of `Client`."""

    def __init__(
        self,
        url: str,
        options: ClientOptions | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Opens no connection yet.

        Args:
            url: Address of the server, such as `http://127.0.0.1:8080`.
            options: Keys, deadlines and retries; None means the defaults.
            transport: Transport of httpx, for proxies and tests.
        """
        self.options = options or ClientOptions()
        self._changes = OwnChanges.of(self.options)
        limits = httpx.Limits(max_connections=self.options.connections)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, transport=transport)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, request: Request[A], deadline_s: float | None = None) -> A:
        """Sends any request and returns its answer."""
        (answer,) = [answer async for answer in self.stream(request, deadline_s)]
        if self._changes is not None:
            self._changes.add(answer)
        return answer

    async def stream(
        self, request: Request[A], deadline_s: float | None = None
    ) -> AsyncIterator[A]:
        """Sends a request with a stream as its answer, and yields the chunks."""
        attempts = Attempts(request, self.options, deadline_s, self._changes)
        while True:
            try:
                sent = self._http.build_request(**attempts.arguments())
                async with asyncio.timeout(attempts.left_s()):
                    response = await self._http.send(sent, stream=True)
                try:
                    reader = attempts.reader(response)
                    whole = reader.whole
                    parts = response.aiter_raw() if whole is None else _iterate_once(whole)
                    while True:
                        async with asyncio.timeout(attempts.left_s()):
                            part = await anext(parts, None)
                        if part is None:
                            break
                        for answer in reader.add(part):
                            yield answer
                    for answer in reader.end():
                        yield answer
                finally:
                    await response.aclose()
                if response.is_success:
                    return
                wait_s = attempts.delay_after(response, reader.content)
            except httpx.ConnectError as error:
                wait_s = attempts.unreachable(error)
            except (TimeoutError, httpx.TimeoutException):
                raise attempts.late() from None
            await asyncio.sleep(wait_s)


async def _iterate_once(value: bytes) -> AsyncIterator[bytes]:
    yield value
