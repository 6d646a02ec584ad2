"""One experiment of a server: its arms, its state, its units, and its guards.

A guard compares an arm with the control over the sliding window.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np

from recserve.experiments.assignment import ArmSplit
from recserve.experiments.conversions import NUM_BUCKETS, RateSums
from recserve.experiments.latencies import NUM_LATENCIES, Ints, Percentile, percentile
from recserve.experiments.saved_counts import OtherSettings, SavedArm, SavedExperiment
from recserve.experiments.settings import (
    ArmFields,
    ArmSettings,
    Exclusion,
    ExperimentSettings,
    GuardSettings,
)
from recserve.experiments.shared_state import Board, SharedState
from recserve.experiments.statistics import sample_ratio_p
from recserve.experiments.tallies import (
    CAUSES,
    COMPARISONS,
    FORWARDINGS,
    SHARED_UNIT,
    ArmResult,
    Cause,
    Comparison,
    Counts,
    Forwarding,
    Requests,
    SeenEvents,
    Window,
    from_bytes,
    hash_number,
    to_bytes,
    user_group,
)
from recserve.experiments.verdict import (
    decide,
    describe_goal,
    is_reached,
    sample_ratio_warning,
)
from recserve.schemas.experiments import (
    ArmStatus,
    ArmVerdict,
    ExperimentNotSaved,
    ExperimentStatus,
    FirstVerdict,
    GuardrailStatus,
    Status,
)

# An arm must be worse with this confidence, so that one bad request stops nothing.
CONFIDENCE = 0.99
P99 = 0.99
log = logging.getLogger(__name__)
# Seconds between two looks of a guard.
LOOK_S = 1.0
# Units that the sample-ratio check remembers, as salted hashes.
MAX_UNITS = 100_000
OTHER_EVENTS, USERS = 0, 1  # places in `Counts.other`


@dataclass(frozen=True)
class Breach:
    """Why an arm is worse than the control.

    Attributes:
        cause: The guard that decided.
        text: The figures, for the log and the status.
    """

    cause: Cause
    text: str


# A breach, or why there is none. Both need one-sided confidence 99 % and `min_requests`.
Check = Breach | Literal["holds", "unclear"]


def judge(control: Requests, arm: Requests, guard: GuardSettings) -> Breach | None:
    """Returns why the arm must stop; None if it may go on."""
    checks = (check_errors, check_empty, check_p99)
    found = (check(control, arm, guard) for check in checks)
    return next((one for one in found if isinstance(one, Breach)), None)


def check_errors(control: Requests, arm: Requests, guard: GuardSettings) -> Check:
    """Returns a breach if the arm surely has more errors than allowed, by the Wilson bound."""
    counts = arm.errors, arm.requests, control.errors, control.requests
    return _check_share("errors", "error share", counts, guard.error_share, guard)


def check_empty(control: Requests, arm: Requests, guard: GuardSettings) -> Check:
    """Returns a breach if the arm surely has more empty answers than allowed."""
    counts = arm.empty, arm.requests, control.empty, control.requests
    return _check_share("empty", "share of empty answers", counts, guard.empty_share, guard)


def check_p99(control: Requests, arm: Requests, guard: GuardSettings) -> Check:
    """Returns a breach if the arm's p99 is surely higher than allowed, by order statistics."""
    if min(control.num_timed, arm.num_timed) < guard.min_requests:
        return "unclear"
    ours = percentile(arm.latencies, P99, 2 * CONFIDENCE - 1)
    base = percentile(control.latencies, P99, CONFIDENCE)
    if ours is None or base is None or ours.low is None:
        return "unclear"
    if ours.low <= guard.p99_factor * base.value:
        return "holds"
    return Breach(
        "p99",
        f"p99 {ours.value * 1e3:.1f} ms in {arm.num_timed} answers; "
        f"control {base.value * 1e3:.1f} ms",
    )


