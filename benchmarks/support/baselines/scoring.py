"""Scores of given candidates without an engine: one by one, with a shared cache, with one mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from benchmarks.support.baselines.llama import Network
from recserve.kernels.trie.trie import Trie
from recserve.models.attention import DenseAttention, DenseSiluAttention
from recserve.models.inputs import NodeInputs
from recserve.models.ranker import Ranker
from recserve.models.recommender import Recommender

CHUNK = 32


@dataclass(frozen=True)
class Items:
    """Candidates of a recommender.

    Attributes:
        tokens: Code tokens [M, L].
        valid: [L] per level, the tokens [M, C] that may follow the prefix, and their mask [M, C].
    """

    tokens: Tensor
    valid: tuple[tuple[Tensor, Tensor], ...]

    @staticmethod
    def of(trie: Trie, rows: Tensor, item_tokens: Tensor, offsets: tuple[int, ...]) -> Items:
        """Returns the candidates with catalogue rows [M]."""
        nodes = F.pad(trie.nodes_of_items(rows), (1, 0))
        valid = []
        for level, offset in enumerate(offsets):
            children = trie.children(nodes[:, level])
            valid.append((children.codes.long() + offset, children.valid))
        return Items(item_tokens[rows], tuple(valid))

    def select(self, part: slice) -> Items:
        """Returns some of the candidates."""
        return Items(self.tokens[part], tuple((t[part], v[part]) for t, v in self.valid))

    def scores(self, logits: Tensor) -> Tensor:
        """Returns [M] sums of log-probabilities over the valid children, from logits [M, L, V]."""
        total = torch.zeros(self.tokens.shape[0])
        for level, (tokens, valid) in enumerate(self.valid):
            kept = logits[:, level].float()
            among = kept.gather(1, tokens).masked_fill(~valid, float("-inf")).logsumexp(1)
            total += kept.gather(1, self.tokens[:, level : level + 1])[:, 0] - among
        return total

    def __len__(self) -> int:
        return self.tokens.shape[0]


@torch.inference_mode()
def pointwise(model: Network, prefix: Tensor, items: Items) -> Tensor:
    """Scores one sequence per candidate, prefix included, CHUNK at a time. prefix [n] -> [M]."""
    levels, out = items.tokens.shape[1], []
    for start in range(0, len(items), CHUNK):
        part = items.select(slice(start, start + CHUNK))
        rows = torch.cat([prefix.expand(len(part), -1), part.tokens[:, :-1]], dim=1)
        out.append(part.scores(model(rows, use_cache=False, logits_to_keep=levels).logits))
    return torch.cat(out)


@torch.inference_mode()
def pointwise_cached(model: Network, prefix: Tensor, items: Items) -> Tensor:
    """Computes the prefix once and copies its cache to each candidate, CHUNK at a time."""
    first: Any = DynamicCache(config=model.config)
    last = model(prefix[None], past_key_values=first, use_cache=True, logits_to_keep=1).logits
    out = []
    for start in range(0, len(items), CHUNK):
        part = items.select(slice(start, start + CHUNK))
        kept = [(layer.keys, layer.values) for layer in first.layers]
        cache = DynamicCache(kept, config=model.config)
        cache.batch_repeat_interleave(len(part))
        deeper = model(part.tokens[:, :-1], past_key_values=cache, use_cache=True).logits
        out.append(part.scores(torch.cat([last.expand(len(part), -1, -1), deeper], dim=1)))
    return torch.cat(out)


@torch.inference_mode()
def dense_mask(model: Recommender, prefix: Tensor, items: Items) -> Tensor:
    """Scores the prefix and all candidates' codes in one pass under one [T, T] mask."""
    n, (count, levels) = prefix.shape[0], items.tokens.shape
    depth = levels - 1
    branches = torch.arange(count * depth) // depth
    mask = torch.ones(n + count * depth, n + count * depth, dtype=torch.bool).tril_()
    mask[n:, n:] &= branches[:, None] == branches[None, :]
    tokens = torch.cat([prefix, items.tokens[:, :-1].flatten()])[None]
    positions = torch.cat([torch.arange(n), n + torch.arange(depth).repeat(count)])[None]
    hidden = model(tokens, positions, DenseAttention(mask))[0]
    deeper = model.full_logits(hidden[n:]).view(count, depth, -1)
    first = model.full_logits(hidden[n - 1 : n])[None].expand(count, -1, -1)
    return items.scores(torch.cat([first, deeper], dim=1))


def ranker_mask(shared: int, prefix: int, candidates: int) -> Tensor:
    """Returns MTGR's mask over a prefix and isolated candidates: [n + M, n + M] bool."""
    size = prefix + candidates
    mask = torch.ones(size, size, dtype=torch.bool).tril_()
    mask[:, :shared] = True
    mask[prefix:, prefix:] = torch.eye(candidates, dtype=torch.bool)
    return mask


@torch.inference_mode()
def ranker_dense(ranker: Ranker, prefix: NodeInputs, shared: int, candidates: NodeInputs) -> Tensor:
    """Runs the prefix and all candidates in one pass under one mask; returns logits [M, tasks]."""
    n = len(prefix)
    mask = ranker_mask(shared, n, len(candidates))
    inputs = NodeInputs.cat([prefix, candidates])
    attend = DenseSiluAttention(mask, ranker.config.normalizer)
    assert inputs.groups is not None
    hidden = ranker(ranker.embed(inputs)[None], inputs.groups[None], attend)[0, n:]
    return ranker.heads(hidden)


@torch.inference_mode()
def ranker_pointwise(
    ranker: Ranker, prefix: NodeInputs, shared: int, candidates: NodeInputs
) -> Tensor:
    """Runs one sequence per candidate, prefix included; returns logits [M, tasks].

    Attention without softmax stores its scores, so batches shrink as prefixes grow.
    """
    n, out = len(prefix), []
    chunk = max(1, min(CHUNK, CHUNK * 200 // n))
    attend = DenseSiluAttention(ranker_mask(shared, n, 1), ranker.config.normalizer)
    embedded = ranker.embed(prefix)
    assert prefix.groups is not None and candidates.groups is not None
    for start in range(0, len(candidates), chunk):
        part = candidates.select(slice(start, start + chunk))
        assert part.groups is not None
        x = torch.cat([embedded.expand(len(part), -1, -1), ranker.embed(part)[:, None]], dim=1)
        groups = torch.cat([prefix.groups.expand(len(part), -1), part.groups[:, None]], dim=1)
        out.append(ranker.heads(ranker(x, groups, attend)[:, n]))
    return torch.cat(out)
