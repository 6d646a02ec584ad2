"""Searches in fixed shapes through the Triton kernels, interpreted: what a graph launches."""

import pytest
import torch

from recserve.engine.beam_search_graph import SearchShape
from recserve.kernels.attention import attention
from recserve.kernels.layers import operators
from recserve.kernels.trie import level_search
from tests.support import triton_interpreter  # noqa: F401
from tests.support.device_worlds import recommending
from tests.support.grids import chosen
from tests.support.recorded_searches import assert_same, with_searches

pytest.importorskip("triton")

from recserve.kernels.attention import triton_attention
from recserve.kernels.layers import triton_rope_write
from recserve.kernels.trie import triton_topk

SHAPES = (SearchShape(3, 8, 24, weighed=True), SearchShape(3, 8, 24), SearchShape(3, 8, None))


@pytest.mark.slow
@pytest.mark.parametrize("variant", chosen(("plain", "filters", "weighed"), "weighed"))
def test_kernels_find_what_the_twins_find(variant, monkeypatch, force_kernels):
    """Two requests of three places, prefixes in a table whose rows lie apart."""
    launched, levels = [], []

    def kernel_attention(batch, *rest):
        if not batch.fixed_shapes:
            return stock(batch, *rest)
        launched.append(batch.num_queries)
        return triton_attention.TritonTreeAttention(batch, *rest)

    def kernel_children(trie, *rest):
        levels.append(trie.insertions is not None)
        return triton_topk.best_children(trie, *rest)

    stock = attention.tree_attention
    with torch.inference_mode():
        launching, world = recommending("cpu"), recommending("cpu")
        world.trie = launching.trie
        wanted = launching.engine.run_many(launching.ask("beam", variant))
        force_kernels("torch")
        world.engine.schedulers["recommender"].runner.attention = kernel_attention
        graphs = with_searches(world, world.trie, lambda step: step, SHAPES)
    monkeypatch.setattr(operators, "rope_write", triton_rope_write.rope_write)
    monkeypatch.setattr(level_search, "best_children", kernel_children)
    assert_same(wanted, world.engine.run_many(launching.ask("beam", variant)))
    assert graphs.counts["replayed"] == 1
    assert len(launched) == (3 if variant == "weighed" else 2) and 3 * 8 in launched
    assert levels == [True] * 3
