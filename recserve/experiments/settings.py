"""Settings of the experiments that a server runs, and the request fields that an arm sets.

Both are checked with the schemas of HTTP bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from recserve.experiments.assignment import WEIGHT_TOLERANCE, valid_weights
from recserve.schemas.experiments import Mode, Use
from recserve.schemas.items import InvalidRequest, RankRequest, RecommendRequest, StrictStruct
from recserve.schemas.text import CompletionRequest
from recserve.schemas.validation import to_message

B = TypeVar("B", bound=msgspec.Struct)
MAX_EXPERIMENTS = 32
MAX_ARMS = 8
MOST_MIN_REQUESTS = 10_000
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


@dataclass(frozen=True)
class UseFields:
    """What arms of one use may set.

    Attributes:
        kind: Message type that checks the fields.
        required: Values of the required fields of that type.
        fields: Names that an arm may set.
        coupled: Names that are checked together. A request that sets one of them takes no part in
            an experiment that sets another one.
        modes: Modes of experiments of this use.
    """

    kind: type[msgspec.Struct]
    required: Mapping[str, Any]
    fields: tuple[str, ...]
    coupled: tuple[str, ...]
    modes: tuple[Mode, ...]


USES: dict[Use, UseFields] = {
    "recommend": UseFields(
        RecommendRequest,
        {},
        ("strategy", "beam_width", "dense_weight", "outcome", "diversity", "scoring"),
        ("strategy", "beam_width", "dense_weight", "outcome", "scoring"),
        ("split", "paired", "shadow", "interleaved"),
    ),
    "rank": UseFields(
        RankRequest,
        {"candidates": [{"item_id": "x"}]},
        ("scorer", "sort_by"),
        ("scorer", "sort_by"),
        ("split", "paired", "shadow"),
    ),
    "text": UseFields(
        CompletionRequest,
        {"prompt": "x"},
        (
            *("speculation", "temperature", "top_p", "top_k", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        ),
        (),
        ("split",),
    ),
}


@dataclass(frozen=True)
class ArmFields:
    """The request fields of one arm.

    Attributes:
        values: Typed values by top-level field name.
    """

    values: Mapping[str, Any]

    @classmethod
    def parse(cls, use: Use, fields: Mapping[str, Any]) -> ArmFields:
        """Converts and checks fields; dots in names nest.

        Raises:
            InvalidRequest: If a field is unknown, not for arms, or out of range.
        """
        rules = USES[use]
        given = nest_fields(fields)
        for name in given:
            if name not in rules.fields:
                listed = ", ".join(rules.fields)
                raise InvalidRequest(name, f"expected a field of {listed}, got {name!r}")
        body = to_message({**rules.required, **given}, rules.kind)
        return cls({name: getattr(body, name) for name in given})

    @property
    def least_k(self) -> int:
        """Fewest items of a slate that these fields fit: their quotas `at_least`."""
        diversity = self.values.get("diversity")
        return 1 if diversity is None else max(1, sum(one.count for one in diversity.quotas))

    def apply(self, body: B) -> B:
        """Returns a request with the fields of this arm."""
        return msgspec.structs.replace(body, **self.values) if self.values else body


def nest_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with dotted names as nested mappings: {"a.b": 1} becomes {"a": {"b": 1}}.

    Raises:
        InvalidRequest: If a name is both a value and a parent.
    """
    found: dict[str, Any] = {}
    for name, value in fields.items():
        *parents, last = name.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise InvalidRequest(name, f"expected one value, got {parent!r} twice")
        if last in place:
            raise InvalidRequest(name, f"expected one value, got {last!r} twice")
        place[last] = dict(value) if isinstance(value, Mapping) else value
    return found


@dataclass(frozen=True)
class Exclusion:
    """Finds requests that set a field of the experiment themselves.

    Attributes:
        defaults: Value of an absent field, by name of each field that excludes.
        most_k: Smallest beam width of the arms; a slate may not be longer. None without one.
        least_k: Largest quota of the arms; a slate may not be shorter.
    """

    defaults: Mapping[str, Any]
    most_k: int | None
    least_k: int

    @classmethod
    def of(cls, use: Use, arms: Iterable[ArmFields]) -> Exclusion:
        """Returns the rule of an experiment with these arms."""
        rules = USES[use]
        arms = tuple(arms)
        names = {name for arm in arms for name in arm.values}
        if names & set(rules.coupled):
            names |= set(rules.coupled)
        plain = to_message(dict(rules.required), rules.kind)
        widths = [arm.values["beam_width"] for arm in arms if arm.values.get("beam_width")]
        ordered = [name for name in rules.fields if name in names]
        return cls(
            {name: getattr(plain, name) for name in ordered},
            min(widths, default=None),
            max(arm.least_k for arm in arms),
        )

    def reason(self, body: msgspec.Struct) -> str | None:
        """Returns why a request takes no part; None if it does."""
        for name, default in self.defaults.items():
            if getattr(body, name) != default:
                return f"the request sets {name}"
        if self.most_k is not None and getattr(body, "k", 0) > self.most_k:
            return f"k is above the beam width {self.most_k} of an arm"
        if getattr(body, "k", self.least_k) < self.least_k:
            return f"k is below the quota {self.least_k} of an arm"
        return None


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
    min_requests: Annotated[int, Meta(ge=10, le=MOST_MIN_REQUESTS)] = 200
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
    found = to_message({"experiments": list(raw)}, _File).experiments
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
