"""Who multiplies on a CPU: C or torch, by a fixed rule that a variable overrides."""

import pytest
import torch

from recserve.kernels.attention.attention import tree_attention
from recserve.kernels.attention.cpu import CpuTreeAttention
from recserve.kernels.attention.native import NativeTreeAttention
from recserve.kernels.attention.reference import HeadLayout
from recserve.kernels.linear import products
from recserve.kernels.native import native, processor
from recserve.kernels.native.processor import LEVELS
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.packing import PackedLinear, pack_weights, packable

HEADS = HeadLayout(2, 2, 16, torch.float32)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
needs_onednn = pytest.mark.skipif(
    not products.onednn_multiplies(F32), reason="this torch has no oneDNN"
)


def prompt(nodes: int) -> TreeBatch:
    slots = torch.arange(nodes)
    return TreeBatch(chain(slots), None, slots, Prefixes.of([slots[:0]]))


@pytest.fixture
def machine(monkeypatch):
    """Makes this process believe in another level of instruction sets."""
    return lambda level: monkeypatch.setattr(processor, "instruction_set", lambda: level)


@needs_compiler
@needs_onednn
@pytest.mark.parametrize("kernels", ["auto", "c", "torch"])
def test_c_multiplies_and_attends_wherever_it_can(kernels, force_kernels):
    force_kernels(kernels)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 6)).eval()
    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = model(x)
        pack_weights(model)
        torch.testing.assert_close(model(x), expected)
    in_c = kernels != "torch"
    assert [(layer.panels is not None) for layer in model] == [in_c] * 2
    for nodes in (1, 700):
        attention = tree_attention(prompt(nodes), HEADS)
        assert isinstance(attention, NativeTreeAttention if in_c else CpuTreeAttention)


@needs_compiler
@needs_onednn
def test_a_weight_that_c_cannot_hold_does_not_decide_for_the_others(force_kernels):
    force_kernels("auto")
    layers = torch.nn.Sequential(torch.nn.Linear(7, 8), torch.nn.Linear(8, 4)).eval()
    pack_weights(layers)
    assert [layer.panels is not None for layer in layers] == [False, True]


@needs_compiler
def test_the_codes_and_their_parts_are_packed_alike_without_onednn(monkeypatch, force_kernels):
    """A bfloat16 model once failed here on processors without AVX-512."""
    force_kernels("auto")
    for module in ("recserve.models.packing", "recserve.kernels.linear.products"):
        monkeypatch.setattr(f"{module}.onednn_multiplies", lambda dtype: False)
    for size in (1, 4, 2048):
        weight = torch.zeros(size, 8, dtype=BF16)
        assert packable(weight) and PackedLinear(weight).panels is not None
    assert not packable(torch.zeros(4, 7, dtype=BF16))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_bfloat16_is_the_fastest_type_where_c_has_an_instruction_for_it(
    kernels, machine, force_kernels
):
    force_kernels(kernels)
    in_c = kernels == "auto" and native.library() is not None
    for level in [*LEVELS, None]:
        machine(level)
        halves = in_c and level == "x86-64-v4-bf16"
        assert products.fastest_dtype([F32, BF16]) == (BF16 if halves else F32)
        assert products.fastest_dtype([BF16, F32]) == (BF16 if halves else F32)
        assert products.fastest_dtype([F16, F32]) == F32
        assert products.fastest_dtype([BF16]) == BF16
        assert products.fastest_dtype([F16]) == F16
