"""The log of a catalogue in Redis: one order for all writers; damage and losses are seen."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import redis

from recserve.bundle.bundle import Bundle
from recserve.features.catalog import redis_log
from recserve.features.catalog.catalog_log import JournalError, PositionLost, PositionTaken
from recserve.features.catalog.change_lines import format_line
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.catalog.item_records import ItemRecord
from recserve.features.catalog.redis_log import RedisCatalogLog
from recserve.features.catalog.versions import (
    ChangeSet,
    ItemChange,
    apply_changes,
    difference,
    first_version,
)
from recserve.features.redis_connection import connect
from tests.support.tiny_bundle import shared_bundle


class Repeating(redis.Redis):
    """A client whose replies are lost once: it sends every script twice."""

    def execute_command(self, *arguments, **options):
        if arguments[0] == "EVALSHA":
            super().execute_command(*arguments, **options)
        return super().execute_command(*arguments, **options)


@pytest.fixture(scope="module")
def catalog():
    return Bundle.open(shared_bundle()).catalog()


@pytest.fixture
def new_log(empty_redis, redis_url, catalog):
    """Returns a function that opens the log as another process."""
    opened = []

    def open_log(kind=redis.Redis):
        opened.append(RedisCatalogLog(kind.from_url(redis_url), catalog))
        return opened[-1]

    yield open_log
    for log in opened:
        log.close()


class Follower:
    """A process: it knows the version of the last position that it has applied."""

    def __init__(self, log, catalog):
        self.log, self.catalog = log, catalog
        self.restart()

    def restart(self):
        rows = {item_id: row for row, item_id in enumerate(self.catalog.items.ids)}
        self.version = self.bundle = first_version(self.catalog, rows)

    def follow(self):
        for change_set in self.log.read(self.version.number + 1, self.version.epoch):
            base = self.bundle if change_set.whole else self.version
            if change_set.whole:
                self.restart()
                base = self.version
            for part in change_set.split():
                base = apply_changes(base, part)
            self.version = base

    def write(self, change_set):
        """Appends a change set at the next position, again after each one that came before it."""
        for _ in range(100):
            self.follow()
            numbered = replace(change_set, number=self.version.number + 1)
            try:
                self.log.append(numbered)
            except PositionTaken:
                continue
            self.follow()
            return numbered
        raise AssertionError("every position was taken")

    def content(self):
        held = difference(self.version)
        puts = {
            c.record.item_id: (
                c.record,
                None if c.vector is None else c.vector.tobytes(),
                None if c.codes is None else c.codes.tobytes(),
            )
            for c in held.changes
        }
        return held.number, puts, set(held.hidden)


def epoch_of(log):
    return int(log._epoch)


def draw_change(draw, catalog):
    """Draws an insertion with a vector, new words of an item, or an item that is hidden."""
    kind = draw.integers(3)
    item_id = catalog.items.ids[draw.integers(len(catalog))]
    if kind == 0:
        return ChangeSet(0, hidden=(item_id, f"stranger-{draw.integers(9)}"))
    if kind == 1:
        record = ItemRecord(item_id, f"words {draw.integers(99)}", ["Care > Lips"], {})
        return ChangeSet(0, (ItemChange(record),))
    name = f"new-{draw.integers(10**6)}"
    record = ItemRecord(name, "é \u2028 \n", [], {}, added_at=1)
    vector = draw.normal(size=catalog.vectors.shape[1]).astype(np.float32)
    codes = draw.integers(catalog.semantic_ids.codebook_sizes).astype(np.uint16)
    return ChangeSet(0, (ItemChange(record, vector, codes),))


@pytest.mark.parametrize("seed", range(3))
def test_all_processes_get_the_changes_of_all_in_one_order(
    new_log, catalog, tmp_path, seed, monkeypatch
):
    """Three write and make snapshots at random; one reads late; a file gets the same order."""
    monkeypatch.setattr(redis_log, "PAGE", 3)
    draw = np.random.default_rng(seed)
    kinds = (redis.Redis, Repeating, redis.Redis)
    all_of_them = [Follower(new_log(kind), catalog) for kind in kinds]
    journal, writes = ItemJournal(tmp_path / "v.jsonl"), 0
    for _ in range(40):
        one = all_of_them[draw.integers(3)]
        if draw.random() < 0.2 and one.version.number:  # it may be behind
            one.log.replace(difference(one.version).split())
        else:
            journal.append(one.write(draw_change(draw, catalog)))
            writes += 1
    late = Follower(new_log(), catalog)
    filed = Follower(ItemJournal(journal.path), catalog)
    for one in (*all_of_them, late, filed):
        one.follow()
    assert len({(one.version.epoch, one.version.time_ms) for one in (*all_of_them, late)}) == 1
    contents = [one.content() for one in (*all_of_them, late)]
    assert all(content == contents[0] for content in contents)
    # A difference does not name a hidden item's words, so only visible ones agree with the file.
    number, puts, hidden = filed.content()
    assert number == contents[0][0] == writes and hidden == contents[0][2]
    shown = puts.keys() - hidden
    assert {k: puts[k] for k in shown} == {k: contents[0][1][k] for k in shown}


def test_writers_at_the_same_time_take_every_position_once(new_log, catalog):
    def write(name):
        one = Follower(new_log(), catalog)
        for number in range(15):
            one.write(ChangeSet(0, hidden=(f"{name} {number}",)))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = new_log().read()
    assert [each.number for each in found] == list(range(1, 46))
    assert len({each.hidden for each in found}) == 45
    for name in "abc":
        assert [h for each in found for h in each.hidden if h[0] == name] == [
            f"{name} {number}" for number in range(15)
        ]


def test_a_wait_ends_with_a_change_or_with_its_time(new_log):
    log, other = new_log(), new_log()
    assert not log.wait(1, 0.01)
    other.read()
    timer = threading.Timer(0.05, other.append, (ChangeSet(1, hidden=("a",)),))
    timer.start()
    assert log.wait(1, 20)
    timer.join()
    assert not log.wait(2, 0.01)


def test_a_gap_and_a_position_of_another_epoch_are_refused(new_log, empty_redis):
    log, other = new_log(), new_log()
    with pytest.raises(PositionTaken, match="read the log"):
        log.append(ChangeSet(1))
    log.read()
    for number in (0, 2):
        with pytest.raises(JournalError):
            log.append(ChangeSet(number))
    other.read()
    log.append(ChangeSet(1))
    with pytest.raises(PositionTaken, match="position 1 is taken"):
        other.append(ChangeSet(1))
    old = epoch_of(log)
    empty_redis.hset(log._keys[2], "server", "another")  # it has taken over
    with pytest.raises(PositionTaken):
        log.append(ChangeSet(2))
    assert log.read(2, old) == []
    log.append(ChangeSet(2))
    first, second = new_log().read()
    assert first.epoch < second.epoch


@pytest.mark.parametrize("lost", range(1, 4))
@pytest.mark.parametrize("rewritten", range(5))
def test_a_loss_by_a_takeover_is_seen_however_much_is_written_after_it(
    new_log, empty_redis, lost, rewritten
):
    ahead, behind = new_log(), new_log()
    ahead.read()
    behind.read()
    for number in range(1, 6):
        if number == 6 - lost:
            copy = empty_redis.dump(ahead._keys[0])
            behind.read()
        ahead.append(ChangeSet(number))
    empty_redis.restore(ahead._keys[0], 0, copy, replace=True)
    empty_redis.hset(ahead._keys[2], "server", "another")
    writer, old = new_log(), epoch_of(ahead)
    kept = len(writer.read())
    assert kept == 5 - lost
    for number in range(kept + 1, kept + 1 + rewritten):
        writer.append(ChangeSet(number))
    assert len(behind.read(kept + 1, old)) == rewritten
    for refused in (lambda: ahead.read(6, old), lambda: ahead.replace([ChangeSet(5, epoch=old)])):
        with pytest.raises(PositionLost):
            refused()
    assert len(ahead.read()) == kept + rewritten


def test_a_log_that_is_gone_is_seen(new_log, empty_redis):
    log = new_log()
    log.read()
    log.append(ChangeSet(1))
    empty_redis.flushall()
    other = new_log()
    other.read()
    other.append(ChangeSet(1))
    with pytest.raises(PositionLost):
        log.read(2, epoch_of(log))
    assert [each.number for each in log.read()] == [1]


def damaged_lines(catalog):
    """Yields lines that no process writes at position 2."""
    good = format_line(ChangeSet(2, hidden=("a",)))
    yield good.replace(b'"a"', b'"b"')
    yield good[:20]
    yield b""
    yield format_line(ChangeSet(3, hidden=("a",)))
    yield format_line(ChangeSet(2, hidden=("a", "a")))
    for item_id in ("", "x" * 10_000):
        yield format_line(ChangeSet(2, hidden=(item_id,)))
    dim, sizes = catalog.vectors.shape[1], catalog.semantic_ids.codebook_sizes
    record = ItemRecord("new", "t", [], {})
    vector, codes = np.ones(dim, np.float32), np.zeros(len(sizes), np.uint16)
    for other, ids in (
        (vector[1:], codes),
        (vector * np.nan, codes),
        (vector, codes[1:]),
        (vector, np.array(sizes, np.uint16)),
    ):
        yield format_line(ChangeSet(2, (ItemChange(record, other, ids),)))
    for field in ({"title": 7}, {"categories": "x"}, {"categories": [7]}, {"added_at": -1}):
        yield format_line(ChangeSet(2, (ItemChange(replace(record, **field)),)))
    unknown = replace(record, attributes={"no such column": 1})
    yield format_line(ChangeSet(2, (ItemChange(unknown),)))
    yield format_line(ChangeSet(2, (ItemChange(record),), ("new",)))


def test_a_damaged_change_set_is_refused_by_its_position(
    new_log, empty_redis, catalog, monkeypatch
):
    log = new_log()
    log.read()
    log.append(ChangeSet(1))
    stream, snapshot = log._keys[:2]
    start, epoch = empty_redis.dump(stream), log._epoch
    for line in damaged_lines(catalog):
        empty_redis.restore(stream, 0, start, replace=True)
        empty_redis.xadd(stream, {"epoch": epoch, "line": line}, "2-0")
        with pytest.raises(JournalError, match="position 2 is damaged"):
            log.read(2, int(epoch))
        empty_redis.delete(stream)
        empty_redis.hset(snapshot, mapping={"position": 2, "epoch": epoch, "lines": line + b"\n"})
        with pytest.raises(JournalError, match="position 2 is damaged"):
            new_log().read()
        empty_redis.delete(snapshot)
    empty_redis.restore(stream, 0, start, replace=True)
    empty_redis.xadd(stream, {"epoch": epoch, "line": format_line(ChangeSet(3))}, "3-0")
    with pytest.raises(JournalError, match="expected position 2, got '3-0'"):
        log.read(2, int(epoch))
    monkeypatch.setattr(redis_log, "MAX_ENTRY_BYTES", 30)
    with pytest.raises(JournalError, match="at most 30"):
        log.append(ChangeSet(2, hidden=("a",)))
    empty_redis.restore(stream, 0, start, replace=True)
    empty_redis.xadd(stream, {"epoch": epoch, "line": b"x" * 31}, "2-0")
    with pytest.raises(JournalError, match="position 2 has 31 bytes"):
        log.read(2, int(epoch))


def test_keys_of_a_catalogue_are_in_one_slot_and_a_server_that_is_gone_is_an_error(new_log):
    log = new_log()
    assert len({redis.crc.key_slot(key.encode()) for key in log._keys}) == 1
    gone = RedisCatalogLog(redis.Redis(port=1), log._catalog)
    for call in (gone.read, lambda: gone.wait(1, 0.1)):
        with pytest.raises(JournalError, match="redis recserve:items:"):
            call()
    lost = RedisCatalogLog(connect("redis+sentinel://127.0.0.1:1/shop"), log._catalog)
    with pytest.raises(JournalError, match="No master found") as refused:
        lost.read()
    assert "ConnectionPool" not in str(refused.value)  # redis-py names all its settings
