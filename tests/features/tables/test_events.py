"""Reading events: schema is refused, rows are refused or counted, order and grouping hold."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.evaluation.cases import leave_one_out_cases
from recserve.features.history.event_kinds import EventKinds
from recserve.features.tables.event_table import read_events
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable, read_items
from recserve.features.tables.parquet import BadRowError, BadRows, SchemaError

START = 1_700_000_000
ITEMS = ItemTable(["a", "b", "c"], ["", "", ""], [[], [], []], pa.table({}))


def written(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path / "events.parquet")
    return path / "events.parquet"


def read(path: Path, on_bad_rows: str = "error", **columns: Any) -> tuple[EventLog, BadRows]:
    return read_events(written(path, **columns), ITEMS, on_bad_rows)  # type: ignore[arg-type]


def test_groups_by_user_in_order_of_time(tmp_path: Path) -> None:
    log, report = read(
        tmp_path,
        user_id=["y", "x", "y", "x"],
        item_id=["a", "b", "c", "a"],
        timestamp=pa.array([START + n for n in (3, 1, 9, 2)], pa.timestamp("s")),
        type=["view", None, "buy", "view"],
        value=pa.array([1.5, None, 2.0, 3.0]),
    )
    assert log.user_ids == ["y", "x"]
    assert log.offsets.tolist() == [0, 2, 4]
    assert log.item_rows.tolist() == [0, 2, 1, 0] and log.item_rows.dtype == np.int32
    assert (log.times - START * 10**6).tolist() == [3_000_000, 9_000_000, 1_000_000, 2_000_000]
    assert [log.type_names[t] for t in log.types] == ["view", "buy", "event", "view"]
    assert log.values.tolist() == [1.5, 2.0, 1.0, 3.0]
    assert log.has_timestamps and report.num_dropped == 0 and report.lines() == []


def test_time_zones_and_units_become_utc_microseconds(tmp_path: Path) -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    zoned = pa.array([noon], pa.timestamp("ns", tz="Asia/Tokyo"))
    log, _ = read(tmp_path, user_id=["u"], item_id=["a"], timestamp=zoned)
    assert log.times.tolist() == [int(noon.timestamp()) * 1_000_000]


def test_positions_order_events_without_times(tmp_path: Path) -> None:
    log, _ = read(tmp_path, user_id=["u", "u"], item_id=["b", "a"], position=[5, 7])
    assert log.times.tolist() == [5, 7] and not log.has_timestamps


def test_position_orders_events_of_one_time(tmp_path: Path) -> None:
    times = pa.array([START, START], pa.timestamp("s"))
    columns = {"user_id": ["u", "u"], "item_id": ["b", "a"], "timestamp": times, "position": [2, 1]}
    log, _ = read(tmp_path, "skip", **columns)
    assert log.item_rows.tolist() == [0, 1]


GOOD: dict[str, Any] = {"user_id": ["u", "u"], "item_id": ["a", "b"], "position": [0, 1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user_id": None}, "column user_id .* is missing"),
        ({"item_id": None}, "column item_id .* is missing"),
        ({"position": None}, "column timestamp .* or position .* is missing"),
        ({"item_id": [0.5, 2]}, "column item_id is double; expected string or integer"),
        ({"position": [0.5, 1.5]}, "column position is double; expected integer"),
        ({"timestamp": [1, 2]}, "column timestamp is int64; expected timestamp"),
        ({"type": [1, 2]}, "column type is int64; expected string"),
        ({"value": ["x", "y"]}, "column value is string; expected float"),
    ],
    ids=str,
)
@pytest.mark.parametrize("on_bad_rows", ["error", "skip"])
def test_schema_is_refused(tmp_path: Path, change: Any, message: str, on_bad_rows: str) -> None:
    columns = {name: values for name, values in (GOOD | change).items() if values is not None}
    with pytest.raises(SchemaError, match=f"events.parquet: {message}"):
        read(tmp_path, on_bad_rows, **columns)


def test_integer_ids_are_their_digits(tmp_path: Path) -> None:
    items = ItemTable(["7", "-1"], ["", ""], [[], []], pa.table({}))
    columns = {"user_id": [12, 12], "item_id": pa.array([-1, 7], pa.int16()), "position": [0, 1]}
    pq.write_table(pa.table(columns), tmp_path / "events.parquet")
    log, _ = read_events(tmp_path / "events.parquet", items)
    assert (log.user_ids, log.item_rows.tolist()) == (["12"], [1, 0])


def test_a_user_id_that_no_store_can_hold_is_refused(tmp_path: Path) -> None:
    """A server could not import the events of such a user."""
    columns = GOOD | {"user_id": ["u", "\N{GRINNING FACE}" * 121]}
    with pytest.raises(BadRowError, match="column user_id, row 1: the id has more than 480 bytes"):
        read(tmp_path, **columns)
    log, report = read(tmp_path, "skip", **columns)
    assert (log.num_events, report.dropped) == (1, {"long user_id": 1})


def test_empty_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    empty = {name: pa.array(values)[:0] for name, values in GOOD.items()}
    with pytest.raises(SchemaError, match="no rows"):
        read(tmp_path, **empty)
    with pytest.raises(SchemaError, match="no such file"):
        read_events(tmp_path / "none.parquet", ITEMS)
    (tmp_path / "text.parquet").write_text("user_id,item_id")
    with pytest.raises(SchemaError, match="not a readable Parquet file"):
        read_events(tmp_path / "text.parquet", ITEMS)
    table = pa.table([["u"], ["u"]], names=["user_id", "user_id"])
    pq.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(SchemaError, match="column user_id appears more than once"):
        read_events(tmp_path / "twice.parquet", ITEMS)
    with pytest.raises(ValueError, match="on_bad_rows is 'ignore'"):
        read(tmp_path, "ignore", **GOOD)


BAD = [
    ({"user_id": ["u", None, "u"]}, "null user_id", "user_id"),
    ({"user_id": ["u", "", "u"]}, "null user_id", "user_id"),
    ({"item_id": ["a", None, "c"]}, "null item_id", "item_id"),
    ({"item_id": ["a", "zzz", "c"]}, "unknown item_id", "item_id"),
    ({"position": [0, None, 2]}, "null position", "position"),
    ({"position": [0, 0, 2]}, "duplicate position", "position"),
    ({"item_id": ["a", "a", "c"], "position": [0, 0, 2]}, "duplicate event", "item_id"),
    ({"value": [1.0, float("inf"), 1.0]}, "value not finite", "value"),
    ({"type": ["view", "", None]}, "invalid type", "type"),
    ({"type": [None, " \t", "x"]}, "invalid type", "type"),
    ({"type": ["x" * 64, "x" * 65, "ü" * 32]}, "invalid type", "type"),
    ({"type": ["x", "ü" * 33, "x"]}, "invalid type", "type"),
]


@pytest.mark.parametrize(("change", "reason", "column"), BAD, ids=[f"{b[1]}-{b[0]}" for b in BAD])
def test_bad_row_is_named_or_dropped(tmp_path: Path, change: Any, reason: str, column: str) -> None:
    columns = {"user_id": ["u"] * 3, "item_id": ["a", "b", "c"], "position": [0, 1, 2]} | change
    with pytest.raises(BadRowError, match=f"events.parquet: column {column}, row 1: .*{reason}"):
        read(tmp_path, **columns)
    log, report = read(tmp_path, "skip", **columns)
    assert log.item_rows.tolist() == [0, 2]
    kept = [name or "event" for name in columns.get("type", ["event"] * 3)[::2]]
    assert [log.type_names[number] for number in log.types] == kept
    assert sorted(log.type_names) == sorted(set(kept)), "no name of a dropped row is left"
    assert report.dropped == {reason: 1} and report.kept_rows.tolist() == [0, 2]
    assert report.examples[0].startswith(f"column {column}, row 1:")
    assert any("dropped 1 of 3 rows" in line for line in report.lines())


@pytest.mark.parametrize("on_bad_rows", ["error", "skip"])
def test_unordered_rows_are_sorted_and_counted(tmp_path: Path, on_bad_rows: str) -> None:
    """Each user's rows by time, then position; ties as in the file."""
    drawn = np.random.default_rng(3)
    for clocks in (("position",), ("timestamp",), ("timestamp", "position")):
        users, items = drawn.integers(0, 4, 60), drawn.permutation(60)
        keys = {
            "timestamp": START + drawn.integers(0, 5, 60),
            "position": drawn.permutation(60),
        }
        columns = {name: keys[name] for name in clocks}
        names = [str(n) for n in range(60)]
        path = written(tmp_path, user_id=users, item_id=items, **columns)
        log, report = read_events(
            path, ItemTable(names, names, [[] for _ in names], pa.table({})), on_bad_rows
        )
        late, wanted = 0, {}
        for row, user in enumerate(users.tolist()):
            mine = wanted.setdefault(str(user), [])
            key = tuple(int(keys[name][row]) for name in clocks)
            late += bool(mine) and key < mine[-1][0]
            mine.append((key, int(items[row])))
        found = {
            user: log.item_rows[log.offsets[n] : log.offsets[n + 1]].tolist()
            for n, user in enumerate(log.user_ids)
        }
        ranked = {user: sorted(rows, key=lambda row: row[0]) for user, rows in wanted.items()}
        assert found == {user: [item for _, item in rows] for user, rows in ranked.items()}
        assert report.num_dropped == 0
        assert report.notes == {f"rows out of {clocks[0]} order, sorted": late}


