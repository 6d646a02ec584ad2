"""The sliding window of a history."""

import numpy as np
import pytest

from recserve.features.tables.encoding import window_start


@pytest.mark.parametrize(("maximum", "block"), [(1, 1), (8, 1), (8, 3), (8, 8), (50, 16)])
def test_window_slides_in_blocks(maximum: int, block: int) -> None:
    starts = [window_start(count, maximum, block) for count in range(4 * maximum + 5)]
    for count, start in enumerate(starts):
        assert start % block == 0 and count - start <= maximum
        assert start == 0 if count <= maximum else count - start > maximum - block
    steps = np.flatnonzero(np.diff(starts))
    assert set(np.diff(starts)[steps].tolist()) <= {block}
    assert set(np.diff(steps).tolist()) <= {block}


@pytest.mark.parametrize("block", [0, 9])
def test_refuses_blocks(block: int) -> None:
    with pytest.raises(ValueError, match=f"block is {block}"):
        window_start(10, 8, block)
