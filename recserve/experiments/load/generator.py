"""The load generator: sends planned requests over HTTP and times them.

Open loop: every request has a scheduled time, and its latency counts from there, whatever the
generator or the server was doing then. A server that stalls therefore delays nothing that is
counted (no coordinated omission). Closed loop: a fixed number of workers send as fast as they get
answers; latency then counts from the send.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec

from recserve.experiments.load.exchanges import Call, HttpExchange, Shot
from recserve.experiments.load.targets import (
    Json,
    MalformedReply,
    StreamJoiner,
    Target,
)

DETAIL = 200
PROGRESS_S = 0.5
# Time between planning and the first request, so that the first sends are not late.
LEAD_S = 0.2
JSON_HEADER = {"Content-Type": "application/json"}
CLIENT_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (TimeoutError, "timeout"),
    (aiohttp.ClientConnectorError, "connect"),
    (aiohttp.ServerDisconnectedError, "disconnect"),
    (aiohttp.ClientPayloadError, "disconnect"),
    (aiohttp.ClientOSError, "disconnect"),
    (MalformedReply, "malformed"),
    (aiohttp.ClientError, "client"),
)


@dataclass(frozen=True)
class LoadOptions:
    """How requests are sent.

    Attributes:
        workers: Workers of a closed loop; 0 for an open loop.
        max_in_flight: Shots under way at most in an open loop; later ones wait, and that counts.
        timeout_s: Longest time for one request.
        stop_after_s: A closed loop sends nothing after this time; None sends all shots.
        headers: HTTP headers besides the content type.
    """

    workers: int = 0
    max_in_flight: int = 1024
    timeout_s: float = 60.0
    stop_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadProgress:
    """Where a run is. seconds: since the start. total: shots planned."""

    done: int
    errors: int
    total: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        exchanges: One per call, in the order in which they ended.
        seconds: From the first scheduled send to the last end.
        cpu_seconds: Processor time that the generator used.
        peak_in_flight: Most shots under way at once.
    """

    exchanges: tuple[HttpExchange, ...]
    seconds: float
    cpu_seconds: float
    peak_in_flight: int


Until = Callable[[Sequence[HttpExchange]], bool]


async def drive(
    shots: Sequence[Shot],
    target: Target,
    options: LoadOptions,
    progress: Callable[[LoadProgress], None] | None = None,
    until: Until | None = None,
) -> Run:
    """Sends all shots and waits for all of them.

    Args:
        shots: In order of their times.
        target: Reads the answers.
        options: How requests are sent.
        progress: Called about twice a second.
        until: Called on a thread with the exchanges of all first shots that have ended. Once it
            returns True, nothing more is sent.
    """
    sender = _Sender(target=target, options=options)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    cpu = time.process_time()
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(_note_reuse)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers={**JSON_HEADER, **options.headers},
        trace_configs=[tracing],
    ) as session:
        sender.session = session
        sender.start = time.perf_counter() + (0.0 if options.workers else LEAD_S)
        watchers = []
        if progress:
            watchers.append(asyncio.create_task(_watch(sender, len(shots), progress)))
        if until is not None:
            watchers.append(asyncio.create_task(_stop_early(sender, until)))
        try:
            await (sender.closed(shots) if options.workers else sender.open(shots))
        finally:
            for watcher in watchers:
                watcher.cancel()
    if progress:
        progress(sender.state(len(shots)))
    return Run(
        exchanges=tuple(sender.exchanges),
        seconds=max((exchange.done for exchange in sender.exchanges), default=0.0),
        cpu_seconds=time.process_time() - cpu,
        peak_in_flight=sender.peak,
    )


async def _note_reuse(session: object, context: SimpleNamespace, params: object) -> None:
    """Notes that a request goes over a connection that carried an earlier one."""
    context.trace_request_ctx.append(True)


