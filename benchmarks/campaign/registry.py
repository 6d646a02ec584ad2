"""All checks, in the order in which a campaign runs them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.campaign.check import CHECKS, Check

# Importing a file registers its checks.
from benchmarks.campaign.checks import (  # noqa: F401
    catalog_log,
    disconnects,
    drain,
    engine_faults,
    fuzzing,
    hostile_schemas,
    overload,
    redis_faults,
    shared_experiments,
    soak,
    swaps,
)


def all_checks() -> list[Check]:
    """Returns all checks by number."""
    return sorted(CHECKS, key=lambda one: int(one.number.removeprefix("R")))


def chosen(numbers: Sequence[str] | None) -> list[Check]:
    """Returns the checks with these numbers; None means all.

    Raises:
        ValueError: If there is no check of a number.
    """
    checks = all_checks()
    if numbers is None:
        return checks
    unknown = set(numbers) - {one.number for one in checks}
    if unknown:
        raise ValueError(
            f"unknown checks {sorted(unknown)}; there are {[c.number for c in checks]}"
        )
    return [one for one in checks if one.number in numbers]
