"""Compiles every variant of every kernel to machine code without a GPU; test_compile.py runs it.

python tests/support/compile_kernels.py 90             # all of them
python tests/support/compile_kernels.py 90 --few       # three of them
"""

import io
import re
import sys
import time
from contextlib import redirect_stdout

import triton
from triton.backends.compiler import GPUTarget

from recserve.kernels.acceptance import (
    triton_accept,
    triton_accept_drawn,
    triton_masks,
    triton_noise,
)
from recserve.kernels.attention import triton_attention, triton_launch
from recserve.kernels.cache import triton_moves
from recserve.kernels.layers import triton_norms, triton_rope_write
from recserve.kernels.linear import triton_head_topk, triton_int8
from recserve.kernels.trie import triton_topk

# Bound on the shared memory of one program, in bytes.
SHARED = {80: 166_912, 90: 232_448}
# Bounds on the bytes that a thread spills to local memory, for fast and for rare kernels.
SPILLED, SPILLS = 8, 128
# Attention variants of benchmarks/gpu.py: dtype, heads, key-value heads, head dim.
CHECKED = [
    ("bf16", 32, 8, 128),
    ("fp16", 6, 2, 80),
    ("fp32", 4, 4, 64),
    ("bf16", 8, 1, 256),
    ("bf16", 4, 4, 32),
    ("fp16", 3, 3, 96),
]


def attention(
    dtype, dim, group, silu=False, limits=False, shared=False, nodes=64, fp8=None,
    stages=triton_launch.STAGES,
):  # fmt: skip
    """Returns a variant of the attention kernel with the arguments of its wrapper.

    `fp8` is None for a pool without FP8. Otherwise it says whether the machine converts FP8 in
    hardware.
    """
    block_group, row = triton.next_power_of_2(group), max(triton.next_power_of_2(dim), 16)
    row_bytes = row * (4 if dtype == "fp32" else 2)
    rows = triton_launch.block_rows(nodes * block_group, block_group, row_bytes)
    constants = {
        "GROUP": group, "BLOCK_GROUP": block_group,
        "BLOCK_Q": rows // block_group, "DIM": dim, "BLOCK_DIM": row,
        "BLOCK_N": triton_launch.keys_of(row_bytes), "SPLIT": triton_launch.SPLIT_KEYS,
        "SILU": silu, "HAS_LIMITS": limits, "HAS_SHARED": shared,
        "FP8": fp8 is not None, "NATIVE": bool(fp8),
        "SCAN": triton_attention.SCAN_NODES,
    }  # fmt: skip
    kinds = {
        **stored("*u8" if fp8 is not None else "*" + dtype),
        "query": "*" + dtype, "out": "*fp32", "lse": "*fp32",
        "scale": "fp32", "inverse_normalizer": "fp32", "num_rows": "i32", "kv_heads": "i32",
    }  # fmt: skip
    warps = triton_launch.warps_of(rows, row_bytes)
    return triton_attention._attend, constants, kinds, warps, stages


def stored(kind):
    """Returns the types of a pool's arguments."""
    return dict.fromkeys(["keys", "values", "key_exponents", "value_exponents"], kind)


def merge(dtype, dim, silu=False, splits=64):
    """Returns a variant of the kernel that merges the parts of a split prefix."""
    block = triton.next_power_of_2(dim)
    constants = {"DIM": dim, "BLOCK_DIM": block, "BLOCK_S": splits, "SILU": silu}
    kinds = {
        "parts": "*fp32",
        "lse": "*fp32",
        "out": "*" + dtype,
        "num_rows": "i32",
        "num_splits": "i32",
    }
    return triton_attention._merge, constants, kinds


def acceptance(dtype, kinds_of_nodes):
    """Yields the variants of the acceptance kernels."""
    sizes = {"LANES": triton_accept.LANES, "TILE": triton_accept.TILE}
    floats = {"logits": "*" + dtype}
    small = dict.fromkeys(["vocabulary", "tiles_per_split", "num_splits", "max_depth"], "i32")
    yield triton_accept.choose_kernel, sizes, {
        **floats, **small, "temperatures": "*fp32", "values": "*fp32", "tokens": "*i32"
    }  # fmt: skip
    yield triton_accept.walk_kernel, {
        "BLOCK_SPLITS": 256, "BLOCK_NODES": triton_accept.BLOCK_NODES, "HAS_KINDS": kinds_of_nodes
    }, {**small, "values": "*fp32", "choices": "*i32"}  # fmt: skip
    yield from drawn_acceptance(kinds_of_nodes, small)


