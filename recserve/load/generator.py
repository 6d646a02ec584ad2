"""Load over HTTP: what is sent when, the generator that sends and times it, and what comes back.

Open loop: every request has a scheduled time, and its latency counts from there, whatever the
generator or the server was doing then. A server that stalls therefore delays nothing that is
counted (no coordinated omission). Closed loop: a fixed number of workers send as fast as they get
answers; latency then counts from the send.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recserve.experiments.assignment import ArmSplit
from recserve.load.datasets import Sample
from recserve.load.targets import (
    Json,
    MalformedReply,
    Reply,
    StreamJoiner,
    Target,
)
from recserve.schemas.experiments import UNTRACKED_HEADER

Mode = Literal["blocks", "split", "paired"]
# Requests of each arm in one randomised block.
PER_BLOCK = 2
URL_FIELD = "url"
Times = NDArray[np.float64]
TIME_COLUMNS = ("timestamp", "arrival_time", "arrived_at", "time", "scheduled_s")
DETAIL = 200
PROGRESS_S = 0.5
# Time between planning and the first request, so that the first sends are not late.
LEAD_S = 0.2
HEADERS = {"Content-Type": "application/json", UNTRACKED_HEADER: "load"}
CLIENT_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (TimeoutError, "timeout"),
    (aiohttp.ClientConnectorError, "connect"),
    (aiohttp.ServerDisconnectedError, "disconnect"),
    (aiohttp.ClientPayloadError, "disconnect"),
    (aiohttp.ClientOSError, "disconnect"),
    (MalformedReply, "malformed"),
    (aiohttp.ClientError, "client"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Attributes:
        url: Full address.
        body: JSON.
        arm: Number of the arm.
        sample: Number of the sample.
    """

    url: str
    body: bytes
    arm: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Shot:
    """Calls that are sent one after the other.

    Attributes:
        at_s: Scheduled time of the first call, in seconds from the start; ignored in a closed loop.
        calls: One call, or the calls of a pair.
    """

    at_s: float
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """One request and what became of it. Times are seconds from the start of the run.

    Attributes:
        shot: Number of the shot.
        place: Place of the call within its shot.
        arm: Number of the arm.
        sample: Number of the sample.
        scheduled: When it was to be sent; for later calls of a shot, when the one before ended.
        sent: When it was sent.
        done: When the last byte arrived, or the request failed.
        status: HTTP status; 0 if there was no answer.
        error: Kind of failure; None if the answer was read.
        detail: What the server or the client said of the failure.
        pieces: Times at which pieces of text arrived.
        reply: What the answer said; None on failure.
    """

    shot: int
    place: int
    arm: int
    sample: int
    scheduled: float
    sent: float
    done: float
    status: int
    error: str | None
    detail: str = ""
    pieces: tuple[float, ...] = ()
    reply: Reply | None = None

    @property
    def latency_ms(self) -> float:
        """Time from the scheduled send to the last byte."""
        return (self.done - self.scheduled) * 1e3


@dataclass(frozen=True)
class Arm:
    """One configuration under test.

    Attributes:
        name: Name in the report.
        url: Address of the server, without the route.
        fields: Request fields of this arm; dots in names nest.
    """

    name: str
    url: str
    fields: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Design:
    """How requests are divided among arms.

    Attributes:
        mode: `blocks` draws the order of arms within small blocks of requests. `split` gives each
            unit one arm permanently, by hash. `paired` sends every request to all arms, one after
            the other in drawn order.
        seed: Seed of the draws, and of the hash.
        weights: Share of units per arm in `split`; None for equal shares.
    """

    mode: Mode = "blocks"
    seed: str = "0"
    weights: tuple[float, ...] | None = None


