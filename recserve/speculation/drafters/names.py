"""Names of the drafters, found without importing them and with them torch."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

ENTRY_POINTS = "recserve.drafters"
JOIN = "+"
_NAME = re.compile(r'^    name = "(\w+)"$', re.MULTILINE)


def drafter_names() -> set[str]:
    """Returns the names of the built-in drafters, read from their files, and of plug-ins."""
    files = Path(__file__).parent.glob("*.py")
    built_in = {name for file in files for name in _NAME.findall(file.read_text("utf-8"))}
    return built_in | {entry.name for entry in entry_points(group=ENTRY_POINTS)}


def check_names(name: str, known: set[str]) -> None:
    """Raises ValueError if one of the names joined by `+` is unknown."""
    if unknown := [part for part in name.split(JOIN) if part not in known]:
        raise ValueError(
            f"drafter is {unknown[0]!r}; choose one of {sorted(known)}, or several joined by "
            f"{JOIN!r}"
        )
