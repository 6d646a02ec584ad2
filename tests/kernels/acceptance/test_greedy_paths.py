"""Greedy paths: who computes here, C where there is a compiler, against the reference."""

import pytest
import torch

from recserve.kernels.acceptance.acceptance import greedy_paths, greedy_paths_reference
from tests.support.accept_cases import CASES, draw
from tests.support.grids import covering

NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def assert_same(logits, tree):
    """Asserts equal paths, and equal tokens up to the end of each."""
    depth = int(tree.depths.max())
    found, wanted = (f(logits, tree, depth) for f in (greedy_paths, greedy_paths_reference))
    assert found.shape == wanted.shape == (tree.num_trees, 2 * depth + 5)
    assert torch.equal(found[:, -1], wanted[:, -1])
    fine = found[:, -1] == 0
    assert torch.equal(found[fine, : depth + 3], wanted[fine, : depth + 3])
    inside = fine[:, None] & (torch.arange(depth + 1) <= wanted[:, depth + 1, None])
    tokens = slice(depth + 3, 2 * depth + 4)
    assert torch.equal(found[:, tokens][inside], wanted[:, tokens][inside])
    return found


@pytest.mark.parametrize(
    "case,dtype,kinds",
    covering(
        [*CASES, ((4, 1), 1), ((1, 6), 63), ((3,), 781)],
        (torch.float32, torch.bfloat16, torch.float16),
        {"plain": False, "kinds": True},
    ),
)
def test_paths(case, dtype, kinds):
    sizes, vocabulary = case
    """Vocabularies below and above a block of vectors; coarse types have many equal logits."""
    tree, logits, *_ = draw(sizes, vocabulary, 1, kinds)
    for scale in (1.0, 0.1, -1.0):
        assert_same((logits * scale).to(dtype), tree)


@pytest.mark.parametrize("vocabulary", [1, 63, 1023, 1024, 1025, 2500])
def test_the_first_of_equal_logits(vocabulary):
    tree = draw((1,) * 9, 7)[0]
    logits = torch.full((9, vocabulary), -3.0)
    places = torch.linspace(0, vocabulary - 1, 9).long()
    logits[torch.arange(9), places] = 0.0
    logits[:, -1] = -0.0  # equals 0
    assert assert_same(logits, tree)[:, 2].tolist() == places.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [NAN, INFINITE])
@pytest.mark.parametrize("vocabulary", [5, 1024, 2050])
def test_what_is_not_finite_is_told(vocabulary, value, dtype):
    """Only of a path's own nodes; one text does not disturb the others."""
    tree = draw((1,) * 6, 4)[0]
    for place in (0, vocabulary // 2, vocabulary - 1):
        logits = torch.randn(6, vocabulary).to(dtype)
        logits[2, place] = value
        logits[4] = -INFINITE
        assert assert_same(logits, tree)[:, -1].tolist() == [0, 0, 1, 0, 1, 0]
    tree, logits, *_ = draw((30,), 50)
    path = [node for node in assert_same(logits, tree)[0, :5].tolist() if node >= 0]
    off = next(node for node in range(30) if node not in path)
    logits[off] = value
    assert assert_same(logits, tree)[0, -1] == 0
