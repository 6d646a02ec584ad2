"""The CPU path against the plain reference, over drawn trees, roots and head layouts."""

import pytest
import torch

from recserve.kernels import reference
from recserve.kernels.cpu_attention import CpuTreeAttention
from recserve.kernels.paged_kv import RootTable, TreeBatch
from recserve.kernels.reference import SOFTMAX, Activation
from recserve.kernels.tree import chain, from_parents, merge, root_branch


def draw_tree(kind: str, n: int, generator: torch.Generator):
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


def draw_batch(kinds, roots, heads, kv_heads, dim, *, cached=0.0, limits=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    trees = [draw_tree(kind, n, g) for kind, n in kinds]
    tree = merge(trees) if len(trees) > 1 else trees[0]
    total = tree.num_nodes + sum(roots)
    slots = torch.randperm(total + 7, generator=g)[:total]
    root_slots = torch.split(slots[: sum(roots)], list(roots))
    queries = None
    if cached:
        keep = torch.rand(tree.num_nodes, generator=g) >= cached
        keep[-1] = True
        queries = keep.nonzero().flatten()
    if limits:
        from dataclasses import replace

        per_node = torch.tensor(roots)[tree.tree_ids()]
        drawn = (torch.rand(tree.num_nodes, generator=g) * (per_node + 1)).long()
        tree = replace(tree, root_limits=drawn)
    batch = TreeBatch(tree, queries, slots[sum(roots) :], tuple(root_slots))
    keys = torch.randn(total + 7, kv_heads, dim, generator=g)
    values = torch.randn(total + 7, kv_heads, dim, generator=g)
    query = torch.randn(batch.num_queries, heads, dim, generator=g)
    return batch, query, keys, values


def as_table(batch: TreeBatch, width: int, hole: int) -> TreeBatch:
    """The same batch with its roots in a table: rows in another order, `hole` in all that is not
    read, and a row of nobody.
    """
    rows = list(reversed(range(len(batch.root_slots))))
    slots = torch.full((len(rows) + 1, width), hole)
    for row, own in zip(rows, batch.root_slots, strict=True):
        slots[row, : own.shape[0]] = own
    table = RootTable(slots, torch.tensor(rows), batch.root_lengths())
    return TreeBatch(batch.tree, batch.queries, batch.slots, table)


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


def same(batch, query, keys, values, activation):
    expected = reference.tree_attention(query, keys, values, batch, activation)
    slots = batch.query_slots()
    got = CpuTreeAttention(batch, activation)(query, keys[slots], values[slots], keys, values)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("limits", [False, True], ids=["whole-root", "root-limits"])
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize("kinds,roots,heads,kv_heads,dim", SHAPES)
def test_softmax_matches_reference(kinds, roots, heads, kv_heads, dim, cached, limits):
    for seed in range(3):
        drawn = draw_batch(
            kinds, roots, heads, kv_heads, dim, cached=cached, limits=limits, seed=seed
        )
        same(*drawn, SOFTMAX)


@pytest.mark.parametrize("limits", [False, True], ids=["whole-root", "root-limits"])
@pytest.mark.parametrize("cached", [0.0, 0.6], ids=["all-new", "some-scored-before"])
@pytest.mark.parametrize("kinds,roots,heads,kv_heads,dim", [s for s in SHAPES if s[2] == s[3]])
def test_silu_matches_reference(kinds, roots, heads, kv_heads, dim, cached, limits):
    for seed in range(3):
        drawn = draw_batch(
            kinds, roots, heads, kv_heads, dim, cached=cached, limits=limits, seed=seed
        )
        same(*drawn, Activation(normalizer=37.0))


def test_shared_rows_are_seen_by_all():
    """Profile and long history (the first 4 nodes) see each other both ways; later nodes see them
    too.
    """
    from dataclasses import replace

    batch, query, keys, values = draw_batch([("chain", 9)], [0], 2, 2, 16)
    tree = replace(batch.tree, shared=torch.tensor([4]))
    assert tree.dense_mask()[0, 3] and not tree.dense_mask()[4, 5]
    batch = TreeBatch(tree, None, batch.slots, batch.root_slots)
    same(batch, query, keys, values, Activation(normalizer=10.0))
    same(batch, query, keys, values, SOFTMAX)


def test_neighbours_do_not_change_a_tree():
    """A tree alone and the same tree packed with others give the same rows."""
    batch, query, keys, values = draw_batch(
        [("tree", 20), ("chain", 6), ("branches", 9)], [12, 0, 31], 4, 2, 32
    )
    slots = batch.slots
    packed = CpuTreeAttention(batch)(query, keys[slots], values[slots], keys, values)
    alone_tree = draw_tree("tree", 20, torch.Generator().manual_seed(0))
    alone = TreeBatch(alone_tree, None, slots[:20], batch.root_slots[:1])
    out = CpuTreeAttention(alone)(query[:20], keys[slots[:20]], values[slots[:20]], keys, values)
    torch.testing.assert_close(packed[:20], out, rtol=1e-6, atol=1e-6)


def test_wrong_mask_is_noticed():
    """The comparison can fail: attention that lets a node see its sibling differs from the
    reference.
    """
    batch, query, keys, values = draw_batch([("branches", 12)], [4], 2, 2, 16)
    wrong = TreeBatch(chain(batch.tree.tokens), None, batch.slots, batch.root_slots)
    slots = batch.slots
    expected = reference.tree_attention(query, keys, values, batch)
    got = CpuTreeAttention(wrong)(query, keys[slots], values[slots], keys, values)
    assert (got - expected).abs().max() > 0.01


def test_the_reference_has_gradients_for_training():
    """The same gradients as attention of one padded batch under a dense mask, root included."""
    from recserve.models.attention import DenseAttention

    batch, query, keys, values = draw_batch([("tree", 14)], [6], 4, 2, 16)
    order = torch.cat([batch.root_slots[0], batch.slots])
    inputs = [x.double().requires_grad_() for x in (query, keys, values)]
    weight = torch.randn(14, 4, 16, generator=torch.Generator().manual_seed(2))
    out = reference.tree_attention(inputs[0].float(), inputs[1].float(), inputs[2].float(), batch)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    mask[6:, 6:] = batch.tree.dense_mask()
    padded = torch.cat([torch.zeros(6, 4, 16), inputs[0].float()])
    dense = DenseAttention(mask)(
        0, padded[None], inputs[1].float()[order][None], inputs[2].float()[order][None]
    )
    expected = torch.autograd.grad((dense[0, 6:] * weight).sum(), inputs)
    for one, two in zip(got, expected, strict=True):
        assert one.abs().max() > 0.1
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("root", [40, 700])
def test_bfloat16_is_near_the_float32_reference(root):
    batch, query, keys, values = draw_batch([("tree", 20), ("branches", 300)], [root, 9], 4, 2, 32)
    query, keys, values = (x.bfloat16() for x in (query, keys, values))
    expected = reference.tree_attention(query.float(), keys.float(), values.float(), batch)
    slots = batch.slots
    got = CpuTreeAttention(batch)(query, keys[slots], values[slots], keys, values)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("kinds,roots,heads,kv_heads,dim", SHAPES[:-1])
def test_roots_in_a_table_are_the_same_roots(kinds, roots, heads, kv_heads, dim):
    """Behind the end of a root, and in the spare slot, stands NaN."""
    batch, query, keys, values = draw_batch(kinds, roots, heads, kv_heads, dim)
    owned = torch.cat([batch.slots, *batch.root_slots])
    foreign = torch.ones(keys.shape[0], dtype=torch.bool)
    foreign[owned] = False
    keys[foreign] = values[foreign] = float("nan")
    hole = int(foreign.nonzero()[0])
    expected = reference.tree_attention(query, keys, values, batch)
    table = as_table(batch, max(roots) + 3, hole)
    assert torch.equal(table.positions(), batch.positions())
    got = reference.padded_tree_attention(query, keys, values, table)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=5e-6)
