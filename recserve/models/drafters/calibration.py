"""Calibration of a draft head: how often a draft of a given size contains all true beams.

It is measured on validation users when the head is trained, and stored in the head's `config.json`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DraftPlan:
    """A draft width, and its average result over the validation users.

    Attributes:
        margin: Beams of the head's own search at each length, relative to the beam width. Also the
            rank of the item that sets its floor, relative to k. 0 drafts nothing.
        nodes: Nodes scored by the first forward pass, or by all of them if nothing is drafted.
        repairs: Further rounds.
        proved: Share of answers without further rounds.
    """

    margin: float
    nodes: float
    repairs: float
    proved: float


@dataclass(frozen=True)
class Calibration:
    """Plans by (beam width, k), including the plan that drafts nothing."""

    plans: dict[tuple[int, int], tuple[DraftPlan, ...]]

    def scaled(self, width: int, k: int) -> list[DraftPlan]:
        """Returns the plans for a beam width and k, scaled from the nearest calibrated ones."""

        def distance(known: tuple[int, int]) -> float:
            return abs(math.log(known[0] / width)) + abs(math.log(known[1] / k))

        nearest = min(self.plans, key=distance)
        ratio = width / nearest[0]
        return [
            DraftPlan(p.margin, p.nodes * ratio, p.repairs, p.proved) for p in self.plans[nearest]
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form; `from_dict` reads it back."""
        return {
            f"{width}/{k}": [asdict(plan) for plan in plans]
            for (width, k), plans in self.plans.items()
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Calibration:
        """Reads what `to_dict` wrote.

        An older form named the width alone, and its plans had another meaning. Such a head drafts
        nothing until it is trained again.

        Raises:
            TypeError: If a plan has other fields.
            ValueError: If the values have another form.
        """
        if values and all("/" not in name for name in values):
            return Calibration({(50, 10): (DraftPlan(0.0, 0.0, 0.0, 1.0),)})
        plans = {}
        for name, listed in values.items():
            width, k = map(int, name.split("/"))
            plans[width, k] = tuple(DraftPlan(**plan) for plan in listed)
        return Calibration(plans)
