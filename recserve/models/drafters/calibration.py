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

    margin: beams that the head's own search keeps at each length, relative to the beam width, and
    place of the item that sets its floor, relative to k; 0: nothing is drafted. nodes: scored by
    the first forward, or by all of them where nothing is drafted. repairs: further rounds. proved:
    share of answers without one.
    """

    margin: float
    nodes: float
    repairs: float
    proved: float


@dataclass(frozen=True)
class Calibration:
    """Plans by beam width and k, the one that drafts nothing among them."""

    plans: dict[tuple[int, int], tuple[DraftPlan, ...]]

    def scaled(self, width: int, k: int) -> list[DraftPlan]:
        """Plans for a beam width and k, taken from the nearest calibrated ones."""

        def distance(known: tuple[int, int]) -> float:
            return abs(math.log(known[0] / width)) + abs(math.log(known[1] / k))

        nearest = min(self.plans, key=distance)
        ratio = width / nearest[0]
        return [
            DraftPlan(p.margin, p.nodes * ratio, p.repairs, p.proved) for p in self.plans[nearest]
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, read back by `from_dict`."""
        return {
            f"{width}/{k}": [asdict(plan) for plan in plans]
            for (width, k), plans in self.plans.items()
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Calibration:
        """Raises TypeError or ValueError where it was not written by `to_dict`. The form of before
        named the width alone, and its plans meant something else: such a head drafts nothing until
        it is trained again.
        """
        if values and all("/" not in name for name in values):
            return Calibration({(50, 10): (DraftPlan(0.0, 0.0, 0.0, 1.0),)})
        plans = {}
        for name, listed in values.items():
            width, k = map(int, name.split("/"))
            plans[width, k] = tuple(DraftPlan(**plan) for plan in listed)
        return Calibration(plans)
