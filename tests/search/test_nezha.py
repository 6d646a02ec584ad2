"""`nezha` against the formulas in a plain loop: states, logits and beams one prefix at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.request import PrefixKeys, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.tree import AUXILIARY
from recserve.models.attention import DenseAttention
from recserve.models.item_heads import load_self_draft, save_self_draft
from recserve.search.strategy import Heads
from tests.support.draft_heads import make_nezha_head
from tests.support.recommenders import CATALOGUES, FORMS, draw_prefix, make

SMALL = EngineConfig(kv_bytes=16 * 2**20)
CHILDREN = FORMS[1:]


def make_engine(model, placeholders: bool = True) -> Engine:
    heads = Heads(make_nezha_head(model, False), make_nezha_head(model, placeholders))
    return build_engine(EngineModels(model, heads=heads), SMALL)


@torch.inference_mode()
def plain_nezha(model, head, prefix, width, excluded=()):
    """Items and scores, best first: one causal forward, then a search in Python dictionaries."""
    x = model.embed(prefix.inputs.tokens)
    if head.config.placeholders:
        x = torch.cat([x, head.placeholders])
    hidden = model.decoder(x[None], torch.arange(len(x))[None], DenseAttention())[0]
    n, levels = len(prefix.inputs), model.config.num_levels
    start = hidden[n - 1]
    contexts = hidden[n:] if head.config.placeholders else start.expand(levels, -1)
    offsets = model.config.level_offsets
    codes = [tuple(c) for c in (model.item_tokens - torch.tensor(offsets)).tolist()]
    allowed = [c for row, c in enumerate(codes) if row not in set(excluded)]
    beams = {(): (0.0, start)}
    for level in range(levels):
        grown = {}
        for path, (score, state) in beams.items():
            valid = sorted({c[level] for c in codes if c[:level] == path})
            tokens = torch.tensor([offsets[level] + code for code in valid])
            log_p = (head.head.weight[tokens] @ (contexts[level] + state)).log_softmax(0)
            for code, token, gain in zip(valid, tokens, log_p.tolist(), strict=True):
                if any(c[: level + 1] == (*path, code) for c in allowed):
                    deeper = state
                    if level + 1 < levels:
                        deeper = head.cells[level](head.tokens(token), state)
                    grown[(*path, code)] = score + gain, deeper
        beams = dict(sorted(grown.items(), key=lambda item: -item[1][0])[:width])
    rows = {code: row for row, code in enumerate(codes)}
    return [(rows[path], score) for path, (score, _) in beams.items()]


@pytest.mark.parametrize("placeholders", [True, False], ids=["placeholders", "none"])
@pytest.mark.parametrize("form,normalization", FORMS)
@pytest.mark.parametrize("codes", CATALOGUES.values(), ids=CATALOGUES.keys())
def test_equals_the_formulas_in_a_plain_loop(codes, form, normalization, placeholders):
    model, trie = make(codes, form, normalization)
    engine = make_engine(model, placeholders)
    head = make_nezha_head(model, placeholders)
    for seed, width in enumerate((1, 3, 10, 512)):
        prefix = draw_prefix(model, 1 + 7 * seed, seed)
        excluded = np.random.default_rng(seed).integers(0, len(codes), len(codes) // 5)
        request = SlateQuery(
            prefix=prefix, trie=trie, k=width, beam_width=width, strategy="nezha", excluded=excluded
        )
        expected = plain_nezha(model, head, prefix, width, excluded.tolist())
        for slate in (engine.run(request), engine.run(request)):  # cold, then from the cache
            assert slate.rows.tolist() == [row for row, _ in expected]
            np.testing.assert_allclose(slate.scores, [s for _, s in expected], atol=2e-4)
            assert not slate.exact and slate.rounds == 1


def test_same_alone_in_a_batch_and_beside_other_strategies():
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    names = ("nezha", "beam", "speculative")
    requests = [
        SlateQuery(
            prefix=draw_prefix(model, 1 + 2 * i, i),
            trie=trie,
            k=2 + i % 5,
            beam_width=3 + i,
            strategy=names[i % 3],
            dense_weight=i % 2,
        )
        for i in range(18)
    ]
    alone = [make_engine(model).run(r) for r in requests]
    engine = make_engine(model)
    packed = engine.run_many(requests)
    again = engine.run_many(requests[::-1])[::-1]
    crossed = engine.run_many([replace(r, strategy=names[i % 2]) for i, r in enumerate(requests)])
    for i, (first, second, third) in enumerate(zip(alone, packed, again, strict=True)):
        assert first.rows.tolist() == second.rows.tolist() == third.rows.tolist()
        np.testing.assert_allclose(second.scores, first.scores, atol=1e-5)
        np.testing.assert_allclose(third.scores, first.scores, atol=1e-5)
        if names[i % 2] == names[i % 3]:
            assert crossed[i].rows.tolist() == first.rows.tolist()
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_one_forward_for_a_new_user_and_none_for_one_who_comes_back():
    """Placeholders ride with the prefix, also when another strategy has cached it; their states are
    kept with it until it is forgotten.
    """
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = make_engine(model)
    runner = engine.schedulers["recommender"].runner
    forward, pieces = runner.forward, []

    def counting(given):
        pieces.append(given)
        return forward(given)

    runner.forward = counting
    prefix = draw_prefix(model, 9, 0)
    request = SlateQuery(prefix=prefix, trie=trie, k=5, beam_width=10, strategy="nezha")
    first = engine.run(request)
    assert len(pieces) == 1 and first.timing.prefix_computed == 10 and first.timing.nodes == 4
    assert pieces[0][0].tree.kinds.tolist() == [0] * 10 + [AUXILIARY] * 4
    again = engine.run(request)
    assert len(pieces) == 1 and again.timing.nodes == 0
    assert again.rows.tolist() == first.rows.tolist()
    engine.forget(PrefixKeys(prefix.keys))
    engine.run(replace(request, strategy="beam"))
    pieces.clear()
    third = engine.run(request)
    assert len(pieces) == 1 and third.timing.prefix_computed == 0 and third.timing.nodes == 4
    np.testing.assert_allclose(third.scores, first.scores, atol=1e-5)


def test_beam_is_the_same_bit_for_bit_with_a_head_beside_it():
    for form, normalization in FORMS:
        model, trie = make(CATALOGUES["ordinary"], form, normalization)
        request = SlateQuery(prefix=draw_prefix(model, 9, 0), trie=trie, k=10, beam_width=20)
        before = build_engine(EngineModels(model), SMALL).run(request)
        after = make_engine(model).run(request)
        assert before.rows.tolist() == after.rows.tolist()
        assert (before.scores == after.scores).all()


@pytest.mark.parametrize("form,normalization", CHILDREN)
def test_only_allowed_items_and_all_of_them_where_few_are_left(form, normalization):
    codes = CATALOGUES["ordinary"]
    model, trie = make(codes, form, normalization)
    engine = make_engine(model)
    for keep in (0, 1, 3, 40):
        kept = np.random.default_rng(keep).permutation(len(codes))[:keep]
        allowed = np.zeros(len(codes), dtype=bool)
        allowed[kept] = True
        slate = engine.run(
            SlateQuery(
                prefix=draw_prefix(model, 4, 0),
                trie=trie,
                k=10,
                beam_width=10,
                strategy="nezha",
                allowed=AllowedItems.of(allowed),
            )
        )
        assert len(slate.rows) == min(10, keep) == len(set(slate.rows.tolist()))
        assert allowed[slate.rows].all()


def test_more_wanted_than_there_are():
    codes = CATALOGUES["ordinary"]
    model, trie = make(codes, "items", "children")
    slate = make_engine(model).run(
        SlateQuery(
            prefix=draw_prefix(model, 4, 0), trie=trie, k=900, beam_width=512, strategy="nezha"
        )
    )
    assert sorted(slate.rows.tolist()) == list(range(len(codes)))
    assert (np.diff(slate.scores) <= 0).all()
    # Normalised over valid children at every level, the probabilities of all items sum to one.
    assert abs(np.exp(slate.scores.astype(np.float64)).sum() - 1) < 1e-4


@pytest.mark.parametrize("width", [1, 4, 12])
def test_the_dense_head_has_its_say(width):
    """Best k of the head's beams and the dense head's own best W, all scored alike."""
    codes = CATALOGUES["ordinary"]
    model, trie = make(codes, "items", "children")
    engine, head, weight = make_engine(model), make_nezha_head(model), 1.5
    requests, expected = [], []
    for seed in range(3):
        prefix = draw_prefix(model, 6 + seed, seed)
        excluded = np.random.default_rng(seed).integers(0, len(codes), 20)
        requests.append(
            SlateQuery(
                prefix=prefix,
                trie=trie,
                k=width,
                beam_width=width,
                strategy="nezha",
                excluded=excluded,
                dense_weight=weight,
            )
        )
        with torch.inference_mode():
            tokens = prefix.inputs.tokens[None]
            hidden = model(tokens, torch.arange(tokens.shape[1])[None], DenseAttention())[:, -1]
            dense = model.dense_scores(hidden)[0].numpy().copy()
        beams = [row for row, _ in plain_nezha(model, head, prefix, width, excluded.tolist())]
        scores = np.empty(len(codes))
        for row, score in plain_nezha(model, head, prefix, len(codes)):
            scores[row] = score + weight * dense[row]
        dense[excluded] = -np.inf
        dense_candidates = np.argsort(-dense, kind="stable")[:width].tolist()
        pool = sorted({*beams, *dense_candidates}, key=lambda row: -scores[row])[:width]
        expected.append((pool, scores[pool]))
    for answer, (rows, scores) in zip(engine.run_many(requests), expected, strict=True):
        assert answer.rows.tolist() == rows
        np.testing.assert_allclose(answer.scores, scores, rtol=1e-4, atol=1e-4)


def test_a_saved_head_answers_the_same(tmp_path):
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    head = make_nezha_head(model)
    save_self_draft(head, tmp_path)
    loaded = load_self_draft(tmp_path, model)
    assert loaded.config == head.config
    request = SlateQuery(
        prefix=draw_prefix(model, 9, 0), trie=trie, k=10, beam_width=20, strategy="nezha"
    )
    slates = [
        build_engine(EngineModels(model, heads=Heads(nezha=h)), SMALL).run(request)
        for h in (head, loaded)
    ]
    assert slates[0].rows.tolist() == slates[1].rows.tolist()
    assert (slates[0].scores == slates[1].scores).all()
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="no usable self-draft head"):
        load_self_draft(tmp_path, model)
