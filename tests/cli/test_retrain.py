"""`recserve retrain`: its limits, its file, and that a killed run goes on where it was."""

import json
import random
import shutil
import socket
from functools import partial

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from recserve.bundle.bundle import Bundle
from recserve.cli import retrain
from recserve.cli.app import app
from recserve.evaluation.cases import leave_one_out_cases
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.schemas.items import ItemsRequest
from recserve.service import Service, ServiceOptions
from recserve.service.options import CatalogLogOptions
from recserve.training import retraining
from recserve.training.retraining import (
    GateLimits,
    Guardrails,
    RetrainConfig,
    Run,
    card_faults,
    compare,
    drift,
    translate,
)
from tests.support.input_parts import write_parts
from tests.support.tiny_bundle import NUM_ITEMS, NUM_USERS, tiny_bundle

LEAST = "items: i\nbundles_dir: b\nruns: r\nevents: [e]\nserved: s\n"
LIMITS = Guardrails(min_requests=100)
BEFORE = {"answers": 900.0, "failed": 9.0, "degraded": 9.0, "slates": 900.0, "outcomes": 180.0}
BEFORE |= {"le 0.01": 800.0, "le 0.1": 895.0, "le +Inf": 900.0}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"failed": 40.0}, "failed"),
        ({"degraded": 90.0}, "degraded"),
        ({"le 0.1": 700.0}, "p99"),
        ({"outcomes": 60.0}, "outcomes per slate"),
        ({"outcomes": 170.0}, ""),
        ({"answers": 20.0, "failed": 20.0}, ""),  # too few to say
    ],
)
def test_guardrails_compare_with_the_time_before_the_load(change, fault):
    faults = retrain.guard_faults(BEFORE, BEFORE | change, LIMITS)
    assert (not faults and not fault) or fault in faults[0]
    assert len(faults) == bool(fault)


def test_windows_add_servers_and_know_those_that_began_anew():
    first = {"a": {"answers": 5.0}, "b": {"answers": 5.0}, "gone": {"answers": 7.0}}
    last = {"a": {"answers": 9.0, "failed": 1.0}, "b": {"answers": 3.0}, "new": {"answers": 2.0}}
    assert retrain.window(first, last) == {"answers": 4.0 + 3.0 + 2.0, "failed": 1.0}


def test_a_name_stands_for_all_of_its_addresses(monkeypatch):
    known = [(socket.AF_INET, 1, 6, "", (f"10.0.0.{n}", 8080)) for n in (2, 1, 1)]
    known.append((socket.AF_INET6, 1, 6, "", ("fd00::1", 8080, 0, 0)))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    expected = ["http://10.0.0.1:8080", "http://10.0.0.2:8080"]
    assert retrain.addresses("http://pods:8080/") == expected
    assert retrain.addresses("https://shop") == ["https://shop"]  # its certificate has the name


