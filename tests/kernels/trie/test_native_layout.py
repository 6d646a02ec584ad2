"""Which prefixes a round scores, and their trees, in C against torch's."""

from concurrent.futures import Future

import pytest
import torch

from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence
from recserve.kernels.native import native
from recserve.kernels.trie.trie import build_trie
from recserve.search.beam_search import Beams, BeamSearch
from recserve.search.filters import RequestFilters
from recserve.search.trie_paths import ScoredPaths, draft_of_keys
from tests.support.grids import covering
from tests.support.recommenders import CATALOGUES as ENGINE_CATALOGUES
from tests.support.recommenders import draw_prefix, make
from tests.support.tries import CATALOGUES, SHAPES, Changed

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
TRIES = [*CATALOGUES, *(f"grown-{name}" for name in SHAPES)]


def trie_of(name):
    if name.startswith("grown-"):
        return Changed(*SHAPES[name.removeprefix("grown-")]).trie
    codes = CATALOGUES[name]
    return build_trie(codes, tuple(int(c) + 1 for c in codes.max(0).values))


def drawn_paths(trie, count, seed):
    """[count, L] nodes of items; of items that have a leaf."""
    g = torch.Generator().manual_seed(seed)
    rows = trie.leaf_rows[torch.randint(0, trie.num_items, (count,), generator=g)]
    return trie.nodes_of_items(rows.long())


def scored_of(trie, keys, share, seed):
    """A table of some of the keys, and all above them."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.unique(keys.flatten())
    keys = keys[torch.rand(len(keys), generator=g) < share]
    return ScoredPaths(keys, torch.randperm(len(keys), generator=g), torch.zeros(len(keys), 4))


def both(call, force_kernels):
    answers = []
    for path in ("auto", "torch"):
        force_kernels(path)
        answers.append(call())
    return answers


def same_drafts(one, two):
    for name in ("tokens", "parents", "depths", "ends", "offsets"):
        assert torch.equal(getattr(one.tree, name), getattr(two.tree, name)), name
    assert torch.equal(one.query_keys, two.query_keys)
    for name in ("queries", "scored"):
        mine, theirs = getattr(one, name), getattr(two, name)
        assert mine is theirs is None or torch.equal(mine, theirs), name
    assert torch.equal(one.inputs.tokens, two.inputs.tokens)


@pytest.mark.parametrize("name, seed", covering(tuple(TRIES), range(4)))
def test_the_trees_of_sets_of_nodes(name, seed, force_kernels):
    trie = trie_of(name)
    paths = drawn_paths(trie, 15, seed)[:, : 1 + seed % trie.num_levels]
    owners = torch.tensor([0, 2, 3]).repeat(5)[:, None]  # the second and the last have no node
    keys = (owners * trie.num_nodes + paths).flatten()
    sizes = torch.tensor(trie.codebook_sizes)
    offsets = 1 + torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
    before = scored_of(trie, keys, 0.4, seed) if seed % 2 else None
    same_drafts(*both(lambda: draft_of_keys(trie, keys, 5, offsets, before), force_kernels))


def test_no_node_at_all():
    trie, nothing = trie_of(TRIES[0]), torch.empty(0, dtype=torch.int64)
    mine = draft_of_keys(trie, nothing, 2, torch.ones(trie.num_levels, dtype=torch.int64))
    assert mine.tree.num_nodes == 0 and mine.tree.offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name, skip_single", covering(tuple(TRIES), (True, False)))
def test_what_a_round_scores(name, skip_single, monkeypatch, force_kernels):
    """At every level, with and without the levels below, some beams dead, some scored before."""
    trie, batch, width = trie_of(name), 2, 6
    g = torch.Generator().manual_seed(0)
    offsets = torch.ones(trie.num_levels, dtype=torch.int64)
    form = "children" if skip_single else "vocabulary"
    model, _ = make(ENGINE_CATALOGUES["ordinary"], "items", form)
    sequences = tuple(
        SearchSequence(
            request=SlateQuery(
                prefix=draw_prefix(model, 1, b), trie=trie, k=3, beam_width=width - b
            ),
            future=Future(),
            submitted_s=0.0,
            model="recommender",
            strategy=None,
        )
        for b in range(batch)
    )
    for level in range(1, trie.num_levels):
        paths = drawn_paths(trie, batch * width, level)[:, :level].view(batch, width, level)
        log_probs = -torch.rand(batch, width, generator=g)
        log_probs[torch.rand(batch, width, generator=g) < 0.3] = -torch.inf
        owners = torch.arange(batch)[:, None, None] * trie.num_nodes
        scored = scored_of(trie, owners + paths, 0.4, level)
        tails = torch.zeros(batch, 4)
        for known in (scored, ScoredPaths.empty(tails)):
            search = BeamSearch(
                model, sequences, [s.request for s in sequences], trie,
                RequestFilters(trie, (None,) * batch), tails, known,
                Beams(level, paths[..., -1], log_probs, paths), [width - b for b in range(batch)],
            )  # fmt: skip
            for closing in (level, trie.num_levels):
                monkeypatch.setitem(trie.__dict__, "closing_level", closing)
                same_drafts(*both(lambda s=search: s.propose(offsets), force_kernels))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_scored_prefixes(dtype, force_kernels):
    """Round after round, with and without keys, and from an empty table."""
    g = torch.Generator().manual_seed(0)
    keys = torch.randperm(200, generator=g)
    slots, hidden = torch.randperm(200, generator=g), torch.randn(200, 5, generator=g).to(dtype)
    parts = torch.split(torch.arange(200), [0, 70, 0, 1, 129])

    def grown():
        table = ScoredPaths.empty(hidden)
        for part in parts:
            table = table.add(keys[part], slots[part], hidden[part])
        return table

    mine, theirs = both(grown, force_kernels)
    assert mine.keys.tolist() == list(range(200))
    for name in ("keys", "slots", "hidden"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
