"""Damaged state of each kind is refused or set aside in words, and never overwritten.

What a server stores must survive a restart. So what it cannot read stays for the operator.
"""

from __future__ import annotations

import json
import random
import zlib
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
from safetensors.numpy import load_file, save_file

from recserve.cli.backup import StateFolders, back_up
from recserve.experiments.experiment import Experiment
from recserve.experiments.saved_counts import SavedCounts
from recserve.experiments.settings import parse_experiments
from recserve.features.catalog.catalog_log import JournalError
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.catalog.popularity import FORMAT as POPULARITY
from recserve.features.catalog.redis_popularity import COUNT, open_popularity
from recserve.features.history import lmdb_store
from recserve.features.history.history import StoreUnavailable
from recserve.features.redis_connection import connect
from recserve.features.shared_counts import Layout, SharedCounts
from recserve.files import FORMAT_KEY
from recserve.service import Service
from recserve.training.retraining import Run
from tests.recorded.upgrade.read import BATCH, SETTINGS, copied, run_command
from tests.recorded.upgrade.test_upgrade import (
    FORMATS,
    LATEST,
    append_redis,
    client_of,
    folder,
    port,
    read_redis,
    read_redis_log,
)

__all__ = ["folder", "port"]  # fixtures
REFUSALS = (ValueError, JournalError, StoreUnavailable, ConnectionError, RuntimeError)
OTHERS = (["two"], {"x": 1}, "x", -1.5, None, True)


def other_value(value: Any, drawn: random.Random) -> Any:
    return drawn.choice([one for one in OTHERS if type(one) is not type(value)])


def other_field(content: Any, drawn: random.Random) -> Any:
    name = drawn.choice(sorted(content))
    return content | {name: other_value(content[name], drawn)}


def other_json(content: bytes, drawn: random.Random) -> bytes:
    return json.dumps(other_field(json.loads(content), drawn)).encode()


def other_msgpack(content: bytes, drawn: random.Random) -> bytes:
    fields = msgspec.msgpack.decode(content)
    place = drawn.choice([fields, *fields["arms"]])
    names = sorted(place.keys() - {"reason", "breach", "seen", "first_verdicts"})
    name = drawn.choice(names)
    place[name] = other_value(place[name], drawn)
    return msgspec.msgpack.encode(fields)


def other_line(content: bytes, drawn: random.Random) -> bytes:
    lines = content.splitlines()
    number = drawn.randrange(len(lines))
    fields = json.loads(lines[number][9:])
    place = drawn.choice([fields, *fields.get("put", ())])
    name = drawn.choice(sorted(place))
    place[name] = other_value(place[name], drawn)
    text = json.dumps(fields).encode()
    lines[number] = b"%08x %s" % (zlib.crc32(text), text)
    return b"\n".join([*lines, b""])


def open_counts(folder: Path) -> None:
    (settings,) = parse_experiments(SETTINGS.SHARED["experiments"])
    SavedCounts(folder / "experiments", [Experiment(settings, lambda: 0.0)])


def continue_batch(folder: Path) -> None:
    run_command(folder, (BATCH[0], "--debug", *BATCH[1:]))


def latest_run(folder: Path) -> None:
    Run.latest(folder / "runs", "some")


# Files of each kind, the doors that open them, and what writes a value of another type into one.
Door = Callable[[Path], object]
FILES: dict[str, tuple[str, tuple[Door, ...], Callable[[bytes, random.Random], bytes] | None]] = {
    "bundle": ("bundle/manifest.json", FORMATS["bundle"][1], other_json),
    "history": ("history/data.mdb", FORMATS["history, LMDB"][1], None),
    "journal": ("items/*.jsonl", FORMATS["journal"][1], other_line),
    "slates": ("slates/slates-*.parquet", FORMATS["slates"][1], None),
    "outcomes": ("slates/outcomes-*.parquet", FORMATS["outcomes"][1], None),
    "events": ("events/events-*.parquet", FORMATS["events"][1], None),
    "batch": ("batch/slates/_job.json", (continue_batch,), other_json),
    "experiments": ("experiments/shelf.counts", (open_counts,), other_msgpack),
    "retrain": ("runs/0001/run.json", (latest_run,), other_json),
}


