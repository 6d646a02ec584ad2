"""Strategy `rpg`: the engine against a plain loop, and product ids from data to answer."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.core.allowed import AllowedItems
from recserve.core.request import LikelihoodQuery, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.evaluation import item_graph as training_graph
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.kernels.item_graph import ItemGraph, search
from recserve.kernels.trie.trie import build_trie
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.recommender import Recommender
from recserve.schemas.items import Candidate, InvalidRequest, RankRequest, RecommendRequest, UserRef
from recserve.search.strategies import rpg as draft_graph
from recserve.service import Service
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import CODES, PARALLEL, recipe_for, train_recommender
from recserve.training.schedule import Schedule
from tests.support.recommenders import prefix_of

FORMS = {
    "items-cosine": ("items", 0.1, False),
    "items-dot": ("items", 0.0, True),
    "codes-dot": ("codes", 0.0, True),
}
SMALL = EngineConfig(kv_bytes=2**20)


def make(form, items=80, sizes=(6, 5, 9)):
    """A drawn model of drawn ids, its trie and a graph of drawn edges."""
    kind, temperature, autoregressive = FORMS[form]
    g = torch.manual_seed(0)
    codes = torch.stack([torch.randint(0, c, (400,), generator=g) for c in sizes], 1)
    codes = torch.unique(codes, dim=0)[:items]
    config = RecommenderConfig(
        DecoderConfig(32, 2, 2, 1, 16, 48),
        sizes,
        kind,
        level_heads=True,
        level_temperature=temperature,
        autoregressive=autoregressive,
    )
    model = Recommender(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=g)
    model.bind_items(codes)
    near = torch.randint(0, len(codes), (len(codes), 4), generator=g).to(torch.int32)
    graph = ItemGraph(near, torch.arange(5, dtype=torch.int32))
    return model.eval(), build_trie(codes, sizes), graph


@torch.no_grad()
def plain_scores(model, prefix):
    """[I] mean over levels of a softmax over the level, item by item."""
    tokens = prefix.inputs.tokens[None]
    hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())[0, -1:]
    codes = model.item_tokens - torch.tensor(model.config.level_offsets)
    scores = []
    for item in codes.tolist():
        levels = [model.parallel_logits(hidden, n)[0].log_softmax(0) for n in range(len(item))]
        scores.append(np.mean([float(p[code]) for p, code in zip(levels, item, strict=True)]))
    return np.array(scores)


@pytest.mark.parametrize("form", FORMS)
def test_exhaustive_mode_equals_a_plain_loop(form):
    model, trie, _ = make(form)
    engine = build_engine(EngineModels(model), SMALL)
    for history in ([], [3], list(range(20))):
        prefix = prefix_of(model, history)
        expected = plain_scores(model, prefix)
        slate = engine.run(
            SlateQuery(prefix=prefix, trie=trie, k=200, beam_width=10, strategy="rpg")
        )
        np.testing.assert_allclose(slate.scores, -np.sort(-expected), atol=1e-5)
        np.testing.assert_allclose(expected[slate.rows], slate.scores, atol=1e-5)
        assert sorted(slate.rows.tolist()) == list(range(trie.num_items))
        assert not slate.exact and slate.rounds == 0 and slate.timing.nodes == 0


@pytest.mark.parametrize("form", FORMS)
def test_only_usable_items_and_k_of_them_whenever_k_exist(form):
    """Excluded rows, wide and narrow filters, with and without the graph, alone and together."""
    model, trie, graph = make(form)
    engine = build_engine(EngineModels(model), SMALL)
    rng = np.random.default_rng(0)
    requests = []
    for n, share in enumerate([None, 0.9, 0.5, 0.05]):
        allowed = share and AllowedItems.of(rng.random(trie.num_items) < share)
        excluded = rng.integers(0, trie.num_items, 30)
        prefix = prefix_of(model, [n, n + 1])
        for used in (None, graph):
            requests.append(
                SlateQuery(
                    prefix=prefix,
                    trie=trie,
                    k=60,
                    beam_width=60,
                    strategy="rpg",
                    excluded=excluded,
                    allowed=allowed,
                    graph=used,
                )
            )
    together = engine.run_many(requests)
    for request, slate in zip(requests, together, strict=True):
        usable = np.ones(trie.num_items, dtype=bool)
        usable[request.excluded] = False
        if request.allowed is not None:
            usable &= request.allowed.mask()
        assert usable[slate.rows].all() and len(set(slate.rows.tolist())) == len(slate.rows)
        assert len(slate.rows) == min(60, int(usable.sum()))
        alone = engine.run(request)
        np.testing.assert_array_equal(alone.rows, slate.rows)
        np.testing.assert_allclose(alone.scores, slate.scores, atol=1e-5)
        if request.graph is None or len(slate.rows) < 60:
            expected = np.where(usable, plain_scores(model, request.prefix), -np.inf)
            np.testing.assert_allclose(
                slate.scores, -np.sort(-expected)[: len(slate.rows)], atol=1e-5
            )


def test_a_graph_with_every_edge_answers_as_exhaustive_mode():
    model, trie, graph = make("items-cosine")
    near = torch.arange(trie.num_items, dtype=torch.int32).repeat(trie.num_items, 1)
    full = replace(graph, neighbours=near)
    engine = build_engine(EngineModels(model), SMALL)
    requests = [
        SlateQuery(
            prefix=prefix_of(model, h),
            trie=trie,
            k=10,
            beam_width=width,
            strategy="rpg",
            excluded=np.array(h),
            graph=used,
        )
        for h in ([1], [5, 6, 7])
        for width in (10, 30)
        for used in (None, full)
    ]
    slates = engine.run_many(requests)
    for exhaustive, walked in zip(slates[::2], slates[1::2], strict=True):
        np.testing.assert_array_equal(exhaustive.rows, walked.rows)
        np.testing.assert_array_equal(exhaustive.scores, walked.scores)


@pytest.mark.parametrize(("unknown", "walks"), [(0, True), (5, True), (6, False), (40, False)])
def test_a_graph_of_too_few_items_is_not_walked(unknown, walks, monkeypatch):
    """Of 80 items five are a sixteenth; where more are newer, slates are those without a graph."""
    model, trie, graph = make("items-cosine")
    known = 80 - unknown
    near = torch.where(graph.neighbours[:known] < known, graph.neighbours[:known], -1)
    walked = []

    def counted(*arguments):
        walked.append(arguments)
        return search(*arguments)

    monkeypatch.setattr(draft_graph, "search", counted)
    engine = build_engine(EngineModels(model), SMALL)
    slates = engine.run_many(
        [
            SlateQuery(
                prefix=prefix_of(model, [1, 2]),
                trie=trie,
                k=10,
                beam_width=10,
                strategy="rpg",
                graph=used,
            )
            for used in (None, ItemGraph(near, graph.entries))
        ]
    )
    assert bool(walked) == walks
    if not walks:
        np.testing.assert_array_equal(slates[0].rows, slates[1].rows)


def test_a_catalogue_of_one_item():
    model, trie, _ = make("items-cosine", items=1)
    graph = ItemGraph(torch.full((1, 1), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    engine = build_engine(EngineModels(model), SMALL)
    for used in (None, graph):
        request = SlateQuery(
            prefix=prefix_of(model, [0]), trie=trie, k=3, beam_width=3, strategy="rpg", graph=used
        )
        assert engine.run(request).rows.tolist() == [0]
        nothing = replace(request, excluded=np.array([0]))
        assert engine.run(nothing).rows.tolist() == []


def test_it_shares_a_batch_with_beam_search():
    model, trie, graph = make("items-dot")
    engine = build_engine(EngineModels(model), SMALL)
    requests = [
        SlateQuery(
            prefix=prefix_of(model, [n, 2 * n]),
            trie=trie,
            k=5,
            beam_width=10,
            strategy=name,
            graph=graph,
        )
        for n in range(3)
        for name in ("beam", "rpg")
    ]
    for request, slate in zip(requests, engine.run_many(requests), strict=True):
        alone = build_engine(EngineModels(model), SMALL).run(request)
        np.testing.assert_array_equal(alone.rows, slate.rows)
        assert slate.exact == (request.strategy == "beam")


def test_a_model_of_level_heads_alone_offers_what_it_learned():
    model, trie, _ = make("items-cosine")
    engine = build_engine(EngineModels(model), SMALL)
    assert engine.selectable == ("rpg",)
    prefix = prefix_of(model, [4, 9])
    with pytest.raises(ValueError, match=r"strategy is 'beam'; choose one of \('rpg',\)"):
        engine.run(SlateQuery(prefix=prefix, trie=trie, k=5, beam_width=5))
    rows = np.array([7, 0, 7, 79])
    requests = [LikelihoodQuery(prefix_of(model, h), trie, rows) for h in ([4, 9], [1])]
    for request, scores in zip(requests, engine.run_many(requests), strict=True):
        expected = plain_scores(model, request.prefix)[rows]
        np.testing.assert_allclose(scores.values[:, 0], expected, atol=1e-5)


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """A bundle of 16-level product ids from the demo's data, trained for a few seconds."""
    folder = tmp_path_factory.mktemp("product")
    files = write_synthetic(folder / "data", SyntheticOptions(500, 300, 12, seed=3))
    options = BuildOptions(
        files.items,
        files.events,
        folder / "bundle",
        quantizer="product",
        levels=16,
        codes=16,
        text_dim=24,
        collaborative_dim=24,
    )
    build_bundle(options, log=lambda _: None)
    bundle = Bundle.open(folder / "bundle")
    recipe = replace(
        PARALLEL,
        hidden_size=48,
        num_heads=2,
        num_layers=1,
        intermediate_size=64,
        dropout=0.1,
        schedule=Schedule(3, 1e-2),
        max_nodes=512,
        validation_users=100,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_graph, "MIN_ITEMS", 100)
        report = train_recommender(bundle, TrainOptions(device="cpu"), recipe, Console(quiet=True))
    return folder / "bundle", report


