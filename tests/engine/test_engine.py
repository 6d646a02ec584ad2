"""The engine against plain paths: full forwards without cache, tree, pages or company."""

import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.errors import DeadlineExceeded, QueueFull
from recserve.core.request import LikelihoodQuery, Prefix, PrefixKeys, RankQuery, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.scheduler import RequestTooLarge
from recserve.kernels.trie.trie import Trie
from recserve.models.attention import DenseAttention, DenseSiluAttention
from recserve.models.inputs import NodeInputs
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead
from recserve.models.ranker import Ranker
from recserve.models.recommender import Recommender
from recserve.search.strategy import Heads
from tests.support.grids import covering
from tests.support.rankers import draw_rows, make_ranker, ranking_prefix
from tests.support.recommenders import CATALOGUES, FORMS, draw_prefix, make

SMALL = EngineConfig(kv_bytes=4 * 2**20)


def engine_of(recommender=None, ranker=None, config=SMALL):
    return build_engine(EngineModels(recommender, ranker=ranker), config)


@torch.inference_mode()
def all_scores(model: Recommender, trie: Trie, prefix: Prefix) -> torch.Tensor:
    """Plain path: every item by one causal forward of prefix and codes, in a loop."""
    item_tokens = model.item_tokens
    scores = torch.empty(len(item_tokens))
    n = len(prefix.inputs)
    children: dict[tuple[int, ...], set[int]] = {}
    codes = item_tokens - torch.tensor(model.config.level_offsets)
    for row in codes.tolist():
        for level in range(len(row)):
            children.setdefault(tuple(row[:level]), set()).add(row[level])
    for item, tokens in enumerate(item_tokens):
        sequence = torch.cat([prefix.inputs.tokens, tokens[:-1]])[None]
        positions = torch.arange(sequence.shape[1])[None]
        hidden = model(sequence, positions, DenseAttention())[0, n - 1 :]
        total, row = 0.0, codes[item].tolist()
        for level, code in enumerate(row):
            if model.config.normalization == "vocabulary":
                logits = model.full_logits(hidden[level : level + 1])[0].double()
                total += logits.log_softmax(0)[tokens[level]].item()
            else:
                valid = sorted(children[tuple(row[:level])])
                logits = model.level_logits(hidden[level : level + 1], level)[0, valid].double()
                total += logits.log_softmax(0)[valid.index(code)].item()
        scores[item] = total
    return scores


@pytest.mark.parametrize("codes,form", covering(CATALOGUES, FORMS))
def test_wide_beam_equals_exhaustive_scoring(codes, form):
    """A beam as wide as the catalogue prunes nothing: ids, order and scores of a plain loop."""
    form, normalization = form
    model, trie = make(codes, form, normalization)
    engine = engine_of(model)
    for seed, events in enumerate([0, 1, 23]):
        prefix = draw_prefix(model, events, seed)
        expected = all_scores(model, trie, prefix)
        slate = engine.run(
            SlateQuery(prefix=prefix, trie=trie, k=len(codes), beam_width=2 * len(codes))
        )
        order = torch.argsort(expected, descending=True, stable=True)
        assert slate.rows.tolist() == order.tolist()
        np.testing.assert_allclose(slate.scores, expected[order], rtol=1e-4, atol=1e-4)
        rows = np.random.default_rng(0).permutation(len(codes))
        scores = engine.run(LikelihoodQuery(prefix, trie, rows)).values[:, 0]
        np.testing.assert_allclose(scores, expected[rows], rtol=1e-4, atol=1e-4)


