"""The audit card: figures recomputed by hand, groups, and a retraining on the past only."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.evaluation.intervals import difference_interval, mean_interval
from recserve.evaluation.untrained import UNTRAINED
from recserve.features.tables import mapped_arrays
from recserve.training.baselines import BaselineComparison, compare_with_baselines
from recserve.training.card import Card, make_card
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import ITEMS, recorded_recipe, train_recommender
from recserve.training.recommender.sasrec import PLAIN, train_sasrec
from recserve.training.schedule import Schedule
from recserve.training.time_split import past_bundle, split_by_time

QUIET = Console(quiet=True)
CPU = TrainOptions(device="cpu", precision="float32")
RECIPE = replace(
    ITEMS,
    hidden_size=32,
    num_heads=2,
    num_layers=1,
    intermediate_size=64,
    schedule=Schedule(1, 1e-2, rates=(("tokens.", 2.0),)),
    max_nodes=256,
)
OPTIONS = EvaluationOptions(strategy="beam", k=(1, 10), width=20)


def build(folder: Path) -> Bundle:
    """120 items, some never bought; 90 users with 1 to 14 events within 60 days."""
    noise = np.random.default_rng(0)
    ids = [f"i{row:03}" for row in range(120)]
    titles = [f"word{row // 10} item{row % 10}" for row in range(120)]
    pq.write_table(pa.table({"item_id": ids, "title": titles}), folder / "items.parquet")
    popular = 1 / np.arange(3, 123)
    popular[100:] = 0
    users, items, times = [], [], []
    for user in range(90):
        size = int(noise.integers(1, 15)) if user % 3 else 2
        users += [f"u{user:02}"] * size
        items += noise.choice(ids, size, p=popular / popular.sum()).tolist()
        times += np.sort(1_600_000_000 + noise.integers(0, 60 * 86_400, size)).tolist()
    table = {"user_id": users, "item_id": items, "timestamp": pa.array(times, pa.timestamp("s"))}
    pq.write_table(pa.table(table), folder / "events.parquet")
    options = BuildOptions(
        *(folder / name for name in ("items.parquet", "events.parquet", "bundle")),
        levels=3,
        codes=4,
        text_dim=16,
        collaborative_dim=8,
    )
    build_bundle(options, log=lambda line: None)
    return Bundle.open(options.out)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A shop with timestamps, a small recommender and a small SASRec."""
    opened = build(tmp_path_factory.mktemp("shop"))
    train_recommender(opened, CPU, RECIPE, QUIET)
    train_sasrec(opened, CPU, replace(PLAIN, hidden_size=16, schedule=Schedule(1, 1e-2)), QUIET)
    return opened


@pytest.fixture(scope="module")
def compared(bundle: Bundle) -> BaselineComparison:
    return compare_with_baselines(bundle, OPTIONS)


@pytest.fixture(scope="module")
def card(bundle: Bundle, compared: BaselineComparison) -> Card:
    return make_card(bundle, compared)