def cut_short(content: bytes, drawn: random.Random) -> bytes:
    return content[: drawn.randrange(1, len(content) - 1)]


# What a disk, a person or another program makes of a file.
DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut short": cut_short,
    "noise": lambda content, drawn: drawn.randbytes(len(content)),
    "another JSON type": lambda content, drawn: json.dumps([drawn.random(), "x"]).encode(),
    "empty": lambda content, drawn: b"",
}


def write_run(folder: Path) -> None:
    path = folder / "runs" / "0001" / "run.json"
    path.parent.mkdir(parents=True)
    record = {"format": "recserve-retrain/1", "settings": "some", "began_us": 1, "served": "one"}
    path.write_text(json.dumps(record | {"tries": {"build": 1}, "collect": {"seconds": 1.0}}))


@pytest.mark.parametrize("damage", [*DAMAGES, "another type of a field"])
@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_refused_and_stays(kind, damage, caplog, capsys, monkeypatch):
    monkeypatch.setattr(lmdb_store, "WAIT_S", 0.1)
    pattern, doors, other = FILES[kind]
    change = DAMAGES.get(damage, other)
    if change is None:
        pytest.skip("its fields are bytes")
    drawn = random.Random(f"{kind} {damage}")
    with copied(LATEST) as copy:
        write_run(copy)
        path = next(copy.glob(pattern))
        content = change(path.read_bytes(), drawn)
        path.write_bytes(content)
        if kind == "journal" and damage in ("cut short", "empty"):
            ItemJournal(path).read()  # a crash leaves such a file; what is left out was no change
            assert damage == "empty" or f"{path}: the last " in caplog.text
        else:
            for open_it in doors:
                with pytest.raises(REFUSALS) as refused:
                    open_it(copy)
                said = str(refused.value)
                said = capsys.readouterr().err if said.endswith("ended with 2") else said
                said = said.rpartition("error: ")[2].strip()
                assert "\n" not in said and (path.name in said or path.parent.name in said), said
        assert path.read_bytes() == content


def other_counts(path: Path, drawn: random.Random) -> None:
    arrays, name = load_file(path), drawn.choice(["keys", "counts", "since_us"])
    array = arrays[name]
    arrays[name] = drawn.choice(
        [array.astype(np.float32), np.concatenate([array, array]), array[:, None], -array - 1]
        + [np.full(array.shape, np.nan)] * (name == "counts")
    )
    if name == "keys" and arrays[name].dtype == np.uint64 and arrays[name].ndim == 1:
        arrays[name] = arrays[name][:-1]
    save_file(arrays, path, {FORMAT_KEY: POPULARITY})


def other_version(path: Path, drawn: random.Random) -> None:
    save_file(load_file(path), path, {FORMAT_KEY: f"recserve-popularity/{drawn.randint(2, 9)}"})


@pytest.mark.parametrize("seed", range(2))
def test_damaged_counts_of_popular_items_are_set_aside(seed, caplog):
    """Twice, so that the second file does not replace the first one; a backup has both."""
    drawn, damaged = random.Random(seed), []
    with copied(LATEST) as copy:
        path = copy / "history" / "popularity.safetensors"
        good = path.read_bytes()
        changes = [other_counts, other_version]
        changes += [
            lambda path, drawn, one=one: path.write_bytes(one(good, drawn))
            for one in DAMAGES.values()
        ]
        for change in drawn.sample(changes, 2):
            path.write_bytes(good)
            change(path, drawn)
            damaged.append(path.read_bytes())
            caplog.clear()
            with Service.open(copy / "bundle", f"lmdb:{copy / 'history'}", "cpu") as service:
                service.catalog.count_events([service.catalog.current.items.base.keys[0]], [10**15])
            assert "starts with the training events" in caplog.text and str(path) in caplog.text
            assert path.exists()  # the counts of this process
        aside = [path.with_name(f"{path.name}.old"), path.with_name(f"{path.name}.old2")]
        assert [one.read_bytes() for one in aside] == damaged
        state = StateFolders(copy / "history", copy / "items", copy / "experiments")
        back_up(state, copy / "backup")
        assert [(copy / "backup" / "history" / one.name).read_bytes() for one in aside] == damaged


