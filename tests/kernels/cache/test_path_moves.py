"""Accepted paths move to their final slots: the reference against a loop over rows."""

import pytest
import torch

from recserve.kernels.cache.moves import move_paths, move_paths_reference
from tests.support.grids import covering

LAYERS, SLOTS, HEADS, DIM = 2, 60, 2, 3


def loop(pool, sources, targets, lengths):
    moved = pool.clone()
    for path, place, length in zip(sources, targets, lengths.tolist(), strict=True):
        for step in range(length):
            moved[:, place[step]] = pool[:, path[step]]
    return moved


@pytest.fixture(params=[move_paths_reference, move_paths], ids=["reference", "operator"])
def move(request):
    """The reference, and who computes on this machine: C where there is a compiler."""
    with torch.inference_mode():
        yield request.param


@pytest.mark.parametrize("lengths", [[0], [4], [0, 0, 0], [3, 0, 4], [1, 2, 3], [4, 4, 4]])
def test_paths_move_to_their_slots_and_nothing_else_does(lengths, move):
    """Each path lies in 20 slots of its own, its nodes at or behind their targets."""
    g = torch.Generator().manual_seed(sum(lengths))
    keys, values = (torch.randn(LAYERS, SLOTS, HEADS, DIM, generator=g) for _ in range(2))
    starts = 20 * torch.arange(len(lengths))[:, None]
    targets = starts + 2 + torch.arange(4)
    sources = starts + 2 + torch.randperm(16, generator=g)[:4].sort().values
    lengths = torch.tensor([[-1, length] for length in lengths])[:, 1]  # a column has strides
    expected = [loop(pool, sources, targets, lengths) for pool in (keys, values)]
    move(keys, values, sources, targets, lengths)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types(dtype, move):
    pools = [torch.randn(LAYERS, SLOTS, HEADS, DIM).to(dtype) for _ in range(2)]
    path, place, length = torch.tensor([[5, 9]]), torch.tensor([[4, 5]]), torch.tensor([2])
    expected = [loop(pool, path, place, length) for pool in pools]
    move(*pools, path, place, length)
    assert all(map(torch.equal, pools, expected))


def test_no_path_moves_nothing(move):
    pool = torch.randn(LAYERS, SLOTS, HEADS, DIM)
    before, none = pool.clone(), torch.empty(0, 3, dtype=torch.int64)
    move(pool, pool, none, none, torch.empty(0, dtype=torch.int64))
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    "dtype, excess", covering((torch.int8, torch.int16, torch.int32, torch.int64), (0, 9, -9))
)
def test_any_integers_are_safe(dtype, excess, move):
    """A plug-in's rule may count in another type, or count wrong. No slot outside is touched."""
    pools = [torch.randn(LAYERS, SLOTS, HEADS, DIM) for _ in range(2)]
    paths, places = torch.tensor([[5, 9], [21, 24]]), torch.tensor([[4, 5], [20, 21]])
    lengths = torch.tensor([2, 1])
    expected = [loop(pool, paths, places, (lengths + excess).clamp(0, 2)) for pool in pools]
    move(*pools, paths, places, (lengths + excess).to(dtype))
    assert all(map(torch.equal, pools, expected))
