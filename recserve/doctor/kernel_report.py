"""Which implementation computes products and attention on this machine, and why."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from recserve.doctor.kernel_comparison import compare_kernels
from recserve.engine.engine import Engine
from recserve.engine.runner import Runner
from recserve.kernels import backend
from recserve.kernels.attention import attention
from recserve.kernels.attention.native import supports_heads
from recserve.kernels.attention.reference import HeadLayout
from recserve.kernels.linear import products
from recserve.kernels.linear.formats import FORMATS
from recserve.kernels.native import native, processor
from recserve.models.adapters import DecoderAdapter, RankerAdapter
from recserve.models.packing import PackedLinear


def rule() -> str:
    """Says who computes products and attention on this CPU, by type."""
    if backend.FORCED != "auto":
        return f"{backend.FORCED}: RECSERVE_KERNELS is {backend.FORCED}"
    why = _without_c(torch.float32)
    if why is not None:
        return f"torch: {why}"
    return f"C, compiled for {processor.instruction_set()}"


def measure_kernels() -> str:
    """Says for each type how long C and torch take for the work of a small model."""
    if native.library() is None:
        return "nothing to compare: no compiled C kernels and no C compiler"
    return "\n".join(
        f"{products.type_name(dtype)} {work}: {times}"
        for dtype in (torch.float32, torch.bfloat16)
        for work, times in compare_kernels(dtype).items()
    )


def kernels_in_use(engine: Engine) -> dict[str, dict[str, str]]:
    """Returns the kernel of each kind of work, by model and work.

    A kind of work is a product with all weights of one shape, or the attention.

    Args:
        engine: A built engine.
    """
    runners: dict[Runner, str] = {}
    for name, scheduler in engine.schedulers.items():
        runners.setdefault(scheduler.runner, name)  # text and its scores share one
    return {name: _kernels(runner) for runner, name in runners.items()}


def _kernels(runner: Runner) -> dict[str, str]:
    adapter = runner.adapter
    assert isinstance(adapter, DecoderAdapter | RankerAdapter)
    if adapter.device.type != "cpu":
        triton = backend.FORCED in ("auto", "c", "triton")
        kernel = "triton" if triton else "torch"
        modules = adapter.model.modules()
        stored = {m.stored for m in modules if isinstance(m, PackedLinear)} - {None}
        if stored:
            bits = min(FORMATS[name].bits for name in stored if name is not None)
            return {"attention": kernel, "products": f"{kernel}: weights in {bits} bits"}
        return {"attention": kernel, "products": "torch"}
    found: Counter[tuple[str, str]] = Counter()
    for module in adapter.model.modules():
        if isinstance(module, PackedLinear):
            name = products.type_name(module.dtype, module.stored)
            kernel = "C" if module.panels is not None else f"torch: {_why_torch(module)}"
            found[f"{list(module.shape)} {name}", kernel] += 1
        elif isinstance(module, nn.Linear):
            name = products.type_name(module.weight.dtype)
            found[f"{list(module.weight.shape)} {name}", "torch: not packed"] += 1
    said = {f"{count} products {work}": kernel for (work, kernel), count in found.items()}
    return {**said, "attention": _attention(runner, adapter)}


def _why_torch(module: PackedLinear) -> str:
    why = _without_c(module.dtype)
    if why is None and module.stored is not None and FORMATS[module.stored].open().panels is None:
        why = f"C has no products of {module.stored}"
    return why or f"C has no products of {module.shape[1]} inputs"


def _attention(runner: Runner, adapter: DecoderAdapter | RankerAdapter) -> str:
    if runner.attention is not attention.tree_attention:
        return "torch: exact sums of the invariant mode"
    if runner.pool.keys.dtype != adapter.dtype:
        return "torch: keys and values have another type"
    shape = runner.pool.shape
    heads = HeadLayout(shape.num_kv_heads, adapter.group, shape.head_dim, adapter.dtype)
    why = _without_c(adapter.dtype)
    if why is None and not supports_heads(heads):
        why = f"C has no heads of {heads.dim}, {heads.group} for a head of keys"
    return "C" if why is None else f"torch: {why}"


def _without_c(dtype: torch.dtype) -> str | None:
    """Returns why nothing of this type runs in C, or None where it does."""
    if not backend.c_is_allowed():
        return f"RECSERVE_KERNELS is {backend.FORCED}"
    if native.library() is None:
        return "no compiled C kernels and no C compiler"
    return None if dtype in native.TYPES else f"C has no products of {products.type_name(dtype)}"
