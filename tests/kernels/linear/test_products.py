"""Who multiplies on a CPU: C or torch, by a fixed rule that a variable overrides."""

import pytest
import torch

from recserve.kernels import backend
from recserve.kernels.attention.attention import tree_attention
from recserve.kernels.attention.cpu import CpuTreeAttention
from recserve.kernels.attention.native import HeadLayout
from recserve.kernels.linear import products
from recserve.kernels.native import native, processor
from recserve.kernels.native.processor import LEVELS, Processor
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.packing import PackedLinear, pack_weights, packable

HEADS = HeadLayout(2, 2, 16, torch.float32)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
needs_onednn = pytest.mark.skipif(not products.onednn_packs(F32), reason="this torch has no oneDNN")


def prompt(nodes: int) -> TreeBatch:
    slots = torch.arange(nodes)
    return TreeBatch(chain(slots), None, slots, (slots[:0],))


@pytest.fixture
def machine(monkeypatch):
    """Makes this process believe in another level and other flags of the processor."""

    def make(level, *flags):
        monkeypatch.setattr(processor, "instruction_set", lambda: level)
        monkeypatch.setattr(processor, "processor", lambda: Processor("a test", frozenset(flags)))

    return make


@needs_compiler
@needs_onednn
@pytest.mark.parametrize("kernels", ["auto", "c", "torch"])
def test_c_multiplies_and_attends_wherever_it_can(kernels, monkeypatch):
    monkeypatch.setattr(backend, "FORCED", kernels)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 6)).eval()
    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = model(x)
        pack_weights(model)
        torch.testing.assert_close(model(x), expected)
    in_c = kernels != "torch"
    assert [(layer.panels is not None) for layer in model] == [in_c] * 2
    for nodes in (1, 700):
        attention = tree_attention(prompt(nodes))
        assert isinstance(attention, CpuTreeAttention)
        assert (attention.native_attention(HEADS) is not None) == in_c


@needs_compiler
def test_bfloat16_stays_with_torch_on_amx_unless_c_is_forced(machine, monkeypatch):
    weights = {dtype: torch.zeros(4, 8, dtype=dtype) for dtype in (F32, BF16)}
    monkeypatch.setattr(products, "onednn_packs", lambda dtype: True)
    for level, flags, kernels, in_c in (
        ("x86-64-v3", (), "auto", True),
        ("x86-64-v4-bf16", (), "auto", True),
        ("x86-64-v4-bf16", ("amx_bf16",), "auto", False),
        ("x86-64-v4-bf16", ("amx_bf16",), "c", True),
        ("x86-64-v3", ("amx_bf16",), "auto", True),  # as an older processor, by RECSERVE_ISA
    ):
        machine(level, *flags)
        monkeypatch.setattr(backend, "FORCED", kernels)
        assert products.runs_in_c(weights[BF16]) == in_c
        assert products.runs_in_c(weights[F32])
        assert products.runs_in_c(weights[BF16], "int8")


@needs_compiler
@needs_onednn
def test_a_weight_that_c_cannot_hold_does_not_decide_for_the_others(monkeypatch):
    monkeypatch.setattr(backend, "FORCED", "auto")
    layers = torch.nn.Sequential(torch.nn.Linear(7, 8), torch.nn.Linear(8, 4)).eval()
    pack_weights(layers)
    assert [layer.panels is not None for layer in layers] == [False, True]


@needs_compiler
def test_the_codes_and_their_parts_are_packed_alike_without_onednn(monkeypatch):
    """A bfloat16 model once failed here on processors without AVX-512."""
    monkeypatch.setattr(backend, "FORCED", "auto")
    for module in ("recserve.models.packing", "recserve.kernels.linear.products"):
        monkeypatch.setattr(f"{module}.onednn_packs", lambda dtype: False)
    for size in (1, 4, 2048):
        weight = torch.zeros(size, 8, dtype=BF16)
        assert packable(weight) and PackedLinear(weight).panels is not None
    assert not packable(torch.zeros(4, 7, dtype=BF16))


def test_bfloat16_is_the_fastest_type_where_the_level_multiplies_it(machine):
    for level in [*LEVELS, None]:
        machine(level)
        halves = level == "x86-64-v4-bf16"
        assert products.fastest_dtype([F32, BF16]) == (BF16 if halves else F32)
        assert products.fastest_dtype([BF16, F32]) == (BF16 if halves else F32)
        assert products.fastest_dtype([F16, F32]) == F32
        assert products.fastest_dtype([BF16]) == BF16
        assert products.fastest_dtype([F16]) == F16
