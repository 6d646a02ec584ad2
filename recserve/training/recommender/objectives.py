"""Losses of a recommender: its levels, its dense head and its level heads.

Every loss is the mean over predicted items, each with its weight. The loss of the levels sums over
an item's levels. Without weights it is the negative log-probability of the item, which the server
reports as its score. A model that is not autoregressive lacks this loss. It trains its trunk on its
level heads instead, with the mean over the levels (RPG, KDD 2025, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.trie.trie import Trie
from recserve.models.attention import DenseAttention
from recserve.models.prefix_template import BOS
from recserve.models.recommender import Recommender
from recserve.training.recommender.full_softmax import full_softmax_loss
from recserve.training.recommender.history_trees import HistoryBatch

MASKED = -1e9


@dataclass(frozen=True)
class Objective:
    """Weights and settings of the losses.

    Attributes:
        label_smoothing: Share of the target probability that is spread over all valid codes.
        mask_seen: True leaves items of the history, and prefixes that lead only to them, out of the
            softmax. This matches a server that filters them.
        dense_weight: Weight of the dense head's loss; 0 leaves it out.
        heads_weight: Weight of the level heads' loss; 0 leaves it out.
        item_dropout: Probability that an item token of a history is hidden in training.
        dense_negatives: Sampled items of the dense loss in a large catalogue.
    """

    label_smoothing: float = 0.0
    mask_seen: bool = True
    dense_weight: float = 0.0
    heads_weight: float = 0.0
    item_dropout: float = 0.0
    dense_negatives: int = 16_384


@dataclass(frozen=True)
class Losses:
    """Losses of one batch.

    Attributes:
        total: Scalar that is minimised.
        parts: Detached means per predicted item, by name.
    """

    total: Tensor
    parts: dict[str, Tensor]


def tree_losses(
    model: Recommender, trie: Trie, paths: Tensor, batch: HistoryBatch, objective: Objective
) -> Losses:
    """Runs the model once over a batch of trees and returns all losses.

    Args:
        model: The recommender.
        trie: Trie of the semantic ids.
        paths: [I, L + 1] trie nodes of each item, from `node_paths`.
        batch: Trees with their targets.
        objective: Weights and settings of the losses.
    """
    tokens = batch.tokens
    if objective.item_dropout and model.training:
        hide = torch.rand(tokens.shape, device=tokens.device) < objective.item_dropout
        tokens = torch.where(hide & (tokens >= model.config.num_code_tokens), BOS, tokens)
    hidden = model(tokens, batch.positions, DenseAttention(batch.mask())).flatten(0, 1)
    items = batch.trunk_rows.shape[0]
    trunk = hidden[batch.trunk_nodes]
    if model.config.autoregressive:
        total = level_loss(model, trie, paths, batch, hidden, objective) / items
        parts = {"levels": total.detach()}
    else:
        total = heads_loss(model, batch, trunk) / (items * model.config.num_levels)
        parts = {"heads": total.detach()}
    if objective.dense_weight:
        dense = dense_loss(model, batch, trunk, objective) / items
        total = total + objective.dense_weight * dense
        parts["dense"] = dense.detach()
    if model.config.autoregressive and objective.heads_weight:
        heads = heads_loss(model, batch, trunk.detach()) / items
        total = total + objective.heads_weight * heads
        parts["heads"] = heads.detach()
    return Losses(total, parts)


def level_loss(
    model: Recommender,
    trie: Trie,
    paths: Tensor,
    batch: HistoryBatch,
    hidden: Tensor,
    objective: Objective,
) -> Tensor:
    """Returns the summed negative log-likelihood of all targets.

    Args:
        model: The recommender.
        trie: Trie of the semantic ids.
        paths: [I, L + 1] trie nodes of each item.
        batch: Trees with their targets.
        hidden: [B * N, E] states of all nodes.
        objective: Settings of the loss.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    counts = torch.bincount(batch.target_levels, minlength=model.config.num_levels).tolist()
    start = 0
    for level, count in enumerate(counts):
        part = slice(start, start + count)
        start += count
        if not count:
            continue
        states = hidden[batch.target_nodes[part]]
        rows = batch.target_rows[part]
        if model.config.normalization == "vocabulary":
            target = model.item_tokens[rows, level]
            logits = model.full_logits(states).float()
            weights = _part(batch.target_weights, part)
            total = total + _sum_losses(logits, target, weights, objective.label_smoothing)
            continue
        parents, targets = paths[rows, level], paths[rows, level + 1]
        children = trie.children(parents)
        logits = model.level_logits(states, level).float().gather(1, children.codes.long())
        slots = targets - trie.first_child[parents].long()
        valid = children.valid
        if objective.mask_seen:
            valid = valid & ~_seen_children(trie, paths, batch, part, level, valid.shape[1])
            valid[torch.arange(count, device=valid.device), slots] = True
        weights = _part(batch.target_weights, part)
        total = total + _cross_entropy(logits, slots, valid, objective.label_smoothing, weights)
    return total


