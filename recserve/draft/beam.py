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
from recserve.kernels.tree import from_paths
from recserve.models.inputs import NodeInputs


@dataclass(frozen=True)
class BeamDraft(Draft):
    """A draft and where the beams lie in it.

    rows [P]: the beams to score, as indices into the flattened [B * W]. path_nodes [P, level]: the
    tree node of each prefix of those beams.
    """

    rows: Tensor | None = None
    path_nodes: Tensor | None = None


def propose(beams: Beams, level_offsets: Tensor, skip_single: bool) -> BeamDraft:
    """Tree of all unscored nodes on the way to a beam that must be scored.

    level_offsets [L]: first token of each level. skip_single: single-child prefixes need no score.
    """
    wanted = beams.alive()
    if skip_single:
        wanted &= beams.trie.num_children(beams.nodes) > 1
    rows = wanted.flatten().nonzero().flatten()
    width = beams.nodes.shape[1]
    paths = beams.paths.flatten(0, 1)[rows]
    built = from_paths(paths, rows // width, len(beams.sequences))
    tree = built.tree
    trie_nodes, depths = tree.tokens, tree.depths
    tokens = level_offsets[depths] + beams.trie.node_codes[trie_nodes]
    scored = torch.full_like(tokens, -1)
    scored[built.nodes] = beams.slots.flatten(0, 1)[rows]
    queries = (scored < 0).nonzero().flatten()
    return BeamDraft(
        replace(tree, tokens=tokens),
        NodeInputs(tokens[queries]),
        queries,
        scored,
        rows,
        built.nodes,
    )
