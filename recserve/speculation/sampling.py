"""Pure functions on rows of logits: what each sampling parameter does, and how a token is drawn.

Every function takes one value per row and leaves a row with neutral values as it is, bit for bit,
so that what a row becomes does not depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.tree import TokenTree

BANNED = float("-inf")
# The likeliest tokens looked at first for top_p; nearly always they hold enough.
HEAD = 1024


def largest(rows: Tensor) -> Tensor:
    """[m] place of the largest entry of each row [m, V], any float dtype, the lowest among equals.

    On a CPU it is found in numpy.
    """
    return rows.argmax(-1) if rows.is_cuda else torch.tensor(largest_on_host(rows))


def largest_on_host(rows: Tensor) -> list[int]:
    """The same of rows on a CPU: several times faster than torch is at it. bfloat16 is compared by
    its bits.
    """
    if rows.dtype == torch.bfloat16:
        bits = rows.view(torch.int16).numpy()
        places: list[int] = bits.argmax(-1).tolist()
        # Of positive numbers the larger has the larger bits, and every other number has less.
        if all(bits.item(row, place) > 0 for row, place in enumerate(places)):
            return places
        rows = rows.float()
    found: list[int] = rows.numpy().argmax(-1).tolist()
    return found


def path_tokens(tree: TokenTree, nodes: Tensor, depth: int) -> Tensor:
    """Drafted tokens on the way to each node, itself included, node 0 excluded.

    nodes [m] packed. depth: most levels below node 0. Returns [m, depth], nearest first, -1 where
    none is left.
    """
    columns = []
    node = nodes
    for _ in range(depth):
        parent = torch.where(node >= 0, tree.parents[node.clamp(min=0)], -1)
        columns.append(torch.where(parent >= 0, tree.tokens[node.clamp(min=0)], -1))
        node = parent
    if not columns:
        return nodes.new_empty(nodes.shape[0], 0)
    return torch.stack(columns, dim=1)


def add_path_counts(counts: Tensor, paths: Tensor) -> Tensor:
    """Counts of committed tokens plus those of each row's path.

    counts [m, V] int, changed in place and returned. paths [m, D], -1 counts nothing.
    """
    ones = (paths >= 0).to(counts.dtype)
    return counts.scatter_add_(1, paths.clamp(min=0), ones)


def last_tokens(paths: Tensor, committed: Tensor, width: int) -> Tensor:
    """The last `width` tokens before each row's draw, nearest first.

    paths [m, D] as in path_tokens, committed [m, width] nearest first. Returns [m, width].
    """
    both = torch.cat([paths, committed], dim=1)
    step = torch.arange(width, device=paths.device)
    used = (paths >= 0).sum(1, keepdim=True)
    return both.gather(1, torch.where(step < used, step, step - used + paths.shape[1]))


def penalise(
    logits: Tensor,
    seen: Tensor,
    written: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalties on tokens that occurred.

    logits [m, V]. seen, written [m, V]: occurrences in prompt and output, and in the output.
    repetition, presence, frequency [m]. Returns [m, V].
    Source: Keskar et al. 2019, section 4.1 (repetition); OpenAI's API (presence, frequency).
    """
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen > 0, repeated, logits)
    return logits - frequency[:, None] * written - presence[:, None] * (written > 0)


def ban(logits: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Tokens [n] banned in the rows [m, n] that name them. logits [m, V]; returns [m, V]."""
    limit = torch.where(rows, BANNED, float("inf")).to(logits.dtype)
    return logits.scatter_reduce(1, tokens.expand_as(rows), limit, "amin")


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Tokens outside top_k, then outside top_p, then under min_p are banned.

    logits [m, V]; top_k [m] int, 0: all; top_p, min_p [m]. Tokens equal to the last kept one are
    kept, so the order of equal logits does not matter. Returns [m, V].
    Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p), arXiv 2407.01082 (min-p).
    """
    vocabulary = logits.shape[1]
    threshold = logits.new_full((logits.shape[0],), BANNED)
    if bool((top_k > 0).any()):
        width = min(int(top_k.max()), vocabulary)
        best = logits.topk(width).values
        last = best.gather(1, (top_k.clamp(1, width) - 1)[:, None])[:, 0]
        threshold = torch.where(top_k > 0, last, threshold)
    if bool((top_p < 1).any()):
        threshold = torch.maximum(threshold, _nucleus(logits, threshold, top_p))
    least = logits.amax(1) + min_p.log()
    return logits.masked_fill(logits < torch.maximum(threshold, least)[:, None], BANNED)


def _nucleus(logits: Tensor, threshold: Tensor, top_p: Tensor) -> Tensor:
    """[m] the smallest logit that top_p keeps of the tokens at or over the threshold [m]."""
    vocabulary = logits.shape[1]
    kept = logits.masked_fill(logits < threshold[:, None], BANNED)
    total = kept.logsumexp(1, keepdim=True)
    for width in (min(HEAD, vocabulary), vocabulary):
        values = kept.topk(width).values
        mass = (values - total).exp()
        before = mass.cumsum(1) - mass
        inside = (before < top_p[:, None]).sum(1).clamp(min=1)
        enough = (inside < width) | (top_p >= 1)
        if width == vocabulary or bool(enough.all()):
            break
    last = values.gather(1, inside[:, None] - 1)[:, 0]
    return torch.where(top_p < 1, last, BANNED)


def truncate_fixed(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As truncate, in shapes that depend on no value: the whole vocabulary is sorted, once."""
    values = logits.sort(dim=1, descending=True).values
    last = values.gather(1, (top_k.clamp(1, logits.shape[1]) - 1)[:, None])
    threshold = torch.where(top_k[:, None] > 0, last, BANNED)
    values = values.masked_fill(values < threshold, BANNED)
    total = logits.masked_fill(logits < threshold, BANNED).logsumexp(1, keepdim=True)
    mass = (values - total).exp()
    before = mass.cumsum(1) - mass
    inside = (before < top_p[:, None]).sum(1, keepdim=True).clamp(min=1)
    nucleus = torch.where(top_p[:, None] < 1, values.gather(1, inside - 1), BANNED)
    least = values[:, :1] + min_p.log()[:, None]
    lowest = torch.maximum(torch.maximum(threshold, nucleus), least)
    return logits.masked_fill(logits < lowest, BANNED)


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [m, V] / temperature [m]; rows of temperature 0 stay."""
    return logits / torch.where(temperature > 0, temperature, 1.0)[:, None]


def keep_only_best(logits: Tensor, rows: Tensor) -> Tensor:
    """Ban all but the largest logit, ties to the lowest token, where `rows` [m] is true."""
    best = torch.full_like(logits, BANNED).scatter_(1, logits.argmax(1, keepdim=True), 0.0)
    return torch.where(rows[:, None], best, logits)
