"""Launch parameters of tree attention in Triton: rows of a block, splits of a prefix, warps and
stages.

Reading a prefix reaches the memory's bandwidth only if every multiprocessor has some ten thousand
bytes in flight. By Little's law, 4 TB/s for a microsecond are 32 KB for each of 132. So a program
has two blocks of keys and values in flight. A prefix is split until the programs fill the
multiprocessors once. More splits would write and read more partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

BLOCK_ROWS = 128  # a block's query rows; every block of a tree reads the prefix again, from L2
FEWEST_ROWS = 32  # smallest block where there are few programs
BLOCK_KEYS = 64
QUERY_BLOCK_BYTES = 2**15
WARP_BYTES = 2**12  # a block's query bytes per warp, so that accumulators stay in registers
WARP_ROWS = 16
# of keys in shared memory, and as many of values; several blocks are in flight
KEY_BLOCK_BYTES = 2**14
SPLIT_KEYS = 128  # prefix tokens that are worth a program of their own
MAX_SPLITS = 64
# Triton uses two stages per block in flight: one reads its slots, one reads the keys there.
STAGES, FEW_STAGES = 5, 3
TABLE_BYTES = 2**12  # slots, subtree ends and weights of a block, and the launch's own use
# Fixed cost of a program, and cost of merging partial results. The unit is keys that a program
# reads in that time. Both numbers are estimates for an H200.
PROGRAM_KEYS, MERGE_KEYS = 256, 256
MAX_WAVES = 4


@dataclass(frozen=True)
class Machine:
    """The multiprocessors of a GPU.

    Attributes:
        multiprocessors: Their number.
        shared_bytes: Shared memory of each.
    """

    multiprocessors: int
    shared_bytes: int


HOPPER = Machine(132, 233_472)


@cache
def machine_of(device: torch.device) -> Machine:
    """Returns the properties of a CUDA device; those of a Hopper where kernels are interpreted."""
    if not (device.type == "cuda" and torch.cuda.is_available()):
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    return Machine(found.multi_processor_count, found.shared_memory_per_multiprocessor)


@dataclass(frozen=True)
class AttentionWork:
    """Size of a batch's attention.

    Attributes:
        nodes: Nodes computed.
        trees: Number of trees.
        longest_prefix: Upper bound of the prefix tokens of a tree.
        fillers: Number of trees that only fill a batch up, with a node or more each. They have no
            prefix to share among programs.
    """

    nodes: int
    trees: int
    longest_prefix: int
    fillers: int = 0


@dataclass(frozen=True)
class Launch:
    """Grid and kernel constants of one batch.

    Attributes:
        num_blocks: Upper bound of the blocks of nodes, known without a host sync.
        num_splits: Programs that share a prefix.
        group: Query heads per KV head.
        block_group: `group` rounded up to a power of two.
        block_q: Nodes of a block.
        block_keys: Keys of a block.
        warps: Warps of a program.
        stages: Pipeline stages of a program.
    """

    num_blocks: int
    num_splits: int
    group: int
    block_group: int
    block_q: int
    block_keys: int
    warps: int
    stages: int


def block_rows(rows_per_tree: int, block_group: int, row_bytes: int) -> int:
    """Returns the query rows of a block: those of a tree, limited by the accumulators' size."""
    wanted: int = triton.next_power_of_2(max(rows_per_tree, 1))
    fitting = min(wanted, BLOCK_ROWS, QUERY_BLOCK_BYTES // row_bytes)
    return max(fitting, 16, block_group)


def keys_of(row_bytes: int) -> int:
    """Returns the keys of a block. row_bytes: bytes of a key, padded to a power of two."""
    return max(min(BLOCK_KEYS, KEY_BLOCK_BYTES // row_bytes), 16)


def warps_of(rows: int, row_bytes: int) -> int:
    """Returns the warps of a program with this many query rows."""
    return max(rows * row_bytes // WARP_BYTES, rows // WARP_ROWS, 4)


def shared_bytes(rows: int, row_bytes: int) -> int:
    """Returns the shared memory of a program with two blocks in flight.

    Products of 64 rows and more read their operands asynchronously, so a third block is in use.
    """
    buffers = 3 if rows >= 64 else 2
    return (rows + 2 * buffers * keys_of(row_bytes)) * row_bytes + TABLE_BYTES


def most_splits(longest_prefix: int) -> int:
    """Returns the largest number of splits of a prefix."""
    return max(min(longest_prefix // SPLIT_KEYS, MAX_SPLITS), 1)


def splits_of(programs: int, places: int, longest_prefix: int, block_keys: int) -> int:
    """Returns the splits of each prefix that finish the last program soonest.

    Args:
        programs: Programs of one split each.
        places: Programs that run at once.
        longest_prefix: Prefix tokens.
        block_keys: Keys of a block.
    """
    most = most_splits(longest_prefix)
    counts = {min(max(wave * places // programs, 1), most) for wave in range(1, MAX_WAVES + 1)}

    def keys(splits: int) -> float:
        waves = -(-programs * splits // places)
        return waves * (longest_prefix / splits + PROGRAM_KEYS) + MERGE_KEYS * (splits > 1)

    best = min(sorted({1, *counts}), key=keys)
    chunk = triton.cdiv(max(longest_prefix, 1), best * block_keys) * block_keys
    return int(triton.cdiv(max(longest_prefix, 1), chunk))


def launch(
    work: AttentionWork, heads: int, kv_heads: int, row_bytes: int, machine: Machine
) -> Launch:
    """Chooses the grid and the kernel constants.

    Args:
        work: Size of the batch.
        heads: H.
        kv_heads: K.
        row_bytes: Bytes of a key, padded to a power of two.
        machine: The GPU.
    """
    group = heads // kv_heads
    block_group = triton.next_power_of_2(group)
    trees = max(work.trees - work.fillers, 1)
    per_tree = -(-max(work.nodes - work.fillers, 1) // trees)
    rows = block_rows(per_tree * block_group, block_group, row_bytes)

    def programs_of(rows: int) -> int:
        # Trees are mostly of equal size. Blocks without a tree cost next to nothing.
        per_head = trees * -(-per_tree // (rows // block_group))
        return int(max(per_head, 1)) * kv_heads

    # If even all splits fill less than half of the device, smaller blocks share the work.
    filled = programs_of(rows) * most_splits(work.longest_prefix)
    while rows > max(FEWEST_ROWS, block_group) and 2 * filled <= machine.multiprocessors:
        filled = filled * programs_of(rows // 2) // programs_of(rows)
        rows //= 2
    block_q, warps = rows // block_group, warps_of(rows, row_bytes)
    # Upper bound for trees with this many nodes in all: each tree wastes part of one block.
    num_blocks = max((work.nodes - work.trees) // block_q + work.trees, 1)
    shared = shared_bytes(rows, row_bytes)
    stages = STAGES if shared <= machine.shared_bytes else FEW_STAGES
    places = machine.multiprocessors * max(min(8 // warps, machine.shared_bytes // shared), 1)
    splits = splits_of(programs_of(rows), places, work.longest_prefix, keys_of(row_bytes))
    return Launch(
        num_blocks, splits, group, block_group, block_q, keys_of(row_bytes), warps, stages
    )
