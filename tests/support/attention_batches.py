"""Random trees, prefixes and pools for attention tests."""

from dataclasses import replace

import torch

from recserve.kernels.attention import triton_launch
from recserve.kernels.tree import chain, from_parents, merge, root_branch
from recserve.kernels.tree_batch import Prefixes, TreeBatch


def draw_tree(kind: str, n: int, generator: torch.Generator):
    """Returns a random tree of n nodes: `chain`, isolated `branches`, `deep`, or any shape."""
    tokens = torch.randint(0, 99, (n,), generator=generator)
    if kind == "chain":
        return chain(tokens)
    if kind == "branches":
        cuts = (
            torch.randperm(n - 1, generator=generator)[: n // 3].sort().values + 1 if n > 1 else []
        )
        return root_branch(tokens, torch.tensor([0, *list(cuts), n]))
    path: list[int] = []
    parents = []
    for i in range(n):
        keep = int(torch.randint(0, len(path) + 1, (), generator=generator))
        if kind == "deep":
            keep = max(keep, len(path) - 1)
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(i)
    return from_parents(tokens, torch.tensor(parents))


def draw_batch(kinds, prefixes, heads, kv_heads, dim, *, cached=0.0, limits=False, seed=0):
    """Returns a random batch: queries, keys, values and trees over prefixes of these lengths."""
    g = torch.Generator().manual_seed(seed)
    trees = [draw_tree(kind, n, g) for kind, n in kinds]
    tree = merge(trees) if len(trees) > 1 else trees[0]
    total = tree.num_nodes + sum(prefixes)
    slots = torch.randperm(total + 7, generator=g)[:total]
    prefix_slots = torch.split(slots[: sum(prefixes)], list(prefixes))
    queries = None
    if cached:
        keep = torch.rand(tree.num_nodes, generator=g) >= cached
        keep[-1] = True
        queries = keep.nonzero().flatten()
    if limits:
        per_node = torch.tensor(prefixes)[tree.tree_ids()]
        drawn = (torch.rand(tree.num_nodes, generator=g) * (per_node + 1)).long()
        tree = replace(tree, prefix_limits=drawn)
    batch = TreeBatch(tree, queries, slots[sum(prefixes) :], Prefixes.of(prefix_slots))
    keys = torch.randn(total + 7, kv_heads, dim, generator=g)
    values = torch.randn(total + 7, kv_heads, dim, generator=g)
    query = torch.randn(batch.num_queries, heads, dim, generator=g)
    return batch, query, keys, values


def as_table(batch: TreeBatch, width: int, hole: int) -> TreeBatch:
    """Returns the batch with fixed shapes and its prefixes in a wide table.

    Rows have another order, unread entries are `hole`, and one row belongs to no request.
    """
    rows = list(reversed(range(len(batch.prefixes))))
    slots = torch.full((len(rows) + 1, width), hole)
    for row, own in zip(rows, batch.prefixes, strict=True):
        slots[row, : own.shape[0]] = own
    starts = torch.tensor(rows) * width
    table = Prefixes.on_device(slots, starts, batch.prefixes.lengths, width)
    return TreeBatch(batch.tree, batch.queries, batch.slots, table, fixed_shapes=True)


SHAPES = [
    ([("chain", 1)], [0], 1, 1, 16),
    ([("chain", 63)], [0], 4, 2, 60),
    ([("chain", 5)], [33], 4, 4, 32),
    ([("branches", 40)], [17], 4, 1, 64),
    ([("tree", 30)], [1], 2, 2, 16),
    ([("deep", 90)], [5], 6, 3, 32),
    ([("tree", 63), ("chain", 1), ("branches", 7)], [9, 0, 130], 4, 2, 32),
    ([("branches", 781), ("deep", 65)], [50, 3], 2, 1, 16),
]


def placed(batch, keys, values, layout):
    """Returns the batch with its keys in a pool whose other slots hold large numbers."""
    starts, stop = [], 3
    offsets = batch.tree.offsets.tolist()
    for b, prefix in enumerate(batch.prefixes):
        n, r = offsets[b + 1] - offsets[b], prefix.shape[0]
        order = {
            "beside": [range(stop, stop + r), range(stop + r + 5, stop + r + 5 + n)],
            "before": [range(stop + n, stop + n + r), range(stop, stop + n)],
            "pages": [
                [stop + i + 7 * (i // 16) for i in range(r)],
                range(stop + 3 * (r + 16), stop + 3 * (r + 16) + n),
            ],
        }[layout]
        starts.append([torch.tensor(list(part), dtype=torch.int64) for part in order])
        stop += 4 * (r + n) + 80
    moved = TreeBatch(
        batch.tree,
        batch.queries,
        torch.cat([tree for _, tree in starts]),
        Prefixes.of([prefix for prefix, _ in starts]),
    )
    old = torch.cat([*batch.prefixes, batch.slots])
    new = torch.cat([*moved.prefixes, moved.slots])
    pools = [torch.full((stop, *pool.shape[1:]), 30.0, dtype=pool.dtype) for pool in (keys, values)]
    for pool, source in zip(pools, (keys, values), strict=True):
        pool[new] = source[old]
    return moved, *pools


def split_short_prefixes(monkeypatch, keys, most=64):
    """Makes attention split prefixes into parts of `most` keys and blocks of 16."""
    for name, value in (("SPLIT_KEYS", keys), ("MAX_SPLITS", most), ("BLOCK_KEYS", 16)):
        monkeypatch.setattr(triton_launch, name, value)
    for name in ("PROGRAM_KEYS", "MERGE_KEYS"):
        monkeypatch.setattr(triton_launch, name, 0)
