"""Ranking features: prefixes that survive events, exposure limits, cross features by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from recserve.features.ranking.cross_features import (
    CROSS_COLUMNS,
    Contexts,
    UserSide,
    cross_features,
)
from recserve.features.ranking.event_features import HOUR, EventColumns
from recserve.features.ranking.ranking import (
    CANDIDATE,
    LONG,
    PROFILE,
    RECENT,
    candidate_columns,
    dense_names,
    max_prefix_rows,
    prefix_columns,
    row_keys,
    split_history,
    visible_rows,
)
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable

NUM_ITEMS = 40


def make_items(count: int = NUM_ITEMS, **attributes: list[object]) -> ItemTable:
    noise = np.random.default_rng(1)
    paths = [[f"Top > Shelf {noise.integers(4)} > Box {noise.integers(12)}"] for _ in range(count)]
    ids = [f"i{n}" for n in range(count)]
    return ItemTable(ids, [""] * count, paths, pa.table(attributes))


def make_log(histories: list[list[int]], values: bool = True, times: bool = True) -> EventLog:
    noise = np.random.default_rng(2)
    lengths = [len(h) for h in histories]
    rows = np.array([r for h in histories for r in h], dtype=np.int32)
    gaps = noise.integers(1, 50, rows.size) * HOUR
    clock = np.cumsum(gaps) if times else np.concatenate([np.arange(n) for n in lengths])
    return EventLog(
        [f"u{n}" for n in range(len(histories))],
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rows,
        clock.astype(np.int64),
        np.zeros(rows.size, dtype=np.int16),
        ("event",),
        noise.integers(1, 6, rows.size).astype(np.float32) if values else np.ones(rows.size, "f4"),
        times,
    )


def random_histories(users: int = 30, longest: int = 40, seed: int = 3) -> list[list[int]]:
    noise = np.random.default_rng(seed)
    return [
        noise.permutation(NUM_ITEMS)[: noise.integers(2, longest)].tolist() for _ in range(users)
    ]


def vectors(count: int = NUM_ITEMS, size: int = 8) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((count, size)).astype(np.float32)


def make_tables(log: EventLog | None = None, items: ItemTable | None = None) -> RankingTables:
    items = items or make_items()
    log = log or make_log(random_histories())
    return RankingTables.fit(log, items, vectors(len(items)), long_items=6, recent_items=8, block=4)


def column(dense: np.ndarray, name: str, tables: RankingTables) -> np.ndarray:
    return dense[:, dense_names(tables.settings).index(name)]


def test_windows_slide_in_blocks_and_hold_the_bounds() -> None:
    settings = make_tables().settings
    splits = [split_history(n, settings) for n in range(60)]
    assert splits[:9] == [(0, 0)] * 9
    assert splits[9] == (0, 4) and splits[13] == (2, 8)
    for n, (start, split) in enumerate(splits):
        assert 0 <= start <= split and split % settings.block == 0
        assert split - start <= settings.long_items and n - split <= settings.recent_items
    moves = [n for n in range(9, 60) if splits[n] != splits[n - 1]]
    assert np.diff(moves).tolist() == [settings.block] * (len(moves) - 1)


def test_new_event_only_appends_until_the_window_slides() -> None:
    tables = make_tables()
    events = EventColumns.of(make_log([list(range(30))]), 0)
    kept, slid = 0, 0
    for n in range(1, 30):
        before, after = (prefix_columns(tables, events.slice(0, m)) for m in (n - 1, n))
        same_split = split_history(n, tables.settings) == split_history(n - 1, tables.settings)
        assert np.array_equal(after.keys[: len(before)], before.keys) == same_split
        kept, slid = kept + same_split, slid + (not same_split)
        assert len(after) <= max_prefix_rows(tables.settings)
    assert kept > 2 * slid > 0


def test_groups_shared_rows_and_who_sees_whom() -> None:
    tables = make_tables()
    prefix = prefix_columns(tables, EventColumns.of(make_log([list(range(13))]), 0))
    groups = prefix.columns.groups.tolist()
    assert groups == [PROFILE] + [LONG] * 6 + [RECENT] * 5
    assert prefix.shared == 7
    assert prefix.columns.tokens.tolist() == [0, *range(2, 13)]
    assert visible_rows(prefix).tolist() == [7] * 7 + [8, 9, 10, 11, 12]


def test_user_without_events_has_the_profile_alone() -> None:
    tables = make_tables()
    nothing = EventColumns.of(make_log([[1, 2]]), 0).slice(0, 0)
    prefix = prefix_columns(tables, nothing)
    assert len(prefix) == prefix.shared == 1
    found = candidate_columns(tables, prefix, np.arange(5), np.full(5, 3 * HOUR))
    assert found.prefix_limits.tolist() == [1] * 5
    assert np.isfinite(found.columns.dense).all()


def test_exposure_limits_count_strictly_earlier_events() -> None:
    tables = make_tables()
    events = EventColumns.of(make_log([list(range(13))]), 0)
    events = replace(events, times=np.arange(13) * HOUR)
    prefix = prefix_columns(tables, events)
    shown = np.array([0, 8, 9, 10, 12, 13]) * HOUR
    found = candidate_columns(tables, prefix, np.arange(6), shown)
    assert found.prefix_limits.tolist() == [7, 7, 8, 9, 11, 12]
    assert candidate_columns(tables, prefix, np.arange(6)).prefix_limits.tolist() == [12] * 6
    assert found.columns.times.tolist() == found.prefix_limits.tolist()
    assert set(found.columns.groups.tolist()) == {CANDIDATE}
    waits = column(found.columns.dense, "log_wait", tables)
    np.testing.assert_allclose(waits[2:], np.log1p([1, 1, 1, 1]), atol=1e-6)


@pytest.mark.parametrize("moments", [False, True])
def test_columns_of_a_candidate_are_its_own(moments: bool) -> None:
    """4,096 candidates, in any order or alone: the same columns, up to the order of sums."""
    tables = make_tables()
    prefix = prefix_columns(tables, EventColumns.of(make_log([list(range(13))]), 0))
    noise = np.random.default_rng(5)
    rows = noise.integers(0, NUM_ITEMS, 4096)
    shown = noise.choice(prefix.events.times, 4096) if moments else None

    def part(index: np.ndarray) -> np.ndarray:
        times = None if shown is None else shown[index]
        return candidate_columns(tables, prefix, rows[index], times).columns.dense

    together = part(np.arange(4096))
    order = noise.permutation(4096)
    np.testing.assert_allclose(part(order), together[order], atol=1e-5)
    for i in (0, 17, 4095):
        np.testing.assert_allclose(part(np.array([i])), together[i : i + 1], atol=1e-5)


def test_keys_depend_on_every_column_and_the_salt() -> None:
    tables = make_tables()
    columns = prefix_columns(tables, EventColumns.of(make_log([[3, 3, 5, 7]]), 0)).columns
    keys = row_keys(columns)
    assert np.unique(keys).size == keys.size
    for name in ("tokens", "groups", "types", "times", "dense"):
        changed = getattr(columns, name).copy()
        changed[2] += 1
        again = row_keys(replace(columns, **{name: changed}))
        assert (again != keys).tolist() == [False, False, True, False, False], name
    assert (row_keys(columns, key_seed=9) != keys).all()
    assert np.array_equal(row_keys(replace(columns, tokens=columns.tokens.copy())), keys)


def test_keys_do_not_collide_on_a_large_log() -> None:
    log = make_log(random_histories(400))
    tables = make_tables(log)
    keys, rows = [], []
    for user in range(log.num_users):
        prefix = prefix_columns(tables, EventColumns.of(log, user))
        c = prefix.columns
        keys.append(prefix.keys)
        rows += [
            (*r, d.tobytes())
            for *r, d in zip(c.tokens, c.groups, c.types, c.times, c.dense, strict=True)
        ]
    assert np.unique(np.concatenate(keys)).size == len(set(rows))


def by_hand(tables: RankingTables, log: EventLog, history: list[int], row: int) -> dict[str, float]:
    """Cross features of one candidate, one line of arithmetic each, from the log itself."""
    seen = history[::-1][:50]
    owned = [rows.tolist() for rows in np.split(log.item_rows, log.offsets[1:-1])]

    def together(one: int, two: int) -> int:
        if one == two:
            return 0
        return sum(
            any(
                o[i] == one and o[j] == two and abs(i - j) <= 20
                for i in range(len(o))
                for j in range(len(o))
            )
            for o in owned
        )

    def count(item: int) -> int:
        return sum(o.count(item) for o in owned)

    names = tables.settings.category_names
    weights = dict(zip(names, tables.settings.category_weights, strict=True))

    def categories(item: int) -> list[str]:
        return [names[c] for c in tables.categories[item] if c < len(names)]

    tally = {n: sum(n in categories(i) for i in seen) for n in names}
    mine = categories(row)
    norm = np.sqrt(sum((tally[n] * weights[n]) ** 2 for n in names))
    norm *= np.sqrt(sum(weights[n] ** 2 for n in mine))
    unit = tables.vectors
    linked = [(0.8**t, i) for t, i in enumerate(seen[:10])]
    scale = np.sqrt(max(count(row), 1))
    everything = unit[seen].sum(0)
    return {
        "log_count": np.log1p(count(row)),
        "cooccurrence": sum(w * together(i, row) / np.sqrt(max(count(i), 1)) for w, i in linked)
        / scale,
        "cooccurrence_last": together(seen[0], row) / np.sqrt(max(count(seen[0]), 1)) / scale,
        "cooccurrence_users": np.log1p(sum(together(i, row) for _, i in linked)),
        "similarity_last": unit[seen[0]] @ unit[row],
        "similarity_all": everything @ unit[row] / np.linalg.norm(everything),
        "similarity_best": max(float(unit[i] @ unit[row]) for i in seen[:10]),
        "category_cosine": sum(tally[n] * weights[n] ** 2 for n in mine) / norm,
        "category_share": tally[mine[0]] / len(seen),
        "repeats": np.log1p(seen.count(row)),
        "repeat_recency": 1 / (1 + seen.index(row)) if row in seen else 0,
        "history_length": np.log1p(len(history)),
    }


def test_cross_features_match_arithmetic_by_hand() -> None:
    log = make_log(random_histories(20))
    tables = make_tables(log)
    history = [*random_histories(1, seed=9)[0], 4, 9, 4]
    events = np.array(history)
    contexts = Contexts.of(events, np.ones(events.size), np.array([events.size]))
    candidates = np.array([0, 4, 9, 13, 39])
    found = cross_features(tables, UserSide.of(tables, contexts), np.zeros(5, np.int64), candidates)
    for row, values in zip(candidates.tolist(), found, strict=True):
        for name, expected in by_hand(tables, log, history, row).items():
            got = values[CROSS_COLUMNS.index(name)]
            assert got == pytest.approx(expected, abs=1e-5), (row, name)


def test_many_contexts_at_once_equal_one_at_a_time() -> None:
    tables = make_tables()
    rows, values = np.arange(30)[::-1].copy(), np.linspace(1, 5, 30)
    lengths, sizes = np.array([0, 1, 7, 30]), [3, 1, 8, 2]
    noise = np.random.default_rng(6)
    owners = np.repeat(np.arange(4), sizes)
    candidates = noise.integers(0, NUM_ITEMS, owners.size)
    together = cross_features(
        tables, UserSide.of(tables, Contexts.of(rows, values, lengths)), owners, candidates
    )
    for c, length in enumerate(lengths):
        part = owners == c
        one = Contexts.of(rows, values, np.array([length]))
        alone = cross_features(
            tables, UserSide.of(tables, one), np.zeros(sizes[c], np.int64), candidates[part]
        )
        np.testing.assert_allclose(together[part], alone, atol=1e-5)


def test_own_event_taken_back_equals_tables_that_never_saw_it() -> None:
    """Without this a training candidate's counts would tell that it is the positive."""
    histories = random_histories(25, longest=15)
    log = make_log(histories)
    items = make_items()
    tables = make_tables(log, items)
    for user in (0, 7, 19):
        last = int(log.offsets[user + 1]) - 1
        kept = np.ones(log.num_events, dtype=bool)
        kept[last] = False
        without = RankingTables.fit(log.select(kept), items, vectors(), 6, 8, 4)
        mean = tables.settings.mean_value
        without = replace(without, settings=replace(without.settings, mean_value=mean))
        history = log.item_rows[log.offsets[user] : log.offsets[user + 1] - 1]
        contexts = Contexts.of(history, np.ones(history.size), np.array([history.size]))
        owner, row = np.zeros(1, np.int64), log.item_rows[last : last + 1].astype(np.int64)
        own = log.values[last : last + 1]
        back = cross_features(tables, UserSide.of(tables, contexts), owner, row, own)
        never = cross_features(without, UserSide.of(without, contexts), owner, row)
        names = [
            "log_count",
            "cooccurrence",
            "cooccurrence_last",
            "cooccurrence_users",
            "mean_value",
        ]
        for name in names:
            at = CROSS_COLUMNS.index(name)
            assert back[0, at] == pytest.approx(never[0, at], abs=1e-5), name
        assert (cross_features(tables, UserSide.of(tables, contexts), owner, row) != never).any()


