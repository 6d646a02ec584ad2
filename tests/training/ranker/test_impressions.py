"""Impressions: what of a slate log becomes training data, and that it teaches what users want."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from benchmarks.rank.impressions import SMALL, FeedOptions, simulate, train
from recserve.cli.app import app
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.service.attribution import Signer
from recserve.training.options import TrainOptions
from recserve.training.ranker.impressions import Impressions, SlateSource
from recserve.training.ranker.ranking_data import RankingData

CPU = TrainOptions(device="cpu", precision="float32")
TINY = FeedOptions(num_users=30, num_items=60, num_slates=6, slate=5)
SIGNER = Signer(b"k" * 16)


def tables_of(feed):
    train = feed.log.leave_one_out().train
    return train, RankingTables.fit(train, feed.items, feed.vectors, 12, 8, 4)


@pytest.mark.parametrize(("users", "holdout"), [("id", None), ("hash", None), ("id", 5)])
def test_impressions_are_those_of_the_log_before_held_out_events(tmp_path, users, holdout):
    feed = simulate(TINY)
    feed = replace(feed, log=feed.log.holding_out(holdout))
    if users == "hash":
        for row in [*feed.slates, *feed.outcomes]:
            row["user"] = SIGNER.user(row["user"])
    source = SlateSource(feed.write(tmp_path), signer=SIGNER if users == "hash" else None)
    train, tables = tables_of(feed)
    found = Impressions.read(source, feed.log, feed.items, tables.settings)
    clicks = {(row["token_id"], row["item_id"]): row["time"] for row in feed.outcomes}
    expected = []
    for row in feed.slates:
        number = int(row["token_id"].partition("-")[0])
        held = np.inf
        if feed.log.holdout()[number]:
            held = feed.log.times[feed.log.offsets[number + 1] - 2]
        taken = [clicks.get((row["token_id"], item["item_id"])) for item in row["items"]]
        if max([row["time"], *(time for time in taken if time)]) < held:
            shown = [int(item["item_id"][1:]) for item in row["items"]]
            expected.append((number, row["time"], shown, [time is not None for time in taken]))
    owners = np.repeat(np.arange(feed.log.num_users), np.diff(found.offsets)).tolist()
    parts = list(zip(found.starts, found.starts[1:], strict=False))
    slates = [
        (owner, time, found.rows[a:b].tolist(), (found.labels[a:b, 0] > 0).tolist())
        for owner, time, (a, b) in zip(owners, found.times.tolist(), parts, strict=True)
    ]
    assert sorted(slates) == sorted(expected) and len(slates) > 50
    assert found.num_held_out == len(feed.slates) - len(slates)
    # An event that a slate led to is a candidate of that slate only.
    assert found.explained(train).sum() == found.labels[:, 0].sum()


def test_batches_hold_each_slate_at_its_time_and_leak_nothing(tmp_path):
    feed = simulate(TINY)
    train, tables = tables_of(feed)
    source = SlateSource(feed.write(tmp_path), unlooked_weight=0.25)
    found = Impressions.read(source, feed.log, feed.items, tables.settings)
    data = RankingData(train, tables, 0, 2, 5, 8, impressions=found, slates=99)
    shown = []
    for plan in data.plan(0):
        batch = data.batch(plan)
        ranks = batch.ranks.numpy()
        rows = batch.inputs.tokens.flatten()[batch.candidates].numpy()
        shown += rows[ranks > 0].tolist()
        assert (batch.weights.numpy()[ranks == 0] == 1).all()
        assert set(np.unique(batch.weights.numpy())) <= {0.25, 1.0}
        # A candidate sees no event that came after it was shown.
        limits = batch.limits.flatten()[batch.candidates].numpy()
        assert (limits <= batch.limits.shape[1]).all()
    assert sorted(shown) == sorted(found.rows.tolist())


def test_a_log_that_cannot_be_used_is_named(tmp_path):
    feed = simulate(TINY)
    _, tables = tables_of(feed)
    with pytest.raises(ValueError, match="expected the folder of a slate log"):
        Impressions.read(SlateSource(tmp_path / "none"), feed.log, feed.items, tables.settings)
    for row in feed.slates:
        row["user"] = SIGNER.user(row["user"])
    source = SlateSource(feed.write(tmp_path / "log"))
    with pytest.raises(ValueError, match="needs the signing_key"):
        Impressions.read(source, feed.log, feed.items, tables.settings)
    log = replace(feed.log, has_timestamps=False)
    with pytest.raises(ValueError, match="needs events with timestamps"):
        Impressions.read(source, log, feed.items, tables.settings)
    done = CliRunner().invoke(app, ["train", "ranker", "--bundle", "b", "--popularity-bias"])
    assert done.exit_code and "without --slate-log" in done.output


@pytest.mark.slow
def test_a_ranker_learns_more_from_impressions_than_from_sampled_items(tmp_path):
    feed = simulate(FeedOptions(120, 120, 12, promotion=3.0))
    recipe = replace(SMALL, batch_roots=16, schedule=replace(SMALL.schedule, epochs=10))
    slates = SlateSource(feed.write(tmp_path / "slates"))
    plain = train(feed, None, recipe, tmp_path / "plain", CPU)
    shown = train(feed, slates, recipe, tmp_path / "shown", CPU)
    assert shown["rank_correlation"] > plain["rank_correlation"] + 0.03


def test_a_run_on_impressions_saves_a_ranker_without_its_bias(tmp_path):
    feed = simulate(TINY)
    recipe = replace(SMALL, popularity_bias=True, schedule=replace(SMALL.schedule, epochs=1))
    source = SlateSource(feed.write(tmp_path / "slates"))
    found = train(feed, source, recipe, tmp_path / "shown", CPU)
    assert set(found) > {"ndcg10", "rank_correlation"}
    with safe_open(tmp_path / "shown" / "model.safetensors", "numpy") as file:
        names = list(file.keys())
    assert not any("by_rank" in name or "ranker" in name for name in names)
