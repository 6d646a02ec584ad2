"""Paths in the trie of semantic ids: their token trees, the table of scored ones, and their scores.

Paths of one request share their beginnings. Three paths of level 2 make one tree of five
nodes:

    paths (3, 7), (3, 9), (5, 1)           3 -+- 7
                                              `- 9
                                           5 --- 1

A path leads from node 0 to any node, so not every path ends in an item. A key names a path of a
request: `request number * num_nodes of the trie + trie node`.

If a level is normalised over the valid children, a path with one child needs no score: the child
has log-probability 0. Such a node is computed only when a path below it forks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.core.strategy import Draft
from recserve.kernels.trie.level_search import (
    DEAD,
    child_log_probs,
    find_keys,
    lay_out,
    scored_table,
)
from recserve.kernels.trie.trie import Trie
from recserve.models.inputs import NodeInputs
from recserve.models.semantic_id_model import SemanticIdModel

LANES = 16  # pads rows to whole vectors, so that sums do not depend on the number of empty columns


@dataclass(frozen=True)
class ScoredPaths:
    """The paths that the target has scored.

    Attributes:
        keys: [n] int64 ascending keys.
        slots: [n] int64 pool slot of each node's attention keys and values.
        hidden: [n, E] final hidden state at each node.
    """

    keys: Tensor
    slots: Tensor
    hidden: Tensor

    @staticmethod
    def empty(like: Tensor) -> ScoredPaths:
        """Returns the empty table for hidden states like those given, [n, E]."""
        empty = torch.empty(0, dtype=torch.int64, device=like.device)
        return ScoredPaths(empty, empty, like[:0])

    def add(self, keys: Tensor, slots: Tensor, hidden: Tensor) -> ScoredPaths:
        """Returns the table with m more paths, which must not be in the table, in any order."""
        return ScoredPaths(*scored_table(self.keys, self.slots, self.hidden, keys, slots, hidden))


@dataclass(frozen=True)
class PathDraft(Draft):
    """A draft of paths.

    Attributes:
        query_keys: [Tq] key of each computed node.
        guessed: Whether the draft may lack nodes that beam search needs, or hold others.
        cached: Whether some of the nodes are a cached draft.
    """

    query_keys: Tensor | None = None
    guessed: bool = False
    cached: bool = False

    def keys_and_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns key [Tq] and pool slot [Tq] of each computed node. slots: [T], of all nodes."""
        assert self.query_keys is not None
        return self.query_keys, slots if self.queries is None else slots[self.queries]


def draft_of_keys(
    trie: Trie,
    keys: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    before: ScoredPaths | None = None,
) -> PathDraft:
    """Returns the nodes of the keys as token trees. Scored nodes are not computed again.

    Args:
        trie: Trie of the catalogue version.
        keys: [n] keys, repeats allowed. With a node come all nodes above it.
        num_trees: B.
        level_offsets: [L] first token of each level.
        before: Nodes that were scored before. None: no node was.
    """
    known, slots = (keys[:0], keys[:0]) if before is None else (before.keys, before.slots)
    trees = lay_out(trie, keys, num_trees, level_offsets, known, slots)
    inputs = NodeInputs(trees.query_tokens)
    return PathDraft(trees.tree, inputs, trees.queries, trees.slots, trees.query_keys)


def needed_paths(trie: Trie, trie_nodes: Tensor, owners: Tensor, skip: bool) -> Tensor:
    """Returns keys of the paths that decide the scores of given items.

    Args:
        trie: Trie of the items.
        trie_nodes: [M, L] trie nodes on the path of every item.
        owners: [M] request of each item.
        skip: Whether to leave out the nodes below the last fork of a path. They add
            log-probability 0.

    Returns:
        [n] keys. The empty path is not among them.
    """
    paths = trie_nodes[:, :-1]
    if skip:
        forks = trie.num_children(paths) > 1
        # Reversed running sum: a node counts if it or a node below it on the path forks.
        needed = forks.int().flip(1).cumsum(1).flip(1) > 0
    else:
        needed = torch.ones_like(paths, dtype=torch.bool)
    keys: Tensor = (owners[:, None] * trie.num_nodes + paths)[needed]
    return keys