def dense_loss(
    model: Recommender, batch: HistoryBatch, trunk: Tensor, objective: Objective
) -> Tensor:
    """Returns the summed negative log-likelihood of the next items over all bound items.

    In a catalogue of more than 4 * `dense_negatives` items, the softmax is estimated from a sample.

    Args:
        model: The recommender.
        batch: Trees with their targets.
        trunk: [q, E] states of the predicted items' trunk nodes.
        objective: Settings of the loss.
    """
    seen = batch.histories[_tree_of(batch, batch.trunk_nodes)]
    index = torch.arange(seen.shape[1], device=seen.device)
    before = (index < batch.trunk_steps[:, None]) & (seen != batch.trunk_rows[:, None])
    if not objective.mask_seen:
        before = torch.zeros_like(before)
    which, where = before.nonzero(as_tuple=True)
    hidden = torch.stack([which, seen[which, where]], dim=1)
    query = model.dense_query_rows(trunk)
    if model.num_bound_items > 4 * objective.dense_negatives:
        return sampled_softmax_loss(
            model, query, batch.trunk_rows, hidden, objective, batch.trunk_weights
        )
    items = model.dense_item_rows()
    return full_softmax_loss(query, items, batch.trunk_rows, hidden, weights=batch.trunk_weights)


def sampled_softmax_loss(
    model: Recommender,
    query: Tensor,
    targets: Tensor,
    hidden: Tensor,
    objective: Objective,
    weights: Tensor | None = None,
) -> Tensor:
    """Estimates the summed cross-entropy over all items from uniform draws with replacement.

    Each drawn item represents I / drawn items.

    Args:
        model: The recommender.
        query: [q, E] query vectors.
        targets: [q] item rows.
        hidden: [x, 2] pairs (row of `query`, item row) that must not be negatives.
        objective: Gives the number of draws.
        weights: [q] weight of each target; None: 1 each.

    Source: Bengio and Senecal 2008, uniform proposal.
    """
    items, drawn = model.num_bound_items, objective.dense_negatives
    sample = torch.randint(items, (drawn,), device=query.device).sort().values
    weight = math.log(items / drawn)
    logits = F.linear(query, model.dense_item_rows(sample)).float() + weight
    which = torch.cat([torch.arange(len(targets)).to(targets), hidden[:, 0]])
    logits = logits.masked_fill(
        hits(sample, which, torch.cat([targets, hidden[:, 1]]), len(targets)), MASKED
    )
    own = (query * model.dense_item_rows(targets)).sum(-1, keepdim=True).float()
    first = torch.zeros_like(targets)
    return _sum_losses(torch.cat([own, logits], dim=1), first, weights)


