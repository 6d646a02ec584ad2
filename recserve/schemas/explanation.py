"""The part of a slate's response that explains it: work, and the tree of the search."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class TreeNode(Struct, frozen=True, kw_only=True, gc=False):
    """One prefix of a semantic id in the tree of a search.

    Attributes:
        parent: Index of the parent in the list; None under the root.
        level: Level of the code, from 0.
        log_prob: Log-probability of the code given the codes above it; None if the target gave
            none.
        round: Number of the forward pass that scored the prefix, from 1; 0 for none.
        origin: `draft` if a drafter proposed the prefix, `repair` if the draft lacked it, `search`
            if beam search reached it. A leaf, and a prefix with one child, is `unscored`.
        rank: Rank in the slate of the item at this leaf; None elsewhere.
    """

    parent: int | None
    level: int
    code: int
    log_prob: float | None
    round: int
    origin: Literal["draft", "search", "repair", "unscored"]
    rank: int | None


class Explanation(Struct, frozen=True, kw_only=True):
    """The work behind a response.

    Attributes:
        history_events: Number of events that were read; the model used `history_used` of them.
        root_tokens_cached: Prefix tokens found in the cache; the others were computed.
        forwards: Number of forward passes over `nodes` tree nodes.
        tree: Scored prefixes and the semantic ids of the slate, parents first. Popular items that
            fill the slate are not in it.
        tree_omitted: Scored prefixes that the tree leaves out because it is too large.
    """

    history_events: int
    history_used: int
    root_tokens_cached: int
    root_tokens_computed: int
    forwards: int
    nodes: int
    tree: list[TreeNode] = []
    tree_omitted: int = 0
