"""One level of beam search in Triton: gather of the children, mask, log-softmax, sum, top-k.

    total[w, c] = log_prob[w] + logit[w, code_c] - log sum_c' exp(logit[w, code_c'])   over children

Bytes moved per beam with m children: 8 for its range, 4 m of codes and m logits. The top-k writes
and reads 8 M more, where M is the number of children of the level's widest node. Codes and logits
are read twice if a node has more than one block of children. A filter adds 8 m of leaf ranks and
two reads of it per child, and two binary searches if the request lists leaves. Insertions
add a binary search per program, and two more per child with a filter. Nothing depends on
the size of the vocabulary or the catalogue. Reference: level_search.best_children_reference.

Each block of children is one program, so that the root's children fill the device too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from recserve.kernels.trie.level_search import BestChildren, ChildQuery, unpacked
from recserve.kernels.trie.trie import Trie

NO_FILTER, EXCLUDED, ALLOWED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Where the log-sum-exp of a beam's children comes from: the caller, the only block, all blocks.
GIVEN, AT_ONCE, IN_PARTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# These arguments differ between levels and versions. They are not specialised, so one compiled
# kernel serves all.
COUNTS = ["beams", "num_codes", "width"]
COUNTS += ["num_ranks", "num_words", "base_nodes", "num_changed", "num_inserted"]
COUNTS += ["rank_steps", "insertion_steps"]
ARRAYS = [
    *(
        "changed_nodes",
        "changed_first",
        "changed_last",
        "later_first",
        "later_count",
        "later_codes",
    ),
    *("inserted", "nodes", "log_probs", "normalizers", "ranks", "words", "counts"),
    *("peaks", "weights"),
]
MOST_CHILDREN = 512  # at once, four per thread, so that their values stay in registers
FILLER = tl.constexpr(2**62)  # fixed_trie.NOWHERE
PARTS = 64  # blocks whose sums are merged at once
# Key of a child with score -inf and node 0, as `level_search.packed` computes it.
NO_CHILD = tl.constexpr((-0x7F800001 << 32) | 0xFFFFFFFF)


@triton.jit
def _below(sorted_ranks, size, rank, mask, steps):
    """Counts the sorted ranks below each rank, with a binary search of `steps` steps per lane.

    The loop is not unrolled: five unrolled searches made the compilation take nine seconds, not
    one.
    """
    count = rank * 0
    for step in range(steps):
        probe = count + (1 << (steps - 1 - step))
        inside = mask & (probe <= size)
        lower = tl.load(sorted_ranks + probe - 1, mask=inside, other=2147483647) < rank
        count = tl.where(lower, probe, count)
    return count


@triton.jit
def _allowed_before(words, counts, rank, mask):
    """Counts the set bits before a rank."""
    place = rank >> 5
    word = tl.load(words + place, mask=mask, other=0)
    word = (word & ((1 << (rank & 31)) - 1)).to(tl.uint32)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
    return tl.load(counts + place, mask=mask, other=0) + word.to(tl.int32)


@triton.jit
def _changed_place(changed_nodes, num_changed, node, mask, steps):
    """Returns the position of nodes in a sorted list, and whether they are in it."""
    place = _below(changed_nodes, num_changed, node, mask, steps)
    there = mask & (place < num_changed)
    return place, there & (tl.load(changed_nodes + place, mask=there, other=-1) == node)


@triton.jit
def _block(
    node_codes, later_codes, logits, first, count, later, total, start, row, num_codes, base_nodes,
    BLOCK: tl.constexpr, INSERTIONS: tl.constexpr,
):  # fmt: skip
    """Loads children from number `start` on of one beam: nodes, whether they exist, and logits."""
    step = start + tl.arange(0, BLOCK)
    child = first + step
    if INSERTIONS:
        child = tl.where(step < count, child, later + step - count)
    valid = step < total
    child = tl.where(valid, child, 0)
    code = tl.load(node_codes + child, mask=valid & (child < base_nodes), other=0)
    if INSERTIONS:
        own = valid & (child >= base_nodes)
        code += tl.load(later_codes + child - base_nodes, mask=own, other=0).to(code.dtype)
    logit = tl.load(logits + row * num_codes + code, mask=valid, other=float("-inf"))
    return child, valid, logit.to(tl.float32)


@triton.jit
def _children_of(
    first_child, changed_nodes, later_first, later_count, nodes, log_probs, row,
    base_nodes, num_changed, insertion_steps, INSERTIONS: tl.constexpr,
):  # fmt: skip
    """Returns the two ranges of a beam's children, and whether the trie has later changes."""
    node, before = tl.load(nodes + row), tl.load(log_probs + row)
    built = node < base_nodes
    first = tl.load(first_child + node, mask=built, other=0).to(tl.int64)
    count = tl.load(first_child + node + 1, mask=built, other=0) - first
    total, later, some = count, first, built
    if INSERTIONS:
        # A list without changed nodes begins with filler; then searches in it are skipped.
        some = tl.load(changed_nodes, mask=num_changed > 0, other=FILLER) < FILLER
        if some:
            place, found = _changed_place(changed_nodes, num_changed, node, some, insertion_steps)
            later = tl.load(later_first + place, mask=found, other=0)
            total = count + tl.load(later_count + place, mask=found, other=0)
    return first, count, later, tl.where(before > float("-inf"), total, 0), before, some


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=ARRAYS)
def weights_kernel(
    first_child, node_codes, changed_nodes, later_first, later_count, later_codes, nodes, log_probs,
    logits, peaks, weights, num_codes, base_nodes, num_changed, insertion_steps,
    BLOCK: tl.constexpr, INSERTIONS: tl.constexpr,
):  # fmt: skip
    """Finds the largest logit of one block of a beam's children, and the sum of exponentials."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, later, total, before, some = _children_of(
        first_child, changed_nodes, later_first, later_count, nodes, log_probs, row, base_nodes,
        num_changed, insertion_steps, INSERTIONS,
    )  # fmt: skip
    peak, weight = before * 0 + float("-inf"), before * 0
    if block * BLOCK < total:
        child, valid, logit = _block(
            node_codes, later_codes, logits, first, count, later, total, block * BLOCK, row,
            num_codes, base_nodes, BLOCK, INSERTIONS,
        )  # fmt: skip
        peak = tl.max(logit, 0)
        weight = tl.sum(tl.exp(logit - tl.where(peak == float("-inf"), 0.0, peak)), 0)
    place = row * tl.num_programs(1) + block
    tl.store(peaks + place, peak)
    tl.store(weights + place, weight)


@triton.jit
def _log_sum(peaks, weights, row, parts, BLOCK_PARTS: tl.constexpr):
    """Merges the parts of one beam into the peak and the log of the sum of exponentials over it."""
    peak, weight = float("-inf"), 0.0
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        place, valid = row * parts + part, part < parts
        own = tl.load(peaks + place, mask=valid, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(own, 0))
        # A beam without children uses a finite peak, so that inf - inf does not occur.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        sums = tl.load(weights + place, mask=valid, other=0.0) * tl.exp(own - safe)
        weight = weight * tl.exp(peak - safe) + tl.sum(sums, 0)
        peak = higher
    return peak, tl.log(weight)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=ARRAYS)
def children_kernel(
    first_child, node_codes, first_leaf, last_leaf, changed_nodes, changed_first, changed_last,
    later_first, later_count, later_codes, inserted, nodes, log_probs, logits, normalizers,
    peaks, weights, ranks, words, counts, keys, beams, num_codes, width, num_ranks, num_words,
    base_nodes, num_changed, num_inserted, rank_steps, insertion_steps,
    BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr, FILTER: tl.constexpr, SUMS: tl.constexpr,
    INSERTIONS: tl.constexpr,
):  # fmt: skip
    """Scores one block of the children of one beam. INSERTIONS: the trie may have insertions."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // beams
    first, count, later, total, before, some = _children_of(
        first_child, changed_nodes, later_first, later_count, nodes, log_probs, row, base_nodes,
        num_changed, insertion_steps, INSERTIONS,
    )  # fmt: skip
    step = block * BLOCK + tl.arange(0, BLOCK)
    key = tl.full([BLOCK], NO_CHILD, dtype=tl.int64)
    if block * BLOCK < total:
        child, valid, logit = _block(
            node_codes, later_codes, logits, first, count, later, total, block * BLOCK, row,
            num_codes, base_nodes, BLOCK, INSERTIONS,
        )  # fmt: skip
        if SUMS == GIVEN:
            peak = tl.load(normalizers + row).to(tl.float32)
            spread = peak * 0
        elif SUMS == IN_PARTS:
            peak, spread = _log_sum(peaks, weights, row, tl.num_programs(1), BLOCK_PARTS)
        else:
            peak = tl.max(logit, 0)
            safe = tl.where(peak == float("-inf"), 0.0, peak)
            spread = tl.log(tl.sum(tl.exp(logit - safe), 0))
        score = before + ((logit - peak) - spread)
        if FILTER != NO_FILTER:
            low = tl.load(first_leaf + child, mask=valid & (child < base_nodes), other=0)
            high = tl.load(last_leaf + child, mask=valid & (child < base_nodes), other=0)
            left = high - low
            if FILTER == ALLOWED:  # bits of the base; later nodes have the range 0 : 0
                own_words, own_counts = words + request * num_words, counts + request * num_words
                left = _allowed_before(own_words, own_counts, high, valid)
                left -= _allowed_before(own_words, own_counts, low, valid)
            low, high, left = low.to(tl.int64), high.to(tl.int64), left.to(tl.int64)
            if INSERTIONS:  # noqa: SIM102 - a constant, which `and` would not be
                if some:
                    moved = _below(inserted, num_inserted, low + 1, valid, insertion_steps)
                    spot, held = _changed_place(
                        changed_nodes, num_changed, child, valid, insertion_steps
                    )
                    changed_low = tl.load(changed_first + spot, mask=held, other=0)
                    changed_high = tl.load(changed_last + spot, mask=held, other=0)
                    low = tl.where(held, changed_low, low + moved)
                    high = tl.where(held, changed_high, high + moved)
                    if FILTER == EXCLUDED:
                        left = high - low
            own_ranks = ranks + request * num_ranks
            # A request without listed leaves has filler only; then searches in it are skipped.
            lowest = tl.load(own_ranks, mask=num_ranks > 0, other=0).to(tl.int64)
            if (num_ranks > 0) & (lowest < FILLER):
                listed = _below(own_ranks, num_ranks, high, valid, rank_steps)
                listed -= _below(own_ranks, num_ranks, low, valid, rank_steps)
                if FILTER == EXCLUDED:
                    left -= listed
                else:
                    left += listed
            valid = valid & (left > 0)
        bits = tl.where(valid, score + 0.0, float("-inf")).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (ordered.to(tl.int64) << 32) | (4294967295 - child)
    tl.store(keys + row * width + step, key, mask=step < width)


