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
from recserve.speculation.drafter import TextContext

# s above is the temperature, and at least this. Trees of the drafters in docs/results/drafters.md
# are best at 0.3 to 0.6 for temperature 0, and for most of them at 1 for temperature 1.
LEAST_SCALE = 0.5
NUM_NOISY_TOKENS = 128  # only this many likeliest tokens get noise; others are hardly ever drawn


def ranking_bytes(rows: int, words: int, greedy: bool) -> int:
    """Returns the memory of logits [rows, words] in float32 while their columns are ranked.

    If no text draws, there are two more tables: all values, and their exponentials or logarithms.
    """
    return 4 * rows * words * (3 if greedy else 1)


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
        greedy: Whether no text draws.
    """

    lengths: Tensor
    temperatures: Tensor
    seeds: Tensor
    greedy: bool

    @staticmethod
    def of(contexts: Seq[TextContext], device: torch.device) -> DraftedTexts:
        """Reads the contexts of the texts."""
        params = [context.params for context in contexts]
        return DraftedTexts(
            lengths=on_device([len(context.tokens) for context in contexts], device),
            temperatures=on_device([p.temperature for p in params], device, torch.float32),
            seeds=on_device([p.seed for p in params], device),
            greedy=all(p.greedy for p in params),
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
    return RankedColumns(best.indices, values / texts.scales[:, None, None])


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