async def _watch(sender: _Sender, total: int, progress: Callable[[LoadProgress], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        progress(sender.state(total))


async def _stop_early(sender: _Sender, until: Until) -> None:
    """Stops the run once `until` says so."""
    seen = 0
    while not sender.stop.is_set():
        await asyncio.sleep(PROGRESS_S)
        while seen in sender.ended:
            seen += 1
        complete = [one for one in sender.exchanges if one.shot < seen]
        if await asyncio.to_thread(until, complete):
            sender.stop.set()


class _Sender:
    """State of one run."""

    session: aiohttp.ClientSession

    def __init__(self, target: Target, options: LoadOptions) -> None:
        self.target = target
        self.options = options
        self.start = 0.0
        self.exchanges: list[HttpExchange] = []
        self.errors = 0
        self.in_flight = 0
        self.peak = 0
        self.finished = 0
        self.ended: set[int] = set()
        self.stop = threading.Event()

    def now(self) -> float:
        """Seconds from the start of the run."""
        return time.perf_counter() - self.start

    def state(self, total: int) -> LoadProgress:
        """Where the run is."""
        return LoadProgress(done=self.finished, errors=self.errors, total=total, seconds=self.now())

    async def closed(self, shots: Sequence[Shot]) -> None:
        """Sends shots with a fixed number of workers."""
        numbered = iter(enumerate(shots))

        async def work() -> None:
            for number, shot in numbered:
                if self.stop.is_set():
                    return
                if self.options.stop_after_s is not None and self.now() > self.options.stop_after_s:
                    return
                await self.shoot(number, shot, self.now())

        await asyncio.gather(*(work() for _ in range(self.options.workers)))

    async def open(self, shots: Sequence[Shot]) -> None:
        """Starts every shot at its time."""
        loop = asyncio.get_running_loop()
        places = asyncio.Semaphore(self.options.max_in_flight)
        tasks: set[asyncio.Task[None]] = set()

        async def one(number: int, shot: Shot) -> None:
            async with places:
                await self.shoot(number, shot, shot.at_s)

        def fire(first: int, end: int) -> None:
            for number in range(first, end):
                task = loop.create_task(one(number, shots[number]))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        try:
            await asyncio.to_thread(self._pace, shots, loop, fire)
            while tasks:
                await asyncio.wait(tasks)
        finally:
            self.stop.set()

    def _pace(
        self,
        shots: Sequence[Shot],
        loop: asyncio.AbstractEventLoop,
        fire: Callable[[int, int], None],
    ) -> None:
        """Wakes the loop when shots are due; a loop's own timers are a millisecond coarse."""
        number = 0
        while number < len(shots):
            wait = shots[number].at_s - self.now()
            if self.stop.wait(wait) if wait > 0 else self.stop.is_set():
                return
            now, end = self.now(), number
            while end < len(shots) and shots[end].at_s <= now:
                end += 1
            if end > number:
                loop.call_soon_threadsafe(fire, number, end)
                number = end

    async def shoot(self, number: int, shot: Shot, scheduled: float) -> None:
        """Sends the calls of a shot one after the other."""
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        for place, call in enumerate(shot.calls):
            exchange = await self.send(number, place, call, scheduled)
            self.exchanges.append(exchange)
            self.errors += exchange.error is not None
            scheduled = exchange.done
        self.in_flight -= 1
        self.finished += 1
        self.ended.add(number)

    async def _post(self, call: Call) -> aiohttp.ClientResponse:
        """Sends a call, again if the server closed a kept connection before it answered.

        llama.cpp's server closes the connection after each stream without saying so. Every try
        takes one such connection from the pool. A failure on a new connection is the request's.
        """
        while True:
            reused: list[bool] = []
            try:
                return await self.session.post(call.url, data=call.body, trace_request_ctx=reused)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                if not reused:
                    raise

    async def send(self, number: int, place: int, call: Call, scheduled: float) -> HttpExchange:
        """Sends one call; a failure is an exchange with an error."""
        sent = self.now()
        status, error, detail, reply = 0, None, "", None
        joiner = StreamJoiner() if self.target.streams else None
        done = 0.0
        try:
            async with await self._post(call) as response:
                status = response.status
                if joiner is not None and status == 200:
                    async for data in response.content.iter_any():
                        joiner.feed(data, self.now())
                    done = self.now()
                    if not joiner.done:
                        raise MalformedReply("the stream ended without its end marker")
                    reply = self.target.read(joiner.answer())
                else:
                    data = await response.read()
                    done = self.now()
                    if status == 200:
                        reply = self.target.read(_decode(data))
                    else:
                        error, detail = f"http_{status}", _error_message(data)
        except (TimeoutError, aiohttp.ClientError, MalformedReply) as failure:
            error = next(name for kind, name in CLIENT_ERRORS if isinstance(failure, kind))
            detail = str(failure)[:DETAIL]
        return HttpExchange(
            shot=number,
            place=place,
            arm=call.arm,
            sample=call.sample,
            scheduled=scheduled,
            sent=sent,
            done=done or self.now(),
            status=status,
            error=error,
            detail=detail,
            pieces=tuple(joiner.piece_times) if joiner is not None else (),
            reply=reply,
        )


def _decode(data: bytes) -> Json:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise MalformedReply(f"the answer is not a JSON object ({error})") from None


def _error_message(data: bytes) -> str:
    """The message of an error answer, in OpenAI's shape or plain."""
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        found = data.decode(errors="replace")
    return str(found)[:DETAIL]
