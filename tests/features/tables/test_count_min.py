"""The count-min sketch against exact counts, with the bound it promises."""

import math

import numpy as np
import pytest

from recserve.features.tables.count_min import CountMinSketch


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (64, 2), (1000, 5), (4096, 4)])
def test_never_below_and_rarely_far_above(width, depth):
    """Zipf keys; at most exp(-depth) of them may exceed the bound, 3 % of slack for one draw."""
    draw = np.random.default_rng(width + depth)
    keys = draw.zipf(1.3, 50_000) % 20_000
    sketch = CountMinSketch(width, depth, seed=1)
    sketch.add(keys)
    seen, exact = np.unique(keys, return_counts=True)
    over = sketch.estimate(seen) - exact
    assert sketch.total == 50_000 and over.min() >= 0
    assert (over > math.e / sketch.width * sketch.total).mean() <= math.exp(-depth) + 0.03


def test_counts_add_up_over_calls_and_by_weight():
    sketch = CountMinSketch(1 << 16, 4)
    sketch.add(np.array([3, 3, 7]))
    sketch.add(np.array([7, 9]), np.array([2.0, 0.5]))
    np.testing.assert_array_equal(sketch.estimate(np.array([3, 7, 9, 11])), [2, 3, 0.5, 0])
    assert sketch.total == 5.5


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="width is 0"):
        CountMinSketch(0, 1)
    with pytest.raises(ValueError, match="depth is -1"):
        CountMinSketch(8, -1)
