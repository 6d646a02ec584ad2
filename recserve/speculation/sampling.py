"""Pure functions on rows of logits: the effect of each sampling parameter.

Every function takes one parameter value per row. A row with neutral values stays the same bit for
bit, so a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.tree import TokenTree

BANNED = float("-inf")
# top_p first examines this many likeliest tokens; they nearly always hold enough probability.
HEAD = 1024


def path_tokens(tree: TokenTree, nodes: Tensor, depth: int) -> Tensor:
    """Returns the drafted tokens on the path to each node: the node included, node 0 excluded.

    Args:
        tree: B packed trees.
        nodes: [m] packed node indices.
        depth: Most levels below node 0.

    Returns:
        [m, depth] tokens, nearest first, -1 after the end of a path.
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
    """Adds the tokens of each row's path to the counts of committed tokens.

    Args:
        counts: [m, V] int, changed in place.
        paths: [m, D] tokens; -1 is not counted.

    Returns:
        `counts`.
    """
    ones = (paths >= 0).to(counts.dtype)
    return counts.scatter_add_(1, paths.clamp(min=0), ones)


def last_tokens(paths: Tensor, committed: Tensor, width: int) -> Tensor:
    """Returns the last `width` tokens before each row's draw, nearest first.

    Args:
        paths: [m, D] tokens, as `path_tokens` returns them.
        committed: [m, width] committed tokens, nearest first.
        width: Number of tokens.

    Returns:
        [m, width] tokens.
    """
    both = torch.cat([paths, committed], dim=1)
    step = torch.arange(width, device=paths.device)
    # The first `used` tokens come from the path, and the others from the committed tokens. These
    # start at column paths.shape[1] of `both`.
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
    """Applies the penalties to tokens that already occurred.

    Args:
        logits: [m, V].
        seen: [m, V] occurrences in prompt and output.
        written: [m, V] occurrences in the output.
        repetition: [m] repetition penalties.
        presence: [m] presence penalties.
        frequency: [m] frequency penalties.

    Returns:
        [m, V] logits.

    Source: Keskar et al. 2019, section 4.1 (repetition); OpenAI's API (presence, frequency).
    """
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen > 0, repeated, logits)
    return logits - frequency[:, None] * written - presence[:, None] * (written > 0)


def ban(logits: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Bans tokens in some rows.

    Args:
        logits: [m, V].
        tokens: [n] token ids.
        rows: [m, n] bool; True bans token n in row m.

    Returns:
        [m, V] logits.
    """
    limit = torch.where(rows, BANNED, float("inf")).to(logits.dtype)
    return logits.scatter_reduce(1, tokens.expand_as(rows), limit, "amin")


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Bans tokens outside top_k, then those outside top_p, then those below min_p.

    Tokens that tie with the last remaining one also remain, so the order of equal logits does not
    matter.

    Args:
        logits: [m, V].
        top_k: [m] int; 0 means all.
        top_p: [m].
        min_p: [m].

    Returns:
        [m, V] logits.

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
    """[m] smallest logit inside top_p among the tokens at or above the threshold [m]."""
    vocabulary = logits.shape[1]
    masked = logits.masked_fill(logits < threshold[:, None], BANNED)
    total = masked.logsumexp(1, keepdim=True)
    for width in (min(HEAD, vocabulary), vocabulary):
        values = masked.topk(width).values
        mass = (values - total).exp()
        # A token is inside if the more likely ones together hold less than top_p.
        before = mass.cumsum(1) - mass
        inside = (before < top_p[:, None]).sum(1).clamp(min=1)
        enough = (inside < width) | (top_p >= 1)
        if width == vocabulary or bool(enough.all()):
            break
    last = values.gather(1, inside[:, None] - 1)[:, 0]
    return torch.where(top_p < 1, last, BANNED)


def truncate_fixed(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Does the same as `truncate` with fixed shapes: it sorts the whole vocabulary once.

    No shape depends on a value, so a captured step can contain this function.
    """
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
    """Returns logits [m, V] divided by temperature [m]; rows with temperature 0 stay unchanged."""
    return logits / torch.where(temperature > 0, temperature, 1.0)[:, None]


def keep_only_best(logits: Tensor, rows: Tensor) -> Tensor:
    """Bans all but the largest logit where `rows` [m] is True, ties to the lowest token."""
    best = torch.full_like(logits, BANNED).scatter_(1, logits.argmax(1, keepdim=True), 0.0)
    return torch.where(rows[:, None], best, logits)