def best_children(trie: Trie, query: ChildQuery) -> BestChildren:
    """Runs `level_search.best_children_reference` with one launch and one top-k.

    Children of more than one block, without given normalisers, take one more launch.
    """
    nodes, width, normalizers = query.nodes, query.width, query.normalizers
    excluded, bits, added = query.filters.excluded, query.filters.bits, query.filters.added
    batch, beams = nodes.shape
    keys = torch.empty(batch, beams * width, dtype=torch.int64, device=nodes.device)
    kind, ranks, unused, words = NO_FILTER, None, nodes, (nodes, nodes)
    num_words = 0
    if excluded is not None:
        kind, ranks = EXCLUDED, excluded
    elif bits is not None:
        kind, ranks = ALLOWED, added
        words, num_words = (bits.words.contiguous(), bits.counts.contiguous()), bits.words.shape[1]
    num_ranks = 0 if ranks is None else ranks.shape[1]
    later, sizes = (unused,) * 7, (0, 0)
    if (own := trie.insertions) is not None:
        later = (*vars(own.changed).values(), own.codes, own.inserted)
        sizes = own.changed.nodes.shape[0], own.inserted.shape[0]
    block = min(triton.next_power_of_2(width), MOST_CHILDREN)
    grid = batch * beams, triton.cdiv(width, block)
    nodes, log_probs = nodes.contiguous(), query.log_probs.contiguous()
    logits, steps = query.logits.contiguous(), max(sizes).bit_length()
    peaks = weights = log_probs
    if normalizers is not None:
        sums = GIVEN
    elif grid[1] == 1:
        sums = AT_ONCE
    else:
        sums = IN_PARTS
        peaks, weights = torch.empty(2, *grid, device=nodes.device)
        changed_nodes, _, _, later_first, later_count, later_codes, _ = later
        weights_kernel[grid](
            trie.first_child, trie.node_codes, changed_nodes, later_first, later_count, later_codes,
            nodes, log_probs, logits, peaks, weights, logits.shape[1], trie.num_built, sizes[0],
            steps, BLOCK=block, INSERTIONS=own is not None,
        )  # fmt: skip
    children_kernel[grid](
        trie.first_child, trie.node_codes, trie.first_leaf, trie.last_leaf, *later,
        nodes, log_probs, logits, log_probs if normalizers is None else normalizers,
        peaks, weights, unused if ranks is None else ranks.contiguous(), *words, keys, beams,
        logits.shape[1], width, num_ranks, num_words, trie.num_built, *sizes,
        num_ranks.bit_length(), steps,
        BLOCK=block, BLOCK_PARTS=PARTS, FILTER=kind.value, SUMS=sums.value,
        INSERTIONS=own is not None,
    )  # fmt: skip
    return unpacked(keys, width, query.keep)
