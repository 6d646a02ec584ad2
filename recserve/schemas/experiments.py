"""The experiment label of a response, and the responses of the experiment routes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Mode = Literal["split", "paired", "shadow", "interleaved"]
Status = Literal["running", "stopped", "fallen_back", "unknown"]
Use = Literal["recommend", "rank", "text"]
VerdictKind = Literal["ship", "keep_control", "no_difference", "not_yet", "no_goal", "invalid"]
GuardrailName = Literal["errors", "empty", "p99"]
GuardrailResult = Literal["holds", "fails", "unclear"]
# Marks a request that no user waits for, such as one of a load test; the value says who sends it.
# It takes no part in experiments, and slate log, outcomes and the list `popular` leave it out. An
# arm's own server gets it too, so two servers that name each other send no request in circles.
UNTRACKED_HEADER = "x-recserve-untracked"


class UnknownExperiment(LookupError):
    """The server has no experiment of that name."""


class ExperimentNotSaved(RuntimeError):
    """The disk has refused the new state of an experiment, or Redis its state or events."""


class ExperimentLabel(Struct, frozen=True, kw_only=True):
    """The experiment and the arm of a response.

    Attributes:
        name: Name of the experiment.
        arm: Name of the arm that answered; None if no single arm did.
        bucket: Hash bucket of the unit, 0 to 9,999.
        hash_version: Version of GrowthBook's hash.
        mode: Mode of the experiment.
        sticky: True if the unit is a user. False means that the request names no user, so the
            request id is hashed and the next request may get another arm.
        reason: Why the request takes no part; None if it does.
    """

    name: str
    arm: str | None
    bucket: int
    hash_version: int
    mode: Mode
    sticky: bool
    reason: str | None = None

    @property
    def header(self) -> str:
        """The value of the header `x-recserve-experiment`: name and arm."""
        return f"{self.name}/{self.arm or '-'}"


class GoalStatus(Struct, frozen=True, kw_only=True):
    """Events of one type that the answers of an arm led to.

    Attributes:
        type: The event type.
        events: Number of events; one per answer, item and type.
        rate: Events per answer; None without answers.
        spread: Variance of the number of events over that number, for `recserve experiments plan`.
            None if there are too few events or users.
        change: Difference to the control's rate, over the control's rate. None for the control, if
            there are too few events or users, and if the control's rate is 0.
        change_low: Lower end of its interval, which holds at every look. The interval is that of
            the difference, over the control's rate.
        change_high: Upper end of its interval.
    """

    type: str
    events: int
    rate: float | None
    spread: float | None = None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None


class GuardrailStatus(Struct, frozen=True, kw_only=True):
    """Whether an arm is worse than the control in something that must not get worse.

    Attributes:
        name: What is compared: the shares of errors and of empty answers, or p99 latency.
        result: `fails` if the arm is surely worse by more than the bound of `guard`, `unclear` if
            there are too few requests.
        control: Value of the control: a share, or milliseconds; None without a value.
        arm: Value of the arm.
    """

    name: GuardrailName
    result: GuardrailResult
    control: float | None
    arm: float | None


class ArmVerdict(Struct, frozen=True, kw_only=True):
    """What to do with an arm.

    Attributes:
        kind: `ship` the arm, `keep_control`, `no_difference` of interest, `not_yet` known,
            `no_goal`: clicks say nothing about the arm, or `invalid`: users are not divided by
            the weights.
        text: The verdict in words, with its reason.
        guardrails: State of errors, empty answers and p99 latency.
        days: Days until a change of `smallest_effect` is seen at this traffic; None if unknown.
    """

    kind: VerdictKind
    text: str
    guardrails: list[GuardrailStatus]
    days: float | None = None


class FirstVerdict(Struct, frozen=True, kw_only=True):
    """The first verdict on an arm by the interval of its goal. Later intervals may say less.

    Attributes:
        kind: `ship`, `keep_control` or `no_difference`.
        text: The verdict in words.
        time: When the server came to it, in RFC 3339.
        answers: Answers of the arm until then.
        events: Events of the deciding goal that these led to.
        control_answers: Answers of the control until then.
        control_events: Events that these led to.
    """

    kind: VerdictKind
    text: str
    time: str
    answers: int
    events: int
    control_answers: int
    control_events: int


class ArmStatus(Struct, frozen=True, kw_only=True):
    """State of one arm.

    Attributes:
        name: Name of the arm.
        weight: Share of the units of the experiment.
        requests: Requests since the start of the experiment.
        errors: Requests that failed on the server's side.
        empty: Answers without an item from a model, or without a token.
        p50_ms: Median latency within the window of the guard, within 1 %; None without answers.
        p99_ms: 99th percentile within the window, within 1 %; None without answers.
        p99_low_ms: Lower end of its 95 % interval; None if there are too few answers.
        p99_high_ms: Upper end of its 95 % interval; None if there are too few answers.
        answers: Answers that count for the rates of goals; 0 if the experiment has no goals.
        goals: Events that these answers led to, by type. The first type decides.
        verdict: The present verdict on the arm; None for the control.
        first_verdict: The first verdict of the goal; None before it, and for the control.
        users: Units that the arm got since the server was started, or from all servers that share
            the experiment, of at most 100,000 in all arms. None outside mode `split`.
    """

    name: str
    weight: float
    requests: int
    errors: int
    empty: int
    p50_ms: float | None
    p99_ms: float | None
    p99_low_ms: float | None
    p99_high_ms: float | None
    answers: int
    goals: list[GoalStatus]
    verdict: ArmVerdict | None
    first_verdict: FirstVerdict | None
    users: int | None


class ExperimentStatus(Struct, frozen=True, kw_only=True):
    """State of one experiment.

    Attributes:
        name: Name of the experiment.
        mode: How requests use the arms.
        status: `fallen_back` means that a guard has stopped it. `unknown` means that several
            servers share it and this one does not reach Redis. Then every request gets the control.
        reason: Why it does not run; None while it runs.
        coverage: Share of the units that take part.
        smallest_effect: Smallest relative change of a rate that is of interest.
        sample_ratio_p: P-value of a chi-square test that units are divided by the weights. None
            outside mode `split`, and before the first unit.
        warning: What to find out before you read on; None if `sample_ratio_p` is not below 0.001.
        started: When it began to count, in RFC 3339.
        durable: True if a restart keeps the status. False without a folder for counts, if another
            process has the folder, if the disk refused the last write, and if Redis does not
            answer.
        servers: Servers that have sent counts of late; None unless several share it.
        uncounted: About how many requests the counts lack: those that Redis has lost, and for each
            killed server as many as it sent at once at most. None unless several servers share it.
        arms: The arms; the first one is the control.
    """

    name: str
    mode: Mode
    status: Status
    reason: str | None
    coverage: float
    smallest_effect: float
    sample_ratio_p: float | None
    warning: str | None
    started: str
    durable: bool
    servers: int | None
    uncounted: int | None
    arms: list[ArmStatus]


class ExperimentsResponse(Struct, frozen=True, kw_only=True):
    """GET /v1/experiments."""

    experiments: list[ExperimentStatus]