def exchange_popularity(folder: Path) -> None:
    store = open_popularity(redis_of(folder), "items", 604800.0, "e38113cc7e85")
    recorded = json.loads((folder / "redis.json").read_text(encoding="utf-8"))
    (dumped,) = (dumped for name, dumped in recorded.items() if name.endswith("}:counts"))
    keys = [int.from_bytes(b64decode(key), "little") for key, _ in dumped[1]]
    counts = np.array([(key, 1.0) for key in keys], COUNT)
    try:
        store.exchange(1, 10**15, 10**15, counts.tobytes(), 0)
    finally:
        store.close()


def exchange_experiment(folder: Path) -> None:
    name = key_of(folder, "counts", "meta").partition("{")[2].partition("}")[0]
    board = SharedCounts(connect(redis_of(folder)), name, Layout(20, 6, 10, 1000, 4), "one")
    delta = np.array([(1, 3), (15, 2)], [("place", "<i4"), ("amount", "<i8")]).tobytes()
    added = {"weight": 3, "acknowledged": 0, "increments": delta, "members": b"\5\0\0\0a hash 1"}
    rest = {"version": 0, "state": b"", "first_slice": 0, "last": False}
    try:
        board.exchange(sequence=1, **added, **rest)
    finally:
        board.close()


def redis_of(folder: Path) -> str:
    return f"redis://127.0.0.1:{(folder / 'port').read_text()}/0"


def key_of(folder: Path, kind: str, end: str) -> str:
    (found,) = client_of(folder).keys(f"recserve:{kind}:*{end}")
    return str(found.decode())


# Keys in Redis: their kind, the end of their name, fields of a hash, and the doors.
KEYS: dict[str, tuple[str, str, tuple[str, ...], tuple[Door, ...]]] = {
    "history": ("history", "user1", (), (read_redis, append_redis)),
    "log": ("items", "log", (), (read_redis_log,)),
    **{
        f"popular {end}": ("popular", end, fields, (exchange_popularity,))
        for end, fields in {
            "counts": ("*",), "changed": (), "meta": ("since", "latest", "version"), "writers": (),
        }.items()
    },
    **{
        f"experiment {end}": ("counts", end, fields, (exchange_experiment,))
        for end, fields in {
            "sums": (), "window": (), "members": (), "writers": (), "meta": ("version", "lost"),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KEYS)
def test_damaged_keys_are_refused_and_stay(folder, kind, seed):
    """A key of another type, and a field that is no number. Nothing is added then."""
    part, end, fields, doors = KEYS[kind]
    drawn, client = random.Random(f"{kind} {seed}"), client_of(folder)
    key = key_of(folder, part, end)
    if fields and seed:
        name = drawn.choice(fields)
        name = drawn.choice(sorted(client.hkeys(key))) if name == "*" else name
        client.hset(key, name, drawn.choice(["x", "", "nan", "-1", "inf", "1e999"]))
    elif client.type(key) == b"string" and part == "history":
        value = client.get(key)
        client.set(key, drawn.choice([value[:-3], drawn.randbytes(40), b"[1]"]))
    elif client.type(key) == b"list":
        client.set(key, "x")
    else:
        client.delete(key)
        client.rpush(key, "x")
    before = contents(client)
    for open_it in doors:
        for _ in range(2):  # servers try again
            with pytest.raises(REFUSALS) as refused:
                open_it(folder)
            assert "\n" not in str(refused.value)
    assert contents(client) == before


def contents(client: redis.Redis) -> dict[bytes, bytes | None]:
    return {key: client.dump(key) for key in sorted(client.keys())}