def _check_share(
    cause: Cause, name: str, counts: tuple[int, int, int, int], floor: float, guard: GuardSettings
) -> Check:
    mine, requests, theirs, control_requests = counts
    if min(requests, control_requests) < guard.min_requests:
        return "unclear"
    share, base = mine / requests, theirs / control_requests
    if wilson_low(mine, requests) <= max(floor, guard.factor * base):
        return "holds"
    return Breach(cause, f"{name} {share:.4f} in {requests} requests; control {base:.4f}")


def wilson_low(count: int, total: int) -> float:
    """Returns the lower end of Wilson's one-sided interval of a share."""
    if not count:
        return 0.0
    z = NormalDist().inv_cdf(CONFIDENCE)
    share = count / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - spread) / (1 + z * z / total)


class ForwardingError(RuntimeError):
    """The server of an arm has not answered a request. The message has no address.

    Attributes:
        result: What became of the request. A refusal is an error of the arm only if the control
            answers the request.
    """

    def __init__(self, result: Forwarding, message: str) -> None:
        super().__init__(message)
        self.result: Forwarding = result


@dataclass(frozen=True)
class ServingArm:
    """An arm of a running experiment.

    Attributes:
        number: Its place among the arms; 0 is the control.
        settings: Its settings, with the address of its server.
        weight: Share of the units.
        fields: Request fields that the arm sets.
        experiment: Name of the experiment.
    """

    number: int
    settings: ArmSettings
    weight: float
    fields: ArmFields
    experiment: str

    @property
    def name(self) -> str:
        """Name of the arm."""
        return self.settings.name

    @property
    def label(self) -> str:
        """The label of metrics, `experiment/arm`."""
        return f"{self.experiment}/{self.name}"

    @property
    def remote(self) -> bool:
        """True if another server answers the requests of the arm."""
        return self.settings.url is not None


