"""Compares answers: what is masked, how numbers may differ, and the differences one by one."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Numbers are stored with this many digits behind the point.
DIGITS = 6
# Different kernels add float32 numbers in different orders. On AVX2, on SSE and in plain torch the
# largest difference of any recorded number is 1.0e-5 (a log-probability).
TOLERANCE = 2e-5
# Fields that differ between two equal requests, and what is stored for them.
MASKED_FIELDS = {"attribution_token": "<token>", "created": "<time>"}
# The program's own version in answers.
VERSION_FIELDS = ("version", "system_fingerprint")
RANDOM_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}")
STAGES = ["queue", "features", "prefill", "draft", "verify", "total"]


@dataclass(frozen=True)
class Difference:
    """One place in which an answer differs from the recorded one.

    Attributes:
        place: JSON path in the answer.
        recorded: The recorded value; MISSING if it has none.
        got: The value of this commit; MISSING if it has none.
    """

    place: str
    recorded: Any
    got: Any

    def __str__(self) -> str:
        return f"{self.place}: recorded {_short(self.recorded)}, got {_short(self.got)}"


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def stable(value: Any, names: dict[str, str]) -> Any:
    """Returns an answer without what differs between two equal answers.

    Args:
        value: Decoded JSON.
        names: Texts that are replaced everywhere, such as the digest of the models.
    """
    if isinstance(value, dict):
        return {key: _field(key, inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [stable(inner, names) for inner in value]
    if isinstance(value, str):
        return stable_text(value, names)
    if isinstance(value, float):
        return round(value, DIGITS) + 0.0  # no -0.0
    return value


def stable_text(text: str, names: dict[str, str]) -> str:
    """Returns a text without random ids and with names for digests."""
    for digest, name in names.items():
        text = text.replace(digest, name)
    return RANDOM_ID.sub("<id>", text)


def _field(key: str, value: Any, names: dict[str, str]) -> Any:
    if key in MASKED_FIELDS:
        return MASKED_FIELDS[key]
    if key in VERSION_FIELDS and isinstance(value, str):
        return "<version>"
    if key == "timing_ms" and isinstance(value, dict):
        return "<stages>" if list(value) == STAGES else list(value)
    if key == "kernels" and isinstance(value, dict):
        return "<kernels>"
    if key == "embedding" and isinstance(value, str):
        data = base64.b64decode(value)
        floats = struct.unpack(f"<{len(data) // 4}f", data)
        return {"base64": [round(number, DIGITS) + 0.0 for number in floats]}
    return stable(value, names)


def differences(
    recorded: Any, got: Any, tolerance: float = TOLERANCE, place: str = "$"
) -> Iterator[Difference]:
    """Yields the places in which two stable answers differ."""
    if isinstance(recorded, float) and isinstance(got, float):
        if not abs(recorded - got) <= tolerance:
            yield Difference(place, recorded, got)
    elif type(recorded) is not type(got):
        yield Difference(place, recorded, got)
    elif isinstance(recorded, dict):
        for key in recorded.keys() | got.keys():
            one, other = recorded.get(key, MISSING), got.get(key, MISSING)
            yield from differences(one, other, tolerance, f"{place}.{key}")
    elif isinstance(recorded, list):
        for index in range(max(len(recorded), len(got))):
            one = recorded[index] if index < len(recorded) else MISSING
            other = got[index] if index < len(got) else MISSING
            yield from differences(one, other, tolerance, f"{place}[{index}]")
    elif recorded != got:
        yield Difference(place, recorded, got)
