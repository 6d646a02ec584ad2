"""C and torch are compared on this machine when an operator asks."""

import pytest

from recserve.doctor import kernel_comparison
from recserve.doctor.kernel_comparison import Comparison, compare


def test_each_pair_is_timed_in_turns_after_a_round_to_warm_up(monkeypatch):
    """By a clock of its own: C takes 3 ms at first and then 1, torch 2 ms."""
    now, calls = [0.0], []
    monkeypatch.setattr(kernel_comparison.time, "perf_counter", lambda: now[0])

    def take(name, first_s, then_s):
        def call():
            now[0] += then_s if name in calls else first_s
            calls.append(name)

        return call

    found = compare([take("c", 3e-3, 1e-3)], [take("torch", 2e-3, 2e-3)])
    assert calls == ["c", "torch"] * (kernel_comparison.ROUNDS + 1)
    assert found.c_ms == pytest.approx((1.0,)) and found.torch_ms == pytest.approx((2.0,))
    assert str(found) == "C 1 ms, torch 2 ms (2x)"
    calls.clear()  # what takes long is timed twice
    compare([take("c", 1.0, 1.0)], [take("torch", 1.0, 1.0)])
    assert calls == ["c", "torch"] * 3


def test_the_ratio_weighs_few_rows_and_many_alike():
    assert Comparison((1.0, 40.0), (2.0, 30.0)).ratio == pytest.approx(1.5**0.5)