def plain_beam(model, trie, prefix, width, excluded=()):
    """Plain path: beam search in Python dictionaries over exhaustive path scores."""
    codes = (model.item_tokens - torch.tensor(model.config.level_offsets)).tolist()
    allowed = [tuple(c) for row, c in enumerate(codes) if row not in set(excluded)]
    n = len(prefix.inputs)
    beams = {(): 0.0}
    for level in range(trie.num_levels):
        grown = {}
        for path, score in beams.items():
            tokens = [model.config.level_offsets[i] + c for i, c in enumerate(path)]
            sequence = torch.cat([prefix.inputs.tokens, torch.tensor(tokens).long()])[None]
            positions = torch.arange(sequence.shape[1])[None]
            hidden = model(sequence, positions, DenseAttention())[0, n - 1 + level][None]
            valid = sorted({tuple(c)[level] for c in codes if tuple(c)[:level] == path})
            open_ = {c[level] for c in allowed if c[:level] == path}
            if model.config.normalization == "vocabulary":
                logits = model.full_logits(hidden)[0].log_softmax(0)
                gains = {c: logits[model.config.level_offsets[level] + c].item() for c in valid}
            else:
                logits = model.level_logits(hidden, level)[0, valid].log_softmax(0)
                gains = dict(zip(valid, logits.tolist(), strict=True))
            grown |= {(*path, c): score + gains[c] for c in valid if c in open_}
        beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
    rows = {tuple(c): row for row, c in enumerate(codes)}
    return [(rows[path], score) for path, score in beams.items()]


