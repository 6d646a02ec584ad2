"""Weights of events, against a plain loop over the entries."""

import random
from dataclasses import replace

import numpy as np
import pytest

from recserve.features.history.event_kinds import KINDS, EventKinds
from recserve.features.history.event_weights import MAX_DISLIKED, EventWeights, disliked_items
from recserve.features.tables.events import DAY_US, EventLog

NAMES = ("rating", "purchase", "x=y", "Kauf,🛒", "add to wishlist", " buy")
LIMITS = (-2.5, 0.0, 2.5, 3.5, 1e30)


def plain(entries: list[tuple[str, float | None, float]], name: str, value: float) -> float:
    """The lowest limit above the value decides."""
    own = [(limit, weight) for other, limit, weight in entries if other == name]
    above = [(limit, weight) for limit, weight in own if limit is not None and value < limit]
    whole = [weight for limit, weight in own if limit is None]
    return min(above)[1] if above else whole[0] if whole else 1.0


@pytest.mark.parametrize("seed", range(20))
def test_weights_are_those_of_a_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    entries: list[tuple[str, float | None, float]] = []
    for name in draw.sample(NAMES, draw.randrange(len(NAMES))):
        limits = [] if name == " buy" else draw.sample(LIMITS, draw.randrange(3))
        limits += [None] if draw.random() < 0.7 else []
        entries += [(name, limit, draw.choice((0, 0.5, 3, 100))) for limit in limits]
    texts = [f"{n}={w:g}" if limit is None else f"{n}<{limit:g}={w:g}" for n, limit, w in entries]
    weights = EventWeights(tuple(draw.sample(texts, len(texts))))
    assert EventWeights.read_record(weights.record()).steps.keys() == weights.steps.keys()
    assert set(weights.valued) == {name for name, limit, _ in entries if limit is not None}
    names = sorted([*NAMES, "buy"])
    types = np.array([draw.randrange(len(names)) for _ in range(200)])
    values = np.array([draw.choice((*LIMITS, 1.0, -3.0, 4.0)) for _ in types], np.float32)
    found = weights.of_events(names, types, values)
    assert found.dtype == np.float32
    expected = [
        plain(entries, names[n], float(v)) for n, v in zip(types.tolist(), values, strict=True)
    ]
    np.testing.assert_array_equal(found, np.float32(expected))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("purchase",), "expected NAME=WEIGHT or NAME<VALUE=WEIGHT"),
        (("purchase=much",), "expected NAME=WEIGHT"),
        (("purchase=-1",), r"the weight is -1; expected 0\.\.100"),
        (("purchase=101",), r"the weight is 101; expected 0\.\.100"),
        (("purchase=nan",), "the weight is nan"),
        (("=2",), "is blank"),
        ((f"{'x' * 65}=2",), "at most 64"),
        (("rating<low=2",), "expected a finite number after <"),
        (("rating<inf=2",), "expected a finite number after <"),
        (("rating<1e39=2",), "expected a finite number after <"),
        (("rating=1", "rating= 2"), "'rating' has two weights"),
        (("rating<2=1", "rating<2.0=2"), "'rating' with values below 2 has two weights"),
    ],
)
def test_bad_weights_are_refused_by_name(entries: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EventWeights(entries)


def test_a_type_that_counts_for_nothing_has_no_weight() -> None:
    EventWeights(("hide=2", "view=1")).check_kinds(EventKinds())
    with pytest.raises(ValueError, match="'impression' is read, so it counts for nothing"):
        EventWeights(("impression=1",)).check_kinds(EventKinds())


@pytest.mark.parametrize("seed", range(10))
def test_disliked_items_are_those_whose_newest_event_is_negative(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [draw.choice(KINDS) for _ in range(draw.randrange(150))]
    rows = [draw.randrange(60) for _ in kinds]
    weights = [draw.choice((0.0, 1.0, 2.5)) for _ in kinds]
    latest: dict[int, int] = {}
    for place, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        if kind != "read":
            latest[row] = place
    wanted = [p for p in latest.values() if kinds[p] == "negative" and weights[p] > 0]
    wanted = sorted(wanted, reverse=True)[:MAX_DISLIKED]
    numbers = np.array([KINDS.index(kind) for kind in kinds], np.uint8)
    found = disliked_items(np.array(rows, np.int64), numbers, np.array(weights, np.float32))
    assert found[0].tolist() == [rows[p] for p in wanted]
    assert found[1].tolist() == [weights[p] for p in wanted]


@pytest.mark.parametrize("seed", range(4))
def test_old_events_count_less_as_targets(seed: int) -> None:
    """Weights are those of a plain loop, have a mean of 1, and a wrong clock moves no others."""
    draw = np.random.default_rng(seed)
    count, half_life = 2000, float(draw.uniform(0.1, 30))
    times = np.sort(draw.integers(0, 40 * DAY_US, count))
    own = draw.uniform(0, 2, count).astype(np.float32) if seed % 2 else None
    log = EventLog(
        user_ids=["a"],
        offsets=np.array([0, count]),
        item_rows=np.zeros(count, np.int32),
        times=times,
        types=np.zeros(count, np.int16),
        type_names=("event",),
        values=np.ones(count, np.float32),
        has_timestamps=True,
        weights=own,
    )
    found = log.relative_weights(half_life)
    newest = sorted(times.tolist())[-2]  # of 2,000
    plain = [
        0.5 ** (max(newest - time, 0) / DAY_US / half_life) * (1.0 if own is None else own[n])
        for n, time in enumerate(times.tolist())
    ]
    np.testing.assert_allclose(found, np.array(plain) * count / sum(plain), rtol=1e-5)
    wrong = replace(log, times=np.append(times[:-1], times[-1] + 400 * DAY_US))
    np.testing.assert_allclose(wrong.relative_weights(half_life)[:-1], found[:-1], rtol=1e-5)
    with pytest.raises(ValueError, match="no timestamps"):
        replace(log, has_timestamps=False).relative_weights(half_life)
