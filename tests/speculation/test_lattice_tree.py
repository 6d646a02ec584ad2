"""Trees from lattices equal brute force over all paths, ties included."""

import numpy as np
import pytest
import torch

from recserve.drafters.shared.lattice_tree import Lattice, lattice_drafts, most_candidates
from recserve.speculation.draft import Budget
from tests.support.grids import chosen


def drawn_lattice(texts, slots, count, pairs=True, step=None, seed=0) -> Lattice:
    """Returns a lattice with drawn log-probabilities, rounded to multiples of `step`."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(texts, slots, count if pairs else 1, count, generator=g) * 2
    logprobs = scores.log_softmax(-1)
    if step is not None:
        logprobs = (logprobs / step).round() * step
    tokens = torch.stack(
        [torch.randperm(999, generator=g)[:count] for _ in range(texts * slots)]
    ).view(texts, slots, count)
    return Lattice(tokens, logprobs)


def all_paths(lattice: Lattice, text: int, depth: int) -> list[tuple[float, tuple[int, ...]]]:
    """Returns score and ranks of every path of at most `depth` slots, summed in float32."""
    logprobs = lattice.logprobs[text].numpy()
    found, level = [], [(np.float32(0), ())]
    for slot in range(depth):
        wider = []
        for score, path in level:
            above = path[-1] if path and logprobs.shape[1] > 1 else 0
            row = score + logprobs[slot, above]
            wider += [(value, (*path, rank)) for rank, value in enumerate(row)]
        level = wider
        found += level
    return found


def tokens_of(lattice, text, path) -> tuple[int, ...]:
    return tuple(int(lattice.tokens[text, slot, rank]) for slot, rank in enumerate(path))


def paths_of(draft) -> list[tuple[int, ...]]:
    """Returns the tokens of every node's path, and checks preorder and depth."""
    paths, open_path = [], []
    for node, (token, parent) in enumerate(
        zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)
    ):
        while open_path and open_path[-1] != parent:
            open_path.pop()
        assert parent == -1 or open_path, "not in preorder"
        open_path.append(node)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert draft.depth == max(map(len, paths), default=0)
    return paths


def expected(lattice, text, budget) -> set[tuple[int, ...]]:
    depth = min(budget.depth, lattice.tokens.shape[1])
    ordered = sorted(all_paths(lattice, text, depth), key=lambda n: (-n[0], len(n[1]), n[1]))
    return {tokens_of(lattice, text, path) for _, path in ordered[: budget.num_nodes]}


@pytest.mark.parametrize("pairs", chosen({"pairs": True, "independent": False}, "pairs"))
def test_the_tree_of_a_lattice_of_16_to_the_4_is_brute_force(pairs):
    lattice = drawn_lattice(3, 4, 16, pairs)
    for nodes in (1, 7, 64):
        budgets = [Budget(nodes, 4), Budget(nodes, 9), Budget(max(nodes // 2, 1), 3)]
        drafts = lattice_drafts(lattice, budgets)
        for text, (draft, budget) in enumerate(zip(drafts, budgets, strict=True)):
            assert set(paths_of(draft)) == expected(lattice, text, budget)
            assert len(draft) == budget.num_nodes


@pytest.mark.parametrize("step", [0.5, 2.0])
def test_ties_go_to_small_depths_and_small_ranks(step):
    lattice = drawn_lattice(4, 5, 4, step=step, seed=1)
    budgets = [Budget(nodes, depth) for nodes, depth in ((1, 5), (12, 5), (30, 2), (63, 4))]
    for text, draft in enumerate(lattice_drafts(lattice, budgets)):
        assert set(paths_of(draft)) == expected(lattice, text, budgets[text])
        assert len(draft) == min(budgets[text].num_nodes, 4 + 16 if text == 2 else 63)


def test_a_tree_of_width_one_is_the_greedy_walk():
    lattice = drawn_lattice(5, 7, 6, seed=2)
    drafts = lattice_drafts(lattice, [Budget(4 + text, 9) for text in range(5)], width=1)
    for text, draft in enumerate(drafts):
        walk = []
        for slot in range(min(4 + text, 7)):
            above = walk[-1] if walk else 0
            walk.append(int(lattice.logprobs[text, slot, above].argmax()))
        assert draft.parents.tolist() == list(range(-1, len(walk) - 1))
        assert tuple(draft.tokens.tolist()) == tokens_of(lattice, text, walk)


def test_a_budget_larger_than_the_lattice_takes_all_of_it():
    lattice = drawn_lattice(2, 2, 3)
    drafts = lattice_drafts(lattice, [Budget(50, 2), Budget(50, 1)])
    assert [len(draft) for draft in drafts] == [3 + 9, 3]


def test_a_text_without_a_budget_gets_no_node():
    lattice = drawn_lattice(2, 3, 3)
    one, other = lattice_drafts(lattice, [Budget(0, 0), Budget(2, 2)])
    assert len(one) == one.depth == 0 and len(other) == 2
    assert [len(draft) for draft in lattice_drafts(lattice, [Budget(0, 0)] * 2)] == [0, 0]


def test_long_blocks_have_fewer_candidates():
    assert most_candidates(15) == 16
    assert [(most_candidates(n) + 1) ** n <= 2**62 for n in (1, 7, 15, 31)] == [True] * 4
    count = most_candidates(31)
    lattice = drawn_lattice(1, 31, count)
    (draft,) = lattice_drafts(lattice, [Budget(40, 31)])
    assert len(set(paths_of(draft))) == 40
