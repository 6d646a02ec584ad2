"""Engines over a pool in FP8: the same answers with any draft, cache and batch."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from recserve.config import ServerConfig
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.text_scheduler import TextScheduler
from recserve.engine.text_step_graph import TextStepGraphs, TextStepLimits
from recserve.kernels import backend
from recserve.kernels.cache.fp8 import FP8, Fp8, parts
from recserve.models.attention import DenseAttention
from recserve.models.packing import packable
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import Candidate, RankRequest, RecommendRequest, UserRef
from recserve.search.strategy import Heads
from recserve.server.loader import ServiceLoader
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support import device_worlds, invariant_texts, recorder, text_plain, triton_interpreter
from tests.support.device_worlds import assert_same, ranking, recommending, text_engine, texts
from tests.support.draft_heads import make_head
from tests.support.grids import chosen, covering, sampled
from tests.support.pretend_cuda import PretendCuda
from tests.support.recommenders import CATALOGUES, FORMS, draw_prefix, make
from tests.support.recorded_steps import SHAPES, Counted
from tests.support.text_engines import PARAMETERS, SPREAD, assert_no_leak, engine_for, prompts
from tests.support.text_plain import TableDrafter, drawn_model, plain
from tests.support.tiny_bundle import shared_bundle

SMALL = EngineConfig(kv_bytes=4 * 2**20, kv_dtype="fp8", load_aware=False)


class RoundedAttention(DenseAttention):
    """Attention of a whole text at once, to keys and values as a pool in FP8 gives them back."""

    def __call__(self, layer, query, key, value):
        return super().__call__(layer, query, Fp8.of(key).float(), Fp8.of(value).float())


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


@pytest.fixture(scope="module")
def expected(model):
    """Plain decoding, one full forward per token, no pool: tokens of a prompt with parameters."""

    @cache
    def tokens_of(name: str, number: int):
        fields = {"max_tokens": 12, "seed": 100 + number} | PARAMETERS[name]
        params = SamplingParams(**fields)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_plain, "DenseAttention", RoundedAttention)
            return params, plain(model, prompts(8)[number].tolist(), params)[0]

    return tokens_of


def test_rounded_keys_and_values_change_a_text(model, expected):
    changed = 0
    for number, prompt in enumerate(prompts(8)):
        params, tokens = expected("warm", number)
        changed += tokens != plain(model, prompt.tolist(), params)[0]
    assert changed


def queries_of(expected, name, drafter="none"):
    """Requests of 8 texts, every second with other parameters, and their tokens."""
    others, requests, wanted = list(PARAMETERS), [], []
    for number, prompt in enumerate(prompts(8)):
        other = others[(others.index(name) + number // 2) % len(others)] if number % 2 else name
        params, tokens = expected(other, number)
        requests.append(TextQuery(prompt, params, Speculation(drafter)))
        wanted.append(tokens)
    known = {tuple(r.prompt.tolist()): w for r, w in zip(requests, wanted, strict=True)}
    return requests, wanted, known


@pytest.mark.parametrize(
    "name,kind",
    sampled(
        SPREAD,
        ("none", "right", "tree", "mixed"),
        default=("everything-none", "everything-mixed"),
    ),
)
def test_texts_are_those_of_plain_decoding(name, kind, model, expected):
    """Alone and together, from an empty cache and a warm one, in prefills of three tokens."""
    requests, wanted, known = queries_of(expected, name, "table")
    table = {"table": TableDrafter(kind if kind != "none" else "mixed", known)}
    engine = engine_for(model, kv_dtype="fp8", drafters=table)
    if kind == "none":
        requests = [replace(r, speculation=Speculation()) for r in requests]
        scheduler = engine.schedulers["text"]
        scheduler.limits = replace(scheduler.limits, prefill_tokens=3)
    assert engine.run(requests[3]).tokens.tolist() == wanted[3]
    for _ in range(2):
        answers = engine.run_many(requests)
        assert [a.tokens.tolist() for a in answers] == wanted
    if kind == "right":
        assert sum(a.counts.num_accepted_tokens for a in answers) > 0
    assert_no_leak(engine)


@pytest.mark.parametrize(
    "record,name",
    covering({"replay": recorder.record, "anew": lambda step: step}, ("everything", "warm")),
)
def test_recorded_steps_write_the_same(name, record, model, expected):
    """Steps in fixed shapes over a pool whose unwritten slots hold large numbers."""
    requests, wanted, known = queries_of(expected, name, "table")
    engine = engine_for(model, kv_dtype="fp8", drafters={"table": TableDrafter("tree", known)})
    scheduler, counted = engine.schedulers["text"], Counted(record)
    with torch.inference_mode():
        limits = TextStepLimits(SHAPES[2:], seconds=float("inf"))
        graphs = TextStepGraphs(scheduler.runner, scheduler.kv, model, limits, counted)
        for stored in (scheduler.runner.pool.keys, scheduler.runner.pool.values):
            codes, exponents = parts(stored)
            codes.fill_(0x70), exponents.fill_(133)
    engine.schedulers["text"] = TextScheduler(
        scheduler.runner, model, scheduler.limits, graphs, kv=scheduler.kv
    )
    answers = [engine.run(requests[0]), *engine.run_many(requests)]
    assert [a.tokens.tolist() for a in answers] == [wanted[0], *wanted]
    assert counted.replays > 4


def test_as_many_more_tokens_fit_as_bytes_are_saved(model):
    sizes = {
        kv_dtype: engine_for(model, pages=200, kv_dtype=kv_dtype).token_capacity("text")
        for kv_dtype in (None, "fp8")
    }
    slot = 2 * 2 * 2  # keys and values, layers, heads; of 8 numbers each
    assert sizes[None] == 800
    assert sizes["fp8"] == 4 * (800 * slot * 8 * 4 // (4 * slot * 9))
    assert (
        engine_for(model, kv_dtype="fp8").schedulers["text"].runner.pool.shape.slot_bytes(FP8) == 72
    )


def test_another_type_is_refused(model):
    with pytest.raises(ValueError, match="kv_dtype is 'int8'; choose fp8, or None"):
        engine_for(model, kv_dtype="int8")


@pytest.mark.parametrize("catalogue,form", covering(("deep", "ordinary"), FORMS))
def test_slates_are_the_same_drafted_together_and_warm(catalogue, form):
    trained, trie = make(CATALOGUES[catalogue], *form)
    heads = Heads(make_head(trained, "from-target"))

    def slates(strategy, engine):
        requests = [
            SlateQuery(
                prefix=draw_prefix(trained, 1 + 9 * i, i),
                trie=trie,
                k=5,
                beam_width=12,
                strategy=strategy,
            )
            for i in range(4)
        ]
        return engine.run_many(requests), requests

    engine = build_engine(EngineModels(trained, heads=heads), SMALL)
    alone, requests = slates("beam", engine)
    others = [[build_engine(EngineModels(trained), SMALL).run(r) for r in requests]]
    others += [slates("beam", engine)[0], slates("speculative", engine)[0]]
    others.append(slates("speculative", build_engine(EngineModels(trained, heads=heads), SMALL))[0])
    for slate in others:
        for got, wanted in zip(slate, alone, strict=True):
            assert got.rows.tolist() == wanted.rows.tolist()
            np.testing.assert_allclose(got.scores, wanted.scores, atol=2e-5)
    floats = slates("beam", build_engine(EngineModels(trained), replace(SMALL, kv_dtype=None)))[0]
    differences = [abs(a.scores[0] - b.scores[0]) for a, b in zip(floats, alone, strict=True)]
    assert max(differences) > 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not packable(torch.empty(1, 1)), reason="this torch has no oneDNN")
def test_invariant_texts_have_the_same_bits():
    """Codes times a power of two lie on the grid that exact sums are made of."""
    model = invariant_texts.packed(invariant_texts.long_sums())
    sizes = replace(invariant_texts.SIZES, kv_dtype="fp8")
    requests, report = invariant_texts.text_queries(), invariant_texts.report
    alone = [
        report(build_engine(EngineModels(text=model), sizes), [request])[0] for request in requests
    ]
    known = {tuple(r.prompt.tolist()): t for r, (t, _) in zip(requests, alone, strict=True)}
    for kind in ("tree", "mixed"):
        engine = build_engine(
            EngineModels(text=model, drafters={"t": TableDrafter(kind, known)}), sizes
        )
        for _ in range(2):
            assert report(engine, invariant_texts.text_queries("t")) == alone, kind


def test_it_is_a_setting_of_the_server(tmp_path):
    """Both models of a bundle answer, a little otherwise, and have room for more."""

    def answered(kv_dtype):
        config = ServerConfig(
            bundle=shared_bundle(), store=f"lmdb:{tmp_path}/{kv_dtype}", journal=tmp_path,
            device="cpu", kv_dtype=kv_dtype, kv_bytes=2**24,
        )  # fmt: skip
        service = ServiceLoader(config).first()
        try:
            user, ids = UserRef(id="me"), service.catalog.current.catalog.items.ids
            events = [EventInput(user_id="me", item_id=item) for item in ids[50:61]]
            service.add_events(EventsRequest(events=events))
            candidates = [Candidate(item_id=item) for item in ids[:40]]
            slate = service.recommend(RecommendRequest(user=user, k=10))
            ranked = service.rank(RankRequest(user=user, candidates=candidates))
            capacities = [service.engine.token_capacity(name) for name in ("recommender", "ranker")]
            return (
                capacities,
                [i.score for i in slate.items],
                {i.item_id: i.score for i in ranked.items},
            )
        finally:
            service.close()

    (capacities, scores, ranks), (more, others, marks) = answered(None), answered("fp8")
    assert all(3 < b / a < 4 for a, b in zip(capacities, more, strict=True))
    assert scores != others and ranks != marks
    np.testing.assert_allclose(others, scores, atol=0.2)
    np.testing.assert_allclose([marks[item] for item in ranks], list(ranks.values()), atol=0.2)


@pytest.fixture
def rounding_worlds(monkeypatch, force_kernels):
    """Tiny engines of both devices over FP8, kernels interpreted; what was launched."""
    monkeypatch.setattr(device_worlds, "SMALL", replace(device_worlds.SMALL, kv_dtype="fp8"))
    monkeypatch.setattr(device_worlds, "EngineConfig", partial(EngineConfig, kv_dtype="fp8"))
    force_kernels("triton")
    return triton_interpreter.interpret_pretended(monkeypatch)


@pytest.mark.parametrize("work", chosen(("beam", "rank", "text"), "text"))
def test_kernels_answer_as_a_cpu_does(work, rounding_worlds):
    """On a pretended CUDA device."""

    def answers(device):
        if work == "text":
            return text_engine(device).run_many(texts("none", "sample", "hot", count=1, most=4))
        world = ranking(device) if work == "rank" else recommending(device)
        return world.engine.run_many(world.ask() if work == "rank" else world.ask("beam"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "FORCED", "torch")
        wanted = answers("cpu")
    with PretendCuda():
        assert_same(answers("cuda"), wanted)
    assert rounding_worlds["_attend"] > 2
