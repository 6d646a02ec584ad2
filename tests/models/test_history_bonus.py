"""The history bonus equals its formula, and a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recserve.models.history_bonus import RECENT, load_history_bonus
from tests.support.history_bonuses import bonus_by_hand, bonus_of


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, -8.0, 1.5]))
def test_the_bonus_is_its_formula(seed: int, repeat: float) -> None:
    """Histories are empty, short, long, repeat items, and hold items without links of their own."""
    noise = np.random.default_rng(seed)
    size, later = int(noise.integers(1, 8)), int(noise.integers(0, 3))
    table = noise.random((size, size)).astype(np.float32) * (noise.random((size, size)) < 0.4)
    width = size + later  # later items joined the catalogue after the training
    histories = [noise.integers(0, width, noise.integers(0, 2 * RECENT)) for _ in range(3)]
    scores = torch.from_numpy(noise.normal(size=(3, width)).astype(np.float32))
    expected = scores.double().numpy().copy()
    for b, history in enumerate(histories):
        expected[b] += bonus_by_hand(table, repeat, history, width)
    bonus_of(table, repeat).add_to(scores, histories)
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-5)


def test_a_row_does_not_depend_on_its_batch() -> None:
    noise = np.random.default_rng(0)
    bonus = bonus_of(noise.random((20, 20)) * (noise.random((20, 20)) < 0.5), -2.0)
    histories = [noise.integers(0, 20, 9) for _ in range(5)]
    together = torch.zeros(5, 20)
    bonus.add_to(together, histories)
    for row, history in zip(together, histories, strict=True):
        alone = torch.zeros(1, 20)
        bonus.add_to(alone, [history])
        assert torch.equal(alone[0], row)


def test_a_saved_bonus_is_read_back(tmp_path: Path) -> None:
    assert load_history_bonus(tmp_path, 4) is None
    bonus = bonus_of(np.eye(4), -4.0)
    bonus.save(tmp_path)
    found = load_history_bonus(tmp_path, 4)
    assert found is not None and found.repeat == -4.0
    for name in ("offsets", "rows", "links"):
        np.testing.assert_array_equal(getattr(found, name), getattr(bonus, name))
