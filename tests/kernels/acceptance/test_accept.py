"""Acceptance: the twins against plain loops, the distributions, and Triton against the twins."""

import pytest
import torch

from recserve.kernels.acceptance import acceptance, noise
from recserve.kernels.acceptance.acceptance import DraftProbs, Keys
from recserve.kernels.tree import from_parents, merge
from tests.support.accept_cases import CASES, draw, draw_tree


def plain_walk(tree, logits, keys, temperatures):
    """Node by node, child by child."""
    nodes, bonus = [], []
    for b, node in enumerate(tree.offsets[:-1].tolist()):
        path = []
        while True:
            path.append(node)
            row = logits[node].float()
            if temperatures[b] > 0:
                position = keys.prefix_lengths[b : b + 1] + tree.depths[node] + 1
                row = (
                    row / temperatures[b]
                    + noise.gumbel(keys.seeds[b : b + 1], position, row.shape[0])[0]
                )
            token = int(row.argmax())
            children = [
                c
                for c in range(tree.num_nodes)
                if tree.parents[c] == node
                and tree.tokens[c] == token
                and (tree.kinds is None or tree.kinds[c] == 0)
            ]
            if not children:
                break
            node = children[0]
        nodes.append(path)
        bonus.append(token)
    return nodes, bonus


@pytest.mark.parametrize("kinds", [False, True], ids=["all-candidates", "some-auxiliary"])
@pytest.mark.parametrize("sizes,vocabulary", CASES)
def test_walk_is_the_plain_walk(sizes, vocabulary, kinds):
    accepted = 0
    for seed in range(5):
        drawn = draw(sizes, vocabulary, seed, kinds)
        nodes, bonus = plain_walk(*drawn)
        depth = int(drawn[0].depths.max())
        tree, logits, keys, temperatures = drawn
        got = acceptance.accept_reference(logits, tree, keys, temperatures, depth)
        assert got.bonus.tolist() == bonus
        assert got.lengths.tolist() == [len(path) - 1 for path in nodes]
        assert [row[row >= 0].tolist() for row in got.nodes] == nodes
        assert got.nodes.shape == (len(sizes), depth + 1)
        accepted += int(got.lengths.sum())
    assert accepted > 0 or sizes == (1,)


def test_a_token_does_not_depend_on_the_draft():
    """Whatever hangs below it, a tree's path and bonus spell the undrafted continuation."""
    g = torch.Generator().manual_seed(0)
    transition = torch.randn(6, 6, generator=g)  # logits of the next token after each token
    spelled = set()
    for seed in range(40):
        tree = draw_tree(25, 6, torch.Generator().manual_seed(seed))
        tree.tokens[0] = 2
        keys = Keys(torch.tensor([7]), torch.tensor([100]))
        walk = acceptance.accept_reference(
            transition[tree.tokens], tree, keys, torch.tensor([0.8]), 24
        )
        path = walk.nodes[0]
        spelled.add((*tree.tokens[path[path >= 0][1:]].tolist(), int(walk.bonus)))
    longest = max(spelled, key=len)
    assert len(longest) > 2 and len(spelled) > 1
    assert all(longest[: len(text)] == text for text in spelled)


def test_rejection_gives_the_target_distribution():
    """First token of 1,000 walks over drawn drafts against p; chi-square, 5 tokens, alpha = 1e-6
    (quantile 33.4), for one child and for three.
    """
    g = torch.Generator().manual_seed(1)
    p, q = torch.rand(2, 5, generator=g).softmax(-1) ** 2
    p, q = p / p.sum(), q / q.sum()
    for children in (1, 3):
        counts, kept, trials = torch.zeros(5, dtype=torch.float64), 0, 1000
        tokens = torch.multinomial(q.expand(trials, 5), children, replacement=True, generator=g)
        for start in range(0, trials, 500):
            parents = torch.tensor([-1] + [0] * children)
            trees = merge(
                [
                    from_parents(torch.cat([torch.zeros(1, dtype=torch.int64), row]), parents)
                    for row in tokens[start : start + 500]
                ]
            )
            seeds = torch.arange(start, start + 500)
            keys = Keys(seeds, torch.full_like(seeds, 3))
            rows = trees.num_nodes
            drawn = DraftProbs(q[None], torch.zeros(rows, dtype=torch.int64))
            walk = acceptance.accept_drawn_reference(p.expand(rows, 5), drawn, trees, keys, 1)
            first = torch.where(walk.lengths > 0, trees.tokens[walk.nodes[:, 1]], walk.bonus)
            counts += torch.bincount(first, minlength=5)
            kept += int(walk.lengths.sum())
        expected = p.double() * trials
        assert float(((counts - expected) ** 2 / expected).sum()) < 33.4
        # One child is accepted with probability 1 - total variation; more with more.
        assert kept / trials > float(torch.minimum(p, q).sum()) - 0.04


def test_a_refused_child_is_drawn_from_the_residual():
    """p is certain of 1, the draft says 0 then 2: nothing accepted, bonus 1."""
    tree = from_parents(torch.tensor([1, 0, 2]), torch.tensor([-1, 0, 1]))
    p = torch.tensor([[0.0, 1.0, 0.0]]).expand(3, 3)
    q = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    keys = Keys(torch.tensor([5]), torch.tensor([0]))
    agreed = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    for drawn in (DraftProbs(q, torch.arange(3)), DraftProbs.none(tree, 3)):
        walk = acceptance.accept_drawn_reference(p, drawn, tree, keys, 2)
        assert walk.nodes.tolist() == [[0, -1, -1]]
        assert walk.lengths.tolist() == [0] and walk.bonus.tolist() == [1]
        # Certain agreement: everything accepted, the bonus from the leaf.
        walk = acceptance.accept_drawn_reference(agreed, drawn, tree, keys, 2)
        assert walk.nodes.tolist() == [[0, 1, 2]] and walk.bonus.tolist() == [2]
