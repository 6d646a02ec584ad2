"""One experiment of a server: its arms, its state and its units."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from recserve.experiments.assignment import ArmSplit, Assignment
from recserve.experiments.serving.arm_fields import ArmFields, Exclusion
from recserve.experiments.serving.arm_tally import ArmResult, ArmTally, percentile
from recserve.experiments.serving.guard import CAUSES, Cause, judge
from recserve.experiments.serving.settings import ArmSettings, ExperimentSettings, GuardSettings
from recserve.schemas.experiments import ArmStatus, ExperimentStatus, Status

log = logging.getLogger(__name__)
# Seconds between two looks of a guard.
LOOK_S = 1.0
# Units that the sample-ratio check remembers, as salted hashes.
MAX_UNITS = 100_000


# What became of a request that the server of an arm got.
Forwarding = Literal["answered", "late", "failed", "refused", "busy"]
FORWARDINGS: tuple[Forwarding, ...] = ("answered", "late", "failed", "refused", "busy")
# Names the arm in a forwarded request. A server leaves such a request out of its own experiments,
# so that two servers that name each other cannot send a request in circles.
ARM_HEADER = "x-recserve-arm"


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
        settings: Its settings, with the address of its server.
        weight: Share of the units.
        fields: Request fields that the arm sets.
        label: `experiment/arm`, the label of metrics.
        tally: Its requests.
        forwarded: Number of requests for its server by what became of them.
    """

    settings: ArmSettings
    weight: float
    fields: ArmFields
    label: str
    tally: ArmTally
    forwarded: Counter[Forwarding] = field(
        default_factory=lambda: Counter(dict.fromkeys(FORWARDINGS, 0))
    )

    @property
    def name(self) -> str:
        """Name of the arm."""
        return self.settings.name

    @property
    def remote(self) -> bool:
        """True if another server answers the requests of the arm."""
        return self.settings.url is not None


@dataclass
class ComparisonCounts:
    """Running sums of comparisons in the modes `paired`, `shadow` and `interleaved`.

    Attributes:
        answers: Requests that both arms answered.
        shared: Sum over these of the share of the control's items that the other arm has.
        identical: Answers with the same items in the same order.
        dropped: Shadow copies that did not run because the server was busy, and pairs in which the
            second arm had less than half of the time until the deadline.
    """

    answers: int = 0
    shared: float = 0.0
    identical: int = 0
    dropped: int = 0


