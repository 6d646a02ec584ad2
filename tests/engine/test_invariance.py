"""The invariant mode: equal bits alone and in company, and refused where they cannot be."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.request import LikelihoodQuery, Prefix, RankQuery, SlateQuery, TextScoreQuery
from recserve.engine import invariance
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.invariance import NotInvariant
from recserve.kernels.attention.exact import exact_attention
from recserve.models.inputs import NodeInputs
from recserve.models.packing import PackedLinear, packable
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import Candidate, RankRequest, RecommendRequest, UserRef
from recserve.search.strategy import Heads
from recserve.service import Service, ServiceOptions
from tests.support.draft_heads import make_head
from tests.support.invariant_texts import SIZES, long_sums, packed, report, text_queries
from tests.support.rankers import draw_rows, make_ranker, ranking_prefix
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.text_engines import assert_no_leak
from tests.support.text_plain import TableDrafter, drawn_model
from tests.support.tiny_bundle import shared_bundle

pytestmark = pytest.mark.skipif(
    not packable(torch.empty(1, 1)), reason="this torch has no oneDNN: nothing is ever packed"
)


def test_scores_of_texts_have_the_same_bits_in_one_step_and_in_many():
    model, draw = packed(long_sums()), np.random.default_rng(4)
    prefix = draw.integers(0, 40, 13)
    offsets = np.cumsum([0, *draw.integers(1, 40, 30)])
    request = TextScoreQuery(
        Prefix(NodeInputs(torch.from_numpy(prefix)), prefix),
        draw.integers(0, 40, offsets[-1]),
        offsets,
        (1, 2, 3),
    )
    found = []
    for step_tokens in (None, 7, 64):
        engine = build_engine(EngineModels(text=model), SIZES)
        engine.schedulers["text_scores"].step_tokens = step_tokens
        found.append(engine.run(request).values.tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "kernels,dtype",
    [
        ("torch", torch.float32),
        *(
            pytest.param(kernels, dtype, marks=pytest.mark.slow)
            for kernels, dtype in (
                ("auto", torch.bfloat16),
                ("auto", torch.float32),
                ("torch", torch.bfloat16),
            )
        ),
    ],
)
def test_a_text_has_the_same_bits_alone_together_drafted_cached_and_preempted(
    dtype, kernels, force_kernels
):
    force_kernels(kernels)
    if not packable(torch.empty(1, 1, dtype=dtype)):
        pytest.skip(f"this processor has no packed products of {dtype}")
    model = packed(long_sums(dtype))
    engine, alone = build_engine(EngineModels(text=model), SIZES), []
    for request in text_queries():
        engine.forget_all()
        alone += report(engine, [request])
    texts = {tuple(r.prompt.tolist()): t for r, (t, _) in zip(text_queries(), alone, strict=True)}
    for kind in ("tree", "mixed"):
        engine = build_engine(
            EngineModels(text=model, drafters={"t": TableDrafter(kind, texts)}), SIZES
        )
        assert report(engine, text_queries("t")) == alone, kind
        assert report(engine, text_queries("t")) == alone, f"{kind}, from the cache"
        assert_no_leak(engine)
    scheduler = engine.schedulers["text"]
    scheduler.limits = replace(scheduler.limits, prefill_tokens=7)
    assert report(engine, text_queries("t")) == alone, "in chunks"
    few = build_engine(
        EngineModels(text=model), replace(SIZES, kv_bytes=14 * 4 * 2 * 2 * 2 * 8 * dtype.itemsize)
    )
    assert few.schedulers["text"].kv.allocator.num_pages == 14
    assert report(few, text_queries()) == alone, "with so few pages that some are preempted"


def same_slates(left, right) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.rows.tolist() == other.rows.tolist()
        assert one.scores.tobytes() == other.scores.tobytes()


@pytest.mark.parametrize(
    "form,normalization,catalogue",
    [
        ("items", "children", "deep"),
        pytest.param("codes", "vocabulary", "ordinary", marks=pytest.mark.slow),
    ],
)
def test_a_slate_has_the_same_bits_alone_together_cached_and_drafted(
    catalogue, form, normalization
):
    """Beam widths and candidates of others, prefixes that grow by an event, and a drafter."""
    model, trie = make(CATALOGUES[catalogue], form, normalization)
    heads = Heads(prefixes=make_head(model, "drawn"))
    model.pack()
    weight = 1.0 if form == "items" else 0.0
    prefixes = [draw_prefix(model, events, seed) for seed, events in enumerate([23, 1, 40, 7])]

    def requests(strategy: str) -> list[SlateQuery]:
        return [
            SlateQuery(
                prefix=prefix,
                trie=trie,
                k=5,
                beam_width=6 + 5 * i,
                dense_weight=weight,
                strategy=strategy,
            )
            for i, prefix in enumerate(prefixes)
        ]

    one = build_engine(EngineModels(model, heads=heads), SIZES)

    def engine() -> Engine:
        one.forget_all()
        return one

    alone = [engine().run(request) for request in requests("beam")]
    same_slates(engine().run_many(requests("beam")), alone)
    cached = engine()
    for _ in range(2):
        same_slates(cached.run_many(requests("beam")[::-1]), alone[::-1])
    grown = engine()
    grown.run(replace(requests("beam")[0], prefix=draw_prefix(model, 19, 0)))
    again = grown.run(requests("beam")[0])
    assert again.timing.prefix_cached > 19
    same_slates([again], alone[:1])
    same_slates(engine().run_many(requests("speculative")), alone)
    rows = np.arange(min(40, len(CATALOGUES[catalogue])))
    wide = engine().run(LikelihoodQuery(prefixes[0], trie, rows))
    few = engine().run(LikelihoodQuery(prefixes[0], trie, rows[3:5]))
    assert wide.values[3:5].tobytes() == few.values.tobytes()


def test_the_mode_is_refused_where_it_does_not_hold(monkeypatch):
    plain = drawn_model(1)
    with pytest.raises(NotInvariant, match="not packed; call its method pack"):
        build_engine(EngineModels(text=plain), SIZES)
    honest = PackedLinear.forward

    def lonely(self, x):
        return honest(self, x) * (1 + 1e-6 * (x.shape[0] < 4))

    monkeypatch.setattr(PackedLinear, "forward", lonely)
    for threads, advice in ((1, "serve it without invariant here"), (2, "try threads 1")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with pytest.raises(
            NotInvariant,
            match=f"bits for 1 rows of a prefix with 0 other rows, with {threads} .*; {advice}$",
        ):
            build_engine(EngineModels(text=packed(long_sums())), SIZES)
    monkeypatch.undo()
    build_engine(EngineModels(text=packed(long_sums())), SIZES)

    def crowded(batch, heads, activation):
        attention = exact_attention(batch, heads, activation)
        return lambda *rows: attention(*rows) * (1 + 1e-6 * (len(batch.prefixes) > 1))

    monkeypatch.setattr(invariance, "exact_attention", crowded)
    with pytest.raises(NotInvariant, match="bits for 2 rows of a prefix with 1 other rows"):
        build_engine(EngineModels(text=packed(long_sums())), SIZES)


def test_strategies_that_are_not_covered_are_not_offered():
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    copied = copy.deepcopy(model)
    heads = Heads(prefixes=make_head(model, "drawn"), nezha=make_head(model, "drawn"))
    assert build_engine(
        EngineModels(copied, heads=heads), replace(SIZES, invariant=False)
    ).selectable == (
        "beam",
        "nezha",
        "speculative",
    )
    model.pack()
    engine = build_engine(EngineModels(model, heads=heads), SIZES)
    assert engine.selectable == ("beam", "speculative")
    with pytest.raises(ValueError, match="strategy is 'nezha'; choose one of"):
        engine.submit(
            SlateQuery(
                prefix=draw_prefix(model, 3, 0), trie=trie, k=5, beam_width=5, strategy="nezha"
            )
        )


def test_answers_of_a_service_have_the_same_bits_warm_and_cold(tmp_path):
    """Slates and likelihoods: the history in one go, and event by event with answers between; a
    candidate alone, and among forty. (What the ranker reads of the clock differs from call to
    call.)
    """

    def opened(name: str) -> Service:
        return Service.open(
            shared_bundle(),
            f"lmdb:{tmp_path}/{name}",
            "cpu",
            ServiceOptions(EngineConfig(invariant=True), journal=tmp_path),
        )

    def ask(service: Service, few: int) -> list[dict[str, float]]:
        user = UserRef(id="me")
        slate = service.recommend(RecommendRequest(user=user, k=20))
        candidates = [Candidate(item_id=i) for i in ids[20 : 20 + few]]
        ranked = service.rank(RankRequest(user=user, candidates=candidates, scorer="likelihood"))
        return [{i.item_id: i.score for i in answer.items} for answer in (slate, ranked)]

    with opened("cold") as cold, opened("warm") as warm:
        ids = cold.catalog.current.catalog.items.ids
        for item in ids[:11]:
            events = EventsRequest(events=[EventInput(user_id="me", item_id=item)])
            cold.add_events(events)
            warm.add_events(events)
            ask(warm, 3)
        expected = ask(cold, 40)
        assert ask(warm, 40) == expected
        for few, many in zip(ask(warm, 1), expected, strict=True):
            assert few.items() <= many.items()


def test_a_ranking_has_the_same_bits_alone_together_and_after_a_cached_prefix():
    """Prefixes that share their first rows, candidates with limits of their own and without."""
    ranker = make_ranker()
    ranker.pack()
    whole, candidates = ranking_prefix(1, 20, 12, 3), draw_rows(300, 3, 1)
    prefixes = [Prefix(whole.inputs.select(slice(n)), whole.keys[:n], 21) for n in (22, 26, 33)]
    limits = np.random.default_rng(0).integers(21, 23, 300)

    built = build_engine(EngineModels(ranker=ranker), replace(SIZES, page_size=8))

    def engine() -> Engine:
        built.forget_all()
        return built

    for chosen in (None, limits):
        requests = [RankQuery(prefix, candidates, chosen) for prefix in prefixes]
        alone = [engine().run(request).values for request in requests]
        grown = engine()
        for number, request in enumerate(requests):
            answer = grown.run(request)
            assert answer.values.tobytes() == alone[number].tobytes()
        assert answer.timing.prefix_cached >= 24
        for answer, expected in zip(engine().run_many(requests[::-1]), alone[::-1], strict=True):
            assert answer.values.tobytes() == expected.tobytes()
        for i in (0, 299):
            own = None if chosen is None else chosen[i : i + 1]
            one = RankQuery(prefixes[2], candidates.select(slice(i, i + 1)), own)
            assert engine().run(one).values[0].tobytes() == alone[2][i].tobytes()
