"""Scores over a catalogue whose later levels are narrower than the first, as is common."""

import pytest
import torch

from recserve.search.trie_paths import first_scores
from tests.support.pretend_cuda import PretendCuda
from tests.support.recommenders import make

FIRST = 9
CODES = torch.tensor([[i, i % 3, 0] for i in range(FIRST)] + [[0, 1, 0], [0, 1, 1]])


@pytest.mark.parametrize("normalization", ["children", "vocabulary"])
@torch.inference_mode()
def test_first_codes_are_scored_on_every_device(normalization, force_kernels):
    """A GPU pads to the widest node of the level; a CPU to the widest of the given nodes."""
    force_kernels("torch")
    model, trie = make(CODES, "codes", normalization)
    assert trie.widths[0] > max(trie.widths[1:])
    state = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    owners = torch.arange(2 * FIRST) // FIRST
    rows = torch.arange(2 * FIRST) % FIRST
    here = first_scores(trie, trie.nodes_of_items(rows), owners, state, model)
    if normalization == "children":
        torch.testing.assert_close(here.view(2, FIRST).exp().sum(1), torch.ones(2))
    with PretendCuda():
        model, trie = model.to("cuda"), trie.to("cuda")
        nodes = trie.nodes_of_items(rows.to("cuda"))
        there = first_scores(trie, nodes, owners.to("cuda"), state.to("cuda"), model)
        torch.testing.assert_close(there.cpu(), here)
