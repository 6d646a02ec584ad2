"""Prefixes of semantic ids as token trees: what every drafter of items proposes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.core.strategy import Draft
from recserve.kernels import dispatch
from recserve.kernels.trie.native_layout import lay_out
from recserve.kernels.trie.trie_tree import tree_of_nodes
from recserve.kernels.trie.trie_view import TrieView
from recserve.models.inputs import NodeInputs
from recserve.search.scored import Scored


@dataclass(frozen=True)
class PrefixDraft(Draft):
    """A draft of prefixes. query_keys [Tq]: key (as in Scored) of each computed node. guessed: it
    may lack what beam search needs, and hold what it does not. kept: some of it proved the same
    answers before.
    """

    query_keys: Tensor | None = None
    guessed: bool = False
    kept: bool = False

    def computed(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Key [Tq] and slot [Tq] of each computed node. slots [T]: of all nodes."""
        assert self.query_keys is not None
        return self.query_keys, slots if self.queries is None else slots[self.queries]


def draft_of_keys(
    trie: TrieView,
    keys: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    before: Scored | None = None,
) -> PrefixDraft:
    """The nodes of these keys as token trees; those scored before are only read.

    keys [n], duplicates allowed; with a node all nodes above it. level_offsets [L]: first token of
    each level.
    """
    if dispatch.lays_out(keys):
        return _laid_out(trie, keys, num_trees, level_offsets, before)
    built = tree_of_nodes(trie, keys, num_trees)
    tokens = level_offsets[built.tree.depths] + trie.codes_of(built.tree.tokens)
    tree, node_keys = replace(built.tree, tokens=tokens), torch.empty_like(tokens)
    node_keys[built.index] = built.keys
    if before is None or not before.keys.shape[0]:
        return PrefixDraft(tree, NodeInputs(tokens), query_keys=node_keys)
    row = before.find(node_keys)
    scored = torch.where(row >= 0, before.slots[row.clamp(min=0)], -1)
    queries = (scored < 0).nonzero().flatten()
    return PrefixDraft(tree, NodeInputs(tokens[queries]), queries, scored, node_keys[queries])


def _laid_out(
    trie: TrieView, keys: Tensor, num_trees: int, level_offsets: Tensor, before: Scored | None
) -> PrefixDraft:
    """The same in C."""
    known, slots = (keys[:0], keys[:0]) if before is None else (before.keys, before.slots)
    laid = lay_out(trie.native, keys, num_trees, level_offsets, known, slots)
    inputs = NodeInputs(laid.query_tokens)
    return PrefixDraft(laid.tree, inputs, laid.queries, laid.slots, laid.query_keys)