class Experiment:
    """A running, stopped or fallen-back experiment. Its methods may run on any thread.

    Attributes:
        settings: Name, mode and guard.
        arms: The arms; the first one is the control.
        split: Assigns units to arms.
        exclusion: Says which requests take no part.
        counts: What this process has counted.
        shared: What all servers have counted, and whether it runs; None unless servers share it.
        keep: Writes a state so that it survives a crash, and raises OSError if it cannot; None
            keeps the state in memory. A stop, a start and a fall-back are written before they are
            acknowledged.
    """

    def __init__(
        self, settings: ExperimentSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts the experiment.

        Args:
            settings: Checked settings.
            clock: Returns seconds; tests replace it.
        """
        self.settings = settings
        guard = settings.guard or GuardSettings()
        fields = settings.arm_fields()
        names = [arm.name for arm in settings.arms]
        self.arms = tuple(
            ServingArm(number, arm, weight, each, settings.name)
            for number, (arm, weight, each) in enumerate(
                zip(settings.arms, settings.weights, fields, strict=True)
            )
        )
        self.split = ArmSplit.even(
            settings.name if settings.seed is None else settings.seed,
            names,
            settings.weights,
            settings.coverage,
        )
        self._status: Status = "running"
        self._reason: str | None = None
        self.shared: SharedState | None = None
        self.counts = Counts(len(names), settings.goal_types)
        self._before = self._new_counts()  # at the last start
        self._window = Window(guard.window_s, self.counts.num_window)
        self.exclusion = Exclusion.of(settings.use, fields)
        self.keep: Callable[[SavedExperiment], None] | None = None
        self._clock = clock
        self._lock = threading.Lock()  # of the counts; nobody holds it while a disk writes
        self._keeping = threading.Lock()  # from making a state until it is written
        self._kept = True  # whether the last write succeeded
        self._units: set[int] = set()
        self._looked_s = clock()
        self._seen = SeenEvents()
        self._ran_s = 0.0
        self._began_s: float | None = clock()  # None while it does not run
        self._breach: tuple[str, str] | None = None  # arm and figures of an automatic fall-back
        self._falling_back = False  # while a fall-back is being written
        self._started_us = time.time_ns() // 1000
        self._first_verdicts: dict[str, FirstVerdict] = {}

    def share(self, board: Board) -> None:
        """Shares counts and status with other servers, before the first request."""
        guard = self.settings.guard or GuardSettings()
        self.shared = SharedState(board, self.counts, guard.window_s, self._clock)

    @property
    def status(self) -> Status:
        """State of the experiment."""
        return self._status if self.shared is None else self.shared.status

    @property
    def reason(self) -> str | None:
        """Why it does not run; None while it runs."""
        return self._reason if self.shared is None else self.shared.reason

    @property
    def head(self) -> Counts:
        """The first counts, up to `Counts.num_head`, of all servers that share it."""
        return self.counts if self.shared is None else self._new_counts(self.shared.head)

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.settings.name

    @property
    def control(self) -> ServingArm:
        """The first arm."""
        return self.arms[0]

    def arm(self, name: str) -> ServingArm:
        """Returns the arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)

    def division(self) -> tuple[tuple[int, ...], float | None]:
        """Returns the units of each arm, and the p-value that they are divided by the weights.

        The p-value is None without units, and so outside mode `split`.
        """
        counts = tuple(self.head.other[:, USERS].tolist())
        return counts, _sample_ratio_p(counts, self.settings.weights)

    def see(self, unit: str, arm: str) -> None:
        """Remembers a unit for the sample-ratio check."""
        number = hash_number(f"{self.split.seed}\0{unit}", 8)
        with self._lock:
            if number in self._units or len(self._units) >= MAX_UNITS:
                return
            self._units.add(number)
            if self.shared is None:
                self.counts.other[self.arm(arm).number, USERS] += 1
            else:
                place = self.counts.places["other"] + 2 * self.arm(arm).number + USERS
                self.shared.add_member(place, number)

    def record(self, arm: ServingArm, result: ArmResult) -> None:
        """Adds the result of a request, and falls back to the control if a guard says so."""
        now_s = self._clock()
        with self._lock:
            places = self.counts.result_places(arm.number, result)
            for place in places:
                self.counts.values[place] += 1
            if self.shared is not None:
                return  # the window has what all servers have sent
            window = self._window.current(now_s)
            for place in places:
                window[place] += 1
            if self.status != "running" or self.settings.guard is None:
                return
            if now_s - self._looked_s < LOOK_S:
                return
            self._looked_s = now_s
            self._look(now_s, self.settings.guard)

    def count_answer(self, arms: Iterable[str], unit: str) -> None:
        """Counts an answer whose events are compared between the arms.

        Args:
            arms: Names of the arms that the answer's items are of: one, or both teams.
            unit: Id of the user, or of the request if it names no user.
        """
        if not self.settings.goal_types:
            return
        group = user_group(self.split.seed, unit)
        with self._lock:
            for name in arms:
                self.counts.answers[self.arm(name).number, group] += 1

    def count_event(self, arm: str, unit: str, event_type: str, key: str) -> None:
        """Counts an event that an answer led to, once; see `count_events`."""
        self.count_events([(arm, unit, event_type, key)])

    def count_events(self, events: Iterable[tuple[str, str, str, str]]) -> None:
        """Counts events that answers led to, each once.

        Args:
            events: Of each event:

                - name of the arm that the item is of; an unknown name counts nothing
                - id of the user, or of the request if the answer was for no user
                - type of the event
                - a key that names the answer and the item; an event with the same key and type
                  comes again

        Raises:
            ExperimentNotSaved: If several servers share it, and Redis does not answer.
        """
        goals, new = self.settings.goal_types, list[tuple[bytes, int]]()
        numbers = {arm.name: arm.number for arm in self.arms} if goals else {}
        for arm, unit, event_type, key in events:
            if (number := numbers.get(arm)) is None:
                continue
            if event_type not in goals:  # it does not count, so it need not be remembered
                with self._lock:
                    self.counts.other[number, OTHER_EVENTS] += 1
                continue
            group, name = user_group(self.split.seed, unit), f"{key} {event_type}"
            goal = goals.index(event_type)
            if self.shared is not None:
                place = self.counts.event_place(number, goal, group)
                new.append((hash_number(name, 8).to_bytes(8, "little"), place))
                continue
            with self._lock:
                if self._seen.add(name):
                    self.counts.events[number, goal, group] += 1
        if self.shared is not None and new:
            try:
                self.shared.count(new)
            except ConnectionError as error:
                log.error("events of experiment %s are not counted: %s", self.name, error)
                raise ExperimentNotSaved(
                    f"the events are stored, but not counted for experiment {self.name}, because "
                    "Redis does not answer; send this request again. Events with an event_id are "
                    "stored once"
                ) from None

    def count_forwarding(self, arm: ServingArm, result: Forwarding) -> None:
        """Counts a request for the server of an arm by what became of it."""
        with self._lock:
            self.counts.forwarded[arm.number, FORWARDINGS.index(result)] += 1

    @property
    def durable(self) -> bool:
        """Whether a restart keeps the status."""
        if self.shared is not None:
            return self.shared.known and not self.shared.stopping
        return self.keep is not None and self._kept

    def save(self) -> None:
        """Looks for a first verdict, and writes the present state.

        Raises:
            OSError: If the disk refuses it.
        """
        self._note_verdicts(self._look_at_all()[0])
        with self._keeping:
            self._keep(self.state())

    def state(self) -> SavedExperiment:
        """Returns counts and status, so that the next process can continue them."""
        with self._lock:
            counts, before = self.counts, self._before
            arms = [
                SavedArm(
                    name=arm.name,
                    requests=now.requests,
                    errors=now.errors,
                    empty=now.empty,
                    answers=to_bytes(counts.answers[arm.number]),
                    events={
                        goal: to_bytes(counts.events[arm.number, place])
                        for place, goal in enumerate(counts.goals)
                    },
                    other_events=int(counts.other[arm.number, OTHER_EVENTS]),
                    before=(past.requests, past.errors, past.empty),
                    latencies=to_bytes(now.latencies),
                    before_latencies=to_bytes(past.latencies),
                )
                for arm, now, past in (
                    (arm, counts.requests(arm.number), before.requests(arm.number))
                    for arm in self.arms
                )
            ]
            return SavedExperiment(
                settings=self.settings_hash(),
                ran_s=self._running_s(),
                arms=arms,
                seen=self._seen.keys(),
                status=self.status,
                reason=self.reason,
                breach=self._breach,
                started_us=self._started_us,
                first_verdicts=dict(self._first_verdicts),
            )

    def restore(self, saved: SavedExperiment) -> None:
        """Continues the counts and the status of an earlier process.

        Raises:
            OtherSettings: If arms, weights, seed or goals differ from those of the counts.
            ValueError: If the counts are damaged. They are not used then.
        """
        if saved.settings != self.settings_hash():
            raise OtherSettings("the counts belong to other arms, weights, goals or another seed")
        counts, before = self._new_counts(), self._new_counts()
        for arm, one in zip(self.arms, saved.arms, strict=True):
            if one.name != arm.name or one.events.keys() != set(counts.goals):
                raise ValueError(f"arms: expected {arm.name} with {', '.join(counts.goals)}")
            number = arm.number
            counts.results[number] = one.requests, one.errors, one.empty
            before.results[number] = one.before
            counts.other[number, OTHER_EVENTS] = one.other_events
            counts.answers[number] = from_bytes(one.answers, NUM_BUCKETS)
            for place, goal in enumerate(counts.goals):
                counts.events[number, place] = from_bytes(one.events[goal], NUM_BUCKETS)
            counts.latencies[number] = from_bytes(one.latencies, NUM_LATENCIES)
            before.latencies[number] = from_bytes(one.before_latencies, NUM_LATENCIES)
        with self._lock:
            self._ran_s = saved.ran_s
            self._status, self._reason, self._breach = saved.status, saved.reason, saved.breach
            if saved.status != "running":
                self._began_s = None
            self._started_us = saved.started_us or self._started_us - int(saved.ran_s * 1e6)
            self._first_verdicts = dict(saved.first_verdicts)
            self._seen = SeenEvents(saved.seen)
            counts.other[:, USERS] = self.counts.other[:, USERS]
            self.counts, self._before = counts, before

    def coin(self, request_id: str) -> random.Random:
        """Returns a source of draws for a request; the same for the same request."""
        return random.Random(f"{self.split.seed}:{request_id}")

    def compare(self, control: Sequence[str], other: Sequence[str]) -> None:
        """Compares the items of both arms for one request."""
        shared = len({*control} & {*other}) / max(len(control), 1)
        added = 1, round(SHARED_UNIT * shared), [*control] == [*other], 0
        with self._lock:
            self.counts.compared += np.array(added, np.int64)

    def drop(self) -> None:
        """Counts a request that the second arm did not get in full."""
        with self._lock:
            self.counts.compared[COMPARISONS.index("dropped")] += 1

    def stop(self) -> None:
        """Stops the experiment: every request gets the control, even if the write fails.

        Raises:
            ExperimentNotSaved: If the disk refuses the state. It is stopped until a restart. Or if
                Redis does not answer. Then it is stopped here, and on other servers later.
        """
        if self.shared is not None:
            try:
                self.shared.stop()
            except ConnectionError as error:
                log.error("experiment %s is stopped on this server only: %s", self.name, error)
                raise ExperimentNotSaved(
                    f"experiment {self.name} is stopped on this server, and not on the others, "
                    "because Redis does not answer; this server goes on trying. Send this request "
                    "again"
                ) from None
            log.warning("experiment %s is stopped", self.name)
            return
        self._stop()  # at once, for this is the safe side
        with self._keeping:
            self._stop()  # a start or a fall-back may have ended meanwhile
            try:
                self._keep(self.state())
            except OSError as error:
                raise self._save_error(
                    "is stopped, but runs again after a restart", error
                ) from None

    def start(self) -> None:
        """Starts the experiment again with empty windows. Assignments are the same as before.

        Raises:
            ExperimentNotSaved: If the disk refuses the state, or Redis does not answer. It is not
                started then.
        """
        if self.shared is not None:
            try:
                self.shared.start()
            except ConnectionError as error:
                log.error("experiment %s is not started: %s", self.name, error)
                raise ExperimentNotSaved(
                    f"experiment {self.name} is not started, because Redis does not answer; send "
                    "this request again"
                ) from None
            log.warning("experiment %s is started", self.name)
            return
        with self._keeping:
            state = self.state()
            arms = [
                msgspec.structs.replace(
                    arm,
                    before=(arm.requests, arm.errors, arm.empty),
                    before_latencies=arm.latencies,
                )
                for arm in state.arms
            ]
            running = {"status": "running", "reason": None, "breach": None, "arms": arms}
            try:
                self._keep(msgspec.structs.replace(state, **running))
            except OSError as error:
                raise self._save_error("is not started", error) from None
            with self._lock:
                self._status, self._reason, self._breach = "running", None, None
                self._falling_back = False
                self._before = self._new_counts(self.counts.values.copy())
                self._window.clear()
                self._looked_s = self._clock()
                if self._began_s is None:
                    self._began_s = self._clock()
        log.warning("experiment %s is started", self.settings.name)

    def describe(self) -> ExperimentStatus:
        """Returns the state for GET /v1/experiments. A new first verdict is written before."""
        if self.shared is None:
            arms, counts, sample_ratio_p = self._look_at_all()
            if self._note_verdicts(arms):
                try:
                    self.save()
                except OSError as error:
                    log.error("experiment %s: a verdict is not saved: %s", self.name, error)
        else:
            try:
                arms, counts, sample_ratio_p = self._look_at_shared()
            except ConnectionError as error:
                log.error("experiment %s: its counts are not read: %s", self.name, error)
                arms, counts, sample_ratio_p = self._look_at_all()
        with self._lock:
            status, reason, first = self.status, self.reason, self._first_by_arm()
        shared = self.shared
        return ExperimentStatus(
            name=self.settings.name,
            mode=self.settings.mode,
            status=status,
            reason=reason,
            coverage=self.settings.coverage,
            smallest_effect=self.settings.smallest_effect,
            sample_ratio_p=sample_ratio_p,
            warning=sample_ratio_warning(sample_ratio_p, counts),
            started=_moment(self._began_us()),
            durable=self.durable,
            servers=None if shared is None else shared.num_servers,
            uncounted=None if shared is None else shared.uncounted,
            arms=[msgspec.structs.replace(arm, first_verdict=first.get(arm.name)) for arm in arms],
        )

    def exchange(self) -> None:
        """Exchanges counts and status with other servers, and falls back if a guard says so.

        Raises:
            ConnectionError: If Redis does not answer.
        """
        assert self.shared is not None
        self.shared.exchange(self._lock)
        guard = self.settings.guard
        if guard is None or self.status != "running":
            return
        found = self._find_breach(self._new_counts(self.shared.window()), guard)
        if found is not None and self.shared.fall_back(found[0].name, found[1].text):
            log.error("experiment %s fell back: %s", self.name, self.reason)
            with self._lock:
                self.counts.fallbacks[CAUSES.index(found[1].cause)] += 1

    def look(self) -> None:
        """Looks for a first verdict on what all servers have counted. Raises ConnectionError."""
        self._look_at_shared()

    def close(self) -> None:
        """Sends the last counts to the servers that share it. Raises ConnectionError."""
        if self.shared is not None:
            self.shared.close(self._lock)

    def _look_at_shared(self) -> tuple[list[ArmStatus], tuple[int, ...], float | None]:
        """As `_look_at_all`, on the present sums of all servers. Raises ConnectionError."""
        assert self.shared is not None
        self.shared.read()
        found = self._look_at_all()
        new = self._new_verdicts(found[0], self._first_by_arm())
        if new:
            self.shared.read({str(self.arm(name).number): each for name, each in new.items()})
        return found

    def _first_by_arm(self) -> dict[str, FirstVerdict]:
        if self.shared is None:
            return dict(self._first_verdicts)
        return {self.arms[int(number)].name: each for number, each in self.shared.notes.items()}

    def _fallen(self) -> tuple[str, str] | None:
        """Returns the arm that made it fall back, and why; None if none did."""
        if self.shared is None:
            return self._breach
        return None if self.shared.state is None else self.shared.state.breach

    def _began_us(self) -> int:
        shared = None if self.shared is None else self.shared.state
        return self._started_us if shared is None else shared.started_us

    @property
    def fallbacks(self) -> dict[Cause, int]:
        """Number of automatic fall-backs by cause."""
        return dict(zip(CAUSES, self.head.fallbacks.tolist(), strict=True))

    @property
    def compared(self) -> dict[Comparison, float]:
        """Sums over the comparisons of the arms' items for one request."""
        found = dict(zip(COMPARISONS, self.head.compared.tolist(), strict=True))
        return found | {"shared": found["shared"] / SHARED_UNIT}

    def _look_at_all(self) -> tuple[list[ArmStatus], tuple[int, ...], float | None]:
        """Returns the state of the arms, the units of each, and the p-value of their ratio."""
        with self._lock:
            if self.shared is None:
                now, before = self._new_counts(self.counts.values.copy()), self._before
                recent = self._new_counts(self._window.sums(self._clock()))
            else:
                now, before = map(self._new_counts, (self.shared.sums, self.shared.before))
                recent = self._new_counts(self.shared.window())
            tallies = [_copy_arm(arm.number, now, before, recent) for arm in self.arms]
            ran_s = self._running_s()
        counts = tuple(now.other[:, USERS].tolist())
        sample_ratio_p = _sample_ratio_p(counts, self.settings.weights)
        arms = [
            self._arm_status(arm, mine, tallies[0], counts, sample_ratio_p, ran_s)
            for arm, mine in zip(self.arms, tallies, strict=True)
        ]
        return arms, counts, sample_ratio_p

    def _note_verdicts(self, arms: Sequence[ArmStatus]) -> bool:
        """Remembers the first verdict on each arm. Returns whether there is a new one."""
        with self._lock:
            new = self._new_verdicts(arms, self._first_verdicts)
            self._first_verdicts |= new
        return bool(new)

    def _new_verdicts(
        self, arms: Sequence[ArmStatus], known: Mapping[str, FirstVerdict]
    ) -> dict[str, FirstVerdict]:
        """Returns the first verdict on each arm that has none yet."""
        control, breach = arms[0], self._fallen()
        return {
            arm.name: FirstVerdict(
                kind=arm.verdict.kind,
                text=arm.verdict.text,
                time=_moment(time.time_ns() // 1000),
                answers=arm.answers,
                events=arm.goals[0].events,
                control_answers=control.answers,
                control_events=control.goals[0].events,
            )
            for arm in arms
            if arm.verdict is not None
            and arm.name not in known
            and is_reached(arm.verdict, breach is not None and breach[0] == arm.name)
        }

    def _arm_status(
        self,
        arm: ServingArm,
        mine: _ArmCounts,
        control: _ArmCounts,
        users: tuple[int, ...],
        sample_ratio_p: float | None,
        ran_s: float,
    ) -> ArmStatus:
        p50, p99 = (percentile(mine.window, share, 0.95) for share in (0.5, P99))
        base = None if mine is control else control
        verdict = None if base is None else self._verdict(arm, mine, base, sample_ratio_p, ran_s)
        return ArmStatus(
            name=arm.name,
            weight=arm.weight,
            requests=mine.total.requests,
            errors=mine.total.errors,
            empty=mine.total.empty,
            p50_ms=_ms(p50.value if p50 else None),
            p99_ms=_ms(p99.value if p99 else None),
            p99_low_ms=_ms(p99.low if p99 else None),
            p99_high_ms=_ms(p99.high if p99 else None),
            answers=mine.answers,
            goals=[
                describe_goal(goal, sums, None if base is None else base.goals[goal], self.settings)
                for goal, sums in mine.goals.items()
            ],
            verdict=verdict,
            first_verdict=None,
            users=users[arm.number] if self.settings.mode == "split" else None,
        )

    def _verdict(
        self,
        arm: ServingArm,
        mine: _ArmCounts,
        control: _ArmCounts,
        sample_ratio_p: float | None,
        ran_s: float,
    ) -> ArmVerdict:
        guard = self.settings.guard or GuardSettings()
        breach = self._fallen()
        fell_back = breach[1] if breach is not None and breach[0] == arm.name else None
        return decide(
            self.settings,
            arm.name,
            [(control.goals[goal], sums) for goal, sums in mine.goals.items()],
            control.other_events + mine.other_events,
            _guardrails(control.judged, mine.judged, guard),
            fell_back,
            sample_ratio_p,
            ran_s,
        )

    def _running_s(self) -> float:
        """Returns for how long the experiment has been running, without stops."""
        if self.shared is not None:
            state = self.shared.state
            return 0.0 if state is None else state.running_s(self.shared.now_ms)
        began_s = self._began_s
        return self._ran_s + (0.0 if began_s is None else self._clock() - began_s)

    def _new_counts(self, values: Ints | None = None) -> Counts:
        return Counts(len(self.arms), self.settings.goal_types, values)

    def _pause(self) -> None:
        self._ran_s, self._began_s = self._running_s(), None

    def settings_hash(self) -> str:
        """Returns a hash of the settings that counts depend on."""
        one = self.settings
        arms = [(arm.name, arm.fields, arm.url) for arm in one.arms]
        parts = (one.use, one.mode, self.split.seed, one.weights, arms, one.goal_types)
        return blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()

    def _look(self, now_s: float, guard: GuardSettings) -> None:
        """Falls back if a guard says so. A thread writes that first, for a disk may be slow."""
        if self._falling_back:
            return
        found = self._find_breach(self._new_counts(self._window.sums(now_s)), guard)
        if found is None:
            return
        if self.keep is None:
            self._fall_back(*found)
            return
        self._falling_back = True
        threading.Thread(
            target=self._fall_back_durably, args=found, name="fall-back", daemon=True
        ).start()

    def _find_breach(
        self, window: Counts, guard: GuardSettings
    ) -> tuple[ServingArm, Breach] | None:
        """Returns the first arm that is worse than the control within the window, and why."""
        control = window.requests(0)
        for arm in self.arms[1:]:
            breach = judge(control, window.requests(arm.number), guard)
            if breach is not None:
                return arm, breach
        return None

    def _fall_back_durably(self, arm: ServingArm, breach: Breach) -> None:
        with self._keeping:
            if not self._falling_back or self.status != "running":
                return
            fallen = {"status": "fallen_back", "reason": f"arm {arm.name}: {breach.text}"}
            state = msgspec.structs.replace(self.state(), breach=(arm.name, breach.text), **fallen)
            try:
                self._keep(state)
            except OSError as error:
                log.error("a fall-back of experiment %s is not saved: %s", self.name, error)
            with self._lock:
                self._falling_back = False
                if self.status == "running":
                    self._fall_back(arm, breach)

    def _fall_back(self, arm: ServingArm, breach: Breach) -> None:
        self._pause()
        self._status, self._reason = "fallen_back", f"arm {arm.name}: {breach.text}"
        self.counts.fallbacks[CAUSES.index(breach.cause)] += 1
        self._breach = arm.name, breach.text
        log.error("experiment %s fell back: %s", self.name, self.reason)

    def _stop(self) -> None:
        with self._lock:
            if self.status != "stopped":
                self._pause()
                self._status, self._reason = "stopped", "stopped by an operator"
                log.warning("experiment %s is stopped", self.name)

    def _keep(self, state: SavedExperiment) -> None:
        """Writes a state. Raises OSError."""
        if self.keep is None:
            return
        try:
            self.keep(state)
        except OSError:
            self._kept = False
            raise
        self._kept = True

    def _save_error(self, outcome: str, error: OSError) -> ExperimentNotSaved:
        log.error("experiment %s %s: %s", self.name, outcome, error)
        return ExperimentNotSaved(
            f"experiment {self.name} {outcome}: its state cannot be written "
            f"({error.strerror or type(error).__name__}); mend the disk of experiments_dir, and "
            "send this request again"
        )


@dataclass(frozen=True)
class _ArmCounts:
    """A copy of the counts of an arm.

    Attributes:
        total: Requests since the start of the experiment.
        judged: Requests since the last start, which the guardrails judge.
        window: [NUM_LATENCIES] answered requests within the window by latency.
        answers: Answers whose events are compared.
        goals: Sums of the goals, the first one decides.
        other_events: Attributed events of other types.
    """

    total: Requests
    judged: Requests
    window: Ints
    answers: int
    goals: dict[str, RateSums]
    other_events: int


def _copy_arm(number: int, counts: Counts, before: Counts, window: Counts) -> _ArmCounts:
    total = counts.requests(number)
    return _ArmCounts(
        total,
        total.since(before.requests(number)),
        window.latencies[number],
        int(counts.answers[number].sum()),
        {goal: counts.sums(number, place) for place, goal in enumerate(counts.goals)},
        int(counts.other[number, OTHER_EVENTS]),
    )


def _guardrails(control: Requests, arm: Requests, guard: GuardSettings) -> list[GuardrailStatus]:
    """Returns the state of the guardrails, which judge all requests since the last start."""

    def status(
        name: Cause, found: Check, control_value: float | None, value: float | None
    ) -> GuardrailStatus:
        result = "fails" if isinstance(found, Breach) else found
        return GuardrailStatus(name=name, result=result, control=control_value, arm=value)

    def share(count: int, total: int) -> float | None:
        return count / total if total else None

    p99s: list[Percentile | None] = [percentile(one.latencies, P99, 0.95) for one in (control, arm)]
    return [
        status(
            "errors",
            check_errors(control, arm, guard),
            share(control.errors, control.requests),
            share(arm.errors, arm.requests),
        ),
        status(
            "empty",
            check_empty(control, arm, guard),
            share(control.empty, control.requests),
            share(arm.empty, arm.requests),
        ),
        status(
            "p99",
            check_p99(control, arm, guard),
            *(_ms(one.value if one else None) for one in p99s),
        ),
    ]


def _moment(time_us: int) -> str:
    """Returns a time in RFC 3339, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_us / 1e6))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _sample_ratio_p(counts: tuple[int, ...], weights: tuple[float, ...]) -> float | None:
    """Returns the p-value of the sample ratio; None without units."""
    return sample_ratio_p(counts, weights) if any(counts) else None
