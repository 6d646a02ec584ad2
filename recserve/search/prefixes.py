"""Prefixes of semantic ids as token trees: the drafts of beam search and of item drafters.

Prefixes of one request share their beginnings. Three beams of level 2 make one tree of five nodes:

    beams (3, 7), (3, 9), (5, 1)        3 -+- 7
                                           '- 9
                                        5 --- 1

If a level is normalised over the valid children, a prefix with one child needs no score: the child
has log-probability 0. Such a node is computed only when a prefix below it forks.

Few prefixes fork below the trie's `closing_level`, and a round costs more than a few nodes. From
that level on, all forks below the beams are scored together with the beams, so that few requests
need another round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.core.strategy import Draft
from recserve.kernels.trie.level_search import lay_out, wanted_prefixes
from recserve.kernels.trie.native import ALIVE, FORKED, OPEN
from recserve.kernels.trie.trie import Trie
from recserve.models.inputs import NodeInputs
from recserve.search.beams import Beams
from recserve.search.scores import Scored


@dataclass(frozen=True)
class PrefixDraft(Draft):
    """A draft of prefixes.

    Attributes:
        query_keys: [Tq] key (as in `Scored`) of each computed node.
        guessed: Whether the draft may lack nodes that beam search needs, or hold others.
        cached: Whether some of the nodes are a cached draft.
    """

    query_keys: Tensor | None = None
    guessed: bool = False
    cached: bool = False

    def computed(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns key [Tq] and pool slot [Tq] of each computed node. slots: [T], of all nodes."""
        assert self.query_keys is not None
        return self.query_keys, slots if self.queries is None else slots[self.queries]


def draft_of_keys(
    trie: Trie,
    keys: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    before: Scored | None = None,
) -> PrefixDraft:
    """Returns the nodes of the keys as token trees. Scored nodes are not computed again.

    Args:
        trie: Trie of the catalogue version.
        keys: [n] keys (as in `Scored`), repeats allowed. With a node come all nodes above it.
        num_trees: B.
        level_offsets: [L] first token of each level.
        before: Nodes that were scored before. None: no node was.
    """
    known, slots = (keys[:0], keys[:0]) if before is None else (before.keys, before.slots)
    trees = lay_out(trie, keys, num_trees, level_offsets, known, slots)
    inputs = NodeInputs(trees.query_tokens)
    return PrefixDraft(trees.tree, inputs, trees.queries, trees.slots, trees.query_keys)


def needs_score(beams: Beams, skip_single: bool) -> Tensor:
    """Returns [B, W] bool: beams whose children the target must score.

    Args:
        beams: The beams.
        skip_single: Whether only beams that fork need a score.
    """
    return beams.forked() if skip_single else beams.alive()


def propose_beams(
    beams: Beams, level_offsets: Tensor, skip_single: bool, extra: Tensor | None = None
) -> PrefixDraft:
    """Returns trees of all unscored nodes on the way to the beams that must be scored.

    Args:
        beams: The beams.
        level_offsets: [L] first token of each level.
        skip_single: Whether prefixes with one child are skipped.
        extra: [n] keys of further nodes to score, each with all nodes above it.
    """
    closing = skip_single and beams.level >= beams.trie.closing_level
    which = OPEN if closing else FORKED if skip_single else ALIVE
    below = beams.widths if closing else [0] * len(beams.sequences)
    keys = wanted_prefixes(
        beams.trie, beams.log_probs, beams.paths, which, beams.scored.keys, below
    )
    if extra is not None:
        keys = torch.cat([keys, extra])
    return draft_of_keys(beams.trie, keys, len(beams.sequences), level_offsets, beams.scored)


def needed_prefixes(trie: Trie, trie_nodes: Tensor, owners: Tensor, skip: bool) -> Tensor:
    """Returns keys (as in `Scored`) of the prefixes that decide the scores of given items.

    Args:
        trie: Trie of the items.
        trie_nodes: [M, L] trie node of every prefix of every item.
        owners: [M] request of each item.
        skip: Whether to leave out prefixes below the last fork of a path. They add log-probability
            0.

    Returns:
        [n] keys. The empty prefix is not among them.
    """
    prefixes = trie_nodes[:, :-1]
    if skip:
        forks = trie.num_children(prefixes) > 1
        # Reversed running sum: a prefix counts if it or a prefix below it on the path forks.
        needed = forks.int().flip(1).cumsum(1).flip(1) > 0
    else:
        needed = torch.ones_like(prefixes, dtype=torch.bool)
    keys: Tensor = (owners[:, None] * trie.num_nodes + prefixes)[needed]
    return keys
