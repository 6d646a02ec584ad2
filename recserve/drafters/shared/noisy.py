"""Ranks a drafter's guesses as the target chooses: with its temperature and its noise.

Under the rule `sample` the target takes argmax(logits / temperature + noise), with noise keyed by
seed and position. That is argmax(logits + temperature * noise), also at temperature 0. A drafter
that ranks its own logits the same way predicts this choice, not the mode of the distribution.

The drafter's logits differ from the target's. If the difference has the law of Gumbel noise times
s, the target takes token y with probability softmax((logits + temperature * noise) / s)[y]. So s
shapes a tree: with a large s it is wide, with a small s deep.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.acceptance.noise import gumbel_of_tokens
from recserve.kernels.host import on_device
from recserve.speculation.drafter import DraftInputs, TextContext

# s above is the temperature, and at least this. Trees of the drafters in docs/results/drafters.md
# are best at 0.3 to 0.6 for temperature 0, and for most of them at 1 for temperature 1.
LEAST_SCALE = 0.5
NUM_NOISY_TOKENS = 128  # only this many likeliest tokens get noise; others are hardly ever drawn
# What the values of columns lose that the request's truncation bans: where a drafter names one
# token, and where it names several. The target may not ban what its drafter would. On a trained
# model with drawn errors the target's token is then first, and among the first eight, nearly as
# often as with the better of 0 and NEVER.
NEVER, RARELY = 1e4, 2.0


def ranking_bytes(rows: int, words: int) -> int:
    """Returns the memory of logits [rows, words] in float32 while their columns are ranked.

    There are two more tables: divided logits, and their exponentials or logarithms.
    """
    return 3 * 4 * rows * words


def best_with_noise(
    logits: Tensor,
    scale: Tensor,
    seeds: Tensor,
    positions: Tensor,
    width: int,
    token_map: Tensor | None = None,
) -> Tensor:
    """Returns the columns of the `width` largest values of `logits + scale * noise`, largest first.

    Only the NUM_NOISY_TOKENS likeliest columns compete, or `width` of them if that is more.

    Args:
        logits: [n, V].
        scale: [n] temperature for raw logits, 1 for divided logits, 0 for no noise.
        seeds: [n] int64.
        positions: [n] int64.
        width: Number of columns to return.
        token_map: [V] token id of each column; None means the column index itself.

    Returns:
        [n, width] column indices.
    """
    best = logits.topk(min(max(NUM_NOISY_TOKENS, width), logits.shape[1]))
    tokens = best.indices if token_map is None else token_map[best.indices]
    noise = gumbel_of_tokens(seeds, positions, tokens)
    order = torch.add(best.values, noise * scale[:, None]).topk(width).indices
    return best.indices.gather(1, order)


@dataclass(frozen=True)
class DraftedTexts:
    """What B texts that are drafted together tell about their draws.

    Attributes:
        lengths: [B] committed tokens.
        temperatures: [B] float32.
        seeds: [B].
        top_k: [B] as in `SamplingTable`, like the next two.
        top_p: [B] float32.
        min_p: [B] float32.
        greedy: Whether no text draws.
        truncates: Whether any text may have top_k, top_p or min_p.
    """

    lengths: Tensor
    temperatures: Tensor
    seeds: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: bool
    truncates: bool

    @staticmethod
    def of(contexts: Seq[TextContext], device: torch.device) -> DraftedTexts:
        """Reads the contexts of the texts."""
        params = [context.params for context in contexts]
        numbers = [
            [len(context.tokens) for context in contexts],
            [p.seed for p in params],
            [p.top_k for p in params],
        ]
        shares = [[p.temperature for p in params], [p.top_p for p in params]]
        shares.append([p.min_p for p in params])
        lengths, seeds, top_k = on_device(numbers, device)
        temperatures, top_p, min_p = on_device(shares, device, torch.float32)
        return DraftedTexts(
            lengths=lengths,
            temperatures=temperatures,
            seeds=seeds,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            greedy=all(p.greedy for p in params),
            truncates=any(p.truncates for p in params),
        )

    @staticmethod
    def of_inputs(inputs: DraftInputs) -> DraftedTexts:
        """Reads the inputs of a captured draft."""
        return DraftedTexts(
            lengths=inputs.lengths,
            temperatures=inputs.temperatures,
            seeds=inputs.seeds,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            min_p=inputs.min_p,
            greedy=inputs.greedy,
            truncates=not inputs.greedy,
        )

    @property
    def scales(self) -> Tensor:
        """[B] float32 scale s of each text, see above."""
        return self.temperatures.clamp(min=LEAST_SCALE)


@dataclass(frozen=True)
class RankedColumns:
    """Some columns of each row, and a value for each of them.

    Attributes:
        columns: [..., C] indices.
        values: [..., C] float32.
    """

    columns: Tensor
    values: Tensor

    def best(self, width: int) -> RankedColumns:
        """Returns the `width` columns with the largest values, largest first."""
        chosen = self.values.topk(width)
        return RankedColumns(self.columns.gather(-1, chosen.indices), chosen.values)


def noisy_logits(
    logits: Tensor,
    texts: DraftedTexts,
    depths: Tensor | int,
    width: int,
    tokens_of: Callable[[Tensor], Tensor] | None = None,
) -> RankedColumns:
    """Returns (logits + temperature * noise) / scale of the likeliest columns.

    Only the NUM_NOISY_TOKENS likeliest columns are returned, or `width` of them if that is more.
    Columns that the text's truncation bans have smaller values, see above.

    Args:
        logits: [B, W, V] float32.
        texts: The B texts.
        depths: [W] tokens between a text's end and the row's own, or one number for all rows.
        width: Least number of columns.
        tokens_of: Returns the token ids of columns. None means that they are the same.
    """
    best, shape = logits.topk(min(max(NUM_NOISY_TOKENS, width), logits.shape[-1])), logits.shape[:2]
    tokens = best.indices if tokens_of is None else tokens_of(best.indices)
    seeds, places = (
        row.expand(shape).flatten()
        for row in (texts.seeds[:, None], texts.lengths[:, None] + depths)
    )
    noise = gumbel_of_tokens(seeds, places, tokens.flatten(0, 1)).view_as(best.values)
    values = torch.addcmul(best.values, noise, texts.temperatures[:, None, None])
    values = values / texts.scales[:, None, None]
    if texts.truncates:
        loss = NEVER if width == 1 else RARELY
        values = values - loss * _find_banned(best.values, logits, texts)
    return RankedColumns(best.indices, values)


def _find_banned(values: Tensor, logits: Tensor, texts: DraftedTexts) -> Tensor:
    """Returns which of the largest values [B, W, C] of the logits [B, W, V] truncation bans.

    The values are in descending order. Of equal values it may ban one and not the other.
    """
    heat, top_k, top_p, min_p = (
        column[:, None, None]
        for column in (texts.temperatures, texts.top_k, texts.top_p, texts.min_p)
    )
    heat = torch.where(heat > 0, heat, 1.0)
    scaled, count = values / heat, values.shape[-1]
    ranks = torch.arange(count, device=values.device)
    banned = (top_k > 0) & (ranks >= top_k)
    # The nucleus is one of the top_k, or of all columns.
    few = scaled.masked_fill(banned, float("-inf")).logsumexp(-1, keepdim=True)
    every = (logits / heat).logsumexp(-1, keepdim=True)
    mass = (scaled - torch.where((top_k > 0) & (top_k <= count), few, every)).exp()
    banned = banned | ((mass.cumsum(-1) - mass >= top_p) & (top_p < 1))
    banned = banned | (scaled < scaled[..., :1] + min_p.log())
    return banned & (ranks > 0) & (texts.temperatures > 0)[:, None, None]


def likeliest(
    logits: Tensor,
    texts: DraftedTexts,
    depths: Tensor | int,
    width: int,
    tokens_of: Callable[[Tensor], Tensor] | None = None,
) -> RankedColumns:
    """Returns the columns of each row that the target takes most likely, and the logarithms of
    these probabilities, see above. For the arguments see `noisy_logits`.
    """
    if texts.greedy:
        best = (logits / LEAST_SCALE).log_softmax(-1).topk(width)
        return RankedColumns(best.indices, best.values)
    noisy = noisy_logits(logits, texts, depths, width, tokens_of)
    return RankedColumns(noisy.columns, noisy.values.log_softmax(-1)).best(width)
