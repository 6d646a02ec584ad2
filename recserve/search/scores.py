"""Scored prefixes, and the log-probabilities that follow from their states.

Keys identify prefixes: `request number * num_nodes of the trie + trie node`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels.trie.level_search import DEAD, find_keys, scored_table
from recserve.kernels.trie.trie import Trie
from recserve.models.recommender import Recommender


@dataclass(frozen=True)
class Scored:
    """A table of the prefixes that the target has scored.

    Attributes:
        keys: [n] int64 ascending keys.
        slots: [n] int64 pool slot of each node's attention keys and values.
        hidden: [n, E] final hidden state at each node.
    """

    keys: Tensor
    slots: Tensor
    hidden: Tensor

    def find(self, keys: Tensor) -> Tensor:
        """Returns the row of each key, -1 where it is not scored, in the shape of `keys`."""
        return find_keys(self.keys, keys)

    def add(self, keys: Tensor, slots: Tensor, hidden: Tensor) -> Scored:
        """Returns the table with m more prefixes, which must not be in the table, in any order."""
        return Scored(*scored_table(self.keys, self.slots, self.hidden, keys, slots, hidden))


def nothing_scored(like: Tensor) -> Scored:
    """Returns the empty table for hidden states like those given, [n, E]."""
    empty = torch.empty(0, dtype=torch.int64, device=like.device)
    return Scored(empty, empty, like[:0])


LANES = 16  # pads rows to whole vectors, so that sums do not depend on the number of empty columns


def level_scores(model: Recommender, hidden: Tensor, level: int) -> tuple[Tensor, Tensor | None]:
    """Returns the logits of one level's codes, and their normaliser.

    Args:
        model: The target.
        hidden: [n, E] states.
        level: The level.

    Returns:
        Logits [n, C] and the values [n] to subtract from each row. None instead of values: the
        logits are normalised over the valid children.
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
    """Returns [n, M] float32 log-probabilities of given codes at one level.

    The model decides the normalisation: over the valid codes of the row, or over the whole
    vocabulary.

    Args:
        model: The target.
        hidden: [n, E] states.
        level: The level.
        codes: [n, M] codes of the level.
        valid: [n, M] bool. Values of other codes are undefined.
    """
    if model.config.normalization == "children":
        logits = model.level_logits(hidden, level).float().gather(1, codes)
        logits = F.pad(logits.masked_fill(~valid, DEAD), (0, -codes.shape[1] % LANES), value=DEAD)
        return logits.log_softmax(-1)[:, : codes.shape[1]]
    logits = model.full_logits(hidden).float()
    return logits.log_softmax(-1).gather(1, codes + model.config.level_offsets[level])


def root_scores(
    trie: Trie, trie_nodes: Tensor, owners: Tensor, last_hidden: Tensor, model: Recommender
) -> Tensor:
    """Returns [M] the log-probability of each candidate's first code.

    Args:
        trie: Trie of the candidates.
        trie_nodes: [M, L] trie node of every prefix of every candidate.
        owners: [M] request of each candidate.
        last_hidden: [B, E] state of the last root token.
        model: The target.
    """
    top = torch.zeros(1, dtype=torch.int64, device=trie.device)
    children = trie.children(top, trie.padding(0))
    codes = children.codes.long().expand(last_hidden.shape[0], -1)
    log_probs = level_log_probs(model, last_hidden, 0, codes, children.valid.expand_as(codes))
    return log_probs[owners, trie.child_columns(trie_nodes[:, 0], top)]


def path_scores(
    trie: Trie, trie_nodes: Tensor, owners: Tensor, scored: Scored, model: Recommender
) -> Tensor:
    """Returns [M] the log-probability of each candidate's codes after the first.

    A prefix without a score has one child and adds 0. Arguments are those of `root_scores`, with
    the scored prefixes instead of the last states.
    """
    size = trie.num_nodes
    out = torch.zeros(trie_nodes.shape[0], device=trie.device)
    levels = trie.levels(scored.keys % size)
    for level in range(1, trie.num_levels):
        here = (levels == level).nonzero().flatten()
        if not here.shape[0]:
            continue
        part = Scored(scored.keys[here], scored.slots[here], scored.hidden[here])
        children = trie.children(part.keys % size, trie.padding(level))
        log_probs = level_log_probs(
            model, part.hidden, level, children.codes.long(), children.valid
        )
        parents, nodes = trie_nodes[:, level - 1], trie_nodes[:, level]
        # Row of each candidate's parent among the scored prefixes of this level, -1: not scored.
        row = part.find(owners * size + parents)
        gain = log_probs[row.clamp(min=0), trie.child_columns(nodes, parents)]
        out += torch.where(row >= 0, gain, 0.0)
    return out
