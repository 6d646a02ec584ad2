"""Losses of a draft head: divergence from the frozen target, and the true next item."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from recserve.kernels.trie.trie import Trie
from recserve.models.attention import Attend, DenseAttention
from recserve.models.item_heads import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.training.recommender.history_trees import HistoryBatch
from recserve.training.recommender.objectives import MASKED


@dataclass
class _Recording(Attend):
    """Attention that records the keys and values of every layer."""

    attend: DenseAttention
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Implements `Attend`."""
        self.keys.append(key)
        self.values.append(value)
        return self.attend(layer, query, key, value)


@dataclass(frozen=True)
class _Behind(Attend):
    """Attention of additional nodes that also see the recorded ones.

    Attributes:
        recorded: Keys and values of N earlier nodes, by layer.
        mask: [B, 1, m, N + m] bool; True where a new node sees a recorded or a new one.
    """

    recorded: _Recording
    mask: Tensor

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Implements `Attend`."""
        keys = torch.cat([self.recorded.keys[layer], key], dim=-3)
        values = torch.cat([self.recorded.values[layer], value], dim=-3)
        return DenseAttention(self.mask)(layer, query, keys, values)


@dataclass(frozen=True)
class TargetStates:
    """Hidden states of the target for a batch of trees.

    Attributes:
        hidden: [B * N, E] states of the tree nodes.
        contexts: [q, P, E] placeholder states of each predicted item, one for each level that the
            head predicts. None for a head without placeholders.
    """

    hidden: Tensor
    contexts: Tensor | None


def read(head: SelfDraftHead, target: Recommender, batch: HistoryBatch) -> TargetStates:
    """Runs the frozen target over a batch of trees.

    For a head with placeholders, a chain of P placeholders follows every position that predicts an
    item. Gradients flow only to the placeholders.

    Args:
        head: The draft head.
        target: The frozen recommender.
        batch: Trees with next items.

    Returns:
        The states that the head's loss needs.
    """
    recorded = _Recording(DenseAttention(batch.mask()))
    with torch.no_grad():
        hidden = target(batch.tokens, batch.positions, recorded)
    if head.placeholders is None:
        return TargetStates(hidden.flatten(0, 1), None)
    levels, size = head.placeholders.shape
    trees, nodes = batch.tokens.shape
    steps = batch.histories.shape[1]
    owners, places = batch.trunk_nodes // nodes, batch.trunk_nodes % nodes
    # anchors [trees, steps]: the trunk node that predicts each step's item.
    anchors = torch.zeros(trees, steps, dtype=torch.int64, device=places.device)
    anchors[owners, batch.trunk_steps] = places
    depth = torch.arange(1, levels + 1, device=places.device)
    positions = batch.positions.gather(1, anchors)[..., None] + depth
    # A placeholder sees what its anchor sees, and the earlier placeholders of its own chain.
    above = batch.mask()[:, 0].gather(1, anchors[..., None].expand(-1, -1, nodes))
    chain = torch.ones(levels, levels, device=places.device).tril()
    own = torch.kron(torch.eye(steps, device=places.device), chain)
    mask = torch.cat(
        [above.repeat_interleave(levels, dim=1), own.bool().expand(trees, -1, -1)], dim=2
    )
    vectors = head.placeholders.repeat(steps, 1).expand(trees, -1, -1)
    ahead = target.decoder(vectors, positions.flatten(1), _Behind(recorded, mask[:, None]))
    ahead = ahead.view(trees, steps, levels, size)[owners, batch.trunk_steps]
    return TargetStates(hidden.flatten(0, 1), ahead)


@dataclass(frozen=True)
class HeadLoss:
    """Losses of a draft head, summed over all predicted levels.

    Attributes:
        divergence: KL(target || head).
        surprise: The head's negative log-probability of the true next items.
    """

    divergence: Tensor
    surprise: Tensor


def head_loss(
    head: SelfDraftHead,
    target: Recommender,
    trie: Trie,
    paths: Tensor,
    batch: HistoryBatch,
    reading: TargetStates,
) -> HeadLoss:
    """Computes the losses of a draft head under teacher forcing.

    Distributions are normalised over the valid children, or over the codes of the level if the
    target is normalised over the vocabulary. Levels above `head.first_level` do not count.

    Args:
        head: The draft head.
        target: The frozen recommender.
        trie: Trie of the semantic ids.
        paths: [I, L + 1] trie nodes of each item, from `node_paths`.
        batch: Trees with next items.
        reading: States of the target for this batch.

    Returns:
        The losses as sums.
    """
    config, hidden = target.config, reading.hidden
    roots = hidden[batch.trunk_nodes]
    codes = target.item_tokens[batch.trunk_rows] - torch.tensor(
        config.level_offsets, device=roots.device
    )
    states, contexts = [roots], head.contexts(roots, reading.contexts)
    for level in range(config.num_levels - 1):
        states.append(head.step(level, states[-1], codes[:, level]))
    divergence = surprise = roots.new_zeros((), dtype=torch.float32)
    for level in range(head.first_level, config.num_levels):
        part = (batch.target_levels == level).nonzero().flatten()
        if not part.shape[0]:
            continue
        nodes, rows = batch.target_nodes[part], batch.target_rows[part]
        item = torch.searchsorted(batch.trunk_nodes, nodes - level)
        wanted = target.level_logits(hidden[nodes], level).float()
        given = head.level_logits(contexts[item, level], states[level][item], level).float()
        truth = codes[item, level]
        if config.normalization == "children":
            children = trie.children(paths[rows, level])
            valid, index = children.valid, children.codes.long()
            wanted = wanted.gather(1, index).masked_fill(~valid, MASKED)
            given = given.gather(1, index).masked_fill(~valid, MASKED)
            truth = paths[rows, level + 1] - trie.first_child[paths[rows, level]].long()
        wanted, given = wanted.log_softmax(-1), given.log_softmax(-1)
        divergence = divergence + (wanted.exp() * (wanted - given)).sum()
        surprise = surprise - given.gather(1, truth[:, None]).sum()
    return HeadLoss(divergence, surprise)
