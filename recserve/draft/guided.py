"""Items that a retriever proposes for verification, at first freely, then guided by the beams.

A guided draft holds only items below the prefixes that beam search has kept so far: what the
retriever likes there is what the target is likely to accept.
Source: SpecGR (Ding et al. 2024, arXiv 2410.02939), inductive drafting and guided re-drafting.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.request import RecommendRequest
from recserve.draft.candidates import needed_prefixes
from recserve.draft.dense import nearest
from recserve.models.dense_retriever import DenseRetriever


@dataclass(frozen=True)
class DraftedItems:
    """Proposed items. owners [n] ascending request numbers, rows [n] item rows.

    keys [m]: the prefixes that the target must score for them, as in Scored.
    """

    owners: Tensor
    rows: Tensor
    keys: Tensor


def draft_freely(
    beams: Beams, retriever: DenseRetriever, sizes: Seq[int], skip_single: bool
) -> DraftedItems:
    """The nearest items of every request. sizes [B]: how many of each."""
    requests = [replace(_request(beams, b), k=size, caps=()) for b, size in enumerate(sizes)]
    found = [each.rows for each in nearest(retriever, beams.tails, requests)]
    return _drafted(beams, np.arange(len(found)), found, skip_single)


def draft_under_beams(
    beams: Beams,
    retriever: DenseRetriever,
    lacking: Seq[int],
    judged: tuple[np.ndarray, ...],
    sizes: Seq[int],
    skip_single: bool,
) -> DraftedItems:
    """The nearest items below the beams of the requests that lack some.

    lacking: request numbers. judged: rows of each request [B] that were proposed before, which do
    not come again. sizes [B]: how many of each.
    """
    allowed = [_open_below(beams, b, judged[b]) for b in lacking]
    found = [np.flatnonzero(bitmap) for bitmap in allowed]
    large = [i for i, b in enumerate(lacking) if found[i].size > sizes[b]]
    if large:
        numbers = [lacking[i] for i in large]
        requests = [
            replace(_request(beams, b), k=sizes[b], caps=(), excluded=None, allowed=allowed[i])
            for i, b in zip(large, numbers, strict=True)
        ]
        for i, each in zip(large, nearest(retriever, beams.tails[numbers], requests), strict=True):
            found[i] = each.rows
    return _drafted(beams, np.array(lacking), found, skip_single)


def _open_below(beams: Beams, b: int, judged: np.ndarray) -> np.ndarray:
    """[rows] bool: items below a beam of request b that it may be answered and were not judged."""
    trie, request = beams.trie, _request(beams, b)
    leaves = trie.leaves(beams.nodes[b][beams.alive()[b]])
    edges = torch.zeros(trie.num_items + 1, dtype=torch.int64, device=trie.device)
    edges.index_add_(0, leaves.first.long(), torch.ones_like(leaves.first, dtype=torch.int64))
    edges.index_add_(0, leaves.last.long(), -torch.ones_like(leaves.last, dtype=torch.int64))
    below = torch.zeros(trie.num_rows, dtype=torch.bool, device=trie.device)
    below[trie.leaf_rows.long()] = edges.cumsum(0)[:-1] > 0
    if trie.gone is not None:
        below[trie.gone] = False
    open_ = below.cpu().numpy()
    if request.allowed is not None:
        open_ &= request.allowed
    if request.excluded is not None:
        open_[request.excluded] = False
    open_[judged] = False
    return open_


def _drafted(
    beams: Beams, numbers: np.ndarray, found: list[np.ndarray], skip_single: bool
) -> DraftedItems:
    device = beams.tails.device
    sizes = [rows.size for rows in found]
    owners = torch.from_numpy(np.repeat(numbers, sizes)).to(device)
    rows = torch.from_numpy(np.concatenate(found)).to(device, torch.int64)
    nodes = beams.trie.nodes_of_items(rows)
    return DraftedItems(owners, rows, needed_prefixes(beams.trie, nodes, owners, skip_single))


def _request(beams: Beams, b: int) -> RecommendRequest:
    request = beams.sequences[b].request
    assert isinstance(request, RecommendRequest)
    return request