def test_conversions_come_from_types_then_values_then_not_at_all() -> None:
    log = make_log(random_histories())
    typed = replace(
        log,
        types=(np.arange(log.num_events) % 2).astype(np.int16),
        type_names=("Purchase", "view"),
    )
    settings = make_tables(typed).settings
    assert settings.conversion_types == ("Purchase",) and settings.tells_conversions
    assert settings.is_conversion(np.array([0, 1]), np.array([1.0, 5.0])).tolist() == [True, False]
    rated = make_tables(log).settings
    assert rated.conversion_value == np.median(log.values) + 1
    assert rated.is_conversion(np.array([0, 0]), np.array([5.0, 1.0])).tolist() == [True, False]
    plain = make_tables(make_log(random_histories(), values=False)).settings
    assert not plain.tells_conversions
    assert plain.is_conversion(np.zeros(2, np.int64), np.ones(2)).all()


def test_side_information_is_standardised_and_overridden_by_the_request() -> None:
    prices: list[object] = [float(n) for n in range(NUM_ITEMS)]
    prices[3] = None
    items = make_items(price=prices, brand=["x"] * NUM_ITEMS)
    tables = make_tables(items=items)
    assert tables.settings.side_names == ("price",)
    prefix = prefix_columns(tables, EventColumns.of(make_log([[1, 2]]), 0))
    rows = np.array([3, 5, 5])
    plain = column(candidate_columns(tables, prefix, rows).columns.dense, "price", tables)
    assert plain[0] == 0 and plain[1] == plain[2] != 0
    given = {"price": np.array([np.nan, np.nan, 39.0])}
    dense = candidate_columns(tables, prefix, rows, given=given).columns.dense
    assert column(dense, "price", tables)[:2].tolist() == plain[:2].tolist()
    assert column(dense, "price", tables)[2] == pytest.approx(tables.side[39, 0])
    with pytest.raises(ValueError, match=r"\['colour'\]; this ranker has: price"):
        candidate_columns(tables, prefix, rows, given={"colour": np.zeros(3)})


