"""Searches in C against torch's: the same slates, rounds and work."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.native import native
from recserve.kernels.trie.level_search import ChildQuery, best_children
from recserve.kernels.trie.native import LevelCodes, NativeDescent, StateKind
from recserve.kernels.trie.trie import build_trie
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead
from recserve.search.strategy import Heads
from tests.support.draft_heads import make_head
from tests.support.grids import covering
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.tries import SHAPES, Changed, engine_of

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
CONFIG = EngineConfig(kv_bytes=16 * 2**20)
FORMS = ["all", "excluded", "allowed", "dense"]


def asked_of(model, trie, form, seed=0):
    """Requests of several widths, with k at the width and below it."""
    rng = np.random.default_rng(seed)
    items = trie.num_items
    requests = []
    for i, (k, width) in enumerate(((1, 1), (2, 3), (3, 10), (40, 40), (4, 40))):
        fields = {}
        if form == "excluded":
            fields["excluded"] = rng.integers(0, items, i)
        if form == "allowed" and i % 2:
            fields["allowed"] = AllowedItems.of(rng.random(items) < 0.4)
        if form == "dense":
            fields["dense_weight"] = 0.7 * (i % 3 > 0)
        prefix = draw_prefix(model, 1 + 2 * i, i)
        requests.append(SlateQuery(prefix=prefix, trie=trie, k=k, beam_width=width, **fields))
    return requests


def work_of(slate):
    return slate.rows.tolist(), slate.rounds, slate.timing.nodes, slate.exact


def same_as_in_torch(model, head, requests, force_kernels):
    """The slates in C, after they were compared with torch's."""
    answers = []
    for path in ("auto", "torch"):
        force_kernels(path)
        answers.append(
            build_engine(EngineModels(model, heads=Heads(head, head)), CONFIG).run_many(requests)
        )
    for mine, theirs in zip(*answers, strict=True):
        assert work_of(mine) == work_of(theirs)
        np.testing.assert_allclose(mine.scores, theirs.scores, atol=2e-5)
    return answers[0]


@pytest.mark.parametrize(
    "codes,form,kind",
    covering(CATALOGUES, FORMS, ("drawn", "from-target", "adversarial"), pairs=True),
)
def test_the_same_slates_rounds_and_nodes_as_in_torch(codes, form, kind, force_kernels):
    model, trie = make(codes, "items", "children")
    head = make_head(model, kind)
    model.pack()
    head.pack()
    asked = asked_of(model, trie, form)
    for strategy in ("beam", "speculative", "nezha"):
        requests = [replace(request, strategy=strategy) for request in asked]
        same_as_in_torch(model, head, requests, force_kernels)


@pytest.mark.parametrize("shape,dense_weight", covering(SHAPES, {"plain": 0.0, "dense": 0.5}))
def test_a_trie_with_later_ids_and_hidden_items(shape, dense_weight, force_kernels):
    changed = Changed(*shape)
    model, _ = engine_of(changed)
    head = SelfDraftHead(SelfDraftConfig(32, changed.base.codebook_sizes)).eval()
    model.pack()
    head.pack()
    draw = np.random.default_rng(3)
    excluded = draw.choice(changed.rows.numpy(), 3)
    for strategy in ("beam", "speculative", "nezha"):
        requests = [
            SlateQuery(
                prefix=draw_prefix(model, 4, width),
                trie=changed.trie,
                k=k,
                beam_width=width,
                strategy=strategy,
                excluded=excluded,
                dense_weight=dense_weight,
            )
            for k, width in ((1, 4), (4, 4), (5, 60))
        ]
        for mine in same_as_in_torch(model, head, requests, force_kernels):
            assert not set(mine.rows.tolist()) & {*changed.hidden, *excluded.tolist()}


def test_a_score_does_not_know_its_company(force_kernels):
    """Bit for bit: alone, among other requests, drafted and not."""
    force_kernels("c")
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    head = make_head(model, "from-target")
    model.pack()
    head.pack()
    engine = build_engine(EngineModels(model, heads=Heads(head, head)), CONFIG)
    requests = asked_of(model, trie, "excluded")
    together = engine.run_many([replace(r, strategy="nezha") for r in requests])
    for request, slate in zip(requests, together, strict=True):
        alone = engine.run(replace(request, strategy="nezha"))
        assert alone.rows.tolist() == slate.rows.tolist()
        assert np.array_equal(alone.scores, slate.scores)


def drawn_trie(items=300, sizes=(6, 7, 8)):
    rng = np.random.default_rng(0)
    return build_trie(
        torch.from_numpy(np.unique(rng.integers(0, sizes, (items, 3)), axis=0)), sizes
    )


def begun(batch):
    """Score and path of the empty prefix of each request."""
    return torch.zeros(batch, 1), torch.empty(batch, 1, 0, dtype=torch.int64)


