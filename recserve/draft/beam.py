"""Full beam search as a draft: the tree of the prefixes whose continuations the target must score.

A prefix with one child needs no score where a level is normalised over valid children (its child
has log-probability 0); such a node is computed later, and only if something below it forks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.drafting import Draft
from recserve.kernels.trie import tree_of_nodes
from recserve.models.inputs import NodeInputs


@dataclass(frozen=True)
class PrefixDraft(Draft):
    """A draft of semantic-id prefixes. query_keys [Tq]: key (as in Scored) of each computed
    node.
    """

    query_keys: Tensor | None = None


def wanted(beams: Beams, skip_single: bool) -> Tensor:
    """[B, W] bool: beams whose children the target must score. skip_single: those that fork."""
    return beams.forked() if skip_single else beams.alive()


def propose(
    beams: Beams, level_offsets: Tensor, skip_single: bool, extra: Tensor | None = None
) -> PrefixDraft:
    """Tree of all unscored nodes on the way to a beam that must be scored.

    level_offsets [L]: first token of each level. extra [n]: keys of further nodes to score, each
    with all nodes above it.
    """
    missing = wanted(beams, skip_single) & (beams.scored.find(beams.keys(beams.nodes)) < 0)
    keys = beams.keys(beams.paths)[missing].flatten()
    if extra is not None:
        keys = torch.cat([keys, extra])
    return draft_of_keys(beams, keys, level_offsets)


def draft_of_keys(beams: Beams, keys: Tensor, level_offsets: Tensor) -> PrefixDraft:
    """The nodes of these keys as token trees; those scored before are only read.

    keys [n], duplicates allowed; with a node all nodes above it.
    """
    built = tree_of_nodes(beams.trie, keys, len(beams.sequences))
    tree = built.tree
    tokens = level_offsets[tree.depths] + beams.trie.node_codes[tree.tokens]
    row = beams.scored.find(built.keys)
    known = row >= 0
    scored, node_keys = torch.full_like(tokens, -1), torch.empty_like(tokens)
    scored[built.index[known]] = beams.scored.slots[row[known]]
    node_keys[built.index] = built.keys
    queries = (scored < 0).nonzero().flatten()
    inputs = NodeInputs(tokens[queries])
    return PrefixDraft(replace(tree, tokens=tokens), inputs, queries, scored, node_keys[queries])
