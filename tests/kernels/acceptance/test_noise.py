"""Noise: Philox against its published vectors, the formula, and independence of everything else."""

import math

import pytest
import torch

from recserve.kernels.acceptance import noise
from recserve.kernels.acceptance.noise import (
    gumbel,
    gumbel_of_tokens,
    gumbel_of_words,
    philox,
    uniform,
)

FULL = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def words(*values):
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    "key,counter,expected",
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL), (FULL,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0xA4093822, 0x299F31D0), PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(key, counter, expected):
    """Known answers of Random123, philox 4x32 with 10 rounds."""
    got = philox(words(*key), words(*counter))
    assert tuple(int(word) for word in got) == expected


def test_gumbel_is_its_formula():
    """Against float64; the largest p are rounded to 1 - 2**-26, which moves the smallest noise."""
    g = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 2**32, (200_000,), generator=g)
    edges = torch.cat([start + torch.arange(-500, 500) for start in (500, 2**30, 2**31)])
    word = torch.cat([drawn[drawn < 2**32 - 2**8], edges])
    p = (word.double() + 0.5) / 2**32
    expected = -torch.log(-torch.log1p(-p))
    got = gumbel_of_words(word)
    low = p > 1 - 2**-8
    assert (got - expected)[~low].abs().max() < 3e-6
    assert (got - expected)[low].abs().max() < 0.15
    assert math.isclose(
        float(gumbel_of_words(torch.zeros(1, dtype=torch.int64))), 33 * math.log(2), rel_tol=1e-6
    )
    assert torch.isfinite(gumbel_of_words(torch.tensor([0, 1, FULL - 1, FULL]))).all()


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 1025, 32_000, 2**17 + 3])
def test_a_row_does_not_depend_on_company_or_chunks(vocabulary, monkeypatch):
    seeds, positions = torch.tensor([3, -7, 2**62, 3]), torch.tensor([0, 9, 2**33, 1])
    together = gumbel(seeds, positions, vocabulary)
    assert together.shape == (4, vocabulary)
    monkeypatch.setattr(noise, "CHUNK", 3 * noise.TILE)
    for row in range(4):
        own = slice(row, row + 1)
        assert torch.equal(gumbel(seeds[own], positions[own], vocabulary)[0], together[row])
    tokens = torch.randint(0, vocabulary, (4, 50), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel_of_tokens(seeds, positions, tokens), together.gather(1, tokens))
    assert torch.equal(
        gumbel(seeds, positions, vocabulary // 2 + 1), together[:, : vocabulary // 2 + 1]
    )


def test_seed_position_token_and_stream_all_count():
    """No word of 4 x 4096 repeats more often than chance: at most 1 pair of equal rows is none."""
    seeds = torch.tensor([0, 1, 2**32, 0, 0, 0])
    positions = torch.tensor([0, 0, 0, 1, 2**32, 0])
    rows = gumbel(seeds, positions, 4096)
    rows = torch.cat([rows, gumbel(seeds[:1], positions[:1], 4096, noise.DRAFT)])
    same = (rows[:, None] == rows[None]).float().mean(-1)
    expected = torch.eye(7)
    expected[0, 5] = expected[5, 0] = 1
    assert (same - expected).abs().max() < 0.01
    assert torch.unique(rows[0]).shape[0] > 4090


def test_uniform_is_in_range_and_even():
    """Chi-square of 100 bins, 200k draws, alpha = 1e-6 (quantile 171)."""
    draws = uniform(torch.arange(2000), torch.full((2000,), 5), 100)
    assert float(draws.min()) >= 0 and float(draws.max()) < 1
    counts = torch.bincount((draws.flatten() * 100).long(), minlength=100).double()
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 171
    assert torch.equal(uniform(torch.arange(3), torch.full((3,), 5), 7), draws[:3, :7])


def test_argmax_draws_from_the_softmax():
    """Chi-square of 10 tokens, 200k positions, alpha = 1e-6 (quantile 44)."""
    logits = torch.linspace(-2, 2, 10)
    positions = torch.arange(200_000)
    tokens = torch.arange(10).expand(200_000, 10)
    drawn = (logits + gumbel_of_tokens(torch.full_like(positions, 11), positions, tokens)).argmax(1)
    expected = logits.double().softmax(0) * 200_000
    counts = torch.bincount(drawn, minlength=10).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 44
