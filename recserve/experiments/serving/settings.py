"""Settings of the experiments that a server runs, checked with the schemas of HTTP bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from recserve.experiments.assignment import WEIGHT_TOLERANCE, valid_weights
from recserve.experiments.serving.arm_fields import USES, ArmFields
from recserve.schemas.experiments import Mode, Use
from recserve.schemas.items import InvalidRequest, StrictStruct
from recserve.schemas.validation import converted

MAX_EXPERIMENTS = 32
MAX_ARMS = 8
MAX_WINDOW = 10_000
MAX_GOALS = 4
DEFAULT_GOALS = ("click",)

Label = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z", description="1 to 64 of A-Z a-z 0-9 . _ -"),
]
Weight = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
EventType = Annotated[str, Meta(min_length=1, max_length=64)]
Factor = Annotated[float, Meta(ge=1, le=1000)]


class ArmSettings(StrictStruct, frozen=True, kw_only=True):
    """One arm.

    Attributes:
        name: Name in responses and metrics.
        weight: Share of the units; None in every arm means equal shares.
        fields: Request fields that the arm sets; dots in names nest.
        url: Address of another recserve server that answers the requests of the arm; None means
            that this server answers them.
        api_key_file: File with an API key of the other server.
        max_in_flight: Most requests that the other server gets at the same time. A further request
            gets the control's answer and counts as an error of the arm.
    """

    name: Label
    weight: Weight | None = None
    fields: dict[str, Any] = {}
    url: Annotated[str, Meta(max_length=256)] | None = None
    api_key_file: str | None = None
    max_in_flight: Annotated[int, Meta(ge=1, le=10_000)] = 128


class GuardSettings(StrictStruct, frozen=True, kw_only=True):
    """When an experiment falls back to its control.

    Attributes:
        window_s: Length of the sliding window.
        min_requests: Requests that control and arm need in the window.
        factor: Highest allowed ratio of error shares, and of shares of empty answers.
        error_share: Error share up to which an arm is never stopped.
        empty_share: Share of empty answers up to which an arm is never stopped.
        p99_factor: Highest allowed ratio of p99 latencies.
    """

    window_s: Annotated[float, Meta(gt=0, le=86_400)] = 300.0
    min_requests: Annotated[int, Meta(ge=10, le=MAX_WINDOW)] = 200
    factor: Factor = 2.0
    error_share: Share = 0.01
    empty_share: Share = 0.01
    p99_factor: Factor = 2.0


class ExperimentSettings(StrictStruct, frozen=True, kw_only=True):
    """One experiment.

    Attributes:
        name: Name in responses, metrics and routes.
        use: Requests that take part; `text` covers completions and chats.
        arms: The arms; the first one is the control.
        mode: How requests use the arms.
        seed: Seed of the hash; None means the name.
        hash_version: Version of GrowthBook's hash.
        coverage: Share of the units that take part.
        guard: When the experiment falls back; None means never.
        goals: Event types whose rates are compared; the first one decides. None means clicks.
        smallest_effect: Smallest relative change of a rate that is of interest. The intervals are
            narrowest where such a change is found.
    """

    name: Label
    use: Use
    arms: Annotated[list[ArmSettings], Meta(min_length=2, max_length=MAX_ARMS)]
    mode: Mode = "split"
    seed: Annotated[str, Meta(max_length=256)] | None = None
    hash_version: Literal[2] = 2
    coverage: Share = 1.0
    guard: GuardSettings | None = GuardSettings()
    goals: Annotated[list[EventType], Meta(min_length=1, max_length=MAX_GOALS)] | None = None
    smallest_effect: Annotated[float, Meta(ge=0.001, le=10)] = 0.1

    @property
    def goal_types(self) -> tuple[str, ...]:
        """Event types that are counted; none if the experiment cannot judge them."""
        if self.use == "text" or self.mode in ("paired", "shadow"):
            return ()
        return DEFAULT_GOALS if self.goals is None else tuple(self.goals)

    @property
    def weights(self) -> tuple[float, ...]:
        """Shares of the arms."""
        given = tuple(arm.weight for arm in self.arms if arm.weight is not None)
        return given or (1 / len(self.arms),) * len(self.arms)

    def arm_fields(self) -> tuple[ArmFields, ...]:
        """Returns the request fields of each arm. Raises InvalidRequest for a wrong one."""
        return tuple(ArmFields.parse(self.use, arm.fields) for arm in self.arms)


class _File(StrictStruct, frozen=True, kw_only=True):
    experiments: Annotated[list[ExperimentSettings], Meta(max_length=MAX_EXPERIMENTS)]


def parse_experiments(raw: Sequence[Mapping[str, Any]]) -> tuple[ExperimentSettings, ...]:
    """Converts the setting `experiments`.

    Args:
        raw: One mapping per experiment, as the configuration file has them.

    Raises:
        InvalidRequest: If a value is out of range; the message names field, bound and value.
    """
    found = converted({"experiments": list(raw)}, _File).experiments
    names = [one.name for one in found]
    for index, one in enumerate(found):
        place = f"experiments[{index}]"
        if one.name in names[:index]:
            raise InvalidRequest(f"{place}.name", f"expected different names, got {one.name!r}")
        _check(one, place)
    return tuple(found)


def _check(one: ExperimentSettings, place: str) -> None:
    names = [arm.name for arm in one.arms]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{place}.arms", f"expected different names, got {', '.join(names)}")
    given = [arm.weight for arm in one.arms if arm.weight is not None]
    if given and not valid_weights(given, len(names)):
        raise InvalidRequest(
            f"{place}.arms",
            f"expected a weight per arm with sum 1 (+-{WEIGHT_TOLERANCE}), got {given}",
        )
    modes = USES[one.use].modes
    if one.mode not in modes:
        raise InvalidRequest(
            f"{place}.mode", f"expected {' or '.join(modes)} for {one.use}, got {one.mode!r}"
        )
    if one.mode != "split" and len(names) != 2:
        raise InvalidRequest(
            f"{place}.arms", f"expected 2 arms for mode {one.mode}, got {len(names)}"
        )
    if one.goals is not None:
        if not one.goal_types:
            raise InvalidRequest(
                f"{place}.goals",
                f"expected none for {one.use} in mode {one.mode}: events are judged for recommend "
                f"and rank in modes split and interleaved, got {', '.join(one.goals)}",
            )
        if len(set(one.goals)) < len(one.goals):
            listed = ", ".join(one.goals)
            raise InvalidRequest(f"{place}.goals", f"expected different types, got {listed}")
    for index, arm in enumerate(one.arms):
        where = f"{place}.arms[{index}]"
        try:
            ArmFields.parse(one.use, arm.fields)
        except InvalidRequest as error:
            param = f"{where}.fields" + (f".{error.param}" if error.param else "")
            raise InvalidRequest(param, _reason(error)) from None
        if one.mode == "interleaved" and any(n.split(".")[0] == "diversity" for n in arm.fields):
            raise InvalidRequest(
                f"{where}.fields.diversity",
                "expected none in mode interleaved: two joined slates cannot keep it",
            )
        if arm.url is not None:
            _check_url(one.use, index, arm.url, f"{where}.url")
        elif arm.api_key_file is not None:
            raise InvalidRequest(f"{where}.api_key_file", "expected none without url")


def _check_url(use: Use, index: int, url: str, param: str) -> None:
    if index == 0:
        raise InvalidRequest(
            param, "expected none for the control: this server answers when the other one fails"
        )
    if use == "text":
        raise InvalidRequest(
            param, "expected none for text; compare two servers with recserve ab instead"
        )
    try:
        parts = urlsplit(url)
        valid = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url in (f"{parts.scheme}://{parts.netloc}", f"{parts.scheme}://{parts.netloc}/")
            and "@" not in parts.netloc
            and url.isascii()
            and url.isprintable()
            and " " not in url
        )
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        # The value may hold a password, so the message does not repeat it.
        raise InvalidRequest(param, "expected http://host:port or https://host:port, nothing else")


def _reason(error: InvalidRequest) -> str:
    return str(error).removeprefix(f"{error.param}: ")