def test_a_file_of_bad_rows_only_is_refused(tmp_path: Path) -> None:
    columns = {"user_id": ["u"], "item_id": ["zzz"], "position": [0]}
    with pytest.raises(SchemaError, match="no usable rows"):
        read(tmp_path, "skip", **columns)


def test_every_column_is_reported(tmp_path: Path) -> None:
    _, report = read(tmp_path, **GOOD, rating=[1, 2], shop=["x", "y"], type=[None, None])
    assert {use.name: use.use for use in report.columns} == {
        "user_id": "user ids",
        "item_id": "item ids",
        "position": "positions",
        "rating": "not used; did you mean value? name it with --column value=rating",
        "shop": "not used",
        "type": "ignored: no row has a value",
    }
    assert report.lines() == []


def test_leave_one_out_holds_the_last_two(tmp_path: Path) -> None:
    log, _ = read(
        tmp_path,
        user_id=["u"] * 3 + ["v"] * 2 + ["w"] * 4,
        item_id=["a", "b", "c", "a", "b", "c", "b", "a", "c"],
        position=[0, 1, 2, 0, 1, 0, 1, 2, 3],
    )
    split = log.leave_one_out()
    assert split.test_rows.tolist() == [2, -1, 2]
    assert split.valid_rows.tolist() == [1, -1, 0]
    train = split.train
    assert [rows.tolist() for rows in np.split(train.item_rows, train.offsets[1:-1])] == [
        [0],
        [0, 1],
        [2, 1],
    ]
    assert train.user_ids == log.user_ids
    assert train.popularity(3).tolist() == [2, 2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_some_users_are_held_out_and_all_others_train_whole(tmp_path: Path, seed: int) -> None:
    """In a log, in its positive events, and after users had more events."""
    draw = np.random.default_rng(seed)
    users = draw.permutation(np.repeat(np.arange(40), draw.integers(1, 7, 40)))
    most = int(draw.integers(1, 30))

    def held(users: np.ndarray) -> set[str]:
        types = draw.choice(["buy", "hide"], len(users), p=[0.9, 0.1]).tolist()
        log, _ = read(
            tmp_path,
            user_id=[f"u{user}" for user in users.tolist()],
            item_id=draw.choice(ITEMS.ids, len(users)).tolist(),
            timestamp=pa.array(START + np.arange(len(users)), pa.timestamp("s")),
            type=types,
        )
        found: set[str] = set()
        for one in (log.holding_out(most), log.holding_out(most).positive(EventKinds())):
            enough = np.flatnonzero(one.lengths() >= 3)
            cases, split = leave_one_out_cases(one, "test"), one.leave_one_out()
            chosen = set(cases.users.tolist())
            assert len(chosen) <= most and chosen <= set(enough.tolist())
            assert chosen == set(np.flatnonzero(split.test_rows >= 0).tolist())
            lost = one.lengths() - split.train.lengths()
            assert lost.tolist() == [2 * (user in chosen) for user in range(one.num_users)]
            found = found or {one.user_ids[user] for user in chosen}
        assert len(found) == min(most, int((log.lengths() >= 3).sum()))
        assert log.holding_out(None) is log
        return found

    everyone = np.repeat(np.arange(40), 3)  # so that all users have enough
    before = held(np.concatenate([users, everyone]))
    assert held(np.concatenate([users, everyone, users])) == before


def test_round_trip_through_arrow(tmp_path: Path) -> None:
    for clock in (
        {"position": [3, 9]},
        {"timestamp": pa.array([START, START + 9], pa.timestamp("s"))},
    ):
        log, _ = read(
            tmp_path,
            user_id=["u", "v"],
            item_id=["c", "a"],
            type=["x", "y"],
            value=[1.0, 2.0],
            **clock,
        )
        pq.write_table(log.to_arrow(ITEMS.ids), tmp_path / "again.parquet")
        again, _ = read_events(tmp_path / "again.parquet", ITEMS)
        for name, value in vars(log).items():
            assert np.array_equal(getattr(again, name), value), name


def test_beauty_has_its_published_size(beauty: Path) -> None:
    items, _ = read_items(beauty / "items.parquet")
    log, report = read_events(beauty / "events.parquet", items)
    assert (len(items), log.num_users, log.num_events) == (12_101, 22_363, 198_502)
    assert log.lengths().min() == 5 and report.lines() == []
    split = log.leave_one_out()
    assert split.train.num_events == 198_502 - 2 * 22_363 and (split.test_rows >= 0).all()
