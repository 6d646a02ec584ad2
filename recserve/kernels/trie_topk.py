"""One level of beam search in Triton: gather of the children, mask, log-softmax, sum, top-k.

    total[w, c] = log_prob[w] + logit[w, code_c] - log sum_c' exp(logit[w, code_c'])   over children

Bytes moved per beam with m children: 8 of its range, 4 m of codes, m logits, 8 M written and read
by the top-k (M the level's widest node); with a filter 8 m of leaf ranks and two reads of it per
child. Nothing depends on the vocabulary or the number of items. Twin: trie_children.best_children.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recserve.kernels.trie import Trie
from recserve.kernels.trie_children import BestChildren, LeafBits, unpacked

NO_FILTER, EXCLUDED, ALLOWED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _below(sorted_ranks, size, rank, mask, STEPS: tl.constexpr):
    """How many of the sorted ranks are lower: a binary search per lane."""
    count = rank * 0
    for step in tl.static_range(STEPS):
        probe = count + (1 << (STEPS - 1 - step))
        inside = mask & (probe <= size)
        lower = tl.load(sorted_ranks + probe - 1, mask=inside, other=2147483647) < rank
        count = tl.where(lower, probe, count)
    return count


@triton.jit
def _allowed_before(words, counts, rank, mask):
    """Set bits before a rank."""
    place = rank >> 5
    word = tl.load(words + place, mask=mask, other=0)
    word = (word & ((1 << (rank & 31)) - 1)).to(tl.uint32)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
    return tl.load(counts + place, mask=mask, other=0) + word.to(tl.int32)


@triton.jit
def children_kernel(
    first_child, node_codes, first_leaf, last_leaf, nodes, log_probs, logits, normalizers,
    ranks, words, counts, keys, beams, num_codes, width, filter_size,
    BLOCK: tl.constexpr, FILTER: tl.constexpr, STEPS: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """All children of one beam."""
    row = tl.program_id(0).to(tl.int64)
    request = row // beams
    node, before = tl.load(nodes + row), tl.load(log_probs + row)
    first = tl.load(first_child + node)
    count = tl.load(first_child + node + 1) - first
    count = tl.where(before > float("-inf"), count, 0)
    step = tl.arange(0, BLOCK)
    valid = step < count
    child = tl.where(valid, first + step, 0)
    code = tl.load(node_codes + child, mask=valid, other=0)
    logit = tl.load(logits + row * num_codes + code, mask=valid, other=float("-inf")).to(tl.float32)
    if NORMALIZED:
        total = before + (logit - tl.load(normalizers + row))
    else:
        peak = tl.max(logit, 0)
        shifted = logit - peak
        total = before + (shifted - tl.log(tl.sum(tl.exp(shifted), 0)))
    if FILTER != NO_FILTER:
        low = tl.load(first_leaf + child, mask=valid, other=0)
        high = tl.load(last_leaf + child, mask=valid, other=0)
        if FILTER == EXCLUDED:
            own = ranks + request * filter_size
            gone = _below(own, filter_size, high, valid, STEPS)
            left = (high - low) - (gone - _below(own, filter_size, low, valid, STEPS))
        else:
            own_words, own_counts = words + request * filter_size, counts + request * filter_size
            left = _allowed_before(own_words, own_counts, high, valid)
            left -= _allowed_before(own_words, own_counts, low, valid)
        valid = valid & (left > 0)
    bits = tl.where(valid, total + 0.0, float("-inf")).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (4294967295 - child.to(tl.int64))
    tl.store(keys + row * width + step, key, mask=step < width)


def best_children(
    trie: Trie,
    nodes: Tensor,
    log_probs: Tensor,
    logits: Tensor,
    width: int,
    keep: int,
    normalizers: Tensor | None = None,
    excluded: Tensor | None = None,
    allowed: LeafBits | None = None,
) -> BestChildren:
    """As `trie_children.best_children`: one launch and one top-k."""
    if excluded is not None and allowed is not None:
        raise ValueError("excluded and allowed were both given; clear the excluded leaves' bits")
    batch, beams = nodes.shape
    keys = torch.empty(batch, beams * width, dtype=torch.int64, device=nodes.device)
    kind, size, unused = NO_FILTER, 0, nodes
    if excluded is not None:
        kind, size = EXCLUDED, excluded.shape[1]
    elif allowed is not None:
        kind, size = ALLOWED, allowed.words.shape[1]
    children_kernel[(batch * beams,)](
        trie.first_child, trie.node_codes, trie.first_leaf, trie.last_leaf,
        nodes.contiguous(), log_probs.contiguous(), logits.contiguous(),
        log_probs if normalizers is None else normalizers,
        unused if excluded is None else excluded,
        unused if allowed is None else allowed.words,
        unused if allowed is None else allowed.counts,
        keys, beams, logits.shape[1], width, size,
        BLOCK=triton.next_power_of_2(width), FILTER=kind.value, STEPS=size.bit_length(),
        NORMALIZED=normalizers is not None,
    )  # fmt: skip
    return unpacked(keys, width, keep)
