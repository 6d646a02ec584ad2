"""Explains a slate: the work behind it, and the tree of its search."""

from __future__ import annotations

import math

import numpy as np

from recserve.core.request import Slate, Timing
from recserve.core.slate_tree import SlateTree
from recserve.kernels.trie.trie import Trie
from recserve.schemas.explanation import Explanation, TreeNode
from recserve.search.strategies.slate_trees import slate_tree


def explanation(
    trie: Trie, slate: Slate | None, rows: np.ndarray, num_events: int, num_used: int
) -> Explanation:
    """Returns the explanation of a slate.

    Args:
        trie: Trie of the slate's catalogue version.
        slate: Result of the engine; None for a slate of popular items.
        rows: [n] int64 rows of the items that came from the model, best first.
        num_events: Number of events that were read.
        num_used: Number of events that the model used.
    """
    timing = Timing() if slate is None else slate.timing
    tree = None if slate is None else slate.tree
    if tree is None:
        tree = slate_tree(trie, rows)
    return Explanation(
        history_events=num_events,
        history_used=num_used,
        root_tokens_cached=timing.prefix_cached,
        root_tokens_computed=timing.prefix_computed,
        forwards=timing.forwards,
        nodes=timing.nodes,
        tree=_nodes(tree, rows),
        tree_omitted=tree.num_omitted,
    )


def _nodes(tree: SlateTree, rows: np.ndarray) -> list[TreeNode]:
    """Returns the nodes of a tree in the form of a response, parents first."""
    ranks = {row: rank for rank, row in enumerate(rows.tolist(), start=1)}
    columns = zip(
        tree.parents.tolist(),
        tree.levels.tolist(),
        tree.codes.tolist(),
        tree.log_probs.tolist(),
        tree.rounds.tolist(),
        tree.origins,
        tree.rows.tolist(),
        strict=True,
    )
    return [
        TreeNode(
            parent=None if parent < 0 else parent,
            level=level,
            code=code,
            log_prob=log_prob if math.isfinite(log_prob) else None,
            round=number,
            origin=origin,
            rank=ranks.get(row),
        )
        for parent, level, code, log_prob, number, origin, row in columns
    ]
