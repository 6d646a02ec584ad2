"""Noise keyed by (seed, position, token): identical in any batch, order, draft and machine.

    words = Philox-4x32-10(key = seed, counter = (block, position, stream)): 32 bits per token
    p = (word + 1/2) / 2**32,   gumbel = -log(-log(1 - p)),   argmax(logits + gumbel) ~ softmax

The four tokens of a block lie LANES apart. So TILE consecutive tokens are LANES blocks and need no
interleaving. The logarithm uses only operations that IEEE 754 rounds exactly. So the Triton version
(triton_noise.py) and every machine give the same bits, which library logarithms do not.
Sources: Salmon et al. 2011 (Philox, Random123); Maddison et al. 2014, section 2 (Gumbel-max).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recserve.kernels.backend import Operator

LANES = 256
TILE = 4 * LANES
CHUNK = 2**16  # words per step, so that intermediate results stay in a core's cache

# Streams: independent uses of the same (seed, position).
TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF
LN2 = 0.693147182464599609375
# log(m) = 2 s + s z (2/3 + z (2/5 + ...)) with s = (m - 1) / (m + 1), z = s * s; float32 values.
SERIES = (0.6666666865348816, 0.4000000059604645, 0.2857142984867096, 0.2222222238779068)


def gumbel_reference(
    seeds: Tensor, positions: Tensor, vocabulary: int, stream: int = TARGET
) -> Tensor:
    """Returns Gumbel noise [n, vocabulary] float32 of the tokens 0 : vocabulary.

    Args:
        seeds: [n] int64.
        positions: [n] int64.
        vocabulary: Number of tokens.
        stream: Which of the independent streams to use.
    """
    return _of_all_tokens(gumbel_of_words, seeds, positions, vocabulary, stream)


def exponential(
    seeds: Tensor, positions: Tensor, vocabulary: int, stream: int = RESIDUAL
) -> Tensor:
    """Returns exponential noise [n, vocabulary] float32, which is exp(-gumbel) of the same words.

    argmax(weights / exponential) draws in proportion to weights that need no normalisation. The
    arguments are those of `gumbel`.
    """
    return _of_all_tokens(exponential_of_words, seeds, positions, vocabulary, stream)


def _of_all_tokens(
    of_words: Callable[[Tensor], Tensor],
    seeds: Tensor,
    positions: Tensor,
    vocabulary: int,
    stream: int,
) -> Tensor:
    rows, device = seeds.shape[0], seeds.device
    tiles = -(-vocabulary // TILE)
    out = torch.empty(rows, tiles, 4, LANES, dtype=torch.float32, device=device)
    # A GPU computes all words at once: it gains nothing from a cache and few launches are cheaper.
    chunk = CHUNK if device.type == "cpu" else out.numel()
    step, height = max(chunk // TILE, 1), max(chunk // (tiles * TILE), 1)
    lanes = torch.arange(tiles * LANES, device=device).view(1, tiles, LANES)
    for top in range(0, rows, height):
        own = slice(top, top + height)
        key, tail = _split_keys(seeds[own, None, None], positions[own, None, None], stream)
        for left in range(0, tiles, step):
            part = slice(left, left + step)
            words = torch.stack(philox(key, (lanes[:, part], *tail)), dim=2)
            out[own, part] = of_words(words)
    return out.flatten(1)[:, :vocabulary]


def gumbel_of_tokens_reference(
    seeds: Tensor, positions: Tensor, tokens: Tensor, stream: int = TARGET
) -> Tensor:
    """Returns the noise at chosen tokens: `gumbel(...)[i, tokens[i]]` without the rest.

    Args:
        seeds: [n] int64.
        positions: [n] int64.
        tokens: [n, k] int64.
        stream: Which of the independent streams to use.

    Returns:
        [n, k] float32.
    """
    key, tail = _split_keys(seeds[:, None], positions[:, None], stream)
    blocks = tokens // TILE * LANES + tokens % LANES
    words = torch.stack(philox(key, (blocks, *tail)), dim=-1)
    chosen = tokens // LANES % 4
    return gumbel_of_words(words.gather(-1, chosen[..., None])[..., 0])


def uniform(seeds: Tensor, positions: Tensor, draws: int, stream: int = ACCEPT) -> Tensor:
    """Returns uniform numbers [n, draws] float32 in [0, 1) with 24 bits each.

    Args:
        seeds: [n] int64.
        positions: [n] int64.
        draws: Numbers per row.
        stream: Which of the independent streams to use.
    """
    key, tail = _split_keys(seeds[:, None], positions[:, None], stream)
    blocks = torch.arange(-(-draws // 4), device=seeds.device)[None]
    words = torch.stack(philox(key, (blocks, *tail)), dim=-1).flatten(1)[:, :draws]
    return (words >> 8).float() * 2.0**-24


def step_keys(lengths: Tensor, numbers: Tensor) -> Tensor:
    """Returns noise positions [m] that no other step of the sequence uses.

    A draw that decided what one step accepted must not decide again in the next step. So the noise
    of drawn drafts, acceptance and residual draws is keyed by the step, not by the position alone.

    Args:
        lengths: [m] committed tokens at the start of the step.
        numbers: [m] number of the draw within the step.
    """
    return (lengths << 32) + numbers


def _split_keys(
    seeds: Tensor, positions: Tensor, stream: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Returns the Philox key, and the counter without its first word."""
    key = (seeds & LOW, (seeds >> 32) & LOW)
    return key, (positions & LOW, (positions >> 32) & LOW, torch.full_like(positions, stream))


