"""Synthetic demo data whose structure a model can learn in a minute.

Topics contain subtopics, and subtopics contain items whose titles share words. A user likes a few
topics. A session stays in one topic and moves from item to item along preferred successors. A few
items receive most of the events, and these items change from quarter to quarter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.features.tables.events import DAY_US

TOPICS = {
    "Kitchen": ("pan", "kettle", "knife", "bowl", "whisk", "mug"),
    "Garden": ("seed", "pot", "rake", "hose", "trellis", "shears"),
    "Music": ("string", "pedal", "tuner", "drum", "reed", "stand"),
    "Running": ("shoe", "sock", "vest", "watch", "bottle", "cap"),
    "Painting": ("brush", "canvas", "easel", "pigment", "palette", "varnish"),
    "Camping": ("tent", "stove", "lantern", "mat", "rope", "compass"),
    "Reading": ("novel", "atlas", "poem", "lamp", "bookmark", "shelf"),
    "Cycling": ("pedal", "chain", "helmet", "pump", "saddle", "glove"),
    "Coffee": ("grinder", "filter", "bean", "scale", "cup", "roast"),
    "Sewing": ("needle", "thread", "fabric", "button", "zip", "pattern"),
}
SUBTOPICS = ("Basics", "Classics", "Tools", "Gifts", "Care")
STYLES = ("plain", "bright", "light", "sturdy", "small", "fine", "quiet", "warm", "swift", "deep")
PERIODS = 4
SUCCESSORS = 5
START_US = 1_760_000_000_000_000
DAYS = 360
NEW_SESSION, FOLLOW, PURCHASE = 0.18, 0.75, 0.2


@dataclass(frozen=True)
class SyntheticOptions:
    """Sizes of the data.

    Attributes:
        num_items: Number of items.
        num_users: Number of users.
        mean_events: Mean number of events per user, before repeated items are removed.
        seed: Seed of all random choices.

    Raises:
        ValueError: If an option is out of range. The message names option, bound and value.
    """

    num_items: int = 2000
    num_users: int = 3000
    mean_events: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        smallest = 2 * SUCCESSORS * len(TOPICS) * len(SUBTOPICS)
        for name, low, high in (
            ("num_items", smallest, 1_000_000),
            ("num_users", 1, 1_000_000),
            ("mean_events", 5, 1000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; expected {low}..{high}")


@dataclass(frozen=True)
class SyntheticFiles:
    """Paths of the two Parquet files."""

    items: Path
    events: Path


def write_synthetic(folder: str | Path, options: SyntheticOptions | None = None) -> SyntheticFiles:
    """Writes items.parquet and events.parquet; equal options give equal data.

    Args:
        folder: Folder of the files, created if needed.
        options: Sizes of the data, or None for the defaults.
    """
    options = options or SyntheticOptions()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = SyntheticFiles(folder / "items.parquet", folder / "events.parquet")
    rng = np.random.default_rng(options.seed)
    groups = np.sort(np.arange(options.num_items) % (len(TOPICS) * len(SUBTOPICS)))
    items = _items(groups, rng)
    pq.write_table(items, files.items)
    pq.write_table(_events(options, groups, items.column("item_id"), rng), files.events)
    return files


def _items(groups: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """Returns one row per item. `groups` [I] is the item's subtopic, counted over all topics."""
    ids, titles, categories, brands, prices = [], [], [], [], []
    for row, group in enumerate(groups.tolist()):
        topic = list(TOPICS)[group // len(SUBTOPICS)]
        subtopic = SUBTOPICS[group % len(SUBTOPICS)]
        one, two = rng.choice(TOPICS[topic], 2, replace=False)
        ids.append(f"item{row:06d}")
        titles.append(f"{rng.choice(STYLES)} {one} {two} {topic} {subtopic} no {row % 97}")
        categories.append([f"{topic} > {subtopic}"])
        brands.append(f"{topic} house {rng.integers(4)}")
        prices.append(round(float(rng.lognormal(2.5 + group % 3 / 3, 0.4)), 2))
    return pa.table(
        {
            "item_id": ids,
            "title": titles,
            "categories": pa.array(categories, pa.list_(pa.string())),
            "brand": brands,
            "price": pa.array(prices, pa.float64()),
        }
    )


def _events(
    options: SyntheticOptions, groups: np.ndarray, ids: pa.ChunkedArray, rng: np.random.Generator
) -> pa.Table:
    """Draws the n-th event of all users at once."""
    num_topics, users = len(TOPICS), options.num_users
    topics = groups // len(SUBTOPICS)
    shares = _popularity(groups, rng)
    bounds = np.searchsorted(topics, np.arange(num_topics + 1))
    taste = rng.dirichlet(np.full(num_topics, 0.25), size=users).cumsum(axis=1)
    lengths = 5 + rng.poisson(options.mean_events - 5, size=users)
    # Each user is active in a random part of the year, so quarters see different events.
    clock = rng.uniform(0, DAYS * 0.6, size=users)
    pace = rng.uniform(0.4, 1.0, size=users) * DAYS * 0.4 / lengths
    current = np.full(users, -1, dtype=np.int64)
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for step in range(int(lengths.max())):
        active = np.flatnonzero(lengths > step)
        opens = (rng.random(active.size) < NEW_SESSION) | (current[active] < 0)
        clock[active] += pace[active] * np.where(opens, 4, 0.02) * rng.exponential(1, active.size)
        period = np.minimum(clock[active] * PERIODS // DAYS, PERIODS - 1).astype(np.int64)
        drawn = (taste[active] < rng.random(active.size)[:, None]).sum(axis=1)
        stay = topics[np.maximum(current[active], 0)]
        # A new session draws a topic by the user's taste; otherwise the session stays in its topic.
        topic = np.where(opens, np.minimum(drawn, num_topics - 1), stay)
        popular = _draw(shares, period, bounds[topic], bounds[topic + 1], rng)
        follow = ~opens & (rng.random(active.size) < FOLLOW)
        chosen = np.where(follow, _successor(groups, current[active], rng), popular)
        current[active] = chosen
        bought = rng.random(active.size) < PURCHASE * (1 + (chosen % 3 == 0))
        micros = START_US + (clock[active] * DAY_US).astype(np.int64) + step
        steps.append((active, chosen, micros, bought))
    user, item, time, bought = (np.concatenate(column) for column in zip(*steps, strict=True))
    order = np.lexsort((time, user))
    # Keep only a user's first event with each item.
    first = np.unique(user[order] * options.num_items + item[order], return_index=True)[1]
    order = order[np.sort(first)]
    names = pa.array([f"user{number:06d}" for number in range(users)])
    kinds = pa.array(["click", "purchase"])
    return pa.table(
        {
            "user_id": names.take(pa.array(user[order])),
            "item_id": ids.take(pa.array(item[order])),
            "timestamp": pa.array(time[order], pa.timestamp("us", tz="UTC")),
            "type": kinds.take(pa.array(bought[order].astype(np.int8))),
        }
    )


def _popularity(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns [PERIODS, I] cumulative item weights; which items are popular changes by quarter."""
    base, trend = rng.normal(size=(2, groups.size))
    rows = []
    for period in range(PERIODS):
        ranks = np.argsort(np.argsort(-(base + 0.5 * period * trend)))
        rows.append((1.0 / (ranks + 10)).cumsum())
    return np.stack(rows)


def _draw(
    sums: np.ndarray,
    period: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draws one item of each range by weight.

    Args:
        sums: [PERIODS, I] cumulative item weights.
        period: [n] quarter of each draw.
        first: [n] first item of each range.
        last: [n] end of each range, exclusive.
        rng: Random generator.

    Returns:
        [n] item rows.
    """
    low = np.where(first > 0, sums[period, np.maximum(first - 1, 0)], 0.0)
    target = low + rng.random(len(first)) * (sums[period, last - 1] - low)
    found = np.empty_like(first)
    for quarter in range(PERIODS):
        now = period == quarter
        found[now] = np.searchsorted(sums[quarter], target[now], side="right")
    return np.asarray(np.clip(found, first, last - 1))


def _successor(groups: np.ndarray, current: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns [n] items a few places on in the subtopic's ring, close ones more often."""
    at = np.maximum(current, 0)
    first = np.searchsorted(groups, groups[at])
    size = np.searchsorted(groups, groups[at], side="right") - first
    step = np.minimum(rng.geometric(0.5, size=at.size), SUCCESSORS)
    return np.asarray(first + (at - first + step) % size)
