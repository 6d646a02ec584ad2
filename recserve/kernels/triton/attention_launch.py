"""How tree attention is launched in Triton: rows of a block, splits of a root, warps and stages.

A root is read at the memory's rate where every multiprocessor has some ten thousand bytes on their
way at any time (Little's law: 4 TB/s for a microsecond are 32 KB for each of 132). So a program
keeps two blocks of keys and values in flight, and a root is cut until the programs fill the
multiprocessors once: more would write and read again more partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

BLOCK_ROWS = 128  # a block's query rows: every block of a tree reads the root again, from L2
FEWEST_ROWS = 32  # that blocks are cut to where few programs are
BLOCK_KEYS = 64
QUERY_BLOCK_BYTES = 2**15
WARP_BYTES = 2**12  # of a block's queries, for each warp: their accumulators stay in registers
WARP_ROWS = 16
KEY_BLOCK_BYTES = 2**14  # of keys in shared memory, and of values; several are in flight
SPLIT_KEYS = 128  # fewer root tokens are not worth a program of their own
MAX_SPLITS = 64
# Triton spends two stages on each block in flight: one to read its slots, one to read by them.
STAGES, FEW_STAGES = 5, 3
TABLE_BYTES = 2**12  # slots, subtree ends and weights of a block, and what a launch takes
# What a program costs before and behind its keys, and merging partial results, both in keys that
# a program reads in that time: estimates for an H200, as the two numbers of a multiprocessor.
PROGRAM_KEYS, MERGE_KEYS = 256, 256
MAX_WAVES = 4


@dataclass(frozen=True)
class Machine:
    """multiprocessors, and the bytes of shared memory that each has."""

    multiprocessors: int
    shared_bytes: int


HOPPER = Machine(132, 233_472)


@cache
def machine_of(device: torch.device) -> Machine:
    """What a CUDA device says of itself; where kernels are interpreted, as on a Hopper."""
    if not (device.type == "cuda" and torch.cuda.is_available()):
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    return Machine(found.multi_processor_count, found.shared_memory_per_multiprocessor)


@dataclass(frozen=True)
class AttentionWork:
    """What a batch asks of attention: nodes computed, trees, and the longest root there may be."""

    nodes: int
    trees: int
    longest_root: int


@dataclass(frozen=True)
class Launch:
    """Grid and constants of one batch. num_blocks: upper bound, known without a host sync."""

    num_blocks: int
    num_splits: int
    group: int
    block_group: int
    block_q: int
    block_keys: int
    warps: int
    stages: int


def block_rows(rows_per_tree: int, block_group: int, row_bytes: int) -> int:
    """Query rows of a block: those of a tree, as far as they fit beside their accumulators."""
    wanted: int = triton.next_power_of_2(max(rows_per_tree, 1))
    fitting = min(wanted, BLOCK_ROWS, QUERY_BLOCK_BYTES // row_bytes)
    return max(fitting, 16, block_group)


def keys_of(row_bytes: int) -> int:
    """Keys of a block; row_bytes: of one, padded to a power of two."""
    return max(min(BLOCK_KEYS, KEY_BLOCK_BYTES // row_bytes), 16)


def warps_of(rows: int, row_bytes: int) -> int:
    """Warps of a program with so many query rows."""
    return max(rows * row_bytes // WARP_BYTES, rows // WARP_ROWS, 4)


def shared_bytes(rows: int, row_bytes: int) -> int:
    """Shared memory of a program with two blocks in flight; with products of 64 rows and more,
    which read theirs behind the program's back, a third is in use meanwhile.
    """
    buffers = 3 if rows >= 64 else 2
    return (rows + 2 * buffers * keys_of(row_bytes)) * row_bytes + TABLE_BYTES


def most_splits(longest_root: int) -> int:
    """Into how many parts a root may be cut."""
    return max(min(longest_root // SPLIT_KEYS, MAX_SPLITS), 1)


def splits_of(programs: int, places: int, longest_root: int, block_keys: int) -> int:
    """Programs for each root, so that the last is done soonest.

    programs: of one split each; places: programs that run at once.
    """
    most = most_splits(longest_root)
    counts = {min(max(wave * places // programs, 1), most) for wave in range(1, MAX_WAVES + 1)}

    def keys(splits: int) -> float:
        waves = -(-programs * splits // places)
        return waves * (longest_root / splits + PROGRAM_KEYS) + MERGE_KEYS * (splits > 1)

    best = min(sorted({1, *counts}), key=keys)
    chunk = triton.cdiv(max(longest_root, 1), best * block_keys) * block_keys
    return int(triton.cdiv(max(longest_root, 1), chunk))


def launch(
    work: AttentionWork, heads: int, kv_heads: int, row_bytes: int, machine: Machine
) -> Launch:
    """Grid for these head counts; row_bytes: of one key, padded to a power of two."""
    group = heads // kv_heads
    block_group = triton.next_power_of_2(group)
    per_tree = -(-work.nodes // work.trees)
    rows = block_rows(per_tree * block_group, block_group, row_bytes)

    def programs_of(rows: int) -> int:
        # Trees are mostly alike; blocks of none cost next to nothing.
        per_head = work.trees * -(-per_tree // (rows // block_group))
        return int(max(per_head, 1)) * kv_heads

    # Where not even all splits fill half of the device, smaller blocks share the work.
    filled = programs_of(rows) * most_splits(work.longest_root)
    while rows > max(FEWEST_ROWS, block_group) and 2 * filled <= machine.multiprocessors:
        filled = filled * programs_of(rows // 2) // programs_of(rows)
        rows //= 2
    block_q, warps = rows // block_group, warps_of(rows, row_bytes)
    # The most that trees of so many nodes in all can need: each wastes part of one block.
    num_blocks = max((work.nodes - work.trees) // block_q + work.trees, 1)
    shared = shared_bytes(rows, row_bytes)
    stages = STAGES if shared <= machine.shared_bytes else FEW_STAGES
    places = machine.multiprocessors * max(min(8 // warps, machine.shared_bytes // shared), 1)
    splits = splits_of(programs_of(rows), places, work.longest_root, keys_of(row_bytes))
    return Launch(
        num_blocks, splits, group, block_group, block_q, keys_of(row_bytes), warps, stages
    )
