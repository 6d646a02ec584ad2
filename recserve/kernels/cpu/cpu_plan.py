"""Plans how a CPU attends to each tree of a batch, once per forward pass for all layers."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.kernels.paged_kv import PrefixTable, TreeBatch
from recserve.kernels.tree import TokenTree

SHALLOW = 8
FEW = 256  # up to so many nodes, an N x N mask costs less than gathering each node's ancestors
TOGETHER = 128  # nodes of isolated branches that attend together
SHORT = 512  # up to so many tokens, copying is faster than merging two results
RUNS = 8  # with this many runs of consecutive slots, slots are gathered one at a time
GAP = 64  # up to so many unrelated slots are read and masked to avoid a copy
FEW_SCORES = 160_000  # of all heads; storing more costs more than the blocks of the flash kernel

Place = slice | Tensor


@dataclass(frozen=True)
class Form:
    """The properties of a model that a plan depends on, in addition to the batch.

    Attributes:
        kv_heads: K.
        group: G, query heads per KV head.
        dim: D, head dimension.
        dtype: Type of queries and keys.
        softmax: Whether the weights are a softmax.
    """

    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype
    softmax: bool


@dataclass(frozen=True)
class Whole:
    """Root and tree of one tree as one list of m keys under one softmax.

    Attributes:
        places: Slots of the keys, in order.
        num_keys: m.
        mask: [n * G, m], 0 or -inf. None means that all rows see all keys.
        few_scores: Whether all scores may be stored at once. The mask is [1] instead of None then.
        count: B, trees with the same number of rows and keys. Their mask is [B, 1, n * G, m].
        distance: Slots from each of these trees to the next.
    """

    places: tuple[Place, ...]
    num_keys: int
    mask: Tensor | None
    few_scores: bool = False
    count: int = 1
    distance: int = 0


@dataclass(frozen=True)
class PlanPart:
    """One tree's share of a batch.

    `root_mask` and `mask` are bool for SiLU. For softmax they are 0 or -inf and are added to the
    scores.

    Attributes:
        rows: The tree's rows among the computed nodes.
        root: Slots of the root, a slice where they are consecutive.
        root_length: R.
        root_mask: [n, R], only with root limits.
        root_empty: [n] rows that see no root token.
        whole: Prefix and tree as one list of keys. The other fields are unused if it is set.
        chain: Whether attention is causal among the computed rows and nothing else.
        ancestors: [n, A] slots of the proper ancestors in a shallow tree.
        ancestor_mask: [n, A], true where the ancestor exists.
        keys: Slots of the rows themselves [n] for a chain or shallow tree, of all nodes [N] for any
            other tree.
        mask: [n, N] for any other tree.
    """

    rows: slice
    root: Place
    root_length: int
    root_mask: Tensor | None
    root_empty: Tensor | None = None
    whole: Whole | None = None
    chain: bool = False
    ancestors: Tensor | None = None
    ancestor_mask: Tensor | None = None
    keys: Place | None = None
    mask: Tensor | None = None


def plan(batch: TreeBatch, form: Form) -> list[PlanPart]:
    """Returns one part for each tree that has a computed node, or several for isolated branches."""
    tree = batch.tree
    queries = batch.queries
    if queries is None:
        queries = torch.arange(tree.num_nodes)
    offsets = tree.offsets.tolist()
    bounds = torch.searchsorted(queries, tree.offsets).tolist()
    parts = []
    assert not isinstance(batch.prefix_slots, PrefixTable)
    for b, prefix_slots in enumerate(batch.prefix_slots):
        if bounds[b] == bounds[b + 1]:
            continue
        shared = 0 if tree.shared is None else int(tree.shared[b])
        cuts = [offsets[b], offsets[b + 1]]
        if cuts[1] - cuts[0] > FEW and not shared:
            cuts = _cuts(tree, *cuts)
        rows = torch.searchsorted(queries, torch.tensor(cuts)).tolist()
        root = consecutive(prefix_slots)
        for start, stop, first, last in zip(cuts, cuts[1:], rows, rows[1:], strict=False):
            if first == last:
                continue
            nodes = queries[first:last]
            limits = None if tree.root_limits is None else tree.root_limits[nodes]
            root_mask = None
            if limits is not None and int(limits.min()) < prefix_slots.shape[0]:
                root_mask = torch.arange(prefix_slots.shape[0])[None, :] < limits[:, None]
            base = PlanPart(slice(first, last), root, prefix_slots.shape[0], root_mask)
            inside = slice(start, stop)
            parts.append(_with_tree(base, batch, prefix_slots, nodes, inside, shared, form))
    return _stacked(parts)


def _cuts(tree: TokenTree, start: int, stop: int) -> list[int]:
    """Returns the bounds of groups of isolated branches of a large tree, from `start` to `stop`.

    Branches below the root do not see each other. So a mask per group has N x TOGETHER scores
    instead of N x N. A shallow tree stays whole, because it has no mask.
    """
    depths = tree.depths[start:stop]
    if int(depths.max()) < SHALLOW:
        return [start, stop]
    tops = ((depths == 0).nonzero().flatten() + start).tolist()
    cuts = [start]
    while cuts[-1] + TOGETHER < stop:
        # the last branch that begins within TOGETHER nodes, or the next one after a longer branch
        place = bisect_right(tops, cuts[-1] + TOGETHER) - 1
        if tops[place] == cuts[-1]:
            place += 1
        if place == len(tops):
            break
        cuts.append(tops[place])
    return [*cuts, stop]


def _with_tree(
    base: PlanPart,
    batch: TreeBatch,
    prefix_slots: Tensor,
    nodes: Tensor,
    inside: slice,
    shared: int,
    form: Form,
) -> PlanPart:
    """Adds to a part how the nodes see each other, as one list of keys if that is cheaper."""
    tree, root_length = batch.tree, base.root_length
    size = inside.stop - inside.start
    depth = int(tree.depths[nodes].max())
    few = size <= FEW
    is_chain = form.softmax and nodes.shape[0] == size == depth + 1 and not shared
    if is_chain and not (few and root_length):
        return _two(base, form, chain=True, keys=consecutive(batch.slots[inside]))
    if not (few and form.softmax) and not shared and depth < SHALLOW:
        ancestors = tree.ancestors(depth)[nodes]
        slots = batch.slots[ancestors.clamp(min=0)]
        own = consecutive(batch.slots[nodes])
        return _two(base, form, ancestors=slots, ancestor_mask=ancestors >= 0, keys=own)
    columns = torch.arange(inside.start, inside.stop)
    seen = (columns <= nodes[:, None]) & (nodes[:, None] < tree.ends[inside])
    seen[:, :shared] = True
    slots = batch.slots[inside]
    if few and form.softmax:
        whole = _whole(base, prefix_slots, slots, seen, form)
        if whole is not None:
            return replace(base, whole=whole)
    return _two(base, form, keys=consecutive(slots), mask=seen)


def _two(base: PlanPart, form: Form, **tree: bool | Tensor | Place) -> PlanPart:
    """Plans root and tree separately: two results that are merged, or added for SiLU."""
    part = replace(base, **tree)  # type: ignore[arg-type]
    if not form.softmax:
        return part
    root_empty = None if part.root_mask is None else ~part.root_mask.any(-1)
    return replace(
        part,
        root_mask=None if part.root_mask is None else added(part.root_mask, form.dtype),
        root_empty=root_empty,
        mask=None if part.mask is None else added(part.mask, form.dtype),
    )


def _whole(
    base: PlanPart, prefix_slots: Tensor, slots: Tensor, seen: Tensor, form: Form
) -> Whole | None:
    """Returns root and tree as one list of keys.

    The result is None where few nodes over a long root are cheaper as two results.
    """
    if base.root_mask is not None:
        seen = torch.cat([base.root_mask, seen], dim=1)
    num_keys = base.root_length + slots.shape[0]
    rows = seen.shape[0] * form.group
    places: tuple[Place, ...]
    near = _near(base, slots)
    if near is not None:
        places, num_keys = (near,), near.stop - near.start
        before = seen[:, : seen.shape[1] - slots.shape[0]]
        behind = torch.zeros(seen.shape[0], num_keys - base.root_length)
        columns = slots - near.start - base.root_length
        behind.index_add_(1, columns, seen[:, before.shape[1] :].float())
        seen = torch.cat([before, behind > 0], dim=1)
    elif isinstance(base.root, Tensor) or base.root_length <= SHORT:
        places = _runs(torch.cat([prefix_slots, slots]))
    else:
        return None
    few_scores = form.dtype == torch.float32 and form.kv_heads * rows * num_keys <= FEW_SCORES
    if bool(seen.all()):
        return Whole(places, num_keys, torch.zeros(1) if few_scores else None, few_scores)
    mask = torch.zeros(rows, num_keys, dtype=form.dtype)
    behind = added(seen.repeat_interleave(form.group, dim=0), form.dtype)
    mask[:, num_keys - seen.shape[1] :] = behind
    return Whole(places, num_keys, mask, few_scores)


def _near(base: PlanPart, slots: Tensor) -> slice | None:
    """Returns root and tree as one stretch of the pool, if the tree lies close behind the root."""
    if isinstance(base.root, Tensor):
        return None
    first, last = int(slots.min()), int(slots.max())
    stop = base.root.stop if base.root_length else first
    if first < stop or last >= stop + slots.shape[0] + GAP:
        return None
    return slice(stop - base.root_length, last + 1)


def _stacked(parts: list[PlanPart]) -> list[PlanPart]:
    """Joins trees of the same size that lie at the same distance in the pool into one part."""
    wholes, starts = [], []
    for part in parts:
        whole = part.whole
        if whole is None or len(whole.places) > 1:
            return parts
        if not isinstance(whole.places[0], slice):
            return parts
        wholes.append(whole)
        starts.append(whole.places[0].start)
    distances = {after - before for before, after in zip(starts, starts[1:], strict=False)}
    sizes = {
        (part.rows.stop - part.rows.start, whole.num_keys)
        for part, whole in zip(parts, wholes, strict=True)
    }
    if len(distances) != 1 or len(sizes) != 1 or min(distances) < 0:
        return parts
    masks = [whole.mask for whole in wholes if whole.mask is not None and whole.mask.ndim > 1]
    if masks and len(masks) < len(wholes):
        return parts
    stacked = replace(
        wholes[0],
        mask=torch.stack(masks)[:, None] if masks else None,
        few_scores=False,
        count=len(wholes),
        distance=distances.pop(),
    )
    return [replace(parts[0], rows=slice(0, parts[-1].rows.stop), whole=stacked)]


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 where the mask is true and -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def consecutive(slots: Tensor) -> Place:
    """Returns consecutive slots as a slice, which gives a view instead of a copy."""
    places = _runs(slots)
    return places[0] if len(places) == 1 else slots


def _runs(slots: Tensor) -> tuple[Place, ...]:
    """Returns the slots as a few slices, or unchanged where they are scattered."""
    n = slots.shape[0]
    if n == 0:
        return (slice(0, 0),)
    breaks = (slots.diff() != 1).nonzero().flatten() + 1
    if breaks.shape[0] >= RUNS:
        return (slots,)
    cuts = [0, *breaks.tolist(), n]
    firsts = slots[cuts[:-1]].tolist()
    sizes = [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))
