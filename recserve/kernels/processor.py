"""The processor that this runs on, as the system describes it."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Processor:
    """name: for people. vendor: as it signs itself, e.g. GenuineIntel; "" where it does not. flags:
    instruction sets in Linux's words; none where the system does not list them.
    """

    name: str
    vendor: str
    flags: frozenset[str]


@functools.cache
def processor() -> Processor:
    """That of this machine."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return described(text)


def described(text: str) -> Processor:
    """The first processor of a /proc/cpuinfo; what is not in it is asked of Python's platform."""
    first = text.partition("\n\n")[0]
    parts = (line.partition(":") for line in first.splitlines())
    about = {key.strip(): value.strip() for key, _, value in parts}
    return Processor(
        about.get("model name") or platform.processor() or platform.machine(),
        about.get("vendor_id", ""),
        frozenset((about.get("flags") or about.get("Features", "")).split()),
    )
