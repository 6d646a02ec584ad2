"""Settings of `recserve retrain` with which a run takes seconds and no figure stops it."""

from __future__ import annotations

from typing import Any

from recserve.features.synthetic import SyntheticFiles


def quick_settings(files: SyntheticFiles, epochs: int) -> dict[str, Any]:
    """Returns the fields of a file that both its gate and its guard let through."""
    return {
        "items": str(files.items),
        "events": [str(files.events)],
        "device": "cpu",
        "train": {"recommender": {"epochs": epochs}},
        "gate": {
            "days": 10_000,
            "margin": 1,
            "min_users": 2,
            "beats_popularity": False,
            "group_margin": 1,
            "min_coverage": 0,
        },
        "guard": {"minutes": 0.02, "longest_minutes": 0.02, "every_s": 0.2},
    }
