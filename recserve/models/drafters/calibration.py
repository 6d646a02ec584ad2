"""Calibration of a draft head: how often a draft of so many prefixes holds all true beams.

Measured when the head is trained, on validation users; kept in the head's `config.json`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DraftPlan:
    """How wide to draft, and what came of it, on average over the validation users.

    spreads: prefixes kept at each length 0 to L - 1, relative to the beam width (0 where the target
    has the say); empty: nothing is drafted. nodes: scored by the first forward, or by all of them
    where nothing is drafted. repairs: further rounds. proved: share of answers without one.
    """

    spreads: tuple[float, ...]
    nodes: float
    repairs: float
    proved: float


@dataclass(frozen=True)
class Calibration:
    """Plans by beam width, the one that drafts nothing among them."""

    plans: dict[int, tuple[DraftPlan, ...]]

    def scaled(self, width: int) -> list[DraftPlan]:
        """Plans for a beam width, taken from the nearest calibrated one."""
        nearest = min(self.plans, key=lambda known: abs(math.log(known / width)))
        ratio = width / nearest
        return [
            DraftPlan(p.spreads, p.nodes * ratio, p.repairs, p.proved) for p in self.plans[nearest]
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, read back by `from_dict`."""
        return {str(width): [asdict(plan) for plan in plans] for width, plans in self.plans.items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Calibration:
        """Raises TypeError or ValueError where it was not written by `to_dict`."""
        plans = {
            int(width): tuple(
                DraftPlan(**{**plan, "spreads": tuple(map(float, plan["spreads"]))})
                for plan in listed
            )
            for width, listed in values.items()
        }
        return Calibration(plans)
