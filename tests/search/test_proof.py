"""When a descent proves a slate: every prefix left out is strictly below the last item."""

from types import SimpleNamespace

import pytest
import torch

from recserve.search.beam_search import Beams, DescentInC, DescentInTorch

DEAD = float("-inf")


def beams(scores: list[list[float]]) -> Beams:
    nodes = torch.zeros(len(scores), len(scores[0]), dtype=torch.int64)
    return Beams(3, nodes, torch.tensor(scores), nodes[..., None].repeat(1, 1, 3))


def proven_in_torch(found, left_out, ranks):
    descent = DescentInTorch(None, ranks)
    descent.last = beams(found)
    scores = torch.tensor(left_out)
    descent.levels = [
        (beams([[score, 0.0] for score in left_out]), torch.tensor([[True, False]] * len(scores)))
    ]
    return descent.proven


def proven_in_c(found, left_out, ranks):
    descent = object.__new__(DescentInC)
    descent.last, descent.item_ranks = beams(found), ranks
    descent.levels = SimpleNamespace(thresholds=left_out)
    return descent.proven


@pytest.mark.parametrize("proven", [proven_in_torch, proven_in_c])
@pytest.mark.parametrize(
    "left_out,expected",
    [
        ([-2.5, -9.0], True),
        ([-2.0, -9.0], False),  # its items may tie with the last one and have lower nodes
        ([-1.5, -9.0], False),
        ([-9.0, -4.0], False),  # one request is enough
        ([DEAD, DEAD], True),
    ],
)
def test_a_tie_proves_nothing(proven, left_out, expected):
    found = [[-1.0, -2.0, -3.0], [-3.0, -4.0, DEAD]]
    assert proven(found, left_out, [1, 1]) == expected


@pytest.mark.parametrize("proven", [proven_in_torch, proven_in_c])
def test_fewer_items_than_asked_for_prove_only_that_nothing_was_left_out(proven):
    found = [[-1.0, DEAD, DEAD]]
    assert proven(found, [DEAD], [1]) and not proven(found, [-50.0], [1])
    assert proven(found, [DEAD], [7]) and not proven(found, [-50.0], [7])
