"""Which implementation computes products and attention on this machine, and why."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from recserve.engine.engine import Engine
from recserve.engine.runtime.runner import DecoderTrunk, RankerTrunk, Runner
from recserve.kernels import dispatch
from recserve.kernels.cpu import cpu_attention, native, products
from recserve.kernels.cpu.choice import KernelChoice
from recserve.kernels.cpu.cpu_plan import Form
from recserve.models.packing import PackedLinear

SHAPES = ((768, 256), (256, 256), (1408, 256), (256, 704))  # a decoder of 256 with 4 heads


def measured_kernels() -> str:
    """Says for each type whether C or torch runs a small model, and how much faster it is."""
    if dispatch.KERNELS != "auto":
        return f"not measured: RECSERVE_KERNELS is {dispatch.KERNELS}"
    if native.library() is None:
        return "torch, as there are no compiled C kernels and no C compiler"
    parts = []
    for dtype in (torch.float32, torch.bfloat16):
        choices = {
            "products": products.total(SHAPES, dtype),
            "int8 weights": products.total(SHAPES, dtype, "int8"),
            "attention": cpu_attention.choose(Form(4, 1, 64, dtype, True)),
        }
        said = ", ".join(f"{name} {_faster(choice)}" for name, choice in choices.items())
        parts.append(f"{products.type_name(dtype)}: {said}")
    return "; ".join(parts)


def _faster(choice: KernelChoice) -> str:
    name = "C" if choice.in_c else "torch"
    return f"{name} ({max(choice.ratio, 1 / choice.ratio):.1f}x)"


def kernels_in_use(engine: Engine) -> dict[str, dict[str, str]]:
    """Returns the kernel of each kind of work, by model and work.

    A kind of work is a product with all weights of one shape, or the attention. Times are those of
    products with 1 and 128 rows. All products of a model run in C, or none.

    Args:
        engine: A built engine. Attention that it has not yet measured is measured.
    """
    runners: dict[Runner, str] = {}
    for name, scheduler in engine.schedulers.items():
        runners.setdefault(scheduler.runner, name)  # text and its scores share one
    return {name: _kernels(runner) for runner, name in runners.items()}


def _kernels(runner: Runner) -> dict[str, str]:
    trunk = runner.trunk
    assert isinstance(trunk, DecoderTrunk | RankerTrunk)
    if trunk.device.type != "cpu":
        triton = dispatch.KERNELS in ("auto", "c", "triton")
        kernel = "triton" if triton else "torch"
        modules = trunk.model.modules()
        if any(isinstance(m, PackedLinear) and m.stored == "int8" for m in modules):
            return {"attention": kernel, "products": f"{kernel}: weights in 8 bits"}
        return {"attention": kernel, "products": "torch"}
    found: Counter[tuple[str, str]] = Counter()
    for module in trunk.model.modules():
        if isinstance(module, PackedLinear):
            name = products.type_name(module.dtype, module.stored)
            kernel = "torch" if module.panels is None else "C"
            why = _why_products(module.shape, module.dtype, module.stored)
            found[f"{list(module.shape)} {name}", f"{kernel}: {why}"] += 1
        elif isinstance(module, nn.Linear):
            name = products.type_name(module.weight.dtype)
            found[f"{list(module.weight.shape)} {name}", "torch: not packed"] += 1
    said = {f"{count} products {work}": kernel for (work, kernel), count in found.items()}
    silu = "torch: C has no SiLU attention"
    attention = _attention(runner, trunk) if isinstance(trunk, DecoderTrunk) else silu
    return {**said, "attention": attention}


def _why_products(
    shape: tuple[int, int], dtype: torch.dtype, stored: products.PackedFormat | None = None
) -> str:
    return _forced(dtype) or products.total([shape], dtype, stored).times


def _attention(runner: Runner, trunk: DecoderTrunk) -> str:
    if runner.attention is not dispatch.tree_attention:
        return "torch: exact sums of the invariant mode"
    if runner.pool.keys.dtype != trunk.dtype:
        return "torch: keys and values have another type"
    c = trunk.model.config.decoder
    form = Form(c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim, trunk.dtype, True)
    forced = _forced(trunk.dtype)
    if forced is not None or form.dim % native.LANES:
        in_c = dispatch.KERNELS == "c" and native.library() is not None
        in_c = in_c and trunk.dtype in native.TYPES and form.dim % native.LANES == 0
        return f"{'C' if in_c else 'torch'}: {forced or f'C has no heads of {form.dim}'}"
    choice = cpu_attention.choose(form)
    return f"{'C' if choice.in_c else 'torch'}: {choice.times}"


def _forced(dtype: torch.dtype) -> str | None:
    """Returns why nothing is measured, or None where C and torch are compared."""
    if dispatch.KERNELS != "auto":
        return f"RECSERVE_KERNELS is {dispatch.KERNELS}"
    if native.library() is None:
        return "no compiled C kernels and no C compiler"
    return None if dtype in native.TYPES else f"C has no products of {products.type_name(dtype)}"
