"""Speculation changes nothing but the rounds: `speculative` against `beam`, good heads and bad."""

import numpy as np
import pytest
import torch

from recserve.core.request import RecommendRequest
from recserve.engine.engine import Engine, EngineConfig
from recserve.engine.heads import Heads
from recserve.models.drafters.nezha import (
    SelfDraftConfig,
    SelfDraftHead,
    load_self_draft,
    save_self_draft,
)
from tests.test_engine import CATALOGUES, FORMS, draw_root, make

SMALL = EngineConfig(kv_bytes=16 * 2**20)


def make_head(model, kind: str) -> SelfDraftHead:
    torch.manual_seed(1)
    head = SelfDraftHead(SelfDraftConfig(32, model.config.codebook_sizes))
    if kind == "from-target":
        head.start_from(model)
    if kind == "adversarial":
        head.start_from(model)
        head.head.weight.data.neg_()
    if kind == "constant":
        for weight in head.parameters():
            weight.data.zero_()
    return head.eval()


@pytest.mark.parametrize("kind", ["drawn", "from-target", "adversarial", "constant"])
@pytest.mark.parametrize("form,normalization", FORMS)
@pytest.mark.parametrize("codes", CATALOGUES.values(), ids=CATALOGUES.keys())
def test_same_ids_order_and_scores_as_beam(codes, form, normalization, kind):
    model, trie = make(codes, form, normalization)
    engine = Engine(model, config=SMALL, heads=Heads(make_head(model, kind)))
    rng = np.random.default_rng(0)
    requests = [
        RecommendRequest(
            draw_root(model, 1 + 2 * i, i),
            trie,
            1 + i,
            width,
            "speculative",
            excluded=rng.integers(0, len(codes), i) if len(codes) > 20 else None,
        )
        for i, width in enumerate((1, 3, 10, 40))
    ]
    for request, drafted in zip(requests, engine.run_many(requests), strict=True):
        plain = engine.run(RecommendRequest(**{**vars(request), "strategy": "beam"}))
        assert drafted.exact and drafted.rows.tolist() == plain.rows.tolist()
        np.testing.assert_allclose(drafted.scores, plain.scores, atol=2e-5)
        assert drafted.rounds <= max(plain.rounds, 1) + (kind != "from-target")


def test_a_wide_draft_needs_one_round():
    """With every prefix drafted the first forward proves the answer."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = Engine(model, config=SMALL, heads=Heads(make_head(model, "drawn")))
    root = draw_root(model, 9, 0)
    drafted = engine.run(RecommendRequest(root, trie, 10, 60, "speculative"))
    plain = engine.run(RecommendRequest(root, trie, 10, 60))
    assert plain.rounds > 1 and drafted.rounds == 1
    assert drafted.rows.tolist() == plain.rows.tolist()


def test_a_saved_head_drafts_the_same(tmp_path):
    model, _ = make(CATALOGUES["ordinary"], "items", "children")
    head = make_head(model, "drawn")
    save_self_draft(head, tmp_path)
    loaded = load_self_draft(tmp_path, model)
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    other, _ = make(CATALOGUES["deep"], "items", "children")
    with pytest.raises(ValueError, match="was made for"):
        load_self_draft(tmp_path, other)


def test_without_a_head_the_strategy_is_refused():
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    engine = Engine(model, config=SMALL)
    with pytest.raises(ValueError, match="choose one of"):
        engine.submit(RecommendRequest(draw_root(model, 3, 0), trie, 3, 3, "speculative"))
