"""Attention of draft networks whose layers see only a part of a text.

A text's rows are committed rows 0..n-1, whose entries lie in the slots of the tokens after them. A
`LayerView` says which of them a layer sees. Networks without views use plain `PagedAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from recserve.drafters.shared.feature_network import LayerView
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree, chains
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.attention import Attend, LayeredAttention, PagedAttention
from recserve.speculation.drafter import StateSpan


def attend_committed(
    batch: TreeBatch, parts: Seq[StateSpan], views: Seq[LayerView], pool: KVPool
) -> Attend:
    """Returns the attention of committed rows.

    Args:
        batch: One chain for each part, with all rows before it as its prefix.
        parts: The rows that are computed.
        views: What each layer sees. Empty if all layers see everything.
        pool: Pages of the network.
    """
    return _attend(batch, views, pool, lambda view: _narrow_committed(batch, parts, view))


def attend_new(batch: TreeBatch, counts: Tensor, views: Seq[LayerView], pool: KVPool) -> Attend:
    """Returns the attention of the committed rows that a captured draft computes.

    Args:
        batch: One chain for each text, with all rows before it as its prefix.
        counts: [B] number of a chain's first rows that have a state.
        views: What each layer sees. Empty if all layers see everything.
        pool: Pages of the network.
    """
    return _attend(batch, views, pool, lambda view: _narrow_new(batch, counts, view))


def attend_drafted(batch: TreeBatch, views: Seq[LayerView], pool: KVPool) -> Attend:
    """Returns the attention of drafted rows.

    Args:
        batch: Drafted trees, with all committed rows of their texts as prefixes.
        views: What each layer sees. Empty if all layers see everything.
        pool: Pages of the network.
    """
    return _attend(batch, views, pool, lambda view: _narrow_drafted(batch, view))


def _attend(
    batch: TreeBatch, views: Seq[LayerView], pool: KVPool, narrow: Callable[[LayerView], TreeBatch]
) -> Attend:
    if not views:
        return PagedAttention(batch, pool)
    attends = {view: PagedAttention(narrow(view), pool) for view in set(views)}
    return LayeredAttention([attends[view] for view in views])


def _narrow_committed(batch: TreeBatch, parts: Seq[StateSpan], view: LayerView) -> TreeBatch:
    """Returns the batch of committed rows for a view.

    Rows that see the same first row are one chain. A row behind a window is a tree of its own. Its
    prefix may hold rows of this batch, because all of them are written before attention reads.
    """
    table, sizes, starts, lengths = batch.prefixes.slots, list[int](), list[int](), list[int]()
    for part in parts:
        start, stop = part.first, part.first + part.states.shape[0]
        own = part.context.row * table.shape[1] + 1  # place of row 0
        cut = view.first + view.window if view.window else stop  # first row behind a window
        unseen = (start, min(stop, view.first), 0)
        seen = (max(start, view.first), min(stop, cut), view.first)
        for first, end, below in (unseen, seen):
            if first < end:
                sizes.append(end - first)
                starts.append(own + below)
                lengths.append(first - below)
        for row in range(max(start, cut), stop):
            sizes.append(1)
            starts.append(own + row - view.window + 1)
            lengths.append(view.window - 1)
    prefixes = Prefixes(table, starts, lengths)
    return TreeBatch(_chains(sizes, batch.slots.device), None, batch.slots, prefixes)


def _narrow_new(batch: TreeBatch, counts: Tensor, view: LayerView) -> TreeBatch:
    """Returns the batch of a captured draft's committed rows for a view.

    Each row is a tree of its own, so that no shape depends on the rows.
    """
    tree, prefixes, texts = batch.tree, batch.prefixes, batch.tree.tree_ids()
    rows = tree.depths + prefixes.lengths[texts]
    below = torch.where(rows < view.first, 0, view.first)
    if view.window:
        below = below.maximum(rows - view.window + 1)
    lengths = torch.where(tree.depths < counts[texts], rows - below, 0)
    longest = view.window or prefixes.longest
    seen = Prefixes.on_device(prefixes.slots, prefixes.starts[texts] + below, lengths, longest)
    nodes, count = chains(tree.num_nodes, 1, batch.slots.device), tree.num_nodes
    return TreeBatch(nodes, None, batch.slots, seen, [1] * count, fixed_shapes=True)


def _chains(sizes: list[int], device: torch.device) -> TokenTree:
    """Returns chains of the given lengths, one tree each. Their tokens are not read."""
    lengths = on_device(sizes, device)
    ends = lengths.cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    index = torch.arange(sum(sizes), device=device)
    depths = index - torch.repeat_interleave(offsets[:-1], lengths, output_size=len(index))
    return TokenTree(
        tokens=index,
        parents=torch.where(depths > 0, index - 1, -1),
        depths=depths,
        ends=torch.repeat_interleave(ends, lengths, output_size=len(index)),
        offsets=offsets,
    )


def _narrow_drafted(batch: TreeBatch, view: LayerView) -> TreeBatch:
    """Returns the batch of drafted rows for a view."""
    prefixes = batch.prefixes.after(view.first)
    if not view.window:
        return replace(batch, prefixes=prefixes)
    if not view.moves:
        return replace(batch, prefixes=prefixes.last(view.window))
    # A row at depth d sees the last W - 1 - d committed rows: the first ones in reverse order.
    prefixes = prefixes.last(view.window - 1).reverse()
    limits = (view.window - 1 - batch.tree.depths).clamp(min=0)
    limits = limits.minimum(prefixes.lengths[batch.tree.tree_ids()])
    return replace(batch, tree=replace(batch.tree, prefix_limits=limits), prefixes=prefixes)
