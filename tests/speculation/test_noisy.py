"""Ranking with the target's noise, against the noise of the whole vocabulary."""

import numpy as np
import torch

from recserve.drafters.shared.noisy import (
    LEAST_SCALE,
    NEVER,
    NUM_NOISY_TOKENS,
    RARELY,
    DraftedTexts,
    best_with_noise,
    likeliest,
    noisy_logits,
)
from recserve.kernels.acceptance.noise import gumbel
from recserve.speculation.sampling import temper, truncate_fixed

NOTHING_BANNED = torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.zeros(4)


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


def test_log_probabilities_are_those_of_the_target_s_choice():
    """Of texts that draw and texts that do not; those alone give the same as beside the others."""
    g = torch.Generator().manual_seed(1)
    logits, width = torch.randn(4, 3, 100, generator=g) * 3, 6
    heat, depths = torch.tensor([0.0, 0.2, 1.0, 1.7]), torch.tensor([0, 1, 1])
    lengths, seeds = torch.tensor([5, 9, 2, 30]), torch.tensor([4, 5, 6, 7])
    places = lengths[:, None] + depths
    noise = gumbel(seeds.repeat_interleave(3), places.flatten(), 100).view(4, 3, 100)
    scales = heat.clamp(min=LEAST_SCALE)[:, None, None]
    expected = ((logits + heat[:, None, None] * noise) / scales).log_softmax(-1).topk(width)
    texts = DraftedTexts(lengths, heat, seeds, *NOTHING_BANNED, greedy=False, truncates=False)
    found = likeliest(logits, texts, depths, width)
    assert torch.equal(found.columns, expected.indices)
    torch.testing.assert_close(found.values, expected.values)
    own = (column[:1] for column in (lengths, heat, seeds, *NOTHING_BANNED))
    greedy = DraftedTexts(*own, greedy=True, truncates=False)
    alone = likeliest(logits[:1], greedy, depths, width)
    assert torch.equal(alone.columns, expected.indices[:1])
    torch.testing.assert_close(alone.values, expected.values[:1])


def test_banned_columns_have_smaller_values():
    """Drawn truncations of drawn rows, against the truncation of the target's logits. The order of
    the others stays, and so do all columns of texts that do not draw.
    """
    rng, g = np.random.default_rng(5), torch.Generator().manual_seed(5)
    banned = 0
    for _ in range(40):
        count = int(rng.choice((60, 300)))
        logits = torch.randn(3, 2, count, generator=g) * float(rng.choice((0.3, 2.0, 8.0)))
        heat = torch.tensor(rng.choice((0.0, 0.6, 1.5), 3), dtype=torch.float32)
        lengths, seeds = torch.tensor([4, 40, 400]), torch.tensor([7, 8, 9])
        top_k = torch.tensor(rng.choice((0, 1, 5, 100, 5000), 3))
        top_p = torch.tensor(rng.choice((1.0, 0.9, 0.4, 0.0), 3), dtype=torch.float32)
        min_p = torch.tensor(rng.choice((0.0, 0.05, 1.0), 3), dtype=torch.float32)
        plain, cut = (
            DraftedTexts(lengths, heat, seeds, top_k, top_p, min_p, greedy=False, truncates=own)
            for own in (False, True)
        )
        width, loss = ((1, NEVER), (5, RARELY))[int(rng.integers(2))]
        free, found = (noisy_logits(logits, texts, 0, width) for texts in (plain, cut))
        assert torch.equal(free.columns, found.columns)
        rows = temper(logits.flatten(0, 1), heat.repeat_interleave(2))
        kept = truncate_fixed(rows, *(x.repeat_interleave(2) for x in (top_k, top_p, min_p)))
        wanted = kept.isneginf().view_as(logits) & (heat > 0)[:, None, None]
        lost = (free.values - found.values) > loss / 2
        assert torch.equal(lost, wanted.gather(-1, found.columns))
        assert torch.equal(free.values[~lost], found.values[~lost])
        banned += int(lost.sum())
    assert banned > 1000