def test_durations():
    assert [retrain.duration_s(text) for text in ("6h", "30m", "1.5d")] == [21600, 1800, 129600]
    for wrong in ("6", "h", "0h", "-1h", "6 hours"):
        with pytest.raises(typer.BadParameter, match="as in 6h"):
            retrain.duration_s(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("items: i\nbundles_dir: b\nruns: r\nurl: x\n", "name files of events"),
        ("items: i\nbundles_dir: b\nruns: r\nevents: [e]\n", "served: is required without url"),
        (f"{LEAST}journal: j\ncatalog_log: redis\n", "journal: the servers have"),
        (f"{LEAST}gate: {{metric: accuracy}}\n", "gate.metric"),
        (f"{LEAST}foo: 1\n", "foo"),
        (f"{LEAST}gate: {{margin: 2}}\n", "margin"),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    done = CliRunner().invoke(app, ["retrain", str(tmp_path / "c.yaml")])
    assert done.exit_code
    assert said in f"{done.output} {done.exception}"


def test_a_run_goes_on_if_only_its_watch_has_other_settings(tmp_path):
    file = tmp_path / "c.yaml"
    digests = []
    for more in ("", "guard: {minutes: 1}\n", "seed: 1\n", "gate: {days: 3}\n"):
        file.write_text(f"items: i\nbundles_dir: b\nruns: r\nevents: [e]\nurl: x\n{more}")
        digests.append(retrain.read_config(file).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_a_bundle_compared_with_itself_does_not_differ(tmp_path):
    bundle = Bundle.open(tiny_bundle(tmp_path))
    found = compare(bundle, bundle, GateLimits(days=10_000))
    assert found["difference"] == 0 and found["users"] > 10
    assert found["interval"][0] < 0 < found["interval"][1]
    assert set(drift(bundle, bundle).values()) == {0.0}


def test_a_wrong_clock_does_not_empty_the_newest_days(tmp_path):
    """Events of a later year than the run are compared, and do not say what is new."""
    bundle = Bundle.open(tiny_bundle(tmp_path))
    times = np.sort(bundle.events().times)
    limits, now_us = GateLimits(days=30), int(times[len(times) // 2])
    assert (
        compare(bundle, bundle, limits, now_us=now_us)["users"]
        > 2 * (compare(bundle, bundle, limits)["users"])
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"groups": {"tail items": {"new": 0.1, "served": 0.3, "interval": [-0.3, -0.1]}}}, "tail"),
        ({"groups": {"tail items": {"new": 0.1, "served": 0.3, "interval": [-0.5, 0.1]}}}, ""),
        ({"items_shown": [40, 100]}, "40 items"),
        ({"collisions": [0.4, 0.2]}, "share their codes"),
    ],
)
def test_the_audit_card_has_bounds(change, fault):
    card = {"groups": {}, "items_shown": [90, 100], "collisions": [0.2, 0.2]} | change
    faults = card_faults(card, GateLimits())
    assert (not faults and not fault) or fault in faults[0]
    assert len(faults) == bool(fault)


def test_values_that_change_their_unit_are_a_shift(tmp_path, monkeypatch):
    """Values of a type that never varied are compared too."""
    bundle = Bundle.open(tiny_bundle(tmp_path))
    spreads = iter([({"buy": 1.0}, {"buy": (1.0, 0.0)}), ({"buy": 1.0}, {"buy": (100.0, 0.0)})])
    monkeypatch.setattr(retraining, "_by_type", lambda _: next(spreads))
    assert drift(bundle, bundle)["value_shift"] > GateLimits().max_value_shift


def test_cases_in_other_rows_keep_their_items():
    bundle = np.random.default_rng(0)
    rows = bundle.permutation(6)
    rows[2] = -1
    from recserve.features.tables.events import EventLog

    items = np.array([0, 2, 3, 4, 2, 5, 1, 2], np.int32)
    log = EventLog(
        ["a", "b"],
        np.array([0, 4, 8]),
        items,
        np.arange(8),
        np.zeros(8, np.int16),
        ("event",),
        np.ones(8, np.float32),
        False,
    )
    cases = leave_one_out_cases(log, "test")
    other = translate(cases, rows)
    for case in range(2):
        wanted = [rows[item] for item in cases.history(case) if item != 2]
        assert other.history(case).tolist() == wanted
        assert other.held[case] == rows[cases.held[case]]


@pytest.mark.parametrize("place", ["journal", "catalog_log"])
def test_live_items_come_from_the_log_of_the_servers(tmp_path, request, place):
    """Items that servers got, in a journal or in a Redis that they share, are built with events."""
    bundle = tiny_bundle(tmp_path, ranker=False)
    files = write_synthetic(tmp_path / "data", SyntheticOptions(NUM_ITEMS, NUM_USERS, 12, seed=3))
    if place == "journal":
        store, log = f"lmdb:{tmp_path}/store", None
        options = ServiceOptions(journal=tmp_path / "items")
    else:
        request.getfixturevalue("empty_redis")
        store, log = request.getfixturevalue("redis_url"), "redis"
        options = ServiceOptions(catalog_log=CatalogLogOptions("redis"))
    hidden = Bundle.open(bundle).catalog().items.ids[7]
    with Service.open(bundle, store, "cpu", options) as service:
        put = [{"item_id": f"live{n}", "title": f"Lamp {n}"} for n in range(3)]
        service.put_items(ItemsRequest(items=put))
        service.hide_item(hidden)
        service.put_items(ItemsRequest(items=[{"item_id": "live1", "title": "Lantern"}]))
        items = service.catalog.current.items
        codes = {one: tuple(items.codes[items.known_rows([one])[0]]) for one in ("live0", "live2")}
        event = {"user_id": "anna", "item_id": "live0", "timestamp": "2026-11-20T08:00:00Z"}
        service.add_events({"events": [event]})
    parts = write_parts(
        tmp_path / "parts", "parquet", pq.read_table(files.items), random.Random(len(place))
    )
    config = RetrainConfig(
        items=str(parts),
        events=[str(files.events)],
        bundles_dir=str(tmp_path),
        runs=str(tmp_path / "runs"),
        served="bundle",
        store=store,
        journal=str(tmp_path / "items") if log is None else None,
        catalog_log=log,
    )
    run, served = Run.latest(tmp_path / "runs", config.digest), Bundle.open(bundle)
    found = retraining.collect(config, run, served)
    assert found["item_changes"] == 4 and found["exported"]["num_unknown"] == 0
    retraining.build(config, run, served, lambda _: None)
    new = Bundle.open(run.folder / "bundle").catalog()
    rows = {item: row for row, item in enumerate(new.items.ids)}
    assert {"live0", "live1", "live2", hidden} <= rows.keys()
    assert new.items.titles[rows["live1"]] == "Lantern"
    assert all(tuple(new.semantic_ids.codes[rows[one]]) == code for one, code in codes.items())
    assert "anna" in Bundle.open(run.folder / "bundle").events().user_ids


def test_what_ends_a_run_and_what_does_not(tmp_path, monkeypatch):
    """Wrong inputs and other settings begin a new run; a lost server or a kill goes on."""
    config = RetrainConfig(
        items="i", events=["e"], bundles_dir=str(tmp_path), runs=str(tmp_path / "runs"), served="b"
    )
    monkeypatch.setattr(Bundle, "open", staticmethod(lambda path: path))

    def end(error):
        def collect(*_):
            raise error

        monkeypatch.setattr(retraining, "collect", collect)
        with pytest.raises(type(error)):
            retrain.run_once(config, None, None)
        return Run.latest(tmp_path / "runs", config.digest).number

    assert end(OSError("the disk is full")) == 1
    assert end(ValueError("no such column")) == 2
    for _ in range(retraining.MAX_TRIES):
        assert end(RuntimeError("no memory")) == 2
    with pytest.raises(ValueError, match="10 processes"):
        retrain.run_once(config, None, None)
    assert end(OSError("the disk is full")) == 3
    config = msgspec.structs.replace(config, seed=1)
    assert end(OSError("the disk is full")) == 4
    record = json.loads((tmp_path / "runs" / "0003" / "run.json").read_text())
    assert record["outcome"] == retraining.GIVEN_UP


def test_the_link_leads_to_what_is_served(tmp_path):
    config = RetrainConfig(
        items="i", events=["e"], bundles_dir=str(tmp_path), runs="r", served="b", link="current"
    )
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        retraining.switch_link(config, name)
        assert (tmp_path / "current").resolve().name == name
    (tmp_path / "current").unlink()
    (tmp_path / "current").mkdir()
    with pytest.raises(ValueError, match="is no link"):
        retraining.switch_link(config, "first")


@pytest.mark.parametrize("seed", range(8))
def test_published_bundles_have_names_of_their_own_and_old_ones_go(tmp_path, seed):
    """Also if the runs were deleted, or a process was killed while it published or deleted."""
    draw = np.random.default_rng(seed)
    bundles, keep = tmp_path / "bundles", int(draw.integers(2, 5))
    config = RetrainConfig(
        items="i",
        events=["e"],
        bundles_dir=str(bundles),
        runs=str(tmp_path / "runs"),
        served="first",
        link="current",
        keep_bundles=None if seed == 0 else keep,
    )
    others = {"first", "retrained-by-hand", "retrained-12", "older.retrained-0001"}
    for name in others:
        (bundles / name).mkdir(parents=True)
    served, contents = "first", dict[str, str]()
    for number in range(12):
        if draw.random() < 0.2:
            shutil.rmtree(tmp_path / "runs")
        run = Run.latest(tmp_path / "runs", config.digest)
        run.note("served", served)
        (run.folder / "bundle").mkdir()
        (run.folder / "bundle" / "manifest.json").write_text(str(number))
        kill = draw.random()
        if kill < 0.2:  # before the folder has its name, or before the step is recorded
            retraining.publish(config, run)
        elif kill < 0.4 and seed:
            (bundles / f".retrained-{number:04}.old").mkdir()
        name = run.step("publish", partial(retraining.publish, config, run))["name"]
        assert name not in contents
        contents[name] = str(number)
        if draw.random() < 0.5:
            retraining.switch_link(config, name)
            served = name
        run.note("outcome", retrain.SERVED)
        retraining.delete_old_bundles(config, run)
        there = {path.name for path in bundles.iterdir() if not path.is_symlink()}
        needed = {served, run.record["served"], *list(contents)[-keep:]}
        assert others <= there and needed <= there
        if seed:
            assert len(there - others) <= keep + 3
        else:
            assert there == others | set(contents)
        for one in there - others:
            assert (bundles / one / "manifest.json").read_text() == contents[one]


def test_a_killed_run_goes_on_at_its_step(tmp_path, monkeypatch):
    """Each step is done once, however often the process ends in the middle of one."""
    config = RetrainConfig(
        items="i", events=["e"], bundles_dir=str(tmp_path), runs=str(tmp_path / "runs"), served="b"
    )
    monkeypatch.setattr(Bundle, "open", staticmethod(lambda path: path))
    done, kills = [], iter(range(100))

    def step(name, result):
        def do(*_):
            if next(kills) % 2 == 0:
                raise RuntimeError("killed")
            done.append(name)
            return result

        return do

    monkeypatch.setattr(retraining, "collect", step("collect", {}))
    monkeypatch.setattr(retraining, "build", step("build", {}))
    monkeypatch.setattr(retraining, "train", step("train", {"validation": {"ndcg@10": 0.5}}))
    monkeypatch.setattr(retraining, "judge", step("gate", {"faults": []}))
    monkeypatch.setattr(retraining, "publish", step("publish", {"name": "b-1"}))
    outcome = ""
    for _ in range(20):
        try:
            outcome = retrain.run_once(config, None, None)
            break
        except RuntimeError:
            continue
    assert outcome == retrain.READY
    assert done == ["collect", "build", "train", "gate", "publish"]
    record = json.loads((tmp_path / "runs" / "0001" / "run.json").read_text())
    assert record["outcome"] == retrain.READY
    assert "Retrain 1" in (tmp_path / "runs" / "0001" / "report.html").read_text()
    assert Run.latest(tmp_path / "runs", config.digest).number == 2
    with retrain.only_one(tmp_path / "runs"), pytest.raises(RuntimeError, match="another retrain"):
        retrain.run_once(config, None, None)
