"""All experiments of a server: draws the arm of each request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from recserve.experiments.experiment import Experiment, ServingArm
from recserve.schemas.experiments import (
    ExperimentLabel,
    ExperimentsResponse,
    UnknownExperiment,
    Use,
)


@dataclass(frozen=True)
class Draw:
    """The part of a request in an experiment.

    Attributes:
        experiment: The experiment.
        label: What the response says about it.
        arm: The arm whose fields the request gets; None leaves the request unchanged.
        counted: True if the result counts for the arm.
    """

    experiment: Experiment
    label: ExperimentLabel
    arm: ServingArm | None
    counted: bool


class Experiments:
    """The experiments of a server, in the order of the configuration."""

    def __init__(self, experiments: Iterable[Experiment] = ()) -> None:
        self._by_name = {one.settings.name: one for one in experiments}
        self._by_use: dict[Use, list[Experiment]] = {"recommend": [], "rank": [], "text": []}
        for one in self._by_name.values():
            self._by_use[one.settings.use].append(one)

    def __iter__(self) -> Iterator[Experiment]:
        return iter(self._by_name.values())

    def find(self, name: str) -> Experiment:
        """Returns an experiment by name. Raises UnknownExperiment."""
        if name not in self._by_name:
            there = ", ".join(self._by_name) or "none"
            raise UnknownExperiment(f"experiments of this server: {there}; got {name[:80]!r}")
        return self._by_name[name]

    @property
    def labels(self) -> frozenset[str]:
        """All values of the label `arm` in metrics."""
        return frozenset(arm.label for one in self._by_name.values() for arm in one.arms)

    def describe(self) -> ExperimentsResponse:
        """Returns the state of all experiments."""
        return ExperimentsResponse(experiments=[one.describe() for one in self._by_name.values()])

    def count_events(self, events: Iterable[tuple[str, str, str, str, str]]) -> None:
        """Counts events that answers of arms led to; see `Experiment.count_events`.

        A token may name an experiment that this server no longer has; its events are left out.

        Args:
            events: Name of the experiment, and what `Experiment.count_events` takes, of each event.

        Raises:
            ExperimentNotSaved: If several servers share an experiment, and Redis does not answer.
        """
        found: dict[str, list[tuple[str, str, str, str]]] = {}
        for name, *event in events:
            arm, unit, event_type, key = event
            found.setdefault(name, []).append((arm, unit, event_type, key))
        for name, own in found.items():
            if (one := self._by_name.get(name)) is not None:
                one.count_events(own)

    def team(self, experiment: str, number: int) -> str:
        """Returns the arm of a team of an interleaved slate.

        Empty if the experiment is gone or has another mode.
        """
        one = self._by_name.get(experiment)
        if one is None or one.settings.mode != "interleaved":
            return ""
        return one.arms[number].name

    def draw(
        self, use: Use, user: str | None, request_id: str, body: msgspec.Struct
    ) -> Draw | None:
        """Draws the arm of a request.

        The first experiment of the use whose coverage includes the unit gets the request.

        Args:
            use: Kind of the request.
            user: Id of the user; None hashes the request id instead.
            request_id: Id of the request.
            body: The request.

        Returns:
            The draw; None if the request is in no experiment.
        """
        for one in self._by_use[use]:
            assigned = one.split.assign(request_id if user is None else user)
            if assigned.arm is not None:
                return _draw(one, assigned.arm, assigned.bucket, user, request_id, body)
        return None


def _draw(
    one: Experiment,
    assigned: str,
    bucket: int,
    user: str | None,
    request_id: str,
    body: msgspec.Struct,
) -> Draw:
    settings = one.settings

    def label(arm: str | None, reason: str | None = None) -> ExperimentLabel:
        return ExperimentLabel(
            name=settings.name,
            arm=arm,
            bucket=bucket,
            hash_version=settings.hash_version,
            mode=settings.mode,
            sticky=user is not None,
            reason=reason,
        )

    excluded = one.exclusion.reason(body)
    if excluded is None and settings.mode == "interleaved" and getattr(body, "diversity", None):
        excluded = "the request sets diversity, which two joined slates cannot keep"
    if excluded is not None:
        return Draw(one, label(None, excluded), None, counted=False)
    if (status := one.status) != "running":
        return Draw(one, label(one.control.name, status), one.control, counted=False)
    if settings.mode != "split":
        arm = None if settings.mode == "interleaved" else one.control.name
        return Draw(one, label(arm), one.control, counted=True)
    one.see(request_id if user is None else user, assigned)
    return Draw(one, label(assigned), one.arm(assigned), counted=True)