@torch.inference_mode()
@pytest.mark.parametrize("form,normalization", FORMS)
def test_narrow_beam_equals_a_plain_beam_search(form, normalization):
    model, trie = make(CATALOGUES["ordinary"], form, normalization)
    engine = engine_of(model)
    for width, seed in product((1, 3, 10), range(4)):
        prefix = draw_prefix(model, 5 + seed, seed)
        excluded = np.random.default_rng(seed).integers(0, trie.num_items, 30)
        slate = engine.run(
            SlateQuery(prefix=prefix, trie=trie, k=width, beam_width=width, excluded=excluded)
        )
        expected = plain_beam(model, trie, prefix, width, excluded.tolist())
        assert slate.rows.tolist() == [row for row, _ in expected]
        np.testing.assert_allclose(slate.scores, [s for _, s in expected], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form,normalization", FORMS)
def test_filters_leave_no_beam_dead(form, normalization):
    """k valid items whenever k exist, whatever the filter, and the best ones at full width."""
    codes = CATALOGUES["ordinary"]
    model, trie = make(codes, form, normalization)
    engine = engine_of(model)
    prefix = draw_prefix(model, 4, 0)
    scores = all_scores(model, trie, prefix)
    rng = np.random.default_rng(0)
    for keep in (1, 3, 40):
        kept = rng.permutation(len(codes))[:keep]
        allowed = np.zeros(len(codes), dtype=bool)
        allowed[kept] = True
        items = AllowedItems.of(allowed)
        bitmap = engine.run(
            SlateQuery(prefix=prefix, trie=trie, k=10, beam_width=200, allowed=items)
        )
        listed = engine.run(
            SlateQuery(
                prefix=prefix, trie=trie, k=10, beam_width=200, excluded=np.flatnonzero(~allowed)
            )
        )
        best = kept[np.argsort(-scores[kept].numpy(), kind="stable")][:10]
        assert bitmap.rows.tolist() == listed.rows.tolist() == best.tolist()
        narrow = engine.run(SlateQuery(prefix=prefix, trie=trie, k=3, beam_width=3, allowed=items))
        assert len(narrow.rows) == min(3, keep) and allowed[narrow.rows].all()
        both = engine.run(
            SlateQuery(
                prefix=prefix, trie=trie, k=10, beam_width=200, excluded=best[:1], allowed=items
            )
        )
        rest = kept[np.argsort(-scores[kept].numpy(), kind="stable")][1:11]
        assert both.rows.tolist() == rest.tolist()


def test_dense_reranking_adds_the_weighted_log_softmax():
    codes = CATALOGUES["ordinary"]
    model, trie = make(codes, "items", "children")
    engine = engine_of(model)
    prefix = draw_prefix(model, 6, 3)
    plain = engine.run(SlateQuery(prefix=prefix, trie=trie, k=len(codes), beam_width=200))
    mixed = engine.run(
        SlateQuery(prefix=prefix, trie=trie, k=len(codes), beam_width=200, dense_weight=0.7)
    )
    with torch.inference_mode():
        tokens = prefix.inputs.tokens[None]
        hidden = model(tokens, torch.arange(tokens.shape[1])[None], DenseAttention())[:, -1]
        dense = model.dense_scores(hidden)[0].numpy()
    by_row = dict(zip(plain.rows.tolist(), plain.scores.tolist(), strict=True))
    expected = [by_row[r] + 0.7 * dense[r] for r in mixed.rows.tolist()]
    np.testing.assert_allclose(mixed.scores, expected, rtol=1e-4, atol=1e-4)
    assert (np.diff(mixed.scores) <= 0).all() and mixed.rows.tolist() != plain.rows.tolist()


@pytest.mark.parametrize("form,normalization", FORMS)
def test_company_order_and_cache_do_not_change_an_answer(form, normalization):
    """Alone, packed with 20 others of other widths, again from the cache, and after new events."""
    model, trie = make(CATALOGUES["ordinary"], form, normalization)
    requests = [
        SlateQuery(
            prefix=draw_prefix(model, 1 + 3 * i, i), trie=trie, k=2 + i % 5, beam_width=3 + i
        )
        for i in range(20)
    ]
    alone = [engine_of(model).run(r) for r in requests]
    engine = engine_of(model)
    packed = engine.run_many(requests)
    again = engine.run_many(requests[::-1])[::-1]
    for first, second, third in zip(alone, packed, again, strict=True):
        assert first.rows.tolist() == second.rows.tolist() == third.rows.tolist()
        np.testing.assert_allclose(second.scores, first.scores, atol=1e-5)
        np.testing.assert_allclose(third.scores, first.scores, atol=1e-5)
        assert third.timing.prefix_computed == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_returning_user_costs_only_new_events(page_size):
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = engine_of(model, config=EngineConfig(page_size=page_size))
    prefix = draw_prefix(model, 40, 0)
    for events in (10, 11, 27, 40):
        part = Prefix(NodeInputs(prefix.inputs.tokens[: events + 1]), prefix.keys[: events + 1])
        request = SlateQuery(prefix=part, trie=trie, k=5, beam_width=10)
        before = {10: 0, 11: 11, 27: 12, 40: 28}[events]
        slate, fresh = engine.run(request), engine_of(model).run(request)
        assert slate.timing.prefix_cached == before
        assert slate.rows.tolist() == fresh.rows.tolist()
        np.testing.assert_allclose(slate.scores, fresh.scores, atol=1e-5)
    engine.forget(PrefixKeys(prefix.keys))
    assert (
        engine.run(SlateQuery(prefix=prefix, trie=trie, k=5, beam_width=10)).timing.prefix_cached
        == 0
    )


def test_pages_in_equal_pages_out_under_pressure():
    """A pool too small for all prefixes evicts, never leaks, and never changes an answer."""
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    slot = 2 * 2 * 2 * 8 * 4
    engine = engine_of(model, config=EngineConfig(page_size=4, kv_bytes=slot * 4 * 70))
    requests = [
        SlateQuery(prefix=draw_prefix(model, 3 + i // 3 % 11, i // 3), trie=trie, k=3, beam_width=6)
        for i in range(120)
    ]
    answers = engine.run_many(requests)
    alone = [engine_of(model).run(request).rows.tolist() for request in requests[::3]]
    for number, answer in enumerate(answers):  # three requests share a prefix
        assert answer.rows.tolist() == alone[number // 3]
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.pages_cached > 0 and stats.prefix_hit_tokens > 0


def test_too_large_full_late_and_cancelled():
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    slot = 2 * 2 * 2 * 8 * 4
    engine = engine_of(model, config=EngineConfig(page_size=4, kv_bytes=slot * 4 * 30, max_queue=2))
    prefix = draw_prefix(model, 5, 0)
    with pytest.raises(RequestTooLarge, match="pages"):
        engine.submit(SlateQuery(prefix=prefix, trie=trie, k=120, beam_width=120))
    late = engine.submit(
        SlateQuery(prefix=prefix, trie=trie, k=3, beam_width=3, deadline_s=time.monotonic() - 1)
    )
    gone = engine.submit(SlateQuery(prefix=prefix, trie=trie, k=3, beam_width=3))
    with pytest.raises(QueueFull) as refused:
        engine.submit(SlateQuery(prefix=prefix, trie=trie, k=3, beam_width=3))
    assert refused.value.retry_after_s > 0
    gone.cancel()
    while engine.step():
        pass
    with pytest.raises(DeadlineExceeded):
        late.result(0)
    assert gone.cancelled() and engine.stats().pages_free == engine.stats().pages_total
    with pytest.raises(ValueError, match="no ranker"):
        engine.submit(RankQuery(prefix, prefix.inputs))


def test_a_bad_request_does_not_hurt_its_neighbours():
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    engine = engine_of(model)
    prefix = draw_prefix(model, 5, 0)
    good = SlateQuery(prefix=prefix, trie=trie, k=3, beam_width=3)
    bad = SlateQuery(
        prefix=draw_prefix(model, 6, 1), trie=trie, k=3, beam_width=3, excluded=np.array([10**6])
    )
    futures = [engine.submit(r) for r in (good, bad, good)]
    while engine.step():
        pass
    assert futures[0].result(0).rows.tolist() == futures[2].result(0).rows.tolist()
    with pytest.raises(ValueError, match="excluded rows"):
        futures[1].result(0)
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_thread_answers_and_closes():
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    engine = engine_of(model)
    engine.start()
    requests = [
        SlateQuery(prefix=draw_prefix(model, 5, i), trie=trie, k=3, beam_width=5) for i in range(30)
    ]
    futures = [engine.submit(r) for r in requests]
    answers = [f.result(30) for f in futures]
    assert engine.alive
    engine.close()
    assert not engine.alive
    alone = engine_of(model)
    for answer, request in zip(answers, requests, strict=True):
        assert answer.rows.tolist() == alone.run(request).rows.tolist()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(requests[0])


@torch.inference_mode()
def plain_ranking(ranker: Ranker, prefix: Prefix, candidates: NodeInputs, limits) -> np.ndarray:
    """One forward with a dense mask written from the rules of MTGR."""
    n, m = len(prefix.inputs), len(candidates)
    inputs = NodeInputs.cat([prefix.inputs, candidates])
    mask = torch.zeros(n + m, n + m, dtype=torch.bool)
    mask[:, : prefix.shared] = True
    mask[:n, :n] |= torch.ones(n, n).tril().bool()
    for j in range(m):
        mask[n + j, : n if limits is None else int(limits[j])] = True
        if limits is not None:
            mask[n + j, int(limits[j]) : n] = False
        mask[n + j, n + j] = True
    attend = DenseSiluAttention(mask, ranker.config.normalizer)
    hidden = ranker(ranker.embed(inputs)[None], inputs.groups[None], attend)[0, n:]
    return ranker.heads(hidden).numpy()


@pytest.mark.parametrize("profile,long,recent", [(1, 0, 0), (2, 30, 0), (1, 17, 9), (0, 0, 20)])
def test_ranking_equals_a_dense_mask_and_needs_no_company(profile, long, recent):
    ranker = make_ranker()
    engine = engine_of(ranker=ranker)
    prefix = ranking_prefix(profile, long, recent, 7)
    candidates = draw_rows(300, 3, 1)
    n = len(prefix.inputs)
    limits = np.random.default_rng(0).integers(prefix.shared, n + 1, 300)
    for chosen in (None, limits):
        scores = engine.run(RankQuery(prefix, candidates, chosen)).values
        np.testing.assert_allclose(
            scores, plain_ranking(ranker, prefix, candidates, chosen), rtol=1e-4, atol=1e-5
        )
        order = torch.randperm(300, generator=torch.manual_seed(0))
        shuffled = engine.run(
            RankQuery(
                prefix, candidates.select(order), None if chosen is None else chosen[order.numpy()]
            )
        )
        np.testing.assert_allclose(shuffled.values, scores[order.numpy()], atol=1e-5)
        for i in (0, 150, 299):
            alone = engine.run(
                RankQuery(
                    prefix,
                    candidates.select(slice(i, i + 1)),
                    None if chosen is None else chosen[i : i + 1],
                )
            )
            np.testing.assert_allclose(alone.values[0], scores[i], atol=1e-5)


def test_ranking_prefix_survives_new_recent_events_and_mixes_with_recommendations():
    ranker = make_ranker()
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = engine_of(model, ranker)
    whole = ranking_prefix(1, 20, 12, 3)
    candidates = draw_rows(40, 3, 1)
    requests, expected = [], []
    for recent in (4, 5, 12):
        rows = slice(0, 21 + recent)
        prefix = Prefix(whole.inputs.select(rows), whole.keys[rows], 21)
        requests.append(RankQuery(prefix, candidates))
        expected.append(plain_ranking(ranker, prefix, candidates, None))
    for request, scores in zip(requests, expected, strict=True):
        answer = engine.run(request)
        np.testing.assert_allclose(answer.values, scores, rtol=1e-4, atol=1e-5)
    assert answer.timing.prefix_cached == 26
    recommend = SlateQuery(prefix=draw_prefix(model, 9, 0), trie=trie, k=3, beam_width=5)
    mixed = engine.run_many([requests[0], recommend, requests[2]])
    np.testing.assert_allclose(mixed[0].values, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mixed[2].values, expected[2], rtol=1e-4, atol=1e-5)
    assert mixed[1].rows.tolist() == engine_of(model).run(recommend).rows.tolist()


def test_4096_candidates_score_as_they_do_alone():
    ranker = make_ranker()
    engine = engine_of(ranker=ranker)
    prefix = ranking_prefix(1, 10, 5, 0)
    candidates = draw_rows(4096, 3, 9)
    scores = engine.run(RankQuery(prefix, candidates)).values
    for i in range(0, 4096, 511):
        alone = engine.run(RankQuery(prefix, candidates.select(slice(i, i + 1)))).values[0]
        np.testing.assert_allclose(alone, scores[i], atol=1e-5)


def test_a_failing_forward_ends_its_requests_and_the_engine_goes_on(monkeypatch):
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    engine = engine_of(model)
    cached = SlateQuery(prefix=draw_prefix(model, 5, 0), trie=trie, k=3, beam_width=3)
    expected = engine.run(cached).rows.tolist()

    def fail(*_):
        raise RuntimeError("broken kernel")

    with monkeypatch.context() as patch:
        patch.setattr(model.decoder, "forward", fail)
        futures = [
            engine.submit(r) for r in (cached, replace(cached, prefix=draw_prefix(model, 9, 1)))
        ]
        while engine.step():
            pass
        for future in futures:
            with pytest.raises(RuntimeError, match="broken kernel"):
                future.result(0)
    assert engine.run(cached).rows.tolist() == expected
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_an_answer_that_fails_takes_no_other_with_it(monkeypatch):
    """Two batches end in one step; that of the second strategy cannot make its answers."""
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    engine = engine_of(model)
    good = SlateQuery(prefix=draw_prefix(model, 5, 0), trie=trie, k=3, beam_width=3)
    bad = LikelihoodQuery(draw_prefix(model, 6, 1), trie, np.array([0, 1]))
    expected = engine.run(good).rows.tolist()
    engine.forget_all()

    def fail(_):
        raise IndexError("broken answer")

    monkeypatch.setattr(engine._strategies["likelihood"], "finish", fail)
    for cached in (False, True):
        futures = [engine.submit(request) for request in (good, bad, good)]
        while engine.step():
            pass
        assert [f.result(0).rows.tolist() for f in (futures[0], futures[2])] == [expected] * 2
        with pytest.raises(IndexError, match="broken answer"):
            futures[1].result(0)
        stats = engine.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total, cached


def test_a_large_request_is_not_starved_by_small_ones():
    """Requests of one model are admitted in order, also while the first finds no room."""
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    slot = 2 * 2 * 2 * 8 * 4
    engine = engine_of(
        model, config=EngineConfig(page_size=4, kv_bytes=slot * 4 * 45, max_running=3)
    )
    order: list[int] = []
    widths = [3, 40, 3, 3, 3, 40, 3]
    for number, width in enumerate(widths):
        future = engine.submit(
            SlateQuery(prefix=draw_prefix(model, 4, number), trie=trie, k=3, beam_width=width)
        )
        future.add_done_callback(lambda _, number=number: order.append(number))
    while engine.step():
        pass
    assert order.index(1) < order.index(2) < order.index(5) < order.index(6)
    assert sorted(order) == list(range(len(widths)))


@pytest.mark.parametrize("width", [1, pytest.param(4, marks=pytest.mark.slow), 12])
def test_dense_head_items_compete_with_the_beams(width):
    """Best k of the plain beam's items and the head's own best W, all scored alike."""
    codes = CATALOGUES["ordinary"]
    model, trie = make(codes, "items", "children")
    head = SelfDraftHead(SelfDraftConfig(32, model.config.codebook_sizes)).eval()
    engine = build_engine(EngineModels(model, heads=Heads(head)), EngineConfig(kv_bytes=2**24))
    requests, expected = [], []
    for seed in range(3):
        prefix = draw_prefix(model, 6 + seed, seed)
        excluded = np.random.default_rng(seed).integers(0, len(codes), 20)
        common = dict(prefix=prefix, trie=trie, k=width, beam_width=width)
        weight = 1.5 * (seed != 1)
        requests.append(SlateQuery(**common, excluded=excluded, dense_weight=weight))
        with torch.inference_mode():
            tokens = prefix.inputs.tokens[None]
            hidden = model(tokens, torch.arange(tokens.shape[1])[None], DenseAttention())[:, -1]
            dense = model.dense_scores(hidden)[0].numpy().copy()
            beams = [row for row, _ in plain_beam(model, trie, prefix, width, excluded.tolist())]
        scores = all_scores(model, trie, prefix).numpy() + weight * dense
        dense[excluded] = -np.inf
        dense_candidates = np.argsort(-dense, kind="stable")[:width].tolist() if weight else []
        pool = sorted({*beams, *dense_candidates}, key=lambda row: -scores[row])[:width]
        expected.append((pool, scores[pool]))
    for strategy in ("beam", "speculative"):
        answers = engine.run_many([replace(request, strategy=strategy) for request in requests])
        for answer, (rows, scores) in zip(answers, expected, strict=True):
            assert answer.rows.tolist() == rows
            np.testing.assert_allclose(answer.scores, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form,normalization", FORMS)
def test_likelihood_of_an_item_is_the_same_in_any_company(form, normalization):
    """Alone, twice in a list, among 4,096 in two orders."""
    codes = torch.unique(torch.randint(0, 12, (9000, 4), generator=torch.manual_seed(2)), dim=0)
    model, trie = make(codes, form, normalization)
    engine = engine_of(model, config=EngineConfig(kv_bytes=2**26))
    prefix = draw_prefix(model, 7, 0)
    rows = np.random.default_rng(0).permutation(len(codes))[:4096]
    scores = engine.run(LikelihoodQuery(prefix, trie, rows)).values[:, 0]
    again = engine.run(LikelihoodQuery(prefix, trie, rows[::-1].copy())).values[::-1, 0]
    np.testing.assert_allclose(again, scores, atol=2e-5)
    for i in (0, 1000, 4095):
        alone = engine.run(LikelihoodQuery(prefix, trie, rows[[i, i]])).values[:, 0]
        np.testing.assert_allclose(alone, scores[i], atol=2e-5)