def drawn_acceptance(kinds_of_nodes, small):
    """Yields the kernels that verify drafts that were drawn from q."""
    kinds = {
        **dict.fromkeys(["p", "q", "residuals", "totals", "values"], "*fp32"), **small,
        "choices": "*i32",
    }  # fmt: skip
    sizes = {"TILE": triton_accept.TILE}
    yield triton_accept_drawn.drawn_walk_kernel, {**sizes, "HAS_KINDS": kinds_of_nodes}, kinds
    yield triton_accept_drawn.bonus_kernel, {**sizes, "LANES": triton_accept.LANES}, kinds
    yield triton_accept_drawn.pick_kernel, {"BLOCK_SPLITS": 256}, kinds


def noise():
    """Yields the kernels of Gumbel noise."""
    sizes = {"LANES": triton_noise.LANES, "TILE": triton_noise.TILE}
    small = dict.fromkeys(["vocabulary", "num_tokens", "stream"], "i32")
    yield triton_noise.all_tokens_kernel, sizes, {**small, "out": "*fp32"}
    yield triton_noise.tokens_kernel, {**sizes, "BLOCK_TOKENS": triton_noise.BLOCK_TOKENS}, {
        **small, "out": "*fp32"
    }  # fmt: skip


def masks():
    """Returns the kernel that applies masks of tokens."""
    return triton_masks.ban_kernel, {"BLOCK": triton_masks.BLOCK}, {
        "logits": "*fp32", "bits": "*i32", "vocabulary": "i32", "words": "i32"
    }  # fmt: skip


def small_kernels(dtype):
    """Yields the variants of the small kernels for one dtype."""
    for fp8 in (False, True):
        pool = stored("*u8" if fp8 else "*" + dtype)
        yield triton_moves.move_kernel, {
            "BLOCK_DEPTH": triton_moves.BLOCK_DEPTH, "BLOCK_WIDTH": triton_moves.BLOCK_WIDTH
        }, {**pool, **dict.fromkeys(["longest", "width"], "i32"), "layer_size": "i64"}  # fmt: skip
        yield triton_rope_write.rope_kernel, {
            "HEADS": 32, "KV_HEADS": 8, "BLOCK_HEADS": 64, "HALF": 48, "BLOCK_HALF": 64,
            "FP8": fp8, "NORM": fp8,
        }, {
            **pool, "qkv": "*" + dtype, "query": "*" + dtype, "cos": "*fp32", "sin": "*fp32",
            "query_weight": "*" + dtype, "key_weight": "*" + dtype, "eps": "fp32",
        }  # fmt: skip
    rows = dict.fromkeys(["x", "y", "weight", "total", "out", "gate_up"], "*" + dtype)
    yield triton_norms.add_norm_kernel, {"SIZE": 2048, "BLOCK_SIZE": 2048}, {**rows, "eps": "fp32"}
    yield triton_norms.gate_kernel, {"SIZE": 6144, "BLOCK_SIZE": triton_norms.BLOCK}, rows
    yield triton_head_topk.head_kernel, {
        "K": 8, "SIZE": 2560, "BLOCK_ROWS": triton_head_topk.MAX_ROWS,
        "BLOCK_TOKENS": triton_head_topk.BLOCK_TOKENS, "BLOCK_SIZE": triton_head_topk.BLOCK_SIZE,
    }, {
        "hidden": "*" + dtype, "weight": "*" + dtype,
        "rows": "i32", "heads": "i32", "vocabulary": "i32", "weight_stride": "i64",
    }  # fmt: skip
    yield triton_int8.int8_linear_kernel, {
        "INNER": 2048, "HAS_BIAS": dtype != "fp32", "BLOCK_ROWS": triton_int8.MAX_ROWS,
        "BLOCK_OUTPUTS": triton_int8.BLOCK_OUTPUTS, "BLOCK_SIZE": triton_int8.BLOCK_SIZE,
    }, {
        "x": "*" + dtype, "bias": "*" + dtype, "out": "*" + dtype, "values": "*i8",
        "scales": "*fp32", "rows": "i32", "size": "i32",
    }  # fmt: skip


