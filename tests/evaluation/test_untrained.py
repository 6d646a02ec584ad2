"""Untrained baselines beside references in plain Python, which follow the definitions by item."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from recserve.evaluation.cases import leave_one_out_cases
from recserve.evaluation.untrained import (
    THREE_HOPS,
    TWO_HOPS,
    UNTRAINED,
    TrainingData,
    UnsuitableEvents,
)
from recserve.features.tables.events import EventLog

HOUR = 3600 * 10**6


def draw_data(seed: int, k: int, timestamps: bool = True) -> TrainingData:
    """Users of every length from 0 to 30, popular and unknown items, and repeats."""
    noise = np.random.default_rng(seed)
    items, users = 60, 50
    lengths = noise.integers(0, 30, users)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    popular = 1 / np.arange(1, items + 1)
    popular[-5:] = 0  # items without an event
    rows = noise.choice(items, offsets[-1], p=popular / popular.sum()).astype(np.int32)
    times = np.concatenate([np.sort(noise.integers(0, 24 * 60, size)) for size in lengths]) * HOUR
    events = EventLog(
        [f"u{user}" for user in range(users)],
        offsets,
        rows,
        times,
        np.zeros(len(rows), np.int16),
        ("view",),
        np.ones(len(rows), np.float32),
        timestamps,
    )
    cases = leave_one_out_cases(events, "test")
    vectors = noise.normal(size=(items, 8)).astype(np.float32)
    train = events.leave_one_out().train
    return TrainingData(train, vectors, cases, events.times[cases.stops], k)


def training_histories(data: TrainingData) -> list[list[int]]:
    bounds = zip(data.train.offsets[:-1], data.train.offsets[1:], strict=True)
    return [data.train.item_rows[start:stop].tolist() for start, stop in bounds]


def rank(data: TrainingData, scores: list[float], hidden: set[int]) -> list[int]:
    """The k best items; equal scores rank by popularity, then by row."""
    counts = Counter(row for history in training_histories(data) for row in history)
    rows = [row for row in range(data.num_items) if row not in hidden]
    rows.sort(key=lambda row: (-round(scores[row], 10), -counts[row], row))
    rows = rows[: data.k]
    return rows + [-1] * (data.k - len(rows))


def popularity(data: TrainingData, case: int, hidden: set[int]) -> list[int]:
    return rank(data, [0.0] * data.num_items, hidden)


def popularity_week(data: TrainingData, case: int, hidden: set[int]) -> list[int]:
    until = min(int(data.held_times[case]), max(data.train.times.tolist()) + 1)
    counts = [0.0] * data.num_items
    for row, time in zip(data.train.item_rows.tolist(), data.train.times.tolist(), strict=True):
        counts[row] += until - 7 * 24 * HOUR <= time < until
    return rank(data, counts, hidden)


def item_knn(data: TrainingData, case: int, hidden: set[int]) -> list[int]:
    users = [
        {user for user, history in enumerate(training_histories(data)) if row in history}
        for row in range(data.num_items)
    ]
    scores = [0.0] * data.num_items
    for age, row in enumerate(data.cases.history(case)[::-1].tolist()):
        for other in range(data.num_items):
            both = len(users[row] & users[other])
            if other != row and both:
                scores[other] += 0.9**age * both / math.sqrt(len(users[row]) * len(users[other]))
    return rank(data, scores, hidden)


def transitions(
    starts: tuple[tuple[int, ...], ...],
) -> Callable[[TrainingData, int, set[int]], list[int]]:
    def slate(data: TrainingData, case: int, hidden: set[int]) -> list[int]:
        follows: dict[int, Counter[int]] = {row: Counter() for row in range(data.num_items)}
        for history in training_histories(data):
            for one, two in zip(history, history[1:], strict=False):
                follows[one][two] += 1

        def similarity(one: int, two: int) -> float:
            a, b = data.vectors[one], data.vectors[two]
            return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

        history = data.cases.history(case).tolist()
        places = np.cumsum([quota for rings in starts for quota in rings])
        ends = [0, *(math.ceil(int(place) * data.k / 10) for place in places)]
        first: list[int] = []
        rest: list[int] = []
        ring_number = 0
        for back, rings in enumerate(starts):
            if back >= len(history):
                ring_number += len(rings)
                continue
            start = history[-1 - back]
            taken = set(first)
            reached: set[int] = set()
            ring = set(follows[start])
            for hop in range(len(rings)):
                scores = {}
                for row in ring - taken - hidden:
                    scores[row] = similarity(start, row)
                    if hop == 0:
                        most = max(follows[start].values())
                        scores[row] += 0.5 * math.log1p(follows[start][row]) / math.log1p(most)
                best = sorted(scores, key=lambda row: -scores[row])
                quota = ends[ring_number + 1] - ends[ring_number]
                first += best[:quota]
                rest += best[quota:]
                ring_number += 1
                reached |= ring | {start}
                ring = {two for one in ring for two in follows[one]} - reached
        anchor = history[-1]
        fill = sorted(range(data.num_items), key=lambda row: -similarity(anchor, row))
        slate = list(dict.fromkeys(first + rest + [row for row in fill if row not in hidden]))
        return (slate + [-1] * data.k)[: data.k]

    return slate


REFERENCES = {
    "popularity": popularity,
    "popularity_week": popularity_week,
    "item_knn": item_knn,
    "transitions_2": transitions(TWO_HOPS),
    "transitions_3": transitions(THREE_HOPS),
}


@pytest.mark.parametrize("name", list(UNTRAINED))
@pytest.mark.parametrize("k", [7, 58])
def test_slates_equal_the_reference(name: str, k: int) -> None:
    """Of all users, with seen items and without, in batches of any size."""
    data = draw_data(k, k)
    slates = UNTRAINED[name].build(data)
    for filtered in (False, True):
        for which in (np.arange(len(data.cases)), np.array([3]), np.array([5, 0])):
            got = slates(which, filtered)
            for case, slate in zip(which.tolist(), got.tolist(), strict=True):
                hidden = set(data.cases.history(case).tolist()) if filtered else set()
                assert slate == REFERENCES[name](data, case, hidden), (case, filtered)


def test_references_are_told_apart() -> None:
    """The data are rich enough for each baseline to have slates of its own."""
    data = draw_data(0, 10)
    made = {
        name: build.build(data)(np.arange(len(data.cases)), True).tobytes()
        for name, build in UNTRAINED.items()
    }
    assert len(set(made.values())) == len(UNTRAINED)


def test_positions_have_no_last_week() -> None:
    with pytest.raises(UnsuitableEvents, match="no timestamps"):
        UNTRAINED["popularity_week"].build(draw_data(0, 5, timestamps=False))


@pytest.mark.parametrize("name", list(UNTRAINED))
def test_held_out_events_are_not_read(name: str) -> None:
    """Another held-out item changes no slate."""
    data = draw_data(2, 10)
    before = UNTRAINED[name].build(data)(np.arange(len(data.cases)), False)
    data.cases.rows[data.cases.stops] = 59
    data.cases.held[:] = 59
    after = UNTRAINED[name].build(data)(np.arange(len(data.cases)), False)
    assert before.tolist() == after.tolist()


@pytest.mark.parametrize("entries", [60, 7200])
def test_memory_is_bounded_without_another_slate(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = draw_data(4, 10)
    which = np.arange(len(data.cases))
    whole = UNTRAINED["item_knn"].build(data)(which, True)
    monkeypatch.setattr("recserve.evaluation.untrained.MAX_ENTRIES", entries)
    assert data.batch == max(1, entries // 60**2)  # 6 * k items of a case in pairs
    assert UNTRAINED["item_knn"].build(data)(which, True).tolist() == whole.tolist()
