"""Prefixes of semantic ids that the target has scored, with what it said, by their keys.

The key of a prefix is `request number * nodes of the trie + trie node`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.cpu.native import compiled
from recserve.kernels.trie.trie_children import DEAD
from recserve.kernels.trie.trie_view import TrieView, padding_of
from recserve.models.recommender import Recommender


@dataclass(frozen=True)
class Scored:
    """keys [n]: ascending. slots [n]: pool slot of the node's keys and values. hidden [n, E]: final
    hidden state at the node.
    """

    keys: Tensor
    slots: Tensor
    hidden: Tensor

    def find(self, keys: Tensor) -> Tensor:
        """Row of each key, -1 where it is not scored. keys: any shape; same shape back."""
        if not self.keys.shape[0]:
            return torch.full_like(keys, -1)
        row = torch.searchsorted(self.keys, keys).clamp(max=self.keys.shape[0] - 1)
        return torch.where(self.keys[row] == keys, row, -1)

    def add(self, keys: Tensor, slots: Tensor, hidden: Tensor) -> Scored:
        """With m more prefixes, in any order, none of which is here already."""
        if dispatch.in_native(hidden):
            return _added(self, keys, slots, hidden.contiguous())
        keys, order = torch.sort(torch.cat([self.keys, keys]))
        slots = torch.cat([self.slots, slots])[order]
        return Scored(keys, slots, torch.cat([self.hidden, hidden])[order])


def nothing_scored(like: Tensor) -> Scored:
    """The empty table, for hidden states like the given ones [n, E]."""
    empty = torch.empty(0, dtype=torch.int64, device=like.device)
    return Scored(empty, empty, like[:0])


def _added(before: Scored, keys: Tensor, slots: Tensor, hidden: Tensor) -> Scored:
    """The same in C."""
    count, size = before.keys.shape[0] + keys.shape[0], hidden.shape[1]
    both = Scored(
        torch.empty(count, dtype=torch.int64),
        torch.empty(count, dtype=torch.int64),
        torch.empty(count, size, dtype=hidden.dtype),
    )
    compiled().scored_table(
        before.keys.shape[0],
        before.keys.data_ptr(),
        before.slots.data_ptr(),
        before.hidden.data_ptr(),
        keys.shape[0],
        keys.data_ptr(),
        slots.data_ptr(),
        hidden.data_ptr(),
        both.keys.data_ptr(),
        both.slots.data_ptr(),
        both.hidden.data_ptr(),
        size * hidden.itemsize,
    )
    return both


LANES = 16  # a sum over whole vectors does not depend on how many empty columns follow


def level_scores(model: Recommender, hidden: Tensor, level: int) -> tuple[Tensor, Tensor | None]:
    """Logits [n, C] of a level's codes at states [n, E], and what is subtracted from each row to
    make them log-probabilities, None: what normalises them over the valid children.
    """
    if model.config.normalization == "children":
        return model.level_logits(hidden, level), None
    logits = model.full_logits(hidden).float()
    start = model.config.level_offsets[level]
    own = logits[:, start : start + model.config.codebook_sizes[level]]
    return own, logits.logsumexp(-1)


def level_log_probs(
    model: Recommender, hidden: Tensor, level: int, codes: Tensor, valid: Tensor
) -> Tensor:
    """Log-probabilities of the given codes at one level.

    hidden [n, E], codes and valid [n, M] -> [n, M] float32, meaningless where not valid. Normalised
    over the valid codes of the row, or over the whole vocabulary, as the model was trained.
    """
    if model.config.normalization == "children":
        logits = model.level_logits(hidden, level).float().gather(1, codes)
        logits = F.pad(logits.masked_fill(~valid, DEAD), (0, -codes.shape[1] % LANES), value=DEAD)
        return logits.log_softmax(-1)[:, : codes.shape[1]]
    logits = model.full_logits(hidden).float()
    return logits.log_softmax(-1).gather(1, codes + model.config.level_offsets[level])


def root_scores(
    trie: TrieView, trie_nodes: Tensor, owners: Tensor, last_hidden: Tensor, model: Recommender
) -> Tensor:
    """Log-probability of each candidate's first code.

    trie_nodes [M, L], owners [M] the request of each, last_hidden [B, E] state of the last root
    token. Returns [M].
    """
    top = torch.zeros(1, dtype=torch.int64, device=trie.device)
    children = trie.children(top, padding_of(trie, 0))
    codes = children.codes.long().expand(last_hidden.shape[0], -1)
    log_probs = level_log_probs(model, last_hidden, 0, codes, children.valid.expand_as(codes))
    return log_probs[owners, trie.places(trie_nodes[:, 0], top)]


def path_scores(
    trie: TrieView, trie_nodes: Tensor, owners: Tensor, scored: Scored, model: Recommender
) -> Tensor:
    """Log-probability of each candidate's codes after the first.

    trie_nodes [M, L], owners [M]. Prefixes that were not scored have one child and add 0. Returns
    [M].
    """
    size = trie.num_nodes
    out = torch.zeros(trie_nodes.shape[0], device=trie.device)
    levels = trie.levels(scored.keys % size)
    for level in range(1, trie.num_levels):
        here = (levels == level).nonzero().flatten()
        if not here.shape[0]:
            continue
        part = Scored(scored.keys[here], scored.slots[here], scored.hidden[here])
        children = trie.children(part.keys % size, padding_of(trie, level))
        log_probs = level_log_probs(
            model, part.hidden, level, children.codes.long(), children.valid
        )
        parents, nodes = trie_nodes[:, level - 1], trie_nodes[:, level]
        row = part.find(owners * size + parents)
        gain = log_probs[row.clamp(min=0), trie.places(nodes, parents)]
        out += torch.where(row >= 0, gain, 0.0)
    return out