class Experiment:
    """A running, stopped or fallen-back experiment. Its methods may run on any thread.

    Attributes:
        settings: Name, mode and guard.
        arms: The arms; the first one is the control.
        split: Assigns units to arms.
        status: State of the experiment.
        reason: Why it does not run; None while it runs.
        fallbacks: Number of automatic fall-backs by cause.
        compared: Comparisons of the arms' items for one request.
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
            ServingArm(arm, weight, each, f"{settings.name}/{arm.name}", ArmTally(guard.window_s))
            for arm, weight, each in zip(settings.arms, settings.weights, fields, strict=True)
        )
        self.split = ArmSplit.even(
            settings.name if settings.seed is None else settings.seed,
            names,
            settings.weights,
            settings.coverage,
        )
        self.status: Status = "running"
        self.reason: str | None = None
        self.fallbacks: Counter[Cause] = Counter(dict.fromkeys(CAUSES, 0))
        self.compared = ComparisonCounts()
        self._exclusion = Exclusion.of(settings.use, fields)
        self._clock = clock
        self._lock = threading.Lock()
        self._units: set[int] = set()
        self._units_per_arm: Counter[str] = Counter()
        self._looked_s = clock()

    @property
    def control(self) -> ServingArm:
        """The first arm."""
        return self.arms[0]

    def arm(self, name: str) -> ServingArm:
        """Returns the arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)

    def assign(self, unit: str) -> Assignment:
        """Returns the arm and the bucket of a unit, always the same ones."""
        return self.split.assign(unit)

    def excludes(self, body: msgspec.Struct) -> str | None:
        """Returns why a request takes no part; None if it does."""
        return self._exclusion.reason(body)

    def see(self, unit: str, arm: str) -> None:
        """Remembers a unit for the sample-ratio check."""
        number = hash(unit)
        with self._lock:
            if number not in self._units and len(self._units) < MAX_UNITS:
                self._units.add(number)
                self._units_per_arm[arm] += 1

    def record(self, arm: ServingArm, result: ArmResult) -> None:
        """Adds the result of a request, and falls back to the control if a guard says so."""
        now_s = self._clock()
        with self._lock:
            arm.tally.add(result, now_s)
            if self.status != "running" or self.settings.guard is None:
                return
            if now_s - self._looked_s < LOOK_S:
                return
            self._looked_s = now_s
            self._look(now_s, self.settings.guard)

    def coin(self, request_id: str) -> random.Random:
        """Returns a source of draws for a request; the same for the same request."""
        return random.Random(f"{self.split.seed}:{request_id}")

    def compare(self, control: Sequence[str], other: Sequence[str]) -> None:
        """Compares the items of both arms for one request."""
        with self._lock:
            self.compared.answers += 1
            self.compared.shared += len({*control} & {*other}) / max(len(control), 1)
            self.compared.identical += [*control] == [*other]

    def drop(self) -> None:
        """Counts a request that the second arm did not get in full."""
        with self._lock:
            self.compared.dropped += 1

    def stop(self) -> None:
        """Stops the experiment: every request gets the control."""
        with self._lock:
            self.status, self.reason = "stopped", "stopped by an operator"
        log.warning("experiment %s is stopped", self.settings.name)

    def start(self) -> None:
        """Starts the experiment again with empty windows. Assignments are the same as before."""
        with self._lock:
            self.status, self.reason = "running", None
            for arm in self.arms:
                arm.tally.forget()
            self._looked_s = self._clock()
        log.warning("experiment %s is started", self.settings.name)

    def described(self) -> ExperimentStatus:
        """Returns the state for GET /v1/experiments."""
        with self._lock:
            now_s = self._clock()
            arms = [_arm_status(arm, now_s) for arm in self.arms]
            status, reason = self.status, self.reason
            counts = tuple(self._units_per_arm[arm.name] for arm in self.arms)
        return ExperimentStatus(
            name=self.settings.name,
            mode=self.settings.mode,
            status=status,
            reason=reason,
            coverage=self.settings.coverage,
            sample_ratio_p=_sample_ratio_p(counts, self.settings.weights),
            arms=arms,
        )

    def _look(self, now_s: float, guard: GuardSettings) -> None:
        control = self.control.tally.window(now_s)
        for arm in self.arms[1:]:
            verdict = judge(control, arm.tally.window(now_s), guard)
            if verdict is not None:
                self.status, self.reason = "fallen_back", f"arm {arm.name}: {verdict.text}"
                self.fallbacks[verdict.cause] += 1
                log.error("experiment %s fell back: %s", self.settings.name, self.reason)
                return


def _arm_status(arm: ServingArm, now_s: float) -> ArmStatus:
    seconds = arm.tally.window(now_s).seconds
    p50, p99 = percentile(seconds, 0.5, 0.95), percentile(seconds, 0.99, 0.95)
    return ArmStatus(
        name=arm.name,
        weight=arm.weight,
        requests=arm.tally.requests,
        errors=arm.tally.errors,
        empty=arm.tally.empty,
        p50_ms=_ms(p50.value if p50 else None),
        p99_ms=_ms(p99.value if p99 else None),
        p99_low_ms=_ms(p99.low if p99 else None),
        p99_high_ms=_ms(p99.high if p99 else None),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _sample_ratio_p(counts: tuple[int, ...], weights: tuple[float, ...]) -> float | None:
    """Returns the p-value of the sample ratio; None without units or without scipy."""
    if not any(counts):
        return None
    try:
        from recserve.experiments.statistics.intervals import sample_ratio_p
    except ModuleNotFoundError:
        return None
    return sample_ratio_p(counts, weights)
