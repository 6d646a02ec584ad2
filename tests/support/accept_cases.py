"""Random trees for the acceptance kernels, with target logits close to the draft."""

from dataclasses import replace

import torch

from recserve.kernels.acceptance.acceptance import Keys
from recserve.kernels.tree import AUXILIARY, from_parents, merge


def draw_tree(n, vocabulary, generator):
    """Returns a root and random nodes below it, which extend the path more often than not."""
    path, parents = [0], [-1]
    for i in range(1, n):
        keep = max(int(torch.randint(1, len(path) + 1, (), generator=generator)), len(path) - 1)
        path = path[:keep]
        parents.append(path[-1])
        path.append(i)
    tokens = torch.randint(0, vocabulary, (n,), generator=generator)
    return from_parents(tokens, torch.tensor(parents))


def draw(sizes, vocabulary, seed=0, kinds=False):
    """Returns merged trees of these sizes with target logits, noise keys and temperatures.

    With `kinds`, some nodes are auxiliary.
    """
    g = torch.Generator().manual_seed(seed)
    tree = merge([draw_tree(n, vocabulary, g) for n in sizes])
    if kinds:
        drawn = (torch.rand(tree.num_nodes, generator=g) < 0.3).long()
        drawn[tree.offsets[:-1]] = 0
        tree = replace(tree, kinds=drawn * AUXILIARY)
    logits = torch.randn(tree.num_nodes, vocabulary, generator=g)
    # A target close to the draft gives long accepted paths.
    rows = tree.parents.clamp(min=0)
    logits[rows, tree.tokens] += 3.0
    trees = len(sizes)
    keys = Keys(
        torch.randint(-(2**62), 2**62, (trees,), generator=g),
        torch.randint(0, 1000, (trees,), generator=g),
    )
    temperatures = torch.rand(trees, generator=g)
    temperatures[::3] = 0
    return tree, logits, keys, temperatures


CASES = [((1,), 5), ((9, 1, 30), 7), ((40,), 3), ((13, 20), 1100)]
