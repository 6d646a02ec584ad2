"""The tree of semantic-id prefixes behind a slate, for requests that ask for an explanation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

Origin = Literal["draft", "search", "repair", "unscored"]


@dataclass(frozen=True)
class TracedRound:
    """The prefixes of one request that one forward pass scored.

    Attributes:
        origin: `draft` if a drafter proposed them before the search, `repair` if the search found
            that the draft lacked them, `search` if beam search reached them level by level.
        nodes: [n] int64 trie nodes.
    """

    origin: Origin
    nodes: Tensor


@dataclass(frozen=True)
class SlateTree:
    """The scored prefixes of a search and the semantic ids of its slate, parents first.

    Attributes:
        parents: [n] int64 index of each node's parent, -1 under the root.
        levels: [n] int64 level of each node's code, from 0.
        codes: [n] int64 code of each node.
        log_probs: [n] float32 log-probability of the code given the codes above it, NaN where the
            target gave none.
        rounds: [n] int64 number of the forward pass that scored the node, from 1; 0 for none.
        origins: Origin of each node. A leaf, and a prefix with a single child, needs no score.
        rows: [n] int64 item row of each leaf of the slate, -1 for all other nodes.
        num_omitted: Scored nodes that were left out because the tree is too large.
    """

    parents: np.ndarray
    levels: np.ndarray
    codes: np.ndarray
    log_probs: np.ndarray
    rounds: np.ndarray
    origins: tuple[Origin, ...]
    rows: np.ndarray
    num_omitted: int