def hits(sample: Tensor, which: Tensor, rows: Tensor, num_queries: int) -> Tensor:
    """Returns a mask of the sampled items that must not be negatives of a query.

    Args:
        sample: [n] item rows, ascending, repeats allowed.
        which: [x] query of each pair.
        rows: [x] item row of each pair.
        num_queries: Number of queries.

    Returns:
        [num_queries, n] bool.
    """
    first = torch.searchsorted(sample, rows)
    count = torch.searchsorted(sample, rows, right=True) - first
    # A pair marks the `count` equal entries of the ascending sample that begin at `first`.
    pair = torch.repeat_interleave(count)
    inside = torch.arange(len(pair)).to(pair) - (count.cumsum(0) - count)[pair]
    found = torch.zeros(num_queries, sample.shape[0], dtype=torch.bool, device=sample.device)
    found[which[pair], first[pair] + inside] = True
    return found


def heads_loss(model: Recommender, batch: HistoryBatch, trunk: Tensor) -> Tensor:
    """Returns the level heads' cross-entropy, summed over all levels and items.

    Each level is predicted only from the state of the history.

    Args:
        model: The recommender.
        batch: Trees with their targets.
        trunk: [q, E] states of the predicted items' trunk nodes.
    """
    total = trunk.new_zeros((), dtype=torch.float32)
    offsets = model.config.level_offsets
    for level, offset in enumerate(offsets):
        logits = model.parallel_logits(trunk, level).float()
        target = model.item_tokens[batch.trunk_rows, level] - offset
        total = total + _sum_losses(logits, target, batch.trunk_weights)
    return total


def _part(weights: Tensor | None, part: slice) -> Tensor | None:
    return None if weights is None else weights[part]


def _sum_losses(
    logits: Tensor, targets: Tensor, weights: Tensor | None, smoothing: float = 0.0
) -> Tensor:
    """Returns the sum of the cross-entropy of each row, times its weight [n] if there are any."""
    if weights is None:
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    return weights @ F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def _cross_entropy(
    logits: Tensor, targets: Tensor, valid: Tensor, smoothing: float, weights: Tensor | None
) -> Tensor:
    """Returns the summed cross-entropy over the valid columns; smoothing also covers only those."""
    log_p = logits.masked_fill(~valid, MASKED).log_softmax(-1)
    own = -log_p.gather(1, targets[:, None])
    loss = own.sum() if weights is None else weights @ own[:, 0]
    if smoothing:
        spread = -(log_p * valid).sum(-1) / valid.sum(-1)
        spread = spread if weights is None else weights * spread
        loss = (1 - smoothing) * loss + smoothing * spread.sum()
    return loss


def _seen_children(
    trie: Trie, paths: Tensor, batch: HistoryBatch, targets: slice, level: int, width: int
) -> Tensor:
    """Returns the [m, width] children whose items are all in the history."""
    known = batch.histories >= 0
    seen = paths[batch.histories.clamp(min=0)]
    child, parent = seen[..., level + 1], seen[..., level]
    # A child is complete once the history has as many items below it as the child has leaves.
    same = (child[:, :, None] == child[:, None, :]) & known[:, None, :]
    earlier = same.tril().sum(-1)
    size = trie.last_leaf[child] - trie.first_leaf[child]
    complete = (earlier >= size) & known
    tree = _tree_of(batch, batch.target_nodes[targets])
    parents = paths[batch.target_rows[targets], level]
    index = torch.arange(known.shape[1], device=known.device)
    hit = complete[tree] & (index < batch.target_steps[targets, None])
    hit &= parent[tree] == parents[:, None]
    which, where = hit.nonzero(as_tuple=True)
    slots = child[tree[which], where] - trie.first_child[parents[which]]
    mask = torch.zeros(tree.shape[0], width, dtype=torch.bool, device=known.device)
    mask[which, slots.long()] = True
    return mask


def _tree_of(batch: HistoryBatch, nodes: Tensor) -> Tensor:
    return nodes // batch.tokens.shape[1]


def node_paths(trie: Trie) -> Tensor:
    """Returns the [I, L + 1] trie node of each prefix of each item, from the empty prefix on."""
    rows = torch.arange(trie.num_items, device=trie.device)
    nodes = trie.nodes_of_items(rows).long()
    return torch.cat([torch.zeros_like(nodes[:, :1]), nodes], dim=1)
