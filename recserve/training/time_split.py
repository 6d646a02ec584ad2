"""A bundle whose models know the past only, for an evaluation of what comes after it.

    recserve evaluate --bundle B --time-split

In leave-one-out, the models have seen what other users did after a held-out event. Here the events
are cut at one time. Vectors, codes and weights come from events before it. Each user's first event
after it is held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console

from recserve.bundle.building import rebuild_bundle
from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.bundle_slates import EXHAUSTIVE
from recserve.evaluation.evaluation import EvaluationOptions
from recserve.features.tables.events import EventLog
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import recorded_recipe, train_recommender

PAST_SHARE = 0.9
# Strategies that need nothing but the recommender, which is all that is trained again.
STRATEGIES = ("auto", "beam", "rpg", EXHAUSTIVE, "dense_head")


@dataclass(frozen=True)
class TimeSplit:
    """How events were divided by time.

    Attributes:
        at: Time of the split, ISO 8601.
        past_events: Number of events before it.
        users: Users with a held-out event, and at least two earlier ones.
        left_out: Users with events after the split who have fewer earlier ones.
        epochs: Epochs of the retraining.
        best_epoch: Epoch whose weights are evaluated.
    """

    at: str
    past_events: int
    users: int
    left_out: int
    epochs: int = 0
    best_epoch: int = 0

    def __str__(self) -> str:
        return (
            f"Time split at {self.at}: vectors, codes and weights are of the {self.past_events:,} "
            f"events before it ({self.best_epoch} of {self.epochs} epochs). The first later event "
            f"of {self.users:,} users is held out. {self.left_out:,} other users had fewer than "
            "two events before. The catalogue has items of both sides."
        )


def split_by_time(events: EventLog) -> tuple[EventLog, int, TimeSplit]:
    """Cuts events at the time that 90 % of them precede.

    Returns:
        The past, with the first later event of each user who has at least two earlier ones; the
        time of the split in microseconds; and the split's figures.

    Raises:
        ValueError: If the events have no timestamps, or no user has events on both sides.
    """
    if not events.has_timestamps:
        raise ValueError(
            "a time split needs timestamps; these events have positions, which order the events "
            "of one user only"
        )
    at = int(np.sort(events.times)[int(PAST_SHARE * events.num_events)])
    past = events.times < at
    users = events.user_indices()
    earlier = np.bincount(users[past], minlength=events.num_users)
    place = np.arange(events.num_events) - events.offsets[:-1][users]
    first = ~past & (place == earlier[users])
    held = first & (earlier[users] >= 2)
    if not held.any():
        raise ValueError("no user has two events before the time of the split and one after it")
    split = TimeSplit(
        datetime.fromtimestamp(at / 1e6, UTC).isoformat(),
        int(past.sum()),
        int(held.sum()),
        int((first & ~held).sum()),
    )
    return events.select(past | held), at, split


@contextmanager
def past_bundle(
    bundle: Bundle,
    options: EvaluationOptions,
    max_minutes: float | None = None,
    console: Console | None = None,
) -> Iterator[tuple[Bundle, EvaluationOptions, TimeSplit]]:
    """Yields a temporary bundle of the past with a recommender of the same recipe.

    Args:
        bundle: The bundle whose items, events, options and recipe are used; it is not changed.
        options: What is evaluated.
        max_minutes: Time limit of the training; None trains all epochs of the recipe.
        console: Where progress is printed; None means standard error.

    Yields:
        The bundle, the options that evaluate its users, and the split.

    Raises:
        BundleError: If the bundle has no recommender.
        ValueError: If split or strategy do not fit, or the events cannot be divided.
    """
    if options.split != "test":
        raise ValueError(f"split is {options.split!r}; a time split evaluates 'test' only")
    if options.strategy not in STRATEGIES:
        raise ValueError(
            f"strategy is {options.strategy!r}; a time split trains the recommender only, so "
            f"choose one of {STRATEGIES}"
        )
    if not bundle.has("recommender"):
        raise BundleError(f"{bundle.root}: no recommender was trained; run `train recommender`")
    console = console or Console(stderr=True)
    events, at, split = split_by_time(bundle.events())
    recipe = recorded_recipe(bundle)
    with TemporaryDirectory() as folder:
        past = rebuild_bundle(bundle, events, Path(folder) / "past", console.print)
        report = train_recommender(
            past,
            TrainOptions(
                seed=bundle.manifest.recommender.get("seed", 0),
                max_minutes=max_minutes,
                device="cuda" if torch.device(options.device).type == "cuda" else "cpu",
            ),
            recipe,
            console,
        )
        split = replace(split, epochs=report.epochs, best_epoch=report.best_epoch)
        yield past, replace(options, since=at), split
