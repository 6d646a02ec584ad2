"""How a CPU attends to each tree of a batch: worked out once per forward, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.kernels.cpu.processor import processor
from recserve.kernels.paged_kv import RootTable, TreeBatch

SHALLOW = 8
FEW = 256  # nodes whose N x N mask costs less than gathering each node's ancestors
SHORT = 512  # tokens that are copied faster than two results are merged
RUNS = 8  # more runs of consecutive slots are gathered one slot at a time
GAP = 64  # foreign slots that are read and masked rather than left out by a copy
# Rows, and multiply-adds of one head for each thread, below which a product's fixed cost and copies
# are most of it. Threads share one product, where the flash kernel gives them heads of their own.
PRODUCT_ROWS, PRODUCT_SIZE = 48, 4_000_000
FEW_SCORES = 160_000  # more of them, of all heads, cost more to keep than the flash kernel's blocks
STEP_ROWS, STEP_KEYS = 16, 64  # sizes of products are rounded up: each new one is compiled
TILE = 2**19  # scores of one product, so that they stay in the processor's caches

Place = slice | Tensor


@dataclass(frozen=True)
class Form:
    """What a plan depends on beside the batch: KV heads K, query heads G of each, head dim D, the
    type of queries and keys, and whether weights are a softmax.
    """

    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype
    softmax: bool


@dataclass(frozen=True)
class Whole:
    """Root and tree of one tree as one list of m keys under one softmax.

    places: their slots, in order. mask [n * G, m]: 0 or -inf, None: all see all. width: with
    oneDNN's products m rounded up, else 0; the mask then is of the last keys, up to the rounded
    end, and of rounded rows. few_scores: all of them may be kept; the mask is [1] for None.
    count: B trees of as many rows and keys, each `distance` slots behind the one before; mask
    [B, 1, n * G, m].
    """

    places: tuple[Place, ...]
    num_keys: int
    mask: Tensor | None
    width: int = 0
    few_scores: bool = False
    count: int = 1
    distance: int = 0


@dataclass(frozen=True)
class PlanPart:
    """One tree's share of a batch.

    rows: its rows among the computed nodes. whole: all it sees in one; the rest is then unused.
    root: slots of the root, as a slice where they are consecutive.
    root_mask [n, R]: only with root limits; root_empty [n]: rows that see nothing of the root.
    chain: causal among the computed rows, nothing else. ancestors [n, A] slots and ancestor_mask
    [n, A]: proper ancestors of a shallow tree; keys [n] slots: of the rows themselves, in both.
    keys [N] slots and mask [n, N]: any other tree.
    root_mask and mask are bool for silu, and 0 or -inf for softmax, which adds them.
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
    """One part for each tree that has a computed node."""
    tree = batch.tree
    queries = batch.queries
    if queries is None:
        queries = torch.arange(tree.num_nodes)
    offsets = tree.offsets.tolist()
    bounds = torch.searchsorted(queries, tree.offsets).tolist()
    parts = []
    assert not isinstance(batch.root_slots, RootTable)
    for b, root_slots in enumerate(batch.root_slots):
        nodes = queries[bounds[b] : bounds[b + 1]]
        if nodes.shape[0] == 0:
            continue
        limits = None if tree.root_limits is None else tree.root_limits[nodes]
        root_mask = None
        if limits is not None and int(limits.min()) < root_slots.shape[0]:
            root_mask = torch.arange(root_slots.shape[0])[None, :] < limits[:, None]
        base = PlanPart(
            slice(bounds[b], bounds[b + 1]),
            consecutive(root_slots),
            root_slots.shape[0],
            root_mask,
        )
        shared = 0 if tree.shared is None else int(tree.shared[b])
        nodes_of_tree = slice(offsets[b], offsets[b + 1])
        parts.append(_with_tree(base, batch, root_slots, nodes, nodes_of_tree, shared, form))
    return _stacked(parts)


