"""Request fields that an arm sets, and the requests that an experiment must leave alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from recserve.schemas.experiments import Mode, Use
from recserve.schemas.items import InvalidRequest, RankRequest, RecommendRequest
from recserve.schemas.text import CompletionRequest
from recserve.schemas.validation import converted

B = TypeVar("B", bound=msgspec.Struct)


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
        ("strategy", "beam_width", "dense_weight", "outcome", "diversity"),
        ("strategy", "beam_width", "dense_weight", "outcome"),
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
        body = converted({**rules.required, **given}, rules.kind)
        return cls({name: getattr(body, name) for name in given})

    @property
    def least_k(self) -> int:
        """Fewest items of a slate that these fields fit: their quota `at_least`."""
        diversity = self.values.get("diversity")
        return 1 if diversity is None or diversity.at_least is None else diversity.at_least.count

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
        plain = converted(dict(rules.required), rules.kind)
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
