"""The dense retriever learns: its data and loss against plain loops, outcomes that it obeys."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.features.tables.events import EventLog
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig
from recserve.models.recommender import Recommender, save_recommender
from recserve.schemas.items import RecommendRequest
from recserve.service import Service
from recserve.training.item_drafters.draft_head import train_drafter
from recserve.training.options import TrainOptions
from recserve.training.recommender.futures import Futures
from recserve.training.recommender.retriever import (
    Negatives,
    RetrieverRecipe,
    retrieval_loss,
    train_retriever,
)
from recserve.training.schedule import Schedule
from tests.support.tiny_bundle import shared_bundle, tiny_bundle

QUIET = Console(quiet=True)
CODES = torch.unique(torch.randint(0, 5, (60, 3), generator=torch.manual_seed(2)), dim=0)


def draw_log(timestamps: bool) -> EventLog:
    """Eight users with 0 to 14 events, three types."""
    draw = np.random.default_rng(4)
    lengths = np.array([3, 0, 14, 1, 2, 9, 5, 11])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = draw.integers(0, len(CODES), offsets[-1]).astype(np.int32)
    times = np.concatenate([np.sort(draw.integers(0, 10**11, n)) for n in lengths])
    if not timestamps:
        times = np.concatenate([np.arange(n) for n in lengths])
    types = draw.integers(0, 3, offsets[-1]).astype(np.int16)
    names = [f"u{n}" for n in range(8)]
    values = np.ones(offsets[-1], np.float32)
    return EventLog(names, offsets, rows, times, types, ("a", "b", "c"), values, timestamps)


def draw_model(form: str) -> Recommender:
    torch.manual_seed(0)
    sizes = tuple(int(c) + 1 for c in CODES.max(0).values)
    config = RecommenderConfig(
        DecoderConfig(16, 1, 2, 2, 8, 24), sizes, form, num_items=len(CODES), max_history_items=6
    )
    model = Recommender(config)
    model.bind_items(CODES)
    return model.eval()


def plain_groups(futures: Futures, pieces) -> dict:
    """(history, events seen, outcome, offset) -> item rows, by loops."""
    log, found = futures.events, {}
    for number, piece in enumerate(pieces):
        events = range(futures.starts[piece], futures.ends[piece])
        for seen in range(1, len(events)):
            for step, event in enumerate(events[seen : seen + futures.horizon]):
                gap = step + 1
                if futures.unit == "seconds":
                    gap = (log.times[event] - log.times[events[seen - 1]]) / 1e6
                offset = max(k for k, bound in enumerate(futures.bounds) if gap >= bound)
                key = (number, seen, int(log.types[event]), offset)
                found.setdefault(key, []).append(int(log.item_rows[event]))
    return found


@pytest.mark.parametrize("form", ["items", "codes"])
@pytest.mark.parametrize("timestamps", [False, True], ids=["events", "seconds"])
def test_futures_equal_plain_loops(form, timestamps):
    model = draw_model(form)
    futures = Futures(draw_log(timestamps), CODES.numpy(), model.config, horizon=5)
    assert futures.unit == ("seconds" if timestamps else "events")
    assert (futures.ends - futures.starts).max() == 7  # the window and its last target
    pieces = np.random.default_rng(1).permutation(len(futures.starts))
    batch = futures.batch(pieces)
    assert batch.state_nodes.shape[0] == (futures.ends - futures.starts - 1).sum()
    width = CODES.shape[1] if form == "codes" else 1
    owner, node = np.divmod(batch.state_nodes.numpy(), batch.tokens.shape[1])
    found = {}
    columns = (batch.group_states, batch.outcomes, batch.offsets)
    for group, (state, outcome, offset) in enumerate(zip(*columns, strict=True)):
        rows = batch.target_rows[batch.target_groups == group].tolist()
        found[int(owner[state]), int(node[state]) // width, int(outcome), int(offset)] = rows
        inside = batch.futures[state]
        assert set(rows) <= set(inside[inside >= 0].tolist())
    assert found == plain_groups(futures, pieces.tolist())
    assert abs(sum(futures.next_shares) - 1) < 1e-9 and abs(sum(futures.window_shares) - 1) < 1e-9
    if not timestamps:
        assert futures.next_shares == (1, 0, 0)


def test_loss_equals_a_plain_loop():
    model = draw_model("items")
    futures = Futures(draw_log(False), CODES.numpy(), model.config, horizon=4)
    batch = futures.batch(np.arange(len(futures.starts)))
    config = RetrieverConfig(
        16, 8, ("a", "b", "c"), (0.5, 0.3, 0.2), "events", futures.bounds, (0.4, 0.3, 0.3)
    )
    retriever = DenseRetriever(config)
    for weight in retriever.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3)
    states = torch.randn(batch.state_nodes.shape[0], 16)
    rows = torch.randint(0, len(CODES), (40,)).sort().values
    negatives = Negatives(rows, torch.randn(40))
    loss = retrieval_loss(retriever, model, states, batch, negatives)
    losses = []
    with torch.no_grad():
        scale = float(retriever.scale)
        for group, state in enumerate(batch.group_states.tolist()):
            query = retriever.queries(states[state], batch.outcomes[group], batch.offsets[group])

            def score(row, query=query):
                item = retriever.items(model.embed_items(torch.tensor(row)))
                return scale * float(query @ item)

            window = set(batch.futures[state].tolist())
            others = sum(
                np.exp(score(row) - expected)
                for row, expected in zip(
                    rows.tolist(), negatives.log_expected.tolist(), strict=True
                )
                if row not in window
            )
            mine = batch.target_rows[batch.target_groups == group].tolist()
            each = [-score(r) + np.log(np.exp(score(r)) + others) for r in mine]
            losses.append(min(each))
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-4)


REPINNED, CLICKED = range(0, 40), range(300, 340)


def two_outcomes(folder) -> Bundle:
    """Users who repin what is among the first 40 items and click what is among 40 others."""
    catalog = Bundle.open(shared_bundle()).catalog()
    draw = np.random.default_rng(0)
    events = []
    for user in range(60):
        repins, clicks = draw.permutation(REPINNED), draw.permutation(CLICKED)
        for place in range(14):
            kind = "repin" if draw.random() < 0.4 else "click"
            row = (repins if kind == "repin" else clicks)[place]
            item_id = catalog.items.ids[row]
            event = {"user_id": f"u{user}", "item_id": item_id, "position": place, "type": kind}
            events.append(event)
    folder.mkdir(exist_ok=True)
    pq.write_table(catalog.items.to_arrow(), folder / "items.parquet")
    pq.write_table(pa.Table.from_pylist(events), folder / "events.parquet")
    out = folder / "bundle"
    options = BuildOptions(
        folder / "items.parquet",
        folder / "events.parquet",
        out,
        levels=2,
        codes=16,
        text_dim=16,
        collaborative_dim=0,
    )
    build_bundle(options, log=lambda _: None)
    bundle = Bundle.open(out)
    torch.manual_seed(5)
    catalog = bundle.catalog()
    config = RecommenderConfig(
        DecoderConfig(32, 1, 2, 1, 16, 64),
        catalog.semantic_ids.codebook_sizes,
        num_items=len(catalog),
        vector_dim=catalog.vectors.shape[1],
        max_history_items=16,
    )
    save_recommender(Recommender(config), bundle.directory("recommender"))
    bundle.commit("recommender", {})
    return bundle


def test_training_learns_outcomes_and_leaves_beam_alone(tmp_path):
    bundle = two_outcomes(tmp_path / "data")
    store = f"lmdb:{tmp_path}/store"
    body = RecommendRequest(history=Bundle.open(bundle.root).catalog().items.ids[:5], k=10)
    with Service.open(bundle.root, store, "cpu") as service:
        assert service.engine.selectable == ("beam",)
        before, version = service.recommend(body), service.versions()["model_version"]
    recipe = RetrieverRecipe(
        drawn=128,
        in_batch=128,
        max_nodes=96,
        validation_users=10,
        schedule=Schedule(15, 1e-2, averaging=0.9),
    )
    report = train_retriever(bundle, TrainOptions(device="cpu"), recipe, QUIET)
    losses = [record.losses["retrieval"] for record in report.history]
    assert losses[-1] < 0.97 * losses[0]
    opened = Bundle.open(bundle.root)
    opened.verify()
    section = opened.manifest.sections["retriever"]
    assert set(section["look_ahead"]) == {"0", "0.25", "0.5", "1"}
    config = json.loads((bundle.root / "retriever" / "config.json").read_text())
    mix = dict(zip(config["outcomes"], config["outcome_shares"], strict=True))
    assert mix == {"click": pytest.approx(0.6, abs=0.06), "repin": pytest.approx(0.4, abs=0.06)}
    ids = opened.catalog().items.ids

    def shares_of(answer):
        rows = {ids.index(item.item_id) for item in answer.items}
        return np.array([len(rows & set(REPINNED)), len(rows & set(CLICKED))]) / 10

    with Service.open(bundle.root, store, "cpu") as service:
        after = service.recommend(body)
        assert [i.item_id for i in after.items] == [i.item_id for i in before.items]
        assert [i.score for i in after.items] == [i.score for i in before.items]
        assert service.versions()["model_version"] != version
        shares = {}
        for mix in ({"repin": 2.0}, {"click": 1.0}, {"repin": 3.0, "click": 3.0}):
            histories = [[ids[n], ids[300 + n], ids[20 + n // 2]] for n in range(0, 40, 4)]
            bodies = [RecommendRequest(history=h, k=10, outcome=mix) for h in histories]
            answers = [service.recommend(body) for body in bodies]
            assert {answer.strategy for answer in answers} == {"dense"}
            shares["+".join(mix)] = np.mean([shares_of(answer) for answer in answers], axis=0)
    assert shares["repin"][0] > 0.8 and shares["click"][1] > 0.8
    assert min(shares["repin+click"]) > 0.35
    found = evaluate_bundle(opened, EvaluationOptions(strategy="dense", k=(5,), users=20, width=10))
    assert found.strategy == "dense" and found.users == 20


def test_heads_of_another_recommender_are_left_out(tmp_path, caplog):
    prefix = tmp_path / "bundle"
    shutil.copytree(shared_bundle(), prefix)
    bundle = Bundle.open(prefix)
    recipe = RetrieverRecipe(drawn=64, in_batch=64, validation_users=5, schedule=Schedule(1, 1e-3))
    train_retriever(bundle, TrainOptions(device="cpu"), recipe, QUIET)
    train_drafter(bundle, TrainOptions(device="cpu", epochs=1, name="nezha"), console=QUIET)
    with Service.open(prefix, f"lmdb:{tmp_path}/store", "cpu") as service:
        assert {"dense", "nezha"} <= set(service.engine.selectable)
        assert service.models()[0]["recserve"]["outcomes"]
    shutil.copytree(
        tiny_bundle(tmp_path / "other", ranker=False) / "recommender",
        prefix / "recommender",
        dirs_exist_ok=True,
    )
    path = prefix / "recommender" / "model.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-3] ^= 1
    path.write_bytes(changed)
    bundle.commit("recommender", {})
    with Service.open(prefix, f"lmdb:{tmp_path}/store", "cpu") as service:
        assert not {"dense", "nezha"} & set(service.engine.selectable)
    for section in ("retriever", "drafters/nezha"):
        assert f"{section} belongs to another recommender" in caplog.text
    with pytest.raises(BundleError, match="no retriever for this recommender"):
        evaluate_bundle(bundle, EvaluationOptions(strategy="dense", k=(5,), width=10))


def test_a_bundle_without_a_recommender_is_refused(tmp_path):
    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False, recommender=False))
    with pytest.raises(BundleError, match="no recommender"):
        train_retriever(bundle, TrainOptions(device="cpu"))
