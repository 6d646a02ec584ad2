"""The best draft of counted continuations: prefixes of what followed, by their share.

For every length m of the matched end, the occurrences that match m tokens give a tree of what
followed them; a node's probability is its share of these occurrences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recserve.speculation.drafters.host_draft import NOTHING, HostDraft
from recserve.speculation.drafters.lookup import SuffixLimits
from recserve.speculation.drafters.text_index import GAP


@dataclass(frozen=True)
class Guess:
    """A draft and its expected accept length if what was counted goes on as before."""

    draft: HostDraft
    score: float


NO_GUESS = Guess(NOTHING, 0.0)


def likeliest(
    rows: NDArray[np.int64],
    matches: NDArray[np.int64],
    limits: SuffixLimits,
    most: int,
    chain: bool = False,
) -> Guess:
    """The best draft over all match lengths.

    rows [o, K]: what followed each occurrence, GAP after its end. matches [o]: tokens that it
    matches. most: nodes. chain: without forks, always on to the most frequent child.
    """
    if not len(rows):
        return NO_GUESS
    order = np.lexsort(rows.T[::-1])
    rows, matches = rows[order], matches[order]
    tree = _prefix_tree(rows)
    best, kept, score = 0, np.empty(0, np.int64), 0.0
    for m in np.unique(matches)[::-1]:
        part = matches >= m
        counts = np.bincount(tree.nodes[part][tree.inside[part]], minlength=len(tree.tokens))
        shares = counts / part.sum()
        room = min(most, limits.room(m))
        if chain:
            chosen = _heaviest_chain(tree, shares)[:room]
        else:
            # Shares fall along a path and ties go to the lower node, so parents come first.
            chosen = np.argsort(-shares, kind="stable")[:room]
        chosen = chosen[shares[chosen] >= limits.min_prob]
        # Whole counts, so that equal scores are equal and the longer match wins.
        total = float(counts[chosen].sum() / part.sum())
        if total > score:
            best, kept, score = int(m), chosen, total
    if not best:
        return NO_GUESS
    kept.sort()
    place = np.full(len(tree.tokens) + 1, -1, np.int64)
    place[kept] = np.arange(len(kept))
    draft = HostDraft(tree.tokens[kept], place[tree.parents[kept]], int(tree.depths[kept].max()))
    return Guess(draft, score)


@dataclass(frozen=True)
class _PrefixTree:
    """Prefixes of sorted rows in preorder. nodes [o, K]: prefix number of each cell, where
    `inside`. tokens, parents, depths [n].
    """

    nodes: NDArray[np.int64]
    inside: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]


def _prefix_tree(rows: NDArray[np.int64]) -> _PrefixTree:
    """rows [o, K] sorted. A cell begins a prefix if a row above differs in it or before it."""
    inside = rows != GAP
    new = inside.copy()
    new[1:] &= np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    numbers = np.where(new, new.cumsum().reshape(new.shape) - 1, -1)
    nodes = np.maximum.accumulate(numbers, axis=0)
    above = np.concatenate([np.full((len(rows), 1), -1), nodes[:, :-1]], axis=1)
    depths = np.broadcast_to(np.arange(1, rows.shape[1] + 1), rows.shape)
    return _PrefixTree(nodes, inside, rows[new], above[new], depths[new])


def _heaviest_chain(tree: _PrefixTree, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """From the root always to the child of the largest share, the first of equals."""
    path: list[int] = []
    children = np.flatnonzero(tree.parents == -1)
    while len(children):
        path.append(int(children[shares[children].argmax()]))
        children = np.flatnonzero(tree.parents == path[-1])
    return np.array(path, np.int64)
