"""The order of semantic ids, also of those that no 64-bit number holds."""

import numpy as np
import pytest
import torch

from recserve.kernels.trie.trie import lexicographic_order


@pytest.mark.parametrize(
    "sizes",
    [
        (7,),
        (3, 1, 4),
        (2**16,) * 3 + (2**14,),  # 2^62 ids fit one number
        (2**16,) * 3 + (2**15,),  # 2^63 do not
        (2**16,) * 4,
        (256,) * 8,
        (2,) * 70,
    ],
    ids=str,
)
def test_rows_are_in_the_order_of_their_codes(sizes):
    """Equal rows stay in their order; the largest codes of every level occur."""
    drawn = np.random.default_rng(len(sizes))
    few = [np.unique([0, size // 2, size - 1]) for size in sizes]
    codes = np.stack([drawn.choice(values, 300) for values in few], axis=1)
    codes[7:9] = [size - 1 for size in sizes]
    codes[100:150] = codes[:50]
    order = lexicographic_order(torch.from_numpy(codes), sizes)
    assert order.tolist() == np.lexsort(codes.T[::-1]).tolist()
