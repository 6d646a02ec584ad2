"""The value at a rank: what a proof compares with, also where there are fewer values."""

import torch

from recserve.search.beam_search import value_at


def test_the_value_at_each_rank():
    values = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, float("-inf")]])
    found = [value_at(values, torch.full((2, 1), rank))[:, 0].tolist() for rank in range(5)]
    nothing = float("-inf")
    assert found == [[3, 5], [2, 5], [1, nothing], [nothing, nothing], [nothing, nothing]]


def test_each_row_has_its_own_rank():
    values = torch.tensor([[1.0, 3.0, 2.0]] * 3)
    assert value_at(values, torch.tensor([[2], [0], [3]])).tolist() == [[1], [3], [float("-inf")]]
