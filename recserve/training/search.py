"""Beam search over the trie for a whole batch of histories at once: the validation inside training.

The engine answers requests; this answers "how good is the model now" for thousands of histories per
minute. The engine's strategy `beam` must give the same items, which a test holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.trie import Trie
from recserve.models.recommender import Recommender


@dataclass
class GrowingAttention:
    """Keys and values of a padded batch, kept per layer, that grow by the nodes of each call.

    mask: [B, 1, new, kept + new] of the call that comes next.
    """

    mask: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, new, H, D], key and value [B, new, K, D] -> [B, new, H, D]."""
        if layer in self.keys:
            key = torch.cat([self.keys[layer], key], dim=1)
            value = torch.cat([self.values[layer], value], dim=1)
        self.keys[layer], self.values[layer] = key, value
        groups = query.shape[-2] // key.shape[-2]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=-2) for x in (key, value))
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.mask
        )
        return out.transpose(1, 2)


@dataclass(frozen=True)
class Found:
    """The finished beams of B histories, best first.

    rows [B, W] item rows, -1 where fewer were found; scores [B, W] log-probabilities, -inf there.
    hidden [B, E]: last state of each root, which the dense head reads.
    """

    rows: Tensor
    scores: Tensor
    hidden: Tensor


def beam_search(
    model: Recommender, trie: Trie, roots: Tensor, lengths: Tensor, width: int, excluded: Tensor
) -> Found:
    """Trie-constrained beam search of B roots.

    roots: [B, S] tokens, right-padded. lengths: [B]. excluded: [B, X] item rows, -1 where padded; a
    prefix that leads to nothing else is dropped with them. The softmax runs as the model's config
    says.
    """
    batch, size = roots.shape
    device = roots.device
    index = torch.arange(size, device=device)
    inside = index < lengths[:, None]
    causal = (index <= index[:, None])[None] & (inside[:, None, :] | (index == index[:, None]))
    attend = GrowingAttention(causal[:, None])
    states = model(roots, index.expand_as(roots), attend)
    root = states[torch.arange(batch, device=device), lengths - 1]
    leaves = torch.where(excluded >= 0, trie.item_leaves[excluded.clamp(min=0)].long(), -1)
    leaves = leaves.sort(1).values
    hidden, nodes = root[:, None], torch.zeros(batch, 1, dtype=torch.int64, device=device)
    scores = torch.zeros(batch, 1, device=device)
    ancestry = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
    for level in range(trie.num_levels):
        log_p, children, valid = _expand(model, trie, hidden, nodes, level)
        total = (scores[..., None] + log_p).masked_fill(~valid, -torch.inf).flatten(1)
        kept = min(width, total.shape[1])
        # Each dropped node holds an excluded item, so this many spare ones are enough.
        total, chosen = total.topk(min(kept + leaves.shape[1], total.shape[1]), dim=1)
        nodes = children.flatten(1).gather(1, chosen)
        total = total.masked_fill(~_open(trie, nodes, leaves), -torch.inf)
        scores, best = total.topk(kept, dim=1)
        nodes, chosen = nodes.gather(1, best), chosen.gather(1, best)
        found = torch.isfinite(scores)
        nodes = torch.where(found, nodes, trie.level_starts[level + 1])
        parent = chosen // children.shape[-1]
        if level + 1 == trie.num_levels:
            break
        ancestry = ancestry.gather(1, parent[..., None].expand(-1, -1, ancestry.shape[-1]))
        itself = torch.eye(kept, dtype=torch.bool, device=device).expand(batch, -1, -1)
        new = torch.cat([ancestry, itself], dim=-1)
        seen = torch.cat([inside[:, None].expand(-1, kept, -1), new], dim=-1)
        attend.mask = seen[:, None]
        tokens = trie.node_codes[nodes].long() + model.config.level_offsets[level]
        hidden = model(tokens, (lengths + level)[:, None], attend)
        ancestry = new
    rows = trie.items_of_leaves(nodes).long()
    return Found(torch.where(found, rows, -1), scores, root)


def _expand(
    model: Recommender, trie: Trie, hidden: Tensor, nodes: Tensor, level: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log_p, children, valid [B, W, M] of all children of the beams."""
    children = trie.children(nodes.flatten())
    codes = children.codes.long()
    flat = hidden.flatten(0, 1)
    if model.config.normalization == "vocabulary":
        log_p = model.full_logits(flat).float().log_softmax(-1)
        log_p = log_p.gather(1, codes + model.config.level_offsets[level])
    else:
        logits = model.level_logits(flat, level).float().gather(1, codes)
        log_p = logits.masked_fill(~children.valid, -torch.inf).log_softmax(-1)
    shape = (*nodes.shape, codes.shape[1])
    return log_p.view(shape), children.nodes.long().view(shape), children.valid.view(shape)


def _open(trie: Trie, nodes: Tensor, leaves: Tensor) -> Tensor:
    """Whether a node has an item that is not excluded. nodes [B, W, M]; leaves [B, X] sorted, -1
    first."""
    flat = nodes.flatten(1)
    first, last = trie.first_leaf[flat].long(), trie.last_leaf[flat].long()
    inside = torch.searchsorted(leaves, last) - torch.searchsorted(leaves, first)
    return (inside < last - first).view(nodes.shape)