def test_product_ids_choose_the_recipe(product):
    bundle = Bundle.open(product[0])
    assert recipe_for(bundle, TrainOptions()) == PARALLEL
    assert recipe_for(bundle, TrainOptions(input="codes")) == CODES


def test_training_lowers_the_loss_and_beats_popularity(product):
    path, report = product
    losses = [record.losses["heads"] for record in report.history]
    assert losses[-1] < 0.8 * losses[0] and set(report.history[0].losses) == {"heads"}
    bundle = Bundle.open(path)
    bundle.verify()
    assert "recommender/item_graph.safetensors" in bundle.manifest.files
    found = {
        s: evaluate_bundle(bundle, EvaluationOptions(strategy=s, k=(10,))) for s in ("auto", "rpg")
    }
    assert found["auto"].strategy == "exhaustive"
    exhaustive, walked = (e.columns["kept"]["ndcg@10"] for e in found.values())
    assert walked > 0.9 * exhaustive
    events = bundle.events()
    popular = np.argsort(-bundle.catalog().popularity)[:10]
    last = events.item_rows[events.offsets[1:] - 1]
    assert found["auto"].columns["kept"]["recall@10"] > 1.5 * np.isin(last, popular).mean()


def test_the_service_answers_from_it(product, tmp_path):
    with Service.open(product[0], f"lmdb:{tmp_path}/history", "cpu") as service:
        assert service.catalog.current.graph is not None
        user = UserRef(id=service.samples(1, 1)["users"][0])
        answer = service.recommend(RecommendRequest(user=user, k=8, explain=True))
        assert answer.strategy == "rpg" and not answer.exact and answer.rounds == 0
        assert len(answer.items) == 8 and {item.source for item in answer.items} == {"model"}
        seen = {event.item_id for event in service.history(user.id).events}
        assert not seen & {item.item_id for item in answer.items}
        scores = [item.score for item in answer.items]
        assert scores == sorted(scores, reverse=True) and answer.explanation.nodes == 0
        candidates = [Candidate(item_id=item.item_id) for item in reversed(answer.items)]
        body = RankRequest(user=user, candidates=candidates, scorer="likelihood")
        ranked = service.rank(body)
        assert [item.item_id for item in ranked.items] == [item.item_id for item in answer.items]
        with pytest.raises(InvalidRequest, match="expected one of auto, rpg, .*, got 'beam'"):
            service.recommend(RecommendRequest(user=user, strategy="beam"))
        with pytest.raises(InvalidRequest, match="does not use it"):
            service.recommend(RecommendRequest(user=user, dense_weight=1.0))


def test_a_walk_begins_at_the_latest_items():
    """Histories shorter and longer than what is read, with items that have no row."""
    draw, most = np.random.default_rng(0), draft_graph.NUM_RECENT_ITEMS
    histories = [
        torch.from_numpy(draw.integers(0, 30, size)) for size in (1, most - 1, most, most + 1, 40)
    ]
    requests = [
        SimpleNamespace(prefix=SimpleNamespace(inputs=SimpleNamespace(tokens=tokens)))
        for tokens in histories
    ]
    rows = draft_graph.latest_items(requests, 20, 5)
    for found, tokens in zip(rows.tolist(), histories, strict=True):
        wanted = [token - 5 if 5 <= token < 25 else -1 for token in tokens.tolist()[-most:]]
        assert found == wanted + [-1] * (most - len(wanted))
    assert draft_graph.latest_items(requests, 20, None).shape == (5, 0)
