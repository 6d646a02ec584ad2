"""Noise and acceptance in Triton, interpreted on the CPU, against their torch twins: equal."""

import pytest
import torch
import triton_interpreter  # noqa: F401
from test_accept import CASES, draw

triton = pytest.importorskip("triton")
tl = triton.language

from recserve.kernels import accept, noise, noise_kernel  # noqa: E402
from recserve.kernels import accept_reference as twin  # noqa: E402


@triton.jit
def numbers(seeds, positions, out, STREAM: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, noise_kernel.LANES)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    words = noise_kernel.words(seed, position, lane, STREAM)
    for word in tl.static_range(4):
        target = out + row * noise_kernel.TILE + word * noise_kernel.LANES + lane
        if KIND == 0:
            tl.store(target, noise_kernel.gumbel(words[word]))
        else:
            tl.store(target, noise_kernel.exponential(words[word]))
    if KIND == 2:
        for draw in range(7):
            coin = noise_kernel.uniform(seed, position, row * 0 + draw, STREAM)
            tl.store(out + row * noise_kernel.TILE + draw, coin)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["gumbel", "exponential", "uniform"])
@pytest.mark.parametrize("stream", [noise.TARGET, noise.RESIDUAL])
def test_noise_has_the_same_bits(kind, stream):
    seeds = torch.tensor([0, -1, 2**62 + 5, 77])
    positions = torch.tensor([0, 3, 2**40, 2**31])
    out = torch.full((4, noise.TILE), float("nan"))
    numbers[(4,)](seeds, positions, out, stream, kind, enable_fp_fusion=False)
    if kind == 2:
        assert torch.equal(out[:, :7], noise.uniform(seeds, positions, 7, stream))
        return
    expected = (noise.exponential if kind else noise.gumbel)(seeds, positions, noise.TILE, stream)
    assert torch.equal(out, expected)


def poison(monkeypatch):
    """Every output starts as NaN or as a number that no result has."""
    empty = torch.empty

    def poisoned(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)


def assert_same(got, expected):
    for name in ("nodes", "lengths", "bonus"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


@pytest.mark.parametrize("kinds", [False, True], ids=["all-candidates", "some-auxiliary"])
@pytest.mark.parametrize("sizes,vocabulary", CASES)
def test_walk_matches_reference(sizes, vocabulary, kinds, monkeypatch):
    monkeypatch.setattr(accept, "BLOCK_NODES", 16)
    monkeypatch.setattr(accept, "BLOCK_TILES", 1)
    tree, logits, keys, temperatures = draw(sizes, vocabulary, 3, kinds)
    depth = int(tree.depths.max())
    expected = twin.accept(logits, tree, keys, temperatures, depth)
    poison(monkeypatch)
    assert_same(accept.accept(logits, tree, keys, temperatures, depth), expected)


def test_ties_go_to_the_lowest_token(monkeypatch):
    monkeypatch.setattr(accept, "BLOCK_TILES", 1)
    tree, logits, keys, temperatures = draw((5, 3), 2500, 0)
    logits.zero_()
    logits[:, [300, 1400, 2400]] = 1.0
    walk = accept.accept(logits, tree, keys, temperatures * 0, 4)
    assert walk.bonus.tolist() == [300, 300]


@pytest.mark.parametrize("kinds", [False, True], ids=["all-candidates", "some-auxiliary"])
@pytest.mark.parametrize("sizes,vocabulary", CASES)
def test_rejection_matches_reference(sizes, vocabulary, kinds, monkeypatch):
    tree, logits, keys, _ = draw(sizes, vocabulary, 4, kinds)
    depth = int(tree.depths.max())
    p = logits.softmax(-1)
    q = (logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).softmax(-1)
    expected = twin.accept_drawn(p, q, tree, keys, depth)
    poison(monkeypatch)
    assert_same(accept.accept_drawn(p, q, tree, keys, depth), expected)
