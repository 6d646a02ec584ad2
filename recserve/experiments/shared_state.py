"""The counts and the switch of an experiment that several servers share.

A `Board` keeps them; `features/shared_counts.py` is one in Redis. Requests only count in this
process. A thread exchanges with the board every EVERY_S: it sends what was counted since, and gets
the state of the switch and the window of the guard. Events of answers go to the board before they
are acknowledged.

What this server knows of the switch is true until LEASE_S after it asked. Later it gives every
request the control, so a stop that was acknowledged holds on all servers LEASE_S afterwards, also
on one that cannot reach the board.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from recserve.experiments.latencies import Ints
from recserve.experiments.tallies import NUM_SLICES, Counts, Window, slice_ms
from recserve.schemas.experiments import FirstVerdict, Status

log = logging.getLogger(__name__)
EVERY_S = 0.5
LOOK_S = 10.0  # between two looks for a first verdict
LEASE_S = 2.0
MAX_TRIES = 5  # to set the switch while other servers set it
MAX_MEMBERS = 5000  # of one delta
STOPPED = "stopped by an operator"
DAMAGED = "its state in Redis is damaged or of another version of recserve; start it again"
UNKNOWN = "Redis does not answer, so every request gets the control"
INCREMENT = np.dtype([("place", "<i4"), ("amount", "<i8")])
MEMBER = np.dtype([("place", "<i4"), ("hash", "S8")])


class SwitchState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether an experiment runs.

    Attributes:
        status: Whether it runs.
        reason: Why it does not run; None if it runs.
        breach: The arm that made it fall back, and why; None if none did.
        ran_s: Seconds for which it had been running before `began_ms`.
        began_ms: When it was started last, in milliseconds since 1970; None unless it runs.
        started_us: When it began to count, in microseconds since 1970.
        set_ms: When this state was set, in milliseconds since 1970.
        token: Tells this state from all others.
    """

    status: Status
    reason: str | None
    breach: tuple[str, str] | None
    ran_s: float
    began_ms: int | None
    started_us: int
    set_ms: int = 0
    token: str = ""

    def running_s(self, now_ms: float) -> float:
        """Returns for how long the experiment has been running."""
        return self.ran_s + (0.0 if self.began_ms is None else (now_ms - self.began_ms) / 1e3)

    def ended(
        self, now_ms: float, status: Status, reason: str, breach: tuple[str, str] | None = None
    ) -> SwitchState:
        """Returns the state of an experiment that does not run."""
        return SwitchState(
            status,
            reason,
            breach or self.breach,
            self.running_s(now_ms),
            None,
            self.started_us,
            int(now_ms),
        )

    def restarted(self, now_ms: float) -> SwitchState:
        """Returns the state of an experiment that runs again."""
        began_ms = int(now_ms) if self.began_ms is None else self.began_ms
        return SwitchState(
            "running", None, None, self.ran_s, began_ms, self.started_us, int(now_ms)
        )


class Exchanged(Protocol):
    """What a board returns for a delta."""

    @property
    def time_ms(self) -> int:
        """Time of the board in milliseconds since 1970."""

    @property
    def version(self) -> int:
        """Version of the switch; 0 if nobody has set it."""

    @property
    def state(self) -> bytes:
        """State of the switch."""

    @property
    def head(self) -> Ints:
        """The sums of all servers, up to `Counts.num_head`."""

    @property
    def slices(self) -> dict[int, Ints]:
        """Slices of the window, up to `Counts.num_window`."""


class Sums(Protocol):
    """What all servers have counted."""

    @property
    def now(self) -> Ints:
        """The sums."""

    @property
    def before(self) -> Ints:
        """The sums at the last start."""

    @property
    def lost(self) -> int:
        """Requests that the board has lost after it had acknowledged them."""

    @property
    def killed(self) -> int:
        """About how many requests servers had not sent when they were killed."""

    @property
    def num_writers(self) -> int:
        """Servers that have called of late."""

    @property
    def notes(self) -> dict[str, bytes]:
        """First verdicts by arm; empty if there is none."""


