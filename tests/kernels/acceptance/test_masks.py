"""Masks of tokens: who computes here and Triton, interpreted, against the reference."""

import pytest
import torch

from recserve.kernels.acceptance.masks import TokenMasks, ban_masked, ban_masked_reference
from tests.support import triton_interpreter  # noqa: F401

pytest.importorskip("triton")

from recserve.kernels.acceptance import triton_masks  # noqa: E402


def case(count, vocabulary, masks):
    """Returns logits, masks with dense, sparse, full and empty words, and the mask of each row."""
    g = torch.Generator().manual_seed(vocabulary)
    words = -(-vocabulary // 32)
    bits = torch.randint(-(2**31), 2**31, (masks, words), generator=g, dtype=torch.int64)
    kinds = torch.randint(0, 3, (masks, words), generator=g)
    bits = torch.where(kinds == 0, -1, torch.where(kinds == 1, 0, bits)).to(torch.int32)
    rows = torch.randint(-1, masks, (count,), generator=g)
    return torch.randn(count, vocabulary, generator=g), bits, rows


@pytest.mark.parametrize("count,vocabulary,masks", [(1, 1, 1), (7, 40, 3), (5, 5000, 2)])
@torch.inference_mode()
def test_masks_are_applied(count, vocabulary, masks):
    logits, bits, rows = case(count, vocabulary, masks)
    wanted = logits.clone()
    for i, row in enumerate(rows.tolist()):
        for token in range(vocabulary if row >= 0 else 0):
            if not int(bits[row, token // 32]) >> (token % 32) & 1:
                wanted[i, token] = -torch.inf
    for kernel in (ban_masked, ban_masked_reference, triton_masks.ban_masked):
        found = logits.clone()
        kernel(found, bits, rows)
        assert torch.equal(found, wanted), kernel
    wide = logits.double()
    TokenMasks(bits, rows).apply(wide, torch.arange(count))
    assert torch.equal(wide.float(), wanted)
