from __future__ import annotations

import math

import pytest
import torch

from recserve.training.recommender.sasrec import shared_negatives_loss


def test_shared_negatives_follow_the_definition() -> None:
    """Each target among itself and the drawn items that are neither it nor hidden, repeats
    counted.
    """
    noise = torch.Generator().manual_seed(1)
    query, items = (torch.randn(n, 4, generator=noise) for n in (3, 6))
    targets, hidden = torch.tensor([2, 0, 2]), torch.tensor([[0, 1], [2, 5], [2, 0]])
    torch.manual_seed(7)
    sample = torch.randint(6, (40,)).tolist()
    assert set(sample) == set(range(6))  # so that every mask is asked for
    expected = 0.0
    for row, target in enumerate(targets.tolist()):
        left_out = {target, *(item for which, item in hidden.tolist() if which == row)}
        scores = (items @ query[row]).tolist()
        negatives = sum(math.exp(scores[item]) for item in sample if item not in left_out)
        expected -= scores[target] - math.log(math.exp(scores[target]) + negatives)
    torch.manual_seed(7)
    got = shared_negatives_loss(query, items, targets, hidden, 40)
    assert got.item() == pytest.approx(expected, rel=1e-5)


def test_shared_negatives_teach_only_the_target_and_the_drawn_items() -> None:
    items = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(3)
    drawn = set(torch.randint(50, (5,)).tolist())
    torch.manual_seed(3)
    none = torch.zeros(0, 2, dtype=torch.int64)
    shared_negatives_loss(torch.ones(1, 4), items, torch.tensor([8]), none, 5).backward()
    assert items.grad is not None
    assert set(items.grad.abs().sum(1).nonzero()[:, 0].tolist()) == drawn | {8}