def test_blocks_of_users_give_the_same_card(
    bundle: Bundle, compared: BaselineComparison, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slates of many users lie on disk and are measured in blocks, with the same figures."""
    monkeypatch.setattr(mapped_arrays, "BLOCK_ROWS", 7)
    monkeypatch.setattr(mapped_arrays, "IN_MEMORY_BYTES", 100)
    again = compare_with_baselines(bundle, OPTIONS)
    assert all(isinstance(made.base, np.memmap) for made in again.model.slates.values())
    assert make_card(bundle, again).to_dict() | {"seconds": card.seconds} == card.to_dict()
    pairs = zip(
        [again.model, *again.baselines.values()],
        [compared.model, *compared.baselines.values()],
        strict=True,
    )
    for one, two in pairs:
        assert one.to_dict() | {"seconds": two.seconds} == two.to_dict()


def gains(compared: BaselineComparison, label: str, column: str) -> np.ndarray:
    """[n] NDCG@10 of each user, item by item."""
    found = ({compared.label: compared.model} | compared.baselines)[label]
    values = []
    for slate, held in zip(found.slates[column], compared.data.cases.held, strict=True):
        place = slate.tolist().index(held) if held in slate else None
        values.append(0.0 if place is None else 1 / math.log2(place + 2))
    return np.array(values)


def test_every_figure_is_that_of_its_users(compared: BaselineComparison, card: Card) -> None:
    """NDCG, leads, groups and coverage of each row, from the slates one by one."""
    assert card.model == "recommender, beam"
    baselines = {each.label for each in UNTRAINED.values()} | {"sasrec, ids"}
    assert set(card.rows) == {card.model} | baselines and not card.omitted
    cases = compared.data.cases
    history = np.array([len(cases.history(case)) for case in range(len(cases))])
    counts = np.bincount(compared.data.training.train.item_rows, minlength=120)
    order = sorted(range(120), key=lambda row: (-counts[row], row))
    parts: dict[int, str] = {}
    before = 0
    for row in order:
        part = min(2, 3 * before // counts.sum()) if counts[row] else 2
        parts[row] = ("head", "torso", "tail")[part]
        before += counts[row]
    masks = {"cold users": history <= 5, "warm users": history > 5}
    for part in ("head", "torso", "tail"):
        masks[f"{part} items"] = np.array([parts[row] == part for row in cases.held.tolist()])
    assert {name: group.users for name, group in card.groups.items()} == {
        name: mask.sum() for name, mask in masks.items()
    }
    assert sum(mask.any() for mask in masks.values()) >= 4  # the data fill the groups
    for column in ("kept", "filtered"):
        ours = gains(compared, card.model, column)
        for label, columns in card.rows.items():
            found, values = columns[column], gains(compared, label, column)
            figure = found.metrics["ndcg@10"]
            assert figure.value == pytest.approx(values.mean())
            assert (figure.low, figure.high) == pytest.approx(mean_interval(values))
            if label == card.model:
                assert not found.model_ahead
            else:
                lead = found.model_ahead["ndcg@10"]
                assert lead.value == pytest.approx((ours - values).mean())
                expected = difference_interval(ours - values)
                assert (lead.low, lead.high) == pytest.approx(expected)
            for name, mask in masks.items():
                if mask.any():
                    part = found.groups[name]["ndcg@10"]
                    assert part.value == pytest.approx(values[mask].mean())
                    assert part.low <= part.value <= part.high
                else:
                    assert not found.groups[name]
            slates = ({card.model: compared.model} | compared.baselines)[label].slates[column]
            assert found.coverage.value == len({*slates.ravel().tolist()} - {-1}) / 120


def test_collisions_are_counted(bundle: Bundle, card: Card) -> None:
    codes = [tuple(row) for row in bundle.catalog().semantic_ids.codes[:, :3].tolist()]
    shared = [codes.count(code) > 1 for code in codes]
    assert 0 < card.collisions.items < 1  # 64 tuples for 120 items
    assert card.collisions.items == pytest.approx(np.mean(shared))
    assert card.collisions.largest == max(map(codes.count, codes))
    assert card.collisions.items == pytest.approx(bundle.manifest.build["collision_share"])


def test_the_past_ends_at_one_time(bundle: Bundle) -> None:
    """Each user's later events are gone, but the first; users with one earlier event keep none."""
    events = bundle.events()
    past, at, split = split_by_time(events)
    assert split.past_events == int((events.times < at).sum())
    assert 0.85 < split.past_events / events.num_events <= 0.9
    held, short = 0, 0
    for user in range(events.num_users):
        before, after = (
            [*zip(log.item_rows[part].tolist(), log.times[part].tolist(), strict=True)]
            for log in (events, past)
            for part in [slice(log.offsets[user], log.offsets[user + 1])]
        )
        early = [event for event in before if event[1] < at]
        late = [event for event in before if event[1] >= at]
        keeps = len(early) >= 2 and bool(late)
        assert after == early + late[:keeps]
        held += keeps
        short += len(early) == 1 and bool(late)
    assert held == split.users > 0 and short > 0
    flat = replace(events, times=np.zeros_like(events.times))
    with pytest.raises(ValueError, match="no user has two events before"):
        split_by_time(flat)
    with pytest.raises(ValueError, match="a time split needs timestamps"):
        split_by_time(replace(events, has_timestamps=False))


def test_the_retrained_model_knows_the_past_only(bundle: Bundle) -> None:
    before = sorted((file, file.stat().st_mtime_ns) for file in bundle.root.rglob("*"))
    events = bundle.events()
    _, at, split = split_by_time(events)
    with past_bundle(bundle, OPTIONS, console=QUIET) as (past, options, found):
        assert (found.at, found.users, found.epochs) == (split.at, split.users, 1)
        past.verify()
        assert recorded_recipe(past) == recorded_recipe(bundle) == RECIPE
        assert past.manifest.build["collaborative_dim"] == 8
        assert past.catalog().items.ids == bundle.catalog().items.ids
        train = past.events().leave_one_out().train
        assert train.times.max() < at
        np.testing.assert_array_equal(past.catalog().popularity, train.popularity(120))
        measured = evaluate_bundle(past, options)
        assert measured.users == split.users
        compared = compare_with_baselines(
            past, options, replace(PLAIN, hidden_size=16, schedule=Schedule(1, 1e-2)), QUIET
        )
        cases = compared.data.cases
        assert (compared.data.events.times[cases.stops] >= at).all()
        assert (compared.data.events.times[cases.stops - 1] < at).all()
        card = make_card(past, compared, found)
        assert f"Time split at {split.at}" in card.to_markdown()
        root = past.root
    assert not root.exists()
    assert sorted((file, file.stat().st_mtime_ns) for file in bundle.root.rglob("*")) == before


def test_a_time_split_refuses(bundle: Bundle, tmp_path: Path) -> None:
    for options, message in (
        (replace(OPTIONS, split="valid"), "split is 'valid'"),
        (replace(OPTIONS, strategy="sasrec"), "strategy is 'sasrec'"),
    ):
        with pytest.raises(ValueError, match=message), past_bundle(bundle, options):
            pass
    with (
        pytest.raises(BundleError, match="no recommender was trained"),
        past_bundle(build(tmp_path), OPTIONS),
    ):
        pass
