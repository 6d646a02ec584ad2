"""The demo data: reproducible, clean, and with structure that beats popularity."""

from pathlib import Path

import numpy as np
import pytest

from recserve.features.synthetic import TOPICS, SyntheticOptions, write_synthetic
from recserve.features.tables.event_table import read_events
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable, read_items


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ItemTable, EventLog]:
    files = write_synthetic(tmp_path_factory.mktemp("data"), SyntheticOptions(1000, 800, 25))
    items, bad_items = read_items(files.items)
    events, bad_events = read_events(files.events, items)
    assert bad_items.lines() == bad_events.lines() == []
    return items, events


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    options = [SyntheticOptions(500, 50, 10, seed) for seed in (1, 1, 2)]
    files = [write_synthetic(tmp_path / str(n), o) for n, o in enumerate(options)]
    contents = [(f.items.read_bytes(), f.events.read_bytes()) for f in files]
    assert contents[0] == contents[1] and contents[0][1] != contents[2][1]


def test_sizes(made: tuple[ItemTable, EventLog]) -> None:
    items, events = made
    assert len(items) == 1000 and events.num_users == 800
    assert 20 < events.lengths().mean() < 26 and events.lengths().min() >= 3
    assert events.type_names == ("click", "purchase") and events.has_timestamps
    assert len({paths[0].split(" > ")[0] for paths in items.categories}) == len(TOPICS)
    assert {"brand", "price"} == set(items.attributes.column_names)
    for rows in np.split(events.item_rows, events.offsets[1:-1])[:20]:
        assert len(np.unique(rows)) == len(rows)


def test_popularity_is_skewed_and_drifts(made: tuple[ItemTable, EventLog]) -> None:
    items, events = made
    counts = np.sort(events.popularity(len(items)))[::-1]
    assert counts[:100].sum() > 0.15 * counts.sum()
    early = events.times < np.quantile(events.times, 0.3)
    late = events.times > np.quantile(events.times, 0.7)
    first, last = (np.bincount(events.item_rows[part], minlength=1000) for part in (early, late))
    assert len(set(np.argsort(-first)[:50]) & set(np.argsort(-last)[:50])) < 40


def test_sessions_stay_in_topic(made: tuple[ItemTable, EventLog]) -> None:
    items, events = made
    topics = np.array([paths[0].split(" > ")[0] for paths in items.categories])
    of_event, users = topics[events.item_rows], events.user_indices()
    inside = users[1:] == users[:-1]
    stays = (of_event[1:] == of_event[:-1])[inside].mean()
    assert (
        stays > 0.75 > 2 * np.square(np.unique(of_event, return_counts=True)[1] / len(users)).sum()
    )


def test_the_last_item_says_more_than_popularity(made: tuple[ItemTable, EventLog]) -> None:
    """Recall@10 of the next item: a table of successors against the most popular items."""
    items, events = made
    split = events.leave_one_out()
    train = split.train
    rows, users = train.item_rows, train.user_indices()
    follows = np.zeros((len(items), len(items)), np.float32)
    inside = users[1:] == users[:-1]
    np.add.at(follows, (rows[:-1][inside], rows[1:][inside]), 1)
    popularity = train.popularity(len(items))
    last = rows[train.offsets[1:] - 1]

    def recall(scores: np.ndarray) -> float:
        own = scores[np.arange(len(last)), split.valid_rows]
        return float(((scores > own[:, None]).sum(axis=1) < 10).mean())

    popular = recall(np.tile(popularity, (len(last), 1)))
    assert recall(follows[last] + 1e-6 * popularity) > max(0.2, 4 * popular)


@pytest.mark.parametrize("option", ["num_items", "num_users", "mean_events"])
def test_refuses_sizes(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is 0; expected"):
        SyntheticOptions(**{option: 0})
