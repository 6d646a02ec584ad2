"""What a store has taken comes out again: by the event log, and by an export of the store."""

import random

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from recserve.cli.app import app
from recserve.features.history.history import HistoryStore
from recserve.features.tables.event_table import read_events
from recserve.service import parquet_log
from recserve.service.effects import Effects
from recserve.service.event_log import EventLogWriter
from recserve.service.history_export import export_events
from recserve.service.parquet_log import LogOptions
from tests.support.live_catalogues import opened
from tests.support.live_server import live

USERS = ["anna", "ben", "carl"]


def life(draw, items, num_events):
    """Returns the events of some requests: new, repeated, wrong, replaced and removed ones."""
    events = []
    for number in range(num_events):
        user, name = draw.choice(USERS), f"e{draw.randrange(num_events // 3)}"
        event = {"user_id": user, "item_id": draw.choice([*items, "unknown"]), "event_id": name}
        correction = draw.choice([None, None, None, "replace", "remove"])
        if correction is not None:
            event["correction"] = correction
        if correction == "remove":
            del event["item_id"]
        elif draw.random() < 0.6:
            event["timestamp"] = f"2026-11-{draw.randrange(1, 28):02}T08:00:{number % 60:02}Z"
        if draw.random() < 0.4:
            event["type"] = draw.choice(["click", "purchase"])
        if draw.random() < 0.3 and correction is None:
            del event["event_id"]
        events.append(event)
    return [events[i : i + 7] for i in range(0, len(events), 7)]


def export_all(service, out):
    events = service.histories
    return export_events(events.store, events.types, service.catalog.current.items, out)


def stored(service, users=USERS):
    """Returns all events of some users as a sorted list."""
    return sorted(
        (user, event.item_id, event.type, event.timestamp)
        for user in users
        for event in service.history(user).events
    )


def read_back(folder, service, users=USERS):
    """Returns the events of a log as a sorted list, as `recserve build` reads them."""
    from recserve.service.histories import _moment

    items = service.bundle.catalog().items
    log, _ = read_events(folder, items)
    return sorted(
        (
            log.user_ids[user],
            items.ids[log.item_rows[i]],
            log.type_names[log.types[i]],
            _moment(int(log.times[i])),
        )
        for i, user in enumerate(log.user_indices().tolist())
        if log.user_ids[user] in users
    )


@pytest.mark.parametrize("door", ["/v1", "Python"])
@pytest.mark.parametrize("seed", range(2))
def test_logs_of_two_servers_hold_what_the_store_has(tmp_path, seed, door):
    draw, folder = random.Random(seed), tmp_path / "events"
    for part in range(2):  # one server after another, on one folder
        log = EventLogWriter(LogOptions(folder, 0.05)) if door == "Python" else None
        settings = {"event_log": folder, "event_log_rotate_s": 0.05} if log is None else {}
        with opened(tmp_path) as service, live(service, **settings) as client:
            if log is not None:
                service.set_effects(Effects(event_log=log))
            for events in life(draw, service.samples(0, 8)["items"], 60):
                if log is not None:
                    service.add_events({"events": events})
                else:
                    client.post("/v1/events", json={"events": events}).raise_for_status()
            if part:
                if log is None:
                    assert "recserve_event_log_rows_total" in client.get("/metrics").text
                client.delete("/v1/users/carl").raise_for_status()
                columns = [pq.read_table(path).column("user_id") for path in folder.iterdir()]
                assert all("carl" not in column.to_pylist() for column in columns)
        if log is not None:
            log.close()
    with opened(tmp_path) as service:
        assert stored(service, ["carl"]) == []
        expected = stored(service)
        assert len(expected) > 20
        assert read_back(folder, service) == expected
        done = export_all(service, tmp_path / "export")
        assert done.num_users >= 2
        assert read_back(tmp_path / "export", service) == expected
        both = read_back([folder, tmp_path / "export"], service)
        assert both == expected  # what both have counts once
        # Events that the log lost, the export has.
        lost = next(folder.glob("*.parquet"))
        lost.unlink()
        parts = [path for path in (folder, tmp_path / "export") if any(path.iterdir())]
        assert set(read_back(parts, service)) >= set(expected)


def test_an_export_since_a_time_has_the_newer_events(tmp_path):
    with opened(tmp_path) as service:
        item = service.samples(0, 1)["items"][0]
        times = [f"2026-11-{day:02}T08:00:00Z" for day in (1, 2, 3)]
        event = {"user_id": "anna", "item_id": item}
        service.add_events({"events": [event | {"timestamp": time} for time in times]})
        bundle, store = service.bundle.root, service.histories.store
        where = f"lmdb:{store.path}"
    out = tmp_path / "out"
    command = ["history", "export", "--bundle", bundle, "--store", where, "--out", out]
    command = [str(word) for word in command]
    said = CliRunner().invoke(app, [*command, "--since", "2026-11-02T08:00:00Z"])
    table = pq.read_table(next(out.iterdir()))
    assert said.exit_code == 0 and f"{table.num_rows} events of" in said.output
    found = [row for row in table.to_pylist() if row["user_id"] == "anna"]
    assert [f"{row['timestamp']:%d}" for row in found] == ["02", "03"]
    wrong = CliRunner().invoke(app, [*command, "--since", "yesterday"])
    assert wrong.exit_code and "expected RFC 3339" in wrong.output


def test_a_store_without_a_list_of_users_cannot_be_exported(tmp_path, monkeypatch):
    with opened(tmp_path) as service:
        monkeypatch.setattr(type(service.histories.store), "users", HistoryStore.users)
        with pytest.raises(RuntimeError, match="cannot list its users"):
            export_all(service, tmp_path / "out")


def test_a_full_buffer_counts_what_it_drops(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_log, "MAX_SIZE", 3)
    with opened(tmp_path) as service:
        log = EventLogWriter(LogOptions(tmp_path / "log", rotate_s=3600.0))
        service.histories.event_log = log
        item = service.samples(0, 1)["items"][0]
        service.add_events({"events": [{"user_id": "anna", "item_id": item}] * 5})
        log.close()
    assert (log.counts.rows["events"], log.counts.dropped["queue_full"]) == (3, 2)