def drawn_heads(trie, size, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(1)
    books = [torch.randn(c, size, generator=g) * scale for c in trie.codebook_sizes]
    return [book.to(dtype) for book in books]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["drawn", "all-tied"])
@pytest.mark.parametrize("shape", [(300, (6, 7, 8), 32), (5000, (6, 40, 200), 40)], ids=str)
def test_each_level_is_that_of_the_twin(shape, dtype, scale):
    """Every state known: level by level the best children of level_search, ties to the lower. In
    the second shape some beams have few children for their level, up to 25 of 200, and others more.
    """
    items, sizes, size = shape
    trie, width = drawn_trie(items, sizes), 12
    heads = drawn_heads(trie, size, dtype, scale)
    search = NativeDescent([LevelCodes.of(book) for book in heads])
    tails = torch.randn(2, size).to(dtype)
    keys = torch.arange(1, trie.num_nodes)
    keys = torch.cat([keys, keys + trie.num_nodes])
    hidden = torch.randn(len(keys), size).to(dtype)
    widths = [width, width - 5]
    found = search(
        trie, *begun(2), tails, trie.num_levels, widths=widths, threshold_ranks=[-1, -1],
        filters=[None, None], scored_keys=keys, scored_hidden=hidden,
    )  # fmt: skip
    assert found.reached == trie.num_levels
    nodes, log_probs, states = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1), tails
    for level, book in enumerate(heads):
        logits = (states.float() @ book.float().T).to(dtype)
        query = ChildQuery(nodes, log_probs, logits, trie.widths[level], width)
        best = best_children(trie, query)
        assert found.used[level + 1] == min(width, best.nodes.shape[1])
        for b, kept in enumerate(widths):
            count = min(kept, int((best.log_probs[b] > -np.inf).sum()))
            mine = found.log_probs[level + 1, b]
            torch.testing.assert_close(mine[:count], best.log_probs[b, :count], atol=1e-5, rtol=0)
            assert (mine[count:] == -np.inf).all()
            path = found.paths[level + 1, b, :count]
            if scale == 0 or dtype == torch.float32:
                assert path[:, level].equal(best.nodes[b, :count])
                above = found.paths[level, b, best.parents[b, :count]]
                assert path[:, :level].equal(above[:, :level])
            assert trie.parents[path[:, level]].equal(path[:, level - 1].int()) or not level
        used = found.used[level + 1]
        nodes = found.paths[level + 1, :, :used, level]
        log_probs = found.log_probs[level + 1, :, :used]
        owners = torch.arange(2)[:, None] * trie.num_nodes
        states = hidden[torch.searchsorted(keys, owners + nodes.clamp(min=1)).flatten()]


@torch.inference_mode()
def test_a_missing_state_stops_it_or_leads_nowhere():
    trie, size, width = drawn_trie(), 16, 4
    search = NativeDescent([LevelCodes.of(book) for book in drawn_heads(trie, size)])
    tails = torch.randn(1, size)
    limits = {"widths": [width], "threshold_ranks": [-1], "filters": [None]}
    nothing = {
        "scored_keys": torch.empty(0, dtype=torch.int64),
        "scored_hidden": torch.empty(0, size),
    }
    stopped = search(trie, *begun(1), tails, 3, **limits, **nothing, stops=True)
    assert stopped.reached == 1 and (stopped.log_probs[1] > -np.inf).all()
    assert stopped.scored[0, 0].tolist() == [StateKind.KNOWN, 0, 0, 0]
    assert stopped.scored[1, 0].tolist() == [StateKind.MISSING] * width
    first = stopped.paths[1, 0, 2, 0]
    some = {"scored_keys": first[None], "scored_hidden": torch.randn(1, size)}
    found = search(trie, *begun(1), tails, 3, **limits, **some)
    assert found.reached == 3
    known, missing = StateKind.KNOWN, StateKind.MISSING
    assert found.scored[1, 0].tolist() == [missing, missing, known, missing]
    assert (found.paths[2, 0, : found.used[2], 0] == first).all()


@torch.inference_mode()
def test_states_that_are_not_numbers_lead_nowhere():
    trie, size = drawn_trie(), 16
    search = NativeDescent([LevelCodes.of(book) for book in drawn_heads(trie, size)])
    bad = torch.full((1, size), float("nan"))
    found = search(
        trie, *begun(1), bad, 3, widths=[4], threshold_ranks=[0], filters=[None],
        scored_keys=torch.empty(0, dtype=torch.int64), scored_hidden=bad[:0],
    )  # fmt: skip
    assert (found.log_probs[1:] == -np.inf).all()


def test_a_trie_of_wide_numbers_is_refused():
    trie = drawn_trie()
    with pytest.raises(ValueError, match="int32"):
        _ = replace(trie, first_child=trie.first_child.long()).address
