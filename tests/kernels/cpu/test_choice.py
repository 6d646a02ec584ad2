"""C or torch: the faster one is chosen, for the shapes that are served, and can be forced."""

import pytest
import torch

from recserve.kernels import dispatch
from recserve.kernels.cpu import choice, cpu_attention, native, products
from recserve.kernels.cpu.choice import MARGIN, KernelChoice
from recserve.kernels.cpu.cpu_attention import CpuTreeAttention
from recserve.kernels.cpu.cpu_plan import Form
from recserve.kernels.paged_kv import TreeBatch
from recserve.kernels.tree import chain
from recserve.models import packing
from recserve.models.config import DecoderConfig
from recserve.models.packing import PackedLinear, fastest_dtype, pack_weights

C_IS_FASTER = KernelChoice("a test", (1.0, 1.0), (2.0, 2.0))
TORCH_IS_FASTER = KernelChoice("a test", (2.0, 2.0), (1.0, 1.0))
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
needs_onednn = pytest.mark.skipif(
    not products.onednn_packs(torch.float32), reason="this torch has no oneDNN"
)


FORM = Form(2, 2, 16, torch.float32, True)


def prompt(nodes: int) -> TreeBatch:
    slots = torch.arange(nodes)
    return TreeBatch(chain(slots), None, slots, (slots[:0],))


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", "auto")


def test_torch_is_chosen_only_where_it_is_clearly_faster_over_all_sizes():
    assert KernelChoice("", (1.0,), (1.0,)).in_c
    assert KernelChoice("", (MARGIN - 0.01,), (1.0,)).in_c
    assert not KernelChoice("", (MARGIN + 0.01,), (1.0,)).in_c
    # Twice as fast for few rows and a third slower for many is a gain; the reverse is a loss.
    assert KernelChoice("", (1.0, 40.0), (2.0, 30.0)).in_c
    assert not KernelChoice("", (1.3, 60.0), (1.0, 30.0)).in_c
    assert str(C_IS_FASTER) == "a test: C (C 1 / 1 ms, torch 2 / 2 ms)"


def test_each_pair_is_timed_in_turns_after_a_round_to_warm_up(monkeypatch):
    """By a clock of its own: C takes 3 ms at first and then 1, torch 2 ms."""
    now = [0.0]
    monkeypatch.setattr(choice.time, "perf_counter", lambda: now[0])
    calls = []

    def take(name: str, first_s: float, then_s: float):
        def call() -> None:
            now[0] += then_s if name in calls else first_s
            calls.append(name)

        return call

    found = choice.measure("work", [take("c", 3e-3, 1e-3)], [take("torch", 2e-3, 2e-3)])
    assert calls == ["c", "torch"] * (choice.ROUNDS + 1)
    assert found.c_ms == pytest.approx((1.0,)) and found.torch_ms == pytest.approx((2.0,))
    # What takes long is timed twice.
    calls.clear()
    choice.measure("work", [take("c", 1.0, 1.0)], [take("torch", 1.0, 1.0)])
    assert calls == ["c", "torch"] * 3


@needs_compiler
@needs_onednn
@pytest.mark.parametrize("faster", [C_IS_FASTER, TORCH_IS_FASTER])
def test_all_products_of_a_model_are_of_the_faster_kind(faster, monkeypatch):
    asked = []
    monkeypatch.setattr(products, "choose", lambda weights, _=None: asked.append(weights) or faster)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 6)).eval()
    x = torch.randn(3, 8)
    with torch.inference_mode():
        expected = model(x)
        pack_weights(model)
        torch.testing.assert_close(model(x), expected)
    assert [(layer.panels is not None) for layer in model] == [faster.in_c] * 2
    assert [[tuple(w.shape) for w in weights] for weights in asked] == [[(4, 8), (6, 4)]]


@needs_compiler
@pytest.mark.parametrize("faster", [C_IS_FASTER, TORCH_IS_FASTER])
def test_attention_is_of_the_faster_kind_whatever_the_batch(faster, monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_attention, "choose", lambda form: asked.append(form) or faster)
    for nodes in (1, 700):
        attention = dispatch.tree_attention(prompt(nodes))
        assert isinstance(attention, CpuTreeAttention)
        assert (attention.natively(FORM) is not None) == faster.in_c
    assert asked == [FORM, FORM]


@needs_compiler
def test_kernels_can_be_forced_and_then_nothing_is_measured(monkeypatch):
    def fail(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(products, "choose", fail)
    monkeypatch.setattr(cpu_attention, "choose", fail)
    weight = torch.zeros(4, 8)
    for kernels, in_c in (("c", True), ("torch", False)):
        monkeypatch.setattr(dispatch, "KERNELS", kernels)
        assert dispatch.packs([weight]) == in_c
        attention = dispatch.tree_attention(prompt(9))
        assert isinstance(attention, CpuTreeAttention)
        assert (attention.natively(FORM) is not None) == in_c


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_are_really_measured_and_the_log_says_which_was_chosen(dtype, caplog):
    """Whatever the machine: times are positive, counted per shape, and remembered."""
    shapes = [(65, 32), (130, 64)]
    found = products.total(shapes, dtype)
    parts = [products.total([shape], dtype) for shape in shapes]
    assert all(t > 0 for t in (*found.c_ms, *found.torch_ms))
    for times in ("c_ms", "torch_ms"):
        summed = [sum(getattr(part, times)[i] for part in parts) for i in range(2)]
        assert getattr(found, times) == pytest.approx(summed)
    attention = cpu_attention.choose(Form(1, 2, 16, dtype, True))
    assert len(attention.c_ms) == 2
    assert all(t > 0 for t in (*attention.c_ms, *attention.torch_ms))
    with caplog.at_level("INFO", logger="recserve"):
        pack_weights(torch.nn.Sequential(torch.nn.Linear(8, 4)).to(dtype))
    if native.library() is not None:
        assert "measured 1 products of" in caplog.text


def test_the_fastest_type_has_to_be_clearly_faster(monkeypatch):
    decoder = DecoderConfig(32, 2, 4, 2, 8, 64, max_positions=64)
    both = torch.float32, torch.bfloat16
    for half_ms, expected in (
        ((0.5, 5.0), torch.bfloat16),
        ((0.95, 9.9), torch.float32),
        ((0.5, 40.0), torch.float32),  # the decoding step gains less than the prompt loses
        ((0.5, 15.0), torch.bfloat16),
    ):
        times = {torch.float32: (1.0, 10.0), torch.bfloat16: half_ms}
        monkeypatch.setattr(dispatch, "products_ms", lambda shapes, dtype, t=times: t[dtype])
        assert fastest_dtype(decoder, both) == expected
    assert packing.fastest_dtype(decoder, [torch.float32]) == torch.float32


def test_a_layer_that_stands_alone_is_measured_for_itself(monkeypatch):
    for faster in (C_IS_FASTER, TORCH_IS_FASTER):
        monkeypatch.setattr(products, "choose", lambda weights, _=None, it=faster: it)
        if packing.packable(torch.zeros(4, 8)):
            layer = PackedLinear(torch.zeros(4, 8))
            assert (layer.panels is not None) == (faster.in_c and native.library() is not None)