class Board(Protocol):
    """Keeps the counts and the switch of one experiment for several servers.

    All methods raise ConnectionError if they do not reach it. A call may be repeated.
    """

    def exchange(
        self,
        *,
        sequence: int,
        weight: int,
        acknowledged: int,
        increments: bytes,
        members: bytes,
        version: int,
        state: bytes,
        first_slice: int,
        last: bool,
    ) -> Exchanged:
        """Adds a delta unless it was added before, and returns what the servers know."""

    def count(self, events: Iterable[tuple[bytes, int]]) -> None:
        """Adds 1 at the place of each event whose hash is new."""

    def switch(self, expected: int, state: bytes, restarts: bool = False) -> bool:
        """Sets the switch if its version is the expected one. Returns whether it is set."""

    def read(self, names: Sequence[str], new: dict[str, bytes] | None = None) -> Sums:
        """Returns the sums and the notes of some names, and writes new notes before."""

    def close(self) -> None:
        """Closes the connections."""


class Shares(Protocol):
    """An experiment that several servers share."""

    @property
    def name(self) -> str:
        """Name of the experiment."""

    def exchange(self) -> None:
        """Exchanges with the board. Raises ConnectionError."""

    def look(self) -> None:
        """Looks for a first verdict. Raises ConnectionError."""

    def close(self) -> None:
        """Sends the last counts. Raises ConnectionError."""