def level_scores(
    model: SemanticIdModel, hidden: Tensor, level: int
) -> tuple[Tensor, Tensor | None]:
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
    if level >= model.config.num_token_levels:  # these codes are certain
        zeros = hidden.new_zeros(hidden.shape[0], model.config.codebook_sizes[level] + 1).float()
        return zeros[:, 1:], zeros[:, 0]
    if model.config.normalization == "level":
        own = logits = model.level_logits(hidden, level).float()
    else:
        logits = model.full_logits(hidden).float()
        start = model.config.level_offsets[level]
        own = logits[:, start : start + model.config.codebook_sizes[level]]
    normalizers, ended = logits.logsumexp(-1), model.config.ended_code
    if ended is not None:  # an id that has ended stays as it is
        own = own.index_copy(1, torch.tensor([ended], device=own.device), normalizers[:, None])
    return own, normalizers


def level_log_probs(
    model: SemanticIdModel, hidden: Tensor, level: int, codes: Tensor, valid: Tensor
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
    config = model.config
    special = level >= config.num_token_levels or config.ended_code is not None
    if config.normalization == "level" or special:
        scores, normalizers = level_scores(model, hidden, level)
        assert normalizers is not None
        return scores.gather(1, codes) - normalizers[:, None]
    logits = model.full_logits(hidden).float()
    return logits.log_softmax(-1).gather(1, codes + config.level_offsets[level])


def path_log_probs(
    trie: Trie, nodes: Tensor, level_logits: Iterable[tuple[Tensor, Tensor | None]]
) -> Tensor:
    """Returns [n] the log-probabilities of paths, meaningless for what is no path of the trie.

    Args:
        trie: Trie of the catalogue version.
        nodes: [n, L] trie nodes.
        level_logits: For each level, logits [n, C] and normalisers, as `level_scores` returns them.
    """
    columns = nodes.unbind(1)
    parents = torch.zeros_like(columns[0])
    total = torch.zeros(parents.shape, device=nodes.device)
    for own, width, (logits, normalizers) in zip(columns, trie.widths, level_logits, strict=True):
        gain = child_log_probs(trie, parents, own[:, None], logits, width, normalizers)
        total, parents = total + gain[:, 0], own
    return total


def first_scores(
    trie: Trie, trie_nodes: Tensor, owners: Tensor, last_hidden: Tensor, model: SemanticIdModel
) -> Tensor:
    """Returns [M] the log-probability of each candidate's first code.

    Args:
        trie: Trie of the candidates.
        trie_nodes: [M, L] trie nodes on the path of every candidate.
        owners: [M] request of each candidate.
        last_hidden: [B, E] state of the last prefix token.
        model: The target.
    """
    top = torch.zeros(1, dtype=torch.int64, device=trie.device)
    children = trie.children(top, trie.padding(0))
    codes = children.codes.long().expand(last_hidden.shape[0], -1)
    log_probs = level_log_probs(model, last_hidden, 0, codes, children.valid.expand_as(codes))
    return log_probs[owners, trie.child_columns(trie_nodes[:, 0], top)]


def path_scores(
    trie: Trie,
    trie_nodes: Tensor,
    owners: Tensor,
    keys: Tensor,
    hidden: Tensor,
    model: SemanticIdModel,
) -> Tensor:
    """Returns [M] the log-probability of each candidate's codes after the first.

    A path without a score has one child and adds 0. Arguments are those of `first_scores`, with
    ascending keys [n] of scored paths and their states [n, E] instead of the last states.
    """
    size = trie.num_nodes
    out = torch.zeros(trie_nodes.shape[0], device=trie.device)
    levels = trie.levels(keys % size)
    for level in range(1, trie.num_levels):
        here = (levels == level).nonzero().flatten()
        if not here.shape[0]:
            continue
        own = keys[here]
        children = trie.children(own % size, trie.padding(level))
        log_probs = level_log_probs(
            model, hidden[here], level, children.codes.long(), children.valid
        )
        parents, nodes = trie_nodes[:, level - 1], trie_nodes[:, level]
        # Row of each candidate's parent among the scored paths of this level, -1: not scored.
        row = find_keys(own, owners * size + parents)
        gain = log_probs[row.clamp(min=0), trie.child_columns(nodes, parents)]
        out += torch.where(row >= 0, gain, 0.0)
    return out
