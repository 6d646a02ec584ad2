"""Events of several files: each event once, and of its versions the one that was received last."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.features.history.history import event_key
from recserve.features.tables.event_files import KIND, SCHEMA
from recserve.features.tables.event_table import read_events
from recserve.features.tables.items import ItemTable
from recserve.features.tables.parquet import BadRowError, SchemaError

NAMES = [f"i{n}" for n in range(6)]
ITEMS = ItemTable(NAMES, [""] * 6, [[]] * 6, pa.table({}))
START = 1_700_000_000_000_000


def write_log(folder, rows, number=0):
    folder.mkdir(exist_ok=True)
    path = folder / f"{KIND}-20261129T0000{number:02}Z-{number}-1.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    return folder


def contents(log):
    """Returns the events as a sorted list of user, item, time, type and value."""
    return sorted(
        (
            log.user_ids[user],
            NAMES[log.item_rows[i]],
            int(log.times[i]),
            log.type_names[log.types[i]],
            float(log.values[i]),
        )
        for i, user in enumerate(log.user_indices().tolist())
    )


def row(change, received):
    user, key, item, time, kind, value, correction = change
    known = key is not None
    return {
        "received": received,
        "user_id": user,
        "item_id": item,
        "timestamp": time,
        "type": kind,
        "value": value,
        "event_id": key,
        "event_key": event_key(key if known else f"{item} {time} {kind}"),
        "correction": correction,
    }


@pytest.mark.parametrize("seed", range(8))
def test_a_random_life_of_events_is_read_back(tmp_path, seed):
    """A first file, then the logs of three servers with new, changed and removed events."""
    draw = random.Random(seed)
    state, first, logs = {}, [], [[], [], []]
    for number in range(120):
        user, key = draw.choice("ab"), draw.choice([None, f"e{draw.randrange(25)}"])
        received = START + 10_000_000 + number
        time = START + draw.randrange(40)
        new = (draw.choice(NAMES), time, draw.choice(["click", "like"]), float(draw.randrange(3)))
        if key is None:
            name = (user, *new[:3])
            if any(u == user and event[:3] == new[:3] for (u, *_), event in state.items()):
                continue
            change = (user, None, *new, None)
            state[name] = new
        elif (user, key) not in state:
            if any(u == user and event[:3] == new[:3] for (u, *_), event in state.items()):
                continue
            change = (user, key, *new, None)
            state[user, key] = new
        elif draw.random() < 0.5:
            change = (user, key, None, None, None, None, "remove")
            del state[user, key]
        else:
            if any(u == user and event[:3] == new[:3] for (u, *_), event in state.items()):
                continue
            change = (user, key, *new, "replace")
            state[user, key] = new
        if number < 30:
            first.append(change)
        if number >= 25:  # the log repeats some events of the first file
            draw.choice(logs).append(row(change, received))
    known = {}
    for user, key, *new, correction in first:
        name = (user, key) if key is not None else (user, *new[:3])
        known.pop(name, None)
        if correction != "remove":
            known[name] = (user, key, *new)
    columns = ["user_id", "event_id", "item_id", "timestamp", "type", "value"]
    table = {n: [event[i] for event in known.values()] for i, n in enumerate(columns)}
    table["timestamp"] = pa.array(table["timestamp"], pa.timestamp("us"))
    pq.write_table(pa.table(table), tmp_path / "first.parquet")
    for number, rows in enumerate(logs):
        write_log(tmp_path / "log", rows, number)
    found, report = read_events([tmp_path / "first.parquet", tmp_path / "log"], ITEMS)
    expected = [((user), *event) for (user, *_), event in state.items()]
    assert contents(found) == sorted(expected)
    assert not report.dropped


def test_a_log_alone_is_read_and_its_faults_are_named(tmp_path):
    good = ("a", "e1", "i1", START, "click", 2.0, None)
    log = write_log(tmp_path / "log", [row(good, START)])
    assert contents(read_events(log, ITEMS)[0]) == [("a", "i1", START, "click", 2.0)]
    removed = ("a", "e1", None, None, None, None, "remove")
    write_log(log, [row(removed, START + 1)], 1)
    with pytest.raises(SchemaError, match="all events were removed"):
        read_events(log, ITEMS)
    write_log(log, [row(("a", "e2", "gone", START, "click", 1.0, None), START + 2)], 2)
    with pytest.raises(BadRowError, match="'gone' is not among the items"):
        read_events(log, ITEMS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SchemaError, match="is an empty folder; expected parts"):
        read_events(tmp_path / "empty", ITEMS)
    (tmp_path / "places.csv").write_text("user_id,item_id,position\na,i1,1\n")
    with pytest.raises(SchemaError, match="orders events by position"):
        read_events([tmp_path / "places.csv", log], ITEMS, "skip")
    (log / f"{KIND}-bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(SchemaError, match="is no file of recserve-event-log"):
        read_events(log, ITEMS)