def test_saved_tables_give_the_same_columns_and_take_later_items(tmp_path) -> None:
    items = make_items()
    tables = make_tables(items=items)
    tables.save(tmp_path)
    loaded = RankingTables.load(tmp_path, items, vectors())
    prefix = prefix_columns(tables, EventColumns.of(make_log([list(range(20))]), 0))
    again = prefix_columns(loaded, EventColumns.of(make_log([list(range(20))]), 0))
    assert np.array_equal(prefix.keys, again.keys)
    rows = np.arange(NUM_ITEMS)
    expected = candidate_columns(tables, prefix, rows).columns.dense
    assert np.array_equal(candidate_columns(loaded, prefix, rows).columns.dense, expected)
    more = RankingTables.load(tmp_path, make_items(NUM_ITEMS + 2), vectors(NUM_ITEMS + 2))
    later = candidate_columns(more, prefix, np.array([NUM_ITEMS + 1])).columns.dense
    assert column(later, "log_count", more) == 0 and column(later, "similarity_all", more) != 0
    with pytest.raises(ValueError, match="has 39 items, the tables were fitted on 40"):
        RankingTables.load(tmp_path, make_items(39), vectors(39))
    (tmp_path / "features.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(ValueError, match="no usable ranking features"):
        RankingTables.load(tmp_path, items, vectors())


def test_wrong_rows_and_lengths_are_refused() -> None:
    tables = make_tables()
    prefix = prefix_columns(tables, EventColumns.of(make_log([[1, 2]]), 0))
    with pytest.raises(ValueError, match=r"item rows span 0..40; expected 0..39"):
        candidate_columns(tables, prefix, np.array([0, 40]))
    with pytest.raises(ValueError, match="shown_at has 3 entries for 2 candidates"):
        candidate_columns(tables, prefix, np.array([0, 1]), np.zeros(3))
    with pytest.raises(ValueError, match="block is 9; it must be in 1..8"):
        RankingTables.fit(make_log([[1]]), make_items(), vectors(), recent_items=8, block=9)


def test_wide_vectors_keep_their_angles() -> None:
    wide = np.random.default_rng(7).standard_normal((NUM_ITEMS, 768)).astype(np.float32)
    wide[1] = wide[0] + 0.2 * wide[1]
    tables = RankingTables.fit(make_log([[1, 2]]), make_items(), wide)
    assert tables.vectors.shape == (NUM_ITEMS, 256)
    exact = wide[0] @ wide[1] / np.linalg.norm(wide[0]) / np.linalg.norm(wide[1])
    assert tables.vectors[0] @ tables.vectors[1] == pytest.approx(exact, abs=0.1)
