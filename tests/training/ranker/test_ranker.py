"""Training of the ranker: its batches leak nothing, and it learns what simple features cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.core.request import Prefix, RankQuery, Scores
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.evaluation.accuracy import auc
from recserve.features.ranking.event_features import HOUR, EventColumns
from recserve.features.ranking.ranking import candidate_columns, dense_names, prefix_columns
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables import mapped_arrays
from recserve.features.tables.event_table import read_events
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable, read_items
from recserve.features.vectors.vectors import collaborative_vectors, fit_text_encoder
from recserve.models.ranker import load_ranker, node_inputs
from recserve.training.options import TrainOptions
from recserve.training.ranker.ranker import (
    RankerRecipe,
    RankerSource,
    RankerTrainee,
    fit_dense_columns,
    fit_ranker,
    make_ranker,
    train_ranker,
)
from recserve.training.ranker.ranking_batch import RankingBatch
from recserve.training.ranker.ranking_data import (
    HeldOut,
    NegativeSampler,
    RankingData,
    cross_fitted_vectors,
    held_batches,
)
from recserve.training.ranker.ranking_quality import (
    attend_within,
    conversion_words,
    ranking_quality,
)
from recserve.training.schedule import Schedule
from tests.support.paths import DATA

TOPICS, PER_TOPIC = 6, 20
NUM_ITEMS = TOPICS * PER_TOPIC
SMALL = RankerRecipe(
    hidden_size=16,
    num_layers=1,
    long_items=12,
    recent_items=8,
    block=4,
    batch_roots=32,
    schedule=Schedule(epochs=6, learning_rate=1e-2, weight_decay=0.01, averaging=0.9),
)
CPU = TrainOptions(device="cpu", precision="float32")


def topic_items(count: int = NUM_ITEMS) -> ItemTable:
    ids = [f"i{n}" for n in range(count)]
    return ItemTable(ids, ids, [[] for _ in ids], pa.table({}))


def topic_log(users: int = 300, seed: int = 0) -> EventLog:
    """Each user stays in two topics; an event is a conversion (value 5) in even topics only."""
    noise = np.random.default_rng(seed)
    rows, lengths = [], []
    for _ in range(users):
        topics = noise.permutation(TOPICS)[:2]
        length = int(noise.integers(5, 25))
        rows.append(noise.choice(topics, length) * PER_TOPIC + noise.integers(0, PER_TOPIC, length))
        lengths.append(length)
    flat = np.concatenate(rows).astype(np.int32)
    return EventLog(
        [f"u{n}" for n in range(users)],
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        flat,
        np.cumsum(noise.integers(0, 3, flat.size) * HOUR).astype(np.int64),
        np.zeros(flat.size, dtype=np.int16),
        ("event",),
        np.where(flat // PER_TOPIC % 2 == 0, 5, 1).astype(np.float32),
        True,
    )


def noise_vectors() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((NUM_ITEMS, 8)).astype(np.float32)


def make_data(log: EventLog, seed: int = 0) -> RankingData:
    train = log.leave_one_out().train
    tables = RankingTables.fit(train, topic_items(), noise_vectors(), 12, 8, 4)
    return RankingData(train, tables, seed, negatives=3, positives=5, batch_roots=16)


def test_ranker_learns_topics_and_which_of_them_convert(tmp_path) -> None:
    log = topic_log()
    report = fit_ranker(RankerSource(log, topic_items(), noise_vectors()), tmp_path, CPU, SMALL)
    assert report.best_epoch >= 1
    tables = RankingTables.load(tmp_path, topic_items(), noise_vectors())
    model = load_ranker(tmp_path, noise_vectors())
    users = np.arange(log.num_users)
    quality = ranking_quality(model, tables, log, users, HeldOut(1))
    assert quality.metrics["click_gauc"] > 0.75
    assert quality.metrics["conversion_auc"] > 0.8
    assert quality.baselines["popularity"] < 0.6 and quality.baselines["vectors"] < 0.6
    events = EventColumns.of(log, 0)
    prefix = prefix_columns(tables, events)
    batch = next(held_batches(log, tables, users[:32], NegativeSampler(log, tables), HeldOut(1)))
    with torch.no_grad():
        logits = score(model, batch)
    rows = batch.inputs.tokens.flatten()[batch.candidates] // PER_TOPIC
    gap = logits[:, 1] - logits[:, 0]
    assert gap[rows % 2 == 0].mean() > gap[rows % 2 == 1].mean() + 1
    assert len(prefix) > 1


def score(model, batch: RankingBatch) -> torch.Tensor:
    hidden = model(model.embed(batch.inputs), batch.inputs.groups, attend_within(model, batch))
    return model.heads(hidden.flatten(0, 1)[batch.candidates])


def test_training_batch_leaks_nothing() -> None:
    log = topic_log(120)
    data = make_data(log)
    owned = [
        set(rows.tolist()) for rows in np.split(data.train.item_rows, data.train.offsets[1:-1])
    ]
    seen = 0
    for plan in data.plan(0)[:6]:
        batch = data.batch(plan)
        tokens, groups = batch.inputs.tokens.numpy(), batch.inputs.groups.numpy()
        width = tokens.shape[1]
        rows, places = np.divmod(batch.candidates.numpy(), width)
        limits, labels = batch.limits.numpy(), batch.labels.numpy()
        for row, place, label in zip(rows, places, labels, strict=True):
            window = plan.windows[row]
            part = EventColumns.of(data.train, window.user).slice(window.start, window.stop)
            visible = part.slice(0, int(limits[row, place]) - 1)
            assert groups[row, place] == 3
            if label[0] == 0:
                assert tokens[row, place] not in owned[window.user] and label[1] == 0
                continue
            seen += 1
            late = part.rows[len(visible) :]
            assert tokens[row, place] in late
            at = len(visible) + int(np.flatnonzero(late == tokens[row, place])[0])
            assert len(visible) < window.split - window.start or (
                len(visible) == window.split - window.start or visible.times[-1] < part.times[at]
            )
            assert label[1] == (part.values[at] == 5)
        prefix_limits = limits[:, : places.min()]
        assert (prefix_limits[groups[:, : places.min()] == 3].size) == 0
    assert seen > 100


def test_cross_fitted_vectors_do_not_know_the_positives() -> None:
    """Events drawn at random have nothing to learn: AUC of a similarity must be 0.5 (+- 0.03).

    Vectors fitted on the very events say more than 0.8 to their own users.
    """
    log, noise = topic_log(), np.random.default_rng(9)
    drawn = [noise.permutation(1500)[:length] for length in log.lengths()]
    log = replace(log, item_rows=np.concatenate(drawn).astype(np.int32))
    vectors = collaborative_vectors(log, 1500, 32, 0)
    folds = cross_fitted_vectors(vectors, log, 32, 1.0, 0)
    tables = RankingTables.fit(log, topic_items(1500), vectors, 12, 8, 4)
    at = dense_names(tables.settings).index("similarity_last")

    def area(fold_vectors: list[np.ndarray]) -> float:
        data = RankingData(log, tables, 0, positives=8, fold_vectors=fold_vectors)
        batches = [data.batch(plan) for plan in data.plan(0)]
        labels = torch.cat([b.labels[:, 0] for b in batches])
        values = torch.cat([b.inputs.dense[..., at].flatten()[b.candidates] for b in batches])
        return auc(labels, values)

    assert area([]) > 0.8
    assert area(folds) == pytest.approx(0.5, abs=0.03)
    assert cross_fitted_vectors(vectors, log, 0, 1.0, 0) == []


@pytest.mark.parametrize("seed", range(12))
def test_windows_and_pairs_are_those_of_plain_loops(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For users of any length, none included, and in blocks of any size."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, int(draw.choice([3, 40, 400])), 30)
    count, block = int(lengths.sum()), int(draw.choice([1, 4, 16]))
    recent, long = block * int(draw.integers(1, 9)), int(draw.integers(0, 100))
    log = EventLog(
        user_ids=[str(user) for user in range(30)],
        offsets=np.append(0, np.cumsum(lengths)),
        item_rows=draw.integers(0, NUM_ITEMS, count).astype(np.int32),
        times=np.arange(count),
        types=np.zeros(count, np.int16),
        type_names=("event",),
        values=np.ones(count, np.float32),
        has_timestamps=True,
    )
    monkeypatch.setattr(mapped_arrays, "BLOCK_ROWS", int(draw.integers(1, 200)))
    tables = RankingTables.fit(log, topic_items(), noise_vectors(), long, recent, block)
    data = RankingData(log, tables, seed)
    noise = np.random.default_rng((seed, 0))
    expected = []
    for user, length in enumerate(lengths.tolist()):
        shift = int(noise.integers(0, recent // block)) * block
        splits = [0, *range(shift or recent, length, recent)]
        for split, stop in zip(splits, [*splits[1:], length], strict=True):
            if stop > split:
                expected.append((user, max(0, split - long), split, stop))
    windows = [window for plan in data.plan(0) for window in plan.windows]
    assert sorted((w.user, w.start, w.split, w.stop) for w in windows) == expected
    pairs = np.unique(log.user_indices() * NUM_ITEMS + log.item_rows)
    assert np.array_equal(data.sampler.had, pairs)


def test_batches_hold_one_fold_and_all_users() -> None:
    log = topic_log(90)
    train = log.leave_one_out().train
    tables = RankingTables.fit(train, topic_items(), noise_vectors(), 12, 8, 4)
    data = RankingData(train, tables, 0, batch_roots=16, fold_vectors=[noise_vectors()] * 4)
    plans = data.plan(0)
    assert all({w.user % 4 for w in plan.windows} == {plan.fold} for plan in plans)
    assert {w.user for plan in plans for w in plan.windows} == set(range(90))


def test_every_event_is_a_target_when_there_is_room() -> None:
    log = topic_log(40)
    data = make_data(log)
    data.positives = 8
    count = sum(int(data.batch(plan).labels[:, 0].sum()) for plan in data.plan(3))
    assert count == data.train.num_events


def test_an_event_and_its_sampled_items_weigh_as_much_as_the_event() -> None:
    log = topic_log(40)
    data, plain = make_data(weighted(log)), make_data(log)
    model = make_ranker(data.tables, noise_vectors(), SMALL, seed=0).eval()
    mean = float(data.train.weights.mean())
    trainee = RankerTrainee(model, data, log, np.arange(4), 0.5)
    for plan in data.plan(0):
        batch = data.batch(plan)
        assert torch.equal(batch.labels, plain.batch(plan).labels)
        rows = batch.inputs.tokens.flatten()[batch.candidates].reshape(-1, 4)
        by_hand = (1 + rows[:, :1] % 3).expand(-1, 4).flatten() / mean
        torch.testing.assert_close(batch.weights, by_hand.float())
        with torch.no_grad():
            logits = score(model, batch)
            each = (
                torch.nn.functional.softplus(logits) - logits * batch.labels[:, : logits.shape[1]]
            )
            expected = (each * by_hand[:, None]).sum() / len(by_hand)
            assert trainee.loss(plan).total.item() == pytest.approx(expected.item(), rel=1e-4)


def weighted(log: EventLog) -> EventLog:
    """The log with weights that follow from the items."""
    return replace(log, weights=(1 + log.item_rows % 3).astype(np.float32))


def test_plans_and_batches_repeat_exactly() -> None:
    log = topic_log(80)
    one, two, other = make_data(log), make_data(log), make_data(log, seed=1)

    def windows(data: RankingData, epoch: int) -> list[object]:
        return [(plan.windows, plan.fold) for plan in data.plan(epoch)]

    assert windows(one, 2) == windows(two, 2) != windows(one, 1)
    assert windows(other, 2) != windows(one, 2)
    plan = one.plan(2)[1]
    first, second = one.batch(plan), two.batch(plan)
    assert torch.equal(first.inputs.tokens, second.inputs.tokens)
    assert torch.equal(first.inputs.dense, second.inputs.dense)


def test_prefix_scores_the_same_in_any_batch() -> None:
    """Padding and neighbours change nothing: 1e-5 in fp32."""
    log = topic_log(60)
    data = make_data(log)
    model = make_ranker(data.tables, noise_vectors(), SMALL, seed=0).eval()
    fit_dense_columns(model, data)
    users = np.arange(12)

    def scores(size: int) -> torch.Tensor:
        sampler = NegativeSampler(log, data.tables)
        found = held_batches(
            log, data.tables, users, sampler, HeldOut(1, negatives=0), batch_roots=size
        )
        with torch.no_grad():
            return torch.cat([score(model, batch) for batch in found])

    torch.testing.assert_close(scores(12), scores(1), atol=1e-5, rtol=0)


def test_engine_scores_what_training_scores_and_a_new_event_costs_one_row() -> None:
    log = topic_log(60)
    data = make_data(log)
    model = make_ranker(data.tables, noise_vectors(), SMALL, seed=0).eval()
    fit_dense_columns(model, data)
    user = int(np.argmax(log.lengths() % 4 == 1))  # two events before the window slides
    sampler = NegativeSampler(log, data.tables)
    users, held = np.array([user]), 2
    batch = next(held_batches(log, data.tables, users, sampler, HeldOut(held, negatives=200)))
    with torch.no_grad():
        expected = score(model, batch).numpy()
    events, tables = EventColumns.of(log, user), data.tables
    rows = batch.inputs.tokens.flatten()[batch.candidates].numpy()

    def ask(engine: Engine, stop: int) -> Scores:
        prefix = prefix_columns(tables, events.slice(0, stop))
        found = candidate_columns(tables, prefix, rows, np.full(rows.size, events.times[stop]))
        inputs = node_inputs(prefix.columns.arrays())
        answer = engine.run(
            RankQuery(
                Prefix(inputs, prefix.keys, prefix.shared),
                node_inputs(found.columns.arrays()),
                found.prefix_limits,
            )
        )
        assert isinstance(answer, Scores)
        return answer

    engine = build_engine(EngineModels(ranker=model), EngineConfig(page_size=1))
    engine.start()
    try:
        first, second = ask(engine, len(events) - held), ask(engine, len(events) - held + 1)
    finally:
        engine.close()
    np.testing.assert_allclose(first.values, expected, atol=1e-5)
    assert first.timing.prefix_cached == 0 and second.timing.prefix_computed == 1


def test_held_batch_has_the_columns_of_serving() -> None:
    log = topic_log(20)
    data = make_data(log)
    sampler = NegativeSampler(log, data.tables)
    batch = next(held_batches(log, data.tables, np.array([7]), sampler, HeldOut(1, negatives=9)))
    events = EventColumns.of(log, 7)
    prefix = prefix_columns(data.tables, events.slice(0, len(events) - 1))
    n = len(prefix)
    assert np.array_equal(batch.inputs.dense[0, :n], prefix.columns.dense)
    rows = batch.inputs.tokens[0, n:].numpy()
    moment = np.full(10, events.times[-1])
    expected = candidate_columns(data.tables, prefix, rows, moment)
    assert np.array_equal(batch.inputs.dense[0, n:], expected.columns.dense)
    assert batch.limits[0, n:].tolist() == expected.prefix_limits.tolist()
    assert rows[0] == events.rows[-1] and not set(rows[1:]) & set(events.rows)


def test_sampler_mixes_popular_and_uniform() -> None:
    """Half uniform, half by popularity: 40,000 draws, share of one item with 60 % of all events."""
    rows = np.where(np.arange(1000) % 5 < 3, 0, np.arange(1000) % NUM_ITEMS).astype(np.int32)
    log = replace(
        topic_log(1),
        user_ids=["a", "b"],
        offsets=np.array([0, 1000, 1000]),
        item_rows=rows,
        times=np.arange(1000),
        types=np.zeros(1000, np.int16),
        values=np.ones(1000, np.float32),
    )
    tables = RankingTables.fit(log, topic_items(), noise_vectors())
    drawn = NegativeSampler(log, tables).draw(np.ones(40_000, int), 1, np.random.default_rng(0))
    weights = np.bincount(rows, minlength=NUM_ITEMS) ** 0.75
    expected = 0.5 * weights[0] / weights.sum() + 0.5 / NUM_ITEMS
    assert (drawn == 0).mean() == pytest.approx(expected, abs=0.01)


def test_ignored_columns_are_named_and_silent() -> None:
    data = make_data(topic_log(40))
    model = make_ranker(data.tables, noise_vectors(), SMALL, seed=0).eval()
    fit_dense_columns(model, data, ["log_count"])
    at = dense_names(data.tables.settings).index("log_count")
    inputs = data.batch(data.plan(0)[0]).inputs
    changed = inputs.dense.clone()
    changed[..., at] += 3
    with torch.no_grad():
        assert torch.equal(model.embed(inputs), model.embed(replace(inputs, dense=changed)))
    with pytest.raises(ValueError, match=r"unknown dense columns \['colour'\]"):
        fit_dense_columns(model, data, ["colour"])


def test_bundle_gets_a_ranker_that_can_be_evaluated(tmp_path) -> None:
    log, items = topic_log(120), topic_items()
    pq.write_table(items.to_arrow(), tmp_path / "items.parquet")
    pq.write_table(log.to_arrow(items.ids), tmp_path / "events.parquet")
    build_bundle(
        BuildOptions(
            items=tmp_path / "items.parquet",
            events=tmp_path / "events.parquet",
            out=tmp_path / "bundle",
            levels=2,
            codes=8,
            text_dim=8,
            collaborative_dim=4,
            on_bad_rows="skip",
        ),
        log=lambda line: None,
    )
    bundle = Bundle.open(tmp_path / "bundle")
    report = train_ranker(bundle, replace(CPU, epochs=1), SMALL)
    opened = Bundle.open(tmp_path / "bundle")
    opened.verify()
    assert opened.has("ranker")
    section = opened.manifest.sections["ranker"]
    assert section["validation"] == report.metrics
    assert section["conversion"] == "events with a value of 5 or more"
    catalog, folder = opened.catalog(), opened.directory("ranker")
    tables = RankingTables.load(folder, catalog.items, catalog.vectors)
    model, users = load_ranker(folder, catalog.vectors), np.arange(50)
    quality = ranking_quality(model, tables, opened.events(), users, HeldOut(1))
    assert quality.users == 50 and 0 < quality.metrics["click_gauc"] < 1


def test_events_without_types_or_values_convert_with_every_click() -> None:
    log = topic_log(40)
    plain = replace(log, values=np.ones(log.num_events, np.float32))
    data = make_data(plain)
    labels = data.batch(data.plan(0)[0]).labels
    assert torch.equal(labels[:, 0], labels[:, 1])
    assert conversion_words(data.tables.settings).startswith("every click")
    # There is nothing that a second task could learn.
    ranker = make_ranker(data.tables, data.tables.vectors, RankerRecipe(), 0)
    assert ranker.config.tasks == ("click",)


def test_users_with_too_few_events_are_refused(tmp_path) -> None:
    log = topic_log(1)
    short = replace(
        log,
        offsets=np.array([0, 2]),
        item_rows=log.item_rows[:2],
        times=log.times[:2],
        types=log.types[:2],
        values=log.values[:2],
    )
    with pytest.raises(ValueError, match="at least three per user"):
        fit_ranker(RankerSource(short, topic_items(), noise_vectors()), tmp_path, CPU, SMALL)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason=f"the development data is not at {DATA}")
def test_movielens_beats_popularity_and_vectors(tmp_path) -> None:
    """One short epoch on real ratings and timestamps, 610 users."""
    folder = DATA / "movielens-small"
    table = pq.read_table(folder / "events.parquet")
    names = ["value" if name == "rating" else name for name in table.column_names]
    pq.write_table(table.rename_columns(names), tmp_path / "events.parquet")
    items, _ = read_items(folder / "items.parquet")
    log, _ = read_events(tmp_path / "events.parquet", items, "skip")
    vectors = fit_text_encoder(items, 32, 0).encode(items)
    recipe = replace(
        RankerRecipe(hidden_size=32, num_layers=1, long_items=32, recent_items=32, block=16),
        schedule=Schedule(epochs=1, learning_rate=4e-3, averaging=0.9),
    )
    fit_ranker(RankerSource(log, items, vectors), tmp_path, CPU, recipe)
    tables = RankingTables.load(tmp_path, items, vectors)
    assert tables.settings.conversion_value == 4.0
    users = np.flatnonzero(log.leave_one_out().test_rows >= 0)
    model = load_ranker(tmp_path, vectors)
    quality = ranking_quality(model, tables, log, users, HeldOut(1, popular_share=1.0))
    assert quality.metrics["click_gauc"] > max(quality.baselines.values()) + 0.02