def trie(dtype, kind, sums, insertions=False, block=256, ranks="*i32"):
    """Returns a variant of the trie step; in captured searches, `ranks` has 64 bits."""
    arrays = ["first_child", "node_codes", "first_leaf", "last_leaf", "ranks", "words", "counts"]
    constants = {
        "BLOCK": block, "BLOCK_PARTS": triton_topk.PARTS, "FILTER": kind.value, "SUMS": sums.value,
        "INSERTIONS": insertions,
    }  # fmt: skip
    return triton_topk.children_kernel, constants, {
        **dict.fromkeys(arrays, "*i32"), "log_probs": "*fp32", "logits": "*" + dtype,
        "normalizers": "*fp32", "ranks": ranks, "peaks": "*fp32", "weights": "*fp32",
        **dict.fromkeys(triton_topk.COUNTS, "i32"),
    }  # fmt: skip


def trie_sums(dtype, insertions):
    """Returns a variant of the kernel that sums over the blocks of a beam's children."""
    return triton_topk.weights_kernel, {"BLOCK": 512, "INSERTIONS": insertions}, {
        **dict.fromkeys(["first_child", "node_codes"], "*i32"),
        **dict.fromkeys(["log_probs", "peaks", "weights"], "*fp32"), "logits": "*" + dtype,
        **dict.fromkeys(triton_topk.COUNTS, "i32"),
    }  # fmt: skip


def forms(capability):
    """Yields all variants on the newest target, and one of each kernel on the older one."""
    yield attention("bf16", 128, 4)
    yield attention("bf16", 128, 4, fp8=capability >= 89)
    yield attention("bf16", 256, 2, limits=True)
    yield merge("bf16", 128)
    yield from acceptance("bf16", True)
    yield from noise()
    yield masks()
    yield from small_kernels("bf16")
    yield trie("bf16", triton_topk.EXCLUDED, triton_topk.AT_ONCE)
    yield trie_sums("fp32", False)
    if capability >= 90:
        yield attention("fp32", 128, 1, silu=True, limits=True, shared=True)
        yield attention("fp16", 80, 3, shared=True)
        yield attention("fp32", 32, 1)
        yield attention("bf16", 128, 4, nodes=1, fp8=True)
        yield attention("bf16", 128, 4, nodes=1)
        yield attention("bf16", 64, 7, nodes=2000)
        yield attention("bf16", 96, 8, silu=True)
        yield from acceptance("fp32", False)
        yield trie("fp32", triton_topk.ALLOWED, triton_topk.GIVEN)
        yield trie("bf16", triton_topk.EXCLUDED, triton_topk.AT_ONCE, insertions=True)
        yield trie("bf16", triton_topk.ALLOWED, triton_topk.GIVEN, insertions=True)
        yield trie("bf16", triton_topk.NO_FILTER, triton_topk.AT_ONCE)


def few_forms(capability):
    """Yields attention over FP8, one acceptance kernel and the trie step."""
    yield attention("bf16", 64, 2, fp8=capability >= 89)
    yield next(acceptance("bf16", True))
    yield trie("bf16", triton_topk.EXCLUDED, triton_topk.AT_ONCE)


