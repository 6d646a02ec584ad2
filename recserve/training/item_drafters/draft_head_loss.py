"""What a self-draft head is trained for: the frozen target's distribution and the next item."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from recserve.kernels.trie.trie import Trie
from recserve.models.attention import DenseAttention
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.training.recommender.history_trees import HistoryBatch
from recserve.training.recommender.objectives import MASKED


@dataclass
class _Recording:
    """Attention that remembers the keys and values of every layer."""

    attend: DenseAttention
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Attend."""
        self.keys.append(key)
        self.values.append(value)
        return self.attend(layer, query, key, value)


@dataclass(frozen=True)
class _Behind:
    """Attention of further nodes that also see recorded ones. mask [B, 1, m, N + m]."""

    recorded: _Recording
    mask: Tensor

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Attend."""
        keys = torch.cat([self.recorded.keys[layer], key], dim=-3)
        values = torch.cat([self.recorded.values[layer], value], dim=-3)
        return DenseAttention(self.mask)(layer, query, keys, values)


@dataclass(frozen=True)
class TargetStates:
    """What the target says about a batch of trees.

    hidden [B * N, E]: at its nodes. contexts [q, L, E]: what the head reads at each level beside
    its state, for each predicted item; None where the head has no placeholders.
    """

    hidden: Tensor
    contexts: Tensor | None


def read(head: SelfDraftHead, target: Recommender, batch: HistoryBatch) -> TargetStates:
    """The frozen target over a batch; where the head has placeholders, over a chain of them behind
    every position that predicts an item. Gradients flow to the placeholders and nowhere else.
    """
    recorded = _Recording(DenseAttention(batch.mask()))
    with torch.no_grad():
        hidden = target(batch.tokens, batch.positions, recorded)
    if not head.config.placeholders:
        return TargetStates(hidden.flatten(0, 1), None)
    levels, size = head.placeholders.shape
    trees, nodes = batch.tokens.shape
    steps = batch.histories.shape[1]
    owners, places = batch.trunk_nodes // nodes, batch.trunk_nodes % nodes
    anchors = torch.zeros(trees, steps, dtype=torch.int64, device=places.device)
    anchors[owners, batch.trunk_steps] = places
    depth = torch.arange(1, levels + 1, device=places.device)
    positions = batch.positions.gather(1, anchors)[..., None] + depth
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
    """Sums over all predicted levels. divergence: KL(target || head). surprise: the head's negative
    log-probability of the true next items.
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
    """Both losses under teacher forcing; level 0 counts where the head draws it, with placeholders.

    paths: of `node_paths`. Normalised over the valid children, or over the level's codes where the
    target is normalised over the vocabulary.
    """
    config, hidden = target.config, reading.hidden
    roots = hidden[batch.trunk_nodes]
    codes = target.item_tokens[batch.trunk_rows] - torch.tensor(
        config.level_offsets, device=roots.device
    )
    states = [roots]
    for level in range(config.num_levels - 1):
        states.append(head.step(level, states[-1], codes[:, level]))
    divergence = surprise = roots.new_zeros((), dtype=torch.float32)
    for level in range(0 if reading.contexts is not None else 1, config.num_levels):
        part = (batch.target_levels == level).nonzero().flatten()
        if not part.shape[0]:
            continue
        nodes, rows = batch.target_nodes[part], batch.target_rows[part]
        item = torch.searchsorted(batch.trunk_nodes, nodes - level)
        contexts = roots if reading.contexts is None else reading.contexts[:, level]
        wanted = target.level_logits(hidden[nodes], level).float()
        given = head.level_logits(contexts[item], states[level][item], level).float()
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
