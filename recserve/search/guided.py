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

from recserve.core.allowed import AllowedItems
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_view import gone_rows
from recserve.models.dense_retriever import DenseRetriever
from recserve.search.beams import Beams
from recserve.search.candidates import needed_prefixes
from recserve.search.dense import nearest


@dataclass(frozen=True)
class DraftedItems:
    """Proposed items. owners [n] ascending request numbers, rows [n] item rows.

    keys [m]: the prefixes that the target must score for them, as in Scored.
    """

    owners: Tensor
    rows: Tensor
    keys: Tensor


def draft_freely(beams: Beams, retriever: DenseRetriever, skip_single: bool) -> DraftedItems:
    """The nearest items of every request, as many as it keeps beams."""
    requests = [replace(request, k=request.width, caps=()) for request in beams.requests]
    found = [each.rows for each in nearest(retriever, beams.tails, requests)]
    return _drafted(beams, np.arange(len(found)), found, skip_single)


def draft_under_beams(
    beams: Beams,
    retriever: DenseRetriever,
    lacking: Seq[int],
    judged: tuple[np.ndarray, ...],
    skip_single: bool,
) -> DraftedItems:
    """The nearest items below the beams of the requests that lack some, as many as each keeps.

    lacking: request numbers. judged: rows of each request [B] that were proposed before, which do
    not come again.
    """
    asked = beams.requests
    allowed = [_open_below(beams, b, judged[b]) for b in lacking]
    found = [np.flatnonzero(bitmap) for bitmap in allowed]
    large = [i for i, b in enumerate(lacking) if found[i].size > asked[b].width]
    if large:
        numbers = [lacking[i] for i in large]
        bitmaps = [AllowedItems.of(allowed[i]) for i in large]
        requests = [
            replace(asked[b], k=asked[b].width, caps=(), excluded=None, allowed=open_)
            for open_, b in zip(bitmaps, numbers, strict=True)
        ]
        for i, each in zip(large, nearest(retriever, beams.tails[numbers], requests), strict=True):
            found[i] = each.rows
    return _drafted(beams, np.array(lacking), found, skip_single)


def _open_below(beams: Beams, b: int, judged: np.ndarray) -> np.ndarray:
    """[rows] bool: items below a beam of request b that it may be answered and were not judged."""
    trie, request = beams.trie, beams.requests[b]
    leaves = trie.leaves(beams.nodes[b][beams.alive()[b]])
    edges = torch.zeros(trie.num_items + 1, dtype=torch.int64, device=trie.device)
    edges.index_add_(0, leaves.first.long(), torch.ones_like(leaves.first, dtype=torch.int64))
    edges.index_add_(0, leaves.last.long(), -torch.ones_like(leaves.last, dtype=torch.int64))
    below = torch.zeros(trie.num_rows, dtype=torch.bool, device=trie.device)
    below[trie.leaf_rows.long()] = edges.cumsum(0)[:-1] > 0
    if (gone := gone_rows(trie)) is not None:
        below[gone] = False
    open_ = below.cpu().numpy()
    if request.allowed is not None:
        open_ &= request.allowed.mask()
    if request.excluded is not None:
        open_[request.excluded] = False
    open_[judged] = False
    return open_


def _drafted(
    beams: Beams, numbers: np.ndarray, found: list[np.ndarray], skip_single: bool
) -> DraftedItems:
    device = beams.tails.device
    sizes = [rows.size for rows in found]
    owners = on_device(np.repeat(numbers, sizes), device)
    rows = on_device(np.concatenate(found), device, torch.int64)
    nodes = beams.trie.nodes_of_items(rows)
    return DraftedItems(owners, rows, needed_prefixes(beams.trie, nodes, owners, skip_single))