def philox(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four words of noise per counter.

    All words are int64 in 0 : 2**32. Shapes broadcast.
    """
    (key0, key1), (a, b, c, d) = key, counter
    for _ in range(ROUNDS):
        # Products wrap at 64 bits and are not masked here. b and d take part in bitwise operations
        # only, so masking their high bits at the end is enough.
        right, left = c * MULTIPLIERS[1], a * MULTIPLIERS[0]
        a = ((right >> 32) ^ (b ^ key0)).bitwise_and_(LOW)
        c = ((left >> 32) ^ (d ^ key1)).bitwise_and_(LOW)
        b, d = right, left
        key0, key1 = key0 + INCREMENTS[0], key1 + INCREMENTS[1]
    return a, b & LOW, c, d & LOW


def gumbel_of_words(words: Tensor) -> Tensor:
    """Returns -log(-log(1 - p)), float32, with p = (word + 1/2) / 2**32. words: int64."""
    return _log(*_split(exponential_of_words(words))).neg_()


def exponential_of_words(words: Tensor) -> Tensor:
    """Returns -log(1 - p), float32, where 1 - p is at least 2**-26. words: int64."""
    p = words.to(torch.float32).add_(0.5).mul_(2.0**-32)
    exponent, mantissa = _split((1 - p).clamp_(min=2.0**-26))
    # Small p decide the argmax. There log(1 - p) is computed from p, because 1 - p would round it.
    return _log(exponent, torch.where(p < 0.25, -p, mantissa)).neg_()


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exponent e and f of x = 2**e (1 + f) with f in -1/4 : 1/2, float32."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F400000) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return exponent.to(torch.float32), mantissa.sub_(1)


def _log(exponent: Tensor, f: Tensor) -> Tensor:
    """Returns log(2**exponent (1 + f)) with every operation rounded separately."""
    s = f / (f + 2)
    z = s * s
    tail = z * SERIES[3]
    for term in (SERIES[2], SERIES[1], SERIES[0]):
        tail.add_(term).mul_(z)
    return tail.add_(2).mul_(s).add_(exponent.mul_(LN2))


TRITON = "recserve.kernels.acceptance.triton_noise"
gumbel = Operator(gumbel_reference, triton=f"{TRITON}:gumbel")
gumbel_of_tokens = Operator(gumbel_of_tokens_reference, triton=f"{TRITON}:gumbel_of_tokens")