def rare_forms():
    """Yields further variants: those of benchmarks/gpu.py and those of a small shared memory.

    Of the benchmark, these are the checks, with half of each variant, and the measurements.
    """
    for number, (dtype, heads, kv_heads, dim) in enumerate(CHECKED):
        for everything in (False, True):
            how = dict.fromkeys(("silu", "limits", "shared"), everything)
            fp8 = True if everything == number % 2 else None
            yield attention(dtype, dim, heads // kv_heads, **how, nodes=257, fp8=fp8)
    yield attention("bf16", 256, 8, nodes=257, fp8=True)
    for nodes in (8, 16):  # blocks of 32 and 64 rows; blocks of 16 and 128 are above
        yield attention("bf16", 128, 4, nodes=nodes)
        yield attention("bf16", 128, 4, nodes=nodes, fp8=True)
    yield attention("bf16", 128, 4, stages=triton_launch.FEW_STAGES)
    yield attention("bf16", 128, 2)
    yield attention("bf16", 64, 1)
    yield attention("bf16", 64, 2)
    yield attention("fp32", 8, 2, nodes=8)  # the models that checks compare with the CPU
    yield attention("fp32", 16, 1, silu=True, limits=True, shared=True, nodes=8)
    yield merge("bf16", 96)
    yield merge("bf16", 64, silu=True)
    yield merge("fp32", 128, splits=2)
    yield from small_kernels("fp16")
    yield from small_kernels("fp32")
    yield trie(
        "bf16",
        triton_topk.EXCLUDED,
        triton_topk.AT_ONCE,
        True,
        block=512,
        ranks="*i64",
    )
    yield trie(
        "bf16",
        triton_topk.EXCLUDED,
        triton_topk.IN_PARTS,
        True,
        block=512,
        ranks="*i64",
    )
    yield trie("fp32", triton_topk.ALLOWED, triton_topk.IN_PARTS, True, block=512)
    yield trie_sums("bf16", True)
    yield trie("bf16", triton_topk.EXCLUDED, triton_topk.GIVEN, True, block=4)


def distinct(wanted):
    """Returns each variant once, with the bound of its first occurrence, which is the lowest."""
    found = {}
    for form, most_spilled in wanted:
        kernel, constants, kinds, *launch = form
        key = (kernel.__name__, *constants.items(), *kinds.items(), *launch)
        assert most_spilled >= found.setdefault(key, (form, most_spilled))[1]
    return found.values()


def compiled(source, capability, options):
    """Returns the compiled kernel and the output of the assembler."""
    told = io.StringIO()
    with redirect_stdout(told):
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=options), told.getvalue()


def spilled_bytes(told):
    """Returns the bytes of local memory that the assembler reports for spilled registers."""
    return max(int(number) for number in re.findall(r"(\d+) bytes spill stores", told))


def main():
    few = "--few" in sys.argv
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # a cached kernel has no assembler output
    for word in sys.argv[1:]:
        if word.isdigit():
            compile_for(int(word), few)


def compile_for(capability, few):
    """Compiles the variants for one compute capability and checks memory and spills."""
    usual = (few_forms if few else forms)(capability)
    rare = rare_forms() if capability >= 90 and not few else ()
    wanted = [*((form, SPILLED) for form in usual), *((form, SPILLS) for form in rare)]
    for (kernel, constants, kinds, *launch), most_spilled in distinct(wanted):
        began = time.perf_counter()
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, "*i64")
            for name in kernel.arg_names
        }
        # Pointers from torch are aligned, so at a launch loads are 16 bytes wide.
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*")
        }
        source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
        options = {"enable_fp_fusion": "accept" not in kernel.__module__}
        options |= dict(zip(("num_warps", "num_stages"), launch, strict=False))
        built, told = compiled(source, capability, options)
        code = built.asm["ptx"]
        shared = built.metadata.shared
        assert len(built.asm["cubin"]) > 1000
        assert shared <= SHARED[capability], f"{kernel.__name__} {constants}: {shared} bytes shared"
        if not options["enable_fp_fusion"]:
            assert "fma.rn.f32" not in code, f"{kernel.__name__}: a fused multiply-add rounds once"
        half = kernel is triton_attention._attend and kinds["query"] != "*fp32"
        if half and capability >= 90:  # bounded only here: on sm_80 a few dozen bytes spill
            spilled = spilled_bytes(told)
            assert spilled <= most_spilled, f"{constants}: {spilled} bytes spilled"
        seconds = time.perf_counter() - began
        print(f"compiled {kernel.__name__} sm_{capability}: {shared} B shared, {seconds:.1f} s")


if __name__ == "__main__":
    main()
