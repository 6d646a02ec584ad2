"""The experiment label of a response, and the responses of the experiment routes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Mode = Literal["split", "paired", "shadow", "interleaved"]
Status = Literal["running", "stopped", "fallen_back"]
Use = Literal["recommend", "rank", "text"]


class UnknownExperiment(LookupError):
    """The server has no experiment of that name."""


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


class ArmStatus(Struct, frozen=True, kw_only=True):
    """State of one arm.

    Attributes:
        name: Name of the arm.
        weight: Share of the units of the experiment.
        requests: Requests since the start of the server.
        errors: Requests that failed on the server's side.
        empty: Answers without an item from a model, or without a token.
        p50_ms: Median latency within the window of the guard; None without answers.
        p99_ms: 99th percentile within the window; None without answers.
        p99_low_ms: Lower end of its 95 % interval; None if there are too few answers.
        p99_high_ms: Upper end of its 95 % interval; None if there are too few answers.
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


class ExperimentStatus(Struct, frozen=True, kw_only=True):
    """State of one experiment.

    Attributes:
        name: Name of the experiment.
        mode: How requests use the arms.
        status: `fallen_back` means that a guard has stopped it.
        reason: Why it does not run; None while it runs.
        coverage: Share of the units that take part.
        sample_ratio_p: P-value of a chi-square test that units are divided by the weights. None
            outside mode `split`, before the first unit, and without scipy.
        arms: The arms; the first one is the control.
    """

    name: str
    mode: Mode
    status: Status
    reason: str | None
    coverage: float
    sample_ratio_p: float | None
    arms: list[ArmStatus]


class ExperimentsResponse(Struct, frozen=True, kw_only=True):
    """GET /v1/experiments."""

    experiments: list[ExperimentStatus]