def parse_arm(text: str, url: str) -> Arm:
    """Returns the arm of `NAME=JSON` or `NAME=URL`.

    Args:
        text: A JSON object of request fields; its field `url` is the server's address.
        url: Address where the arm names none.

    Raises:
        ValueError: If the text is neither.
    """
    name, found, value = text.partition("=")
    if not found or not name:
        raise ValueError(f"arm {text!r}: expected NAME=JSON or NAME=URL")
    if value.startswith(("http://", "https://")):
        return Arm(name=name, url=value.rstrip("/"))
    try:
        fields = json.loads(value or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"arm {name}: {value!r} is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"arm {name}: expected a JSON object, got {value!r}")
    own = fields.pop(URL_FIELD, url)
    return Arm(name=name, url=str(own).rstrip("/"), fields=fields)


def check_samples(samples: Sequence[Sample], target: Target) -> None:
    """Raises ValueError if the data set does not fit the route."""
    one = samples[0]
    if target.kind == "text" and not one.turns:
        raise ValueError(f"{target.name} needs prompts, and this data set holds users")
    if target.kind == "items" and one.turns:
        raise ValueError(f"{target.name} needs users, and this data set holds prompts")
    if target.name == "rank" and not one.candidates:
        raise ValueError("rank needs candidates: ask for some per user")


def sample_order(num_samples: int, num_requests: int, seed: str) -> NDArray[np.int64]:
    """Returns the sample of each request: drawn orders of all samples, one after the other."""
    drawn = np.random.default_rng(_number(seed, "order"))
    rounds = -(-num_requests // num_samples)
    orders = [drawn.permutation(num_samples) for _ in range(max(rounds, 1))]
    return np.concatenate(orders)[:num_requests].astype(np.int64)


def make_plan(
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    target: Target,
    times: Times,
    design: Design,
    fields: Json,
) -> list[Shot]:
    """Returns the shots of a run, in order of time.

    Args:
        samples: Requests to send; their order is drawn.
        arms: At least one.
        target: Makes the requests.
        times: Scheduled seconds, one per shot; a closed loop reads only their number.
        design: How arms are drawn.
        fields: Request fields of all arms.
    """
    order = sample_order(len(samples), len(times), design.seed)
    drawn = np.random.default_rng(_number(design.seed, "arms"))
    bodies = _Bodies(samples=samples, arms=arms, target=target, fields=fields)
    if design.mode == "paired":
        choices = [tuple(drawn.permutation(len(arms))) for _ in order]
    elif design.mode == "blocks":
        block = np.repeat(np.arange(len(arms)), PER_BLOCK)
        blocks = -(-len(order) // len(block))
        drawn_arms = np.concatenate([drawn.permutation(block) for _ in range(max(blocks, 1))])
        choices = [(arm,) for arm in drawn_arms[: len(order)]]
    else:
        split = ArmSplit.even(design.seed, [arm.name for arm in arms], design.weights)
        numbers = {arm.name: number for number, arm in enumerate(arms)}
        chosen = [split.assign(sample.unit).arm for sample in samples]
        choices = [() if chosen[i] is None else (numbers[str(chosen[i])],) for i in order]
    return [
        Shot(at_s=float(time), calls=tuple(bodies.call(int(i), int(arm)) for arm in picked))
        for time, i, picked in zip(times, order, choices, strict=True)
        if picked
    ]


@dataclass(frozen=True)
class _Bodies:
    """Makes each request once: a sample comes again with the same bytes."""

    samples: Sequence[Sample]
    arms: Sequence[Arm]
    target: Target
    fields: Json
    made: dict[tuple[int, int], Call] = field(default_factory=dict)

    def call(self, sample: int, arm: int) -> Call:
        """The request of a sample to an arm."""
        found = self.made.get((sample, arm))
        if found is None:
            one = self.arms[arm]
            body = self.target.body(self.samples[sample], {**self.fields, **one.fields})
            found = Call(url=one.url + self.target.path, body=body, arm=arm, sample=sample)
            self.made[sample, arm] = found
        return found


def _number(seed: str, purpose: str) -> int:
    """A seed for numpy from a text, different per purpose."""
    return int.from_bytes(f"{purpose}:{seed}".encode(), "little")


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> Times:
    """Returns sorted arrival times in seconds from 0, exponential gaps at `rate` per second.

    Raises:
        ValueError: If the rate or the duration is not positive.
    """
    if rate <= 0 or duration_s <= 0:
        raise ValueError(f"rate {rate}/s for {duration_s} s: expected both above 0")
    drawn = np.random.default_rng(seed)
    gaps: Times = np.empty(0)
    while gaps.sum() < duration_s:
        more = drawn.exponential(1 / rate, max(64, int(rate * duration_s / 4)))
        gaps = np.concatenate([gaps, more])
    times = np.cumsum(gaps)
    return times[times < duration_s]


def trace_arrivals(path: Path, rate: float | None = None, duration_s: float | None = None) -> Times:
    """Returns the arrival times of a recorded trace, from 0.

    Args:
        path: JSON lines or Parquet with a column of TIME_COLUMNS, or a text file with one number
            of seconds per line. AIPerf's and Mooncake's `timestamp` is in milliseconds.
        rate: Mean rate to which the trace is stretched or squeezed; None keeps its own.
        duration_s: Times after this are left out; None for all.

    Raises:
        ValueError: If there is no such column, or fewer than two times.
    """
    times: Times = np.sort(_trace_times(path))
    if len(times) < 2:
        raise ValueError(f"{path}: expected at least two arrival times, found {len(times)}")
    times = times - times[0]
    if rate is not None and times[-1] > 0:
        times = times * ((len(times) - 1) / rate / times[-1])
    return times if duration_s is None else times[times < duration_s]


def _trace_times(path: Path) -> Times:
    if path.suffix == ".parquet":
        names = pq.read_schema(path).names
        column = _time_column(names, path)
        values = pq.read_table(path, columns=[column])[column].to_pylist()
        return _seconds(values, column)
    numbered = enumerate(path.read_bytes().split(b"\n"), 1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    is_json = bool(lines) and lines[0][1].lstrip().startswith(b"{")
    column, values = "", []
    for number, line in lines:
        try:
            if not is_json:
                values.append(float(line))
                continue
            row = msgspec.json.decode(line, type=dict[str, Any])
            column = column or _time_column(list(row), path)
            values.append(row[column])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
            wanted = f"a JSON object with {column or 'a time'}"
            raise ValueError(f"{path}, line {number}: expected {wanted}") from None
        except ValueError as error:
            if is_json:
                raise
            shown = ascii(line[:40])[1:]
            raise ValueError(f"{path}, line {number}: expected a number, got {shown}") from error
    return _seconds(values, column) if is_json else np.array(values)


def _time_column(names: list[str], path: Path) -> str:
    column = next((name for name in TIME_COLUMNS if name in names), None)
    if column is None:
        raise ValueError(f"{path}: expected one of the columns {', '.join(TIME_COLUMNS)}")
    return column


def _seconds(values: list[Any], column: str) -> Times:
    """Datetimes become seconds; `timestamp` numbers are milliseconds, as in AIPerf's traces."""
    if values and hasattr(values[0], "timestamp"):
        return np.array([value.timestamp() for value in values])
    return np.array(values, dtype=float) * (1e-3 if column == "timestamp" else 1.0)


@dataclass(frozen=True)
class LoadOptions:
    """How requests are sent.

    Attributes:
        workers: Workers of a closed loop; 0 for an open loop.
        max_in_flight: Shots under way at most in an open loop; later ones wait, and that counts.
        timeout_s: Longest time for one request.
        stop_after_s: A closed loop sends nothing after this time; None sends all shots.
        headers: HTTP headers besides the content type and the mark of untracked requests.
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
        headers={**HEADERS, **options.headers},
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
            await (sender.send_in_turn(shots) if options.workers else sender.send_on_time(shots))
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

    async def send_in_turn(self, shots: Sequence[Shot]) -> None:
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

    async def send_on_time(self, shots: Sequence[Shot]) -> None:
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