class Exchanger:
    """Exchanges the counts of experiments with their boards every EVERY_S, and at the end.

    A server that is killed loses the answers of the last EVERY_S, of all arms alike, and no event.
    """

    def __init__(self, experiments: Iterable[Shares]) -> None:
        """Calls nothing yet."""
        self._experiments = list(experiments)
        self._failed: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="experiment-counts", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Sends the last counts."""
        self._closing.set()
        self._thread.join()
        for one in self._experiments:
            self._try(one, one.close)

    def _run(self) -> None:
        next_look_s = time.monotonic() + LOOK_S
        while not self._closing.is_set():
            began_s = time.monotonic()
            looks, next_look_s = (
                (True, began_s + LOOK_S) if began_s > next_look_s else (False, next_look_s)
            )
            for one in self._experiments:
                self._try(one, one.exchange)
                if looks:
                    self._try(one, one.look)
            self._closing.wait(max(0.0, began_s + EVERY_S - time.monotonic()))

    def _try(self, one: Shares, call: Callable[[], None]) -> None:
        try:
            call()
        except ConnectionError as error:
            if one.name not in self._failed:
                log.error("experiment %s: %s; its requests get the control", one.name, error)
            self._failed.add(one.name)
        except Exception:  # of one exchange; the thread goes on
            log.exception("experiment %s", one.name)
        else:
            if one.name in self._failed:
                log.info("experiment %s: Redis answers again", one.name)
            self._failed.discard(one.name)


class SharedState:
    """What this server knows of an experiment that others serve too, and what it has not sent.

    One thread exchanges; others may read, switch and count events.

    Attributes:
        head: The sums of all servers, up to `Counts.num_head`, of the last exchange.
        sums: All sums, of the last `read`.
        before: The sums at the last start, likewise.
        stopping: Whether this server has stopped it and the board has not acknowledged that.
        num_servers: Servers that have called of late.
        uncounted: About how many requests no sum has, because a server was killed before it sent
            them or Redis has lost them.
    """

    def __init__(
        self, board: Board, counts: Counts, window_s: float, clock: Callable[[], float]
    ) -> None:
        """Calls nothing yet.

        Args:
            board: Keeps the counts.
            counts: Counts of this process, which others change under their lock.
            window_s: Length of the window.
            clock: Returns seconds.
        """
        self._board, self._own, self._clock = board, counts, clock
        # These arrays are replaced and never changed, so readers need no lock.
        self.head = np.zeros(counts.num_head, np.int64)
        self.sums = self.before = np.zeros(counts.values.size, np.int64)
        self._window = Window(NUM_SLICES * slice_ms(window_s) / 1e3, counts.num_window)
        self.num_servers = self.uncounted = 0
        self.notes: dict[str, FirstVerdict] = {}
        self._state: SwitchState | None = None
        self._written = b""  # the state as the board has it
        self._version = 0
        self._known_until_s = -math.inf
        self._offset_ms = 0.0  # of the board's time against the clock
        self.stopping, self._stopped_ms = False, 0.0
        self._lock = threading.RLock()  # of the state; nobody holds it during a call
        self._taken = counts.values.copy()  # what has gone into deltas
        self._members: list[tuple[int, int]] = []
        self._delta: dict[str, Any] | None = None  # one whose acknowledgement has not come
        self._sequence = self._acknowledged = 0
        self._first_slice = 0

    @property
    def known(self) -> bool:
        """Whether this server knows the state of the switch."""
        return self._clock() < self._known_until_s

    @property
    def status(self) -> Status:
        """Whether the experiment runs, as far as this server knows."""
        if self.stopping:
            return "stopped"
        state = self._state
        return "unknown" if state is None or not self.known else state.status

    @property
    def reason(self) -> str | None:
        """Why it does not run; None if it runs."""
        if self.stopping:
            return STOPPED
        if self.status == "unknown":
            return UNKNOWN
        state = self._state
        return None if state is None else state.reason

    @property
    def state(self) -> SwitchState | None:
        """The last state that this server has seen."""
        return self._state

    @property
    def now_ms(self) -> float:
        """The time of the board."""
        return self._clock() * 1e3 + self._offset_ms

    def window(self) -> Ints:
        """Returns the sums of the window, up to `Counts.num_window`."""
        with self._lock:
            return self._window.sums(self.now_ms / 1e3)

    def add_member(self, place: int, number: int) -> None:
        """Counts what is different from all that any server has added."""
        self._members.append((place, number))

    def exchange(self, lock: threading.Lock, last: bool = False) -> None:
        """Sends a delta and takes what the board knows.

        Args:
            lock: Lock of the counts of this process.
            last: Whether this server ends.

        Raises:
            ConnectionError: If the board is not reached. The same delta is sent next time.
        """
        delta = self._delta = self._delta or self._next_delta(lock)
        with self._lock:
            version, written, asked_s = self._version, self._written, self._clock()
        reply = self._board.exchange(
            **delta,
            version=version,
            state=written,
            first_slice=self._first_slice,
            last=last,
        )
        self._delta = None
        self._acknowledged += delta["weight"]
        with self._lock:
            self._offset_ms = reply.time_ms - self._clock() * 1e3
            self.head = reply.head
            if reply.version != self._version:
                self._window.clear()
            for number, values in reply.slices.items():
                self._window.put(number, values)
            self._first_slice = max(reply.slices, default=0) if reply.version == version else 0
            self._follow(reply.version, reply.state, asked_s)
        if not reply.version:
            began = SwitchState(
                "running", None, None, 0.0, reply.time_ms, 1000 * reply.time_ms, reply.time_ms
            )
            self._set(began)
        if self.stopping and self._state is not None:
            self._stop_again(self._state)

    def read(self, new: dict[str, FirstVerdict] | None = None) -> None:
        """Reads the sums and the first verdicts.

        Args:
            new: First verdicts by arm; one that a server has written before stays.

        Raises:
            ConnectionError: If the board is not reached.
        """
        names = [str(number) for number in range(len(self._own.results))]
        written = {name: msgspec.json.encode(each) for name, each in (new or {}).items()}
        found = self._board.read(names, written)
        notes: dict[str, FirstVerdict] = {}
        for name, note in found.notes.items():
            try:
                notes |= {name: msgspec.json.decode(note, type=FirstVerdict)} if note else {}
            except msgspec.DecodeError as error:
                log.error("a first verdict in Redis is damaged: %s", error)
        self.sums, self.before, self.notes = found.now, found.before, notes
        self.num_servers, self.uncounted = found.num_writers, found.lost + found.killed

    def count(self, events: Iterable[tuple[bytes, int]]) -> None:
        """Counts events by hash and place. Raises ConnectionError."""
        if not self.known:
            raise ConnectionError(UNKNOWN)
        self._board.count(events)

    def stop(self) -> None:
        """Stops the experiment: here at once, and on all servers if the board answers.

        Raises:
            ConnectionError: If it does not. Each exchange tries again.
        """
        self._stopped_ms, self.stopping = self.now_ms, True
        self._send_stop()

    def start(self) -> None:
        """Starts the experiment on all servers. Raises ConnectionError."""
        self._change(lambda state: state.restarted(self.now_ms), restarts=True)
        self.stopping = False

    def fall_back(self, arm: str, text: str) -> bool:
        """Makes all servers fall back, unless another one has just changed the state.

        Returns:
            Whether this server has done it.

        Raises:
            ConnectionError: If the board is not reached.
        """
        state = self._state
        if state is None or state.status != "running":
            return False
        reason = f"arm {arm}: {text}"
        return self._set(state.ended(self.now_ms, "fallen_back", reason, (arm, text)))

    def close(self, lock: threading.Lock) -> None:
        """Sends the last counts. Raises ConnectionError."""
        try:
            self.exchange(lock)
            while self._has_more(lock):
                self.exchange(lock)
            self.exchange(lock, last=True)
        finally:
            self._board.close()

    def _stop_again(self, state: SwitchState) -> None:
        """Sends a stop that was not acknowledged, unless somebody has started it since."""
        if state.status == "running" and state.set_ms > self._stopped_ms:
            log.warning("a stop is dropped, because another server has been told to start later")
            self.stopping = False
        else:
            self._send_stop()

    def _send_stop(self) -> None:
        self._change(lambda state: state.ended(self.now_ms, "stopped", STOPPED))
        self.stopping = False

    def _has_more(self, lock: threading.Lock) -> bool:
        with lock:
            return bool(self._members) or bool((self._own.values != self._taken).any())

    def _next_delta(self, lock: threading.Lock) -> dict[str, Any]:
        """Returns what was counted since the last delta."""
        with lock:
            values = self._own.values.copy()
            members, self._members = self._members[:MAX_MEMBERS], self._members[MAX_MEMBERS:]
        added = values - self._taken
        places = np.flatnonzero(added)
        increments = np.zeros(places.size, INCREMENT)
        increments["place"], increments["amount"] = places, added[places]
        packed = b"".join(
            place.to_bytes(4, "little") + number.to_bytes(8, "little") for place, number in members
        )
        weight = int(added[: self._own.results.size].reshape(-1, 3)[:, 0].sum())
        self._taken = values
        if places.size or members:
            self._sequence += 1
        return {
            "sequence": self._sequence,
            "weight": weight,
            "acknowledged": self._acknowledged,
            "increments": increments.tobytes(),
            "members": packed,
        }

    def _change(
        self, make: Callable[[SwitchState], SwitchState], restarts: bool = False
    ) -> SwitchState:
        """Sets the switch, also if others set it at the same time. Raises ConnectionError."""
        for _ in range(MAX_TRIES):
            state = self._state
            if state is None:
                raise ConnectionError(UNKNOWN)
            if self._set(make(state), restarts):
                return state
        raise ConnectionError("other servers change its state all the time")

    def _set(self, state: SwitchState, restarts: bool = False) -> bool:
        """Sets the switch if this server knows its version. Otherwise it reads the switch."""
        version, asked_s = self._version, self._clock()
        state = msgspec.structs.replace(state, token=secrets.token_hex(8))
        written = msgspec.json.encode(state)
        done = self._board.switch(version, written, restarts)
        with self._lock:
            if done:
                self._follow(version + 1, written, asked_s)
                self._first_slice = 0
                self._window.clear()
                return True
        asked_s = self._clock()
        reply = self._board.exchange(
            sequence=0,
            weight=0,
            acknowledged=0,
            increments=b"",
            members=b"",
            version=0,
            state=b"",
            first_slice=self._first_slice,
            last=False,
        )
        with self._lock:
            self._follow(reply.version, reply.state, asked_s)
        return False

    def _follow(self, version: int, written: bytes, asked_s: float) -> None:
        """Takes a state of the switch, unless this server knows a later one."""
        if version < self._version or not version:
            return
        self._known_until_s = max(self._known_until_s, asked_s + LEASE_S)
        if (version, written) == (self._version, self._written):
            return
        try:
            state = msgspec.json.decode(written, type=SwitchState)
        except msgspec.DecodeError as error:
            log.error("the state of an experiment in Redis is damaged: %s", error)
            now_ms = self.now_ms
            state = SwitchState("stopped", DAMAGED, None, 0.0, None, int(1e3 * now_ms), int(now_ms))
        if self._state is not None and state.status != self._state.status:
            log.warning("an experiment is %s on all servers: %s", state.status, state.reason)
        self._version, self._written, self._state = version, written, state
