"""Ranking with the target's noise, against the noise of the whole vocabulary."""

import torch

from recserve.kernels.noise import gumbel
from recserve.speculation.drafters.noisy import NUM_NOISY_TOKENS, best_with_noise


def test_ranks_are_those_of_the_likeliest_tokens_with_full_noise():
    """In 32 rows of a vocabulary of 1,000: equal to ranking all of the 128 likeliest; and the best
    is what the target draws from a distribution that sharp.
    """
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 1000, generator=g) * 8
    seeds, positions = torch.arange(32) * 7 - 50, torch.arange(32) + 3
    scale = torch.tensor([0.0, 0.5, 1.0, 1.3]).repeat(8)
    noisy = logits + gumbel(seeds, positions, 1000) * scale[:, None]
    least = logits.topk(NUM_NOISY_TOKENS).values[:, -1:]
    expected = noisy.masked_fill(logits < least, float("-inf")).topk(5).indices
    found = best_with_noise(logits, scale, seeds, positions, 5)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, 0], noisy.argmax(1))
    words = torch.randperm(1000, generator=g)
    mapped = best_with_noise(logits, scale, seeds, positions, 3, words)
    noisy = logits + gumbel(seeds, positions, 1000)[:, words] * scale[:, None]
    kept = noisy.masked_fill(logits < least, float("-inf"))
    assert torch.equal(mapped[:, 0], kept.argmax(1))
    assert best_with_noise(logits[:, :4], scale, seeds, positions, 4).shape == (32, 4)