def _with_tree(
    base: PlanPart,
    batch: TreeBatch,
    root_slots: Tensor,
    nodes: Tensor,
    inside: slice,
    shared: int,
    form: Form,
) -> PlanPart:
    """Add how the nodes see each other, or all of it in one."""
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
        whole = _whole(base, root_slots, slots, seen, form)
        if whole is not None:
            return replace(base, whole=whole)
    return _two(base, form, keys=consecutive(slots), mask=seen)


def _two(base: PlanPart, form: Form, **tree: bool | Tensor | Place) -> PlanPart:
    """Root and tree apart: results that are merged, or for silu added."""
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
    base: PlanPart, root_slots: Tensor, slots: Tensor, seen: Tensor, form: Form
) -> Whole | None:
    """Root and tree as one; None where few nodes over a long root are cheaper in two results."""
    if base.root_mask is not None:
        seen = torch.cat([base.root_mask, seen], dim=1)
    num_keys = base.root_length + slots.shape[0]
    rows = seen.shape[0] * form.group
    size = rows * num_keys * form.dim
    big = rows >= PRODUCT_ROWS and size >= PRODUCT_SIZE * torch.get_num_threads()
    if big and has_products(form.dtype):
        width, height = _up(num_keys, STEP_KEYS), _up(rows, STEP_ROWS)
        padded = seen.new_zeros(height, seen.shape[1] + width - num_keys)
        padded[:rows, : seen.shape[1]] = seen.repeat_interleave(form.group, dim=0)
        padded[rows:, : seen.shape[1]] = True
        places = _runs(torch.cat([root_slots, slots]))
        return Whole(places, num_keys, added(padded, torch.float32), width)
    near = _near(base, slots)
    if near is not None:
        places, num_keys = (near,), near.stop - near.start
        before = seen[:, : seen.shape[1] - slots.shape[0]]
        behind = torch.zeros(seen.shape[0], num_keys - base.root_length)
        columns = slots - near.start - base.root_length
        behind.index_add_(1, columns, seen[:, before.shape[1] :].float())
        seen = torch.cat([before, behind > 0], dim=1)
    elif isinstance(base.root, Tensor) or base.root_length <= SHORT:
        places = _runs(torch.cat([root_slots, slots]))
    else:
        return None
    few_scores = form.dtype == torch.float32 and form.kv_heads * rows * num_keys <= FEW_SCORES
    if bool(seen.all()):
        return Whole(places, num_keys, torch.zeros(1) if few_scores else None, 0, few_scores)
    mask = torch.zeros(rows, num_keys, dtype=form.dtype)
    behind = added(seen.repeat_interleave(form.group, dim=0), form.dtype)
    mask[:, num_keys - seen.shape[1] :] = behind
    return Whole(places, num_keys, mask, 0, few_scores)


def _near(base: PlanPart, slots: Tensor) -> slice | None:
    """Root and tree as one stretch of the pool, if the tree lies close behind the root."""
    if isinstance(base.root, Tensor):
        return None
    first, last = int(slots.min()), int(slots.max())
    stop = base.root.stop if base.root_length else first
    if first < stop or last >= stop + slots.shape[0] + GAP:
        return None
    return slice(stop - base.root_length, last + 1)


def _stacked(parts: list[PlanPart]) -> list[PlanPart]:
    """Trees of the same size, each a stretch of the pool at the same distance, as one."""
    wholes, starts = [], []
    for part in parts:
        whole = part.whole
        if whole is None or whole.width or len(whole.places) > 1:
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


def has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN's float32 products beat the flash kernel for keys of this type: on x86, but
    for Intel's processors, where those of the flash kernel (MKL's) are as fast, and for the halves
    on processors with AMX, which the flash kernel uses.
    """
    if not torch.backends.mkldnn.is_available() or _of_intel():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or not torch.cpu._is_amx_tile_supported()


def _of_intel() -> bool:
    """Whether this processor says that it is Intel's."""
    return processor().vendor == "GenuineIntel"


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is true, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def consecutive(slots: Tensor) -> Place:
    """The same slots as a slice where they follow each other: a view instead of a copy."""
    places = _runs(slots)
    return places[0] if len(places) == 1 else slots


def _runs(slots: Tensor) -> tuple[Place, ...]:
    """The same slots as few slices, or as they are where they are scattered."""
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


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
