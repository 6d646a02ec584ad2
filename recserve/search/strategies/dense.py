"""Strategy `dense`: nearest neighbours of query vectors made from the prefix's last state.

No tree is scored.

The k places of a slate are split over (outcome, time offset) pairs in proportion to their shares.
Vectors of nearly the same direction are merged and their places added. An index finds the items
near each vector. Every item belongs to its nearest vector, whichever vector it was found with. The
places of a vector go to its nearest items; places that remain free go to the nearest of all other
items that were found. A result does not depend on the other requests of a batch.

Source: PinRec, arXiv 2504.10507, budgets per outcome and embedding compression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

from recserve.core.allowed import is_removed
from recserve.core.diversity import first_k
from recserve.core.finite import NotFinite
from recserve.core.request import Slate, SlateQuery, VectorIndex
from recserve.core.sequence import SearchSequence, request_of, stacked_last_hidden
from recserve.core.strategy import OneRoundStrategy, Results
from recserve.kernels.host import on_device
from recserve.models.dense_retriever import DenseRetriever
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.device_index import DeviceIndex
from recserve.search.strategy import Heads, RecommendStrategy

MERGE_COSINE = 0.98  # smallest cosine at which two vectors are merged
OVERFETCH = 3  # items to find per place, in addition to the excluded ones
DEPTH_FACTOR = 8  # factor by which a repeated search finds more items


class DenseStrategy(OneRoundStrategy, RecommendStrategy):
    """Retrieval with one vector per outcome and time offset, without any tree round.

    Scores are cosines times the retriever's scale: the logits of its training softmax.
    """

    name = "dense"
    dense_weight = "ignored"
    outcome = True
    auto = "hurried"
    missing = "no retriever for this recommender; run `recserve train retriever`"

    def __init__(self, retriever: DenseRetriever) -> None:
        self.retriever = retriever
        self.scale = np.float32(retriever.scale.item())

    @classmethod
    def from_models(cls, model: SemanticIdModel, heads: Heads) -> Self | None:
        """Returns the strategy for a recommender with a retriever."""
        if heads.retriever is None or not model.config.autoregressive:
            return None
        return cls(heads.retriever)

    def results(self, sequences: Seq[SearchSequence], draft: None, hidden: None) -> Results:
        """Runs the head once and one index search for all requests."""
        requests = [request_of(s, SlateQuery) for s in sequences]
        found = nearest(self.retriever, stacked_last_hidden(sequences), requests)
        return [
            Slate(items.rows, items.cosines * self.scale, self.exact, 0, sequence.timing)
            for items, sequence in zip(found, sequences, strict=True)
        ]


@dataclass(frozen=True)
class Queries:
    """Query vectors of several requests.

    Attributes:
        vectors: [n, E] float32 unit vectors.
        owners: [n] ascending request numbers.
        budgets: [n] slate places of each vector.
        numbers: [n] number of each vector among those of its request.
    """

    vectors: np.ndarray
    owners: np.ndarray
    budgets: np.ndarray
    numbers: np.ndarray

    def of(self, requests: np.ndarray) -> Queries:
        """Returns the queries of some requests. Request numbers do not change."""
        own = np.isin(self.owners, requests)
        columns = (self.vectors, self.owners, self.budgets, self.numbers)
        return Queries(*(column[own] for column in columns))


@dataclass(frozen=True)
class Retrieved:
    """Items of one request, nearest first, ties in the order of item rows.

    Attributes:
        rows: [n] int64 item rows.
        cosines: [n] float32.
    """

    rows: np.ndarray
    cosines: np.ndarray


@dataclass(frozen=True)
class AssignedItems:
    """Items that a search found, each with the query of its request that it is nearest to.

    Attributes:
        rows: [m] item rows, each once per request.
        queries: [m] indices of queries.
        cosines: [m] float32.
        unfilled: [u] requests with a query that found fewer items of its own than it has places.
    """

    rows: np.ndarray
    queries: np.ndarray
    cosines: np.ndarray
    unfilled: np.ndarray


def nearest(
    retriever: DenseRetriever, last_hidden: Tensor, requests: Seq[SlateQuery]
) -> list[Retrieved]:
    """Returns k nearest items for each request. All requests use one catalogue version.

    Args:
        retriever: Makes query vectors from states.
        last_hidden: [B, E] state of the last prefix token of each request.
        requests: B requests, each with an index of item vectors.

    Raises:
        ValueError: If a request has no index, or an outcome mix of the wrong length.
    """
    index, strategy = requests[0].index, requests[0].strategy
    if index is None or any(request.index is None for request in requests):
        raise ValueError(f"strategy {strategy!r} needs the index of the catalogue's item vectors")
    config = retriever.config
    shares = np.stack([_shares(r, config.outcome_shares) for r in requests])
    pairs = shares[:, :, None] * np.array(config.offset_shares)
    places = np.array([request.k for request in requests])
    budgets = split_budgets(pairs.reshape(len(requests), -1), places)
    used = np.flatnonzero(budgets.any(0))
    outcomes, offsets = (
        on_device(part, last_hidden.device) for part in np.divmod(used, len(config.offset_bounds))
    )
    vectors = retriever.queries(last_hidden[:, None], outcomes, offsets)
    if isinstance(index, DeviceIndex):
        depth = max(first_depth(request, index.num_items) for request in requests)
        host, rows = index.search_then_read(vectors, depth)
        return retrieve(queries_of(host, budgets[:, used]), index, requests, rows)
    host = vectors.float().cpu().numpy()  # the only host sync: faiss reads host memory
    return retrieve(queries_of(host, budgets[:, used]), index, requests)


def _shares(request: SlateQuery, default: tuple[float, ...]) -> np.ndarray:
    """Returns [O] the share of each outcome, with sum 1.

    Raises:
        ValueError: If the request's mix has another length.
    """
    shares = np.array(default) if request.outcome is None else request.outcome
    if shares.shape != (len(default),):
        raise ValueError(
            f"shape of outcome is {shares.shape}; the retriever has {len(default)} outcomes"
        )
    return np.asarray(shares / shares.sum())


def split_budgets(shares: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Splits places [B] in proportion to shares [B, V], by the largest remainder.

    Args:
        shares: [B, V] with rows of sum 1.
        places: [B] int64.

    Returns:
        [B, V] int64 with row sums `places`. Ties go to the earlier vector.
    """
    exact = shares * places[:, None]
    # The small constant keeps 2.9999999 from becoming 2.
    whole = np.floor(exact + 1e-9).astype(np.int64)
    left = places - whole.sum(1)
    order = np.argsort(whole - exact, axis=1, kind="stable")
    ranks = np.argsort(order, axis=1, kind="stable")
    return np.asarray(whole + (ranks < left[:, None]))


def merge_alike(vectors: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """Merges the budgets of vectors of nearly the same direction.

    A vector joins the first vector, in the order of falling budgets, with a cosine of at least
    MERGE_COSINE. If that vector joins another one, both join it.

    Args:
        vectors: [B, V, E] unit vectors.
        budgets: [B, V].

    Returns:
        [B, V] budgets, 0 for vectors that were merged into another.
    """
    order = np.argsort(-budgets, axis=1, kind="stable")
    sorted_vectors = np.take_along_axis(vectors, order[..., None], axis=1)
    alike = np.tril(sorted_vectors @ sorted_vectors.swapaxes(1, 2) >= MERGE_COSINE, -1)
    leaders = np.where(alike.any(2), alike.argmax(2), np.arange(budgets.shape[1]))
    for _ in range(budgets.shape[1].bit_length()):  # pointer jumping to the final leader
        leaders = np.take_along_axis(leaders, leaders, axis=1)
    leaders = np.take_along_axis(order, leaders, axis=1)
    merged = np.zeros_like(budgets)
    owners = np.arange(len(budgets))[:, None]
    np.add.at(merged, (owners, leaders), np.take_along_axis(budgets, order, axis=1))
    return merged


def queries_of(vectors: np.ndarray, budgets: np.ndarray) -> Queries:
    """Returns the vectors that have a place to fill, after merging.

    Args:
        vectors: [B, V, E] float32.
        budgets: [B, V].

    Raises:
        NotFinite: If a vector is not finite. The engine then starts the requests of the batch one
            by one.
    """
    if not np.isfinite(vectors).all():
        raise NotFinite
    budgets = merge_alike(vectors, budgets)
    owners, which = budgets.nonzero()
    return Queries(vectors[owners, which], owners, budgets[owners, which], which)


def retrieve(
    queries: Queries,
    index: VectorIndex,
    requests: Seq[SlateQuery],
    searched: np.ndarray | None = None,
) -> list[Retrieved]:
    """Returns the items of each request: k items wherever the filter and the caps leave k.

    One search covers all requests. Requests with too few allowed items are searched again,
    DEPTH_FACTOR times deeper, and finally through the whole index. Those with a vector that found
    fewer items of its own than it has places are searched once more only: another vector may be
    nearer to all items there are.

    Args:
        queries: n queries of B requests.
        index: The index of the requests.
        requests: The requests.
        searched: [B, V, F] rows near each vector, if the first search has been made already.
    """
    found: dict[int, Retrieved] = {}
    first = np.array([first_depth(request, index.num_items) for request in requests])
    depths = first
    waiting = np.arange(len(requests))
    while waiting.size:
        part = queries.of(waiting)
        if searched is None:
            rows, _ = index.search(part.vectors, int(depths[waiting].max()))
        else:
            rows, searched = searched[part.owners, part.numbers], None
        usable = (rows >= 0) & (np.arange(rows.shape[1]) < depths[part.owners][:, None])
        usable &= _mask_allowed(rows, part.owners, requests)
        items = _assign(part, rows, usable, index)
        slates = _slates(part, items, requests)
        found |= slates
        short = np.array([slates[b].rows.size < requests[b].k for b in waiting.tolist()])
        short |= (depths[waiting] == first[waiting]) & np.isin(waiting, items.unfilled)
        waiting = waiting[short & (depths[waiting] < index.num_items)]
        depths = np.minimum(depths * DEPTH_FACTOR, index.num_items)
    return [found[b] for b in range(len(requests))]


def first_depth(request: SlateQuery, num_items: int) -> int:
    """Returns the items to find per vector so that enough of them are probably allowed.

    The estimate assumes that items near a vector are filtered as often as items of the whole index.
    """
    trie = request.trie
    gone = trie.removed_rows
    num_gone = 0 if gone is None else gone.shape[0]
    wanted = OVERFETCH * request.k * num_items / max(trie.num_rows - num_gone, 1)
    if request.allowed is not None:
        wanted *= trie.num_rows / max(request.allowed.count, 1)
    excluded = 0 if request.excluded is None else request.excluded.size
    return max(1, min(num_items, math.ceil(wanted) + excluded))


def _mask_allowed(rows: np.ndarray, owners: np.ndarray, requests: Seq[SlateQuery]) -> np.ndarray:
    """Returns [n, F] bool: whether the owner [n] of rows [n, F] may get them."""
    trie = requests[0].trie
    excluded = [
        b * trie.num_rows + r.excluded.astype(np.int64)
        for b, r in enumerate(requests)
        if r.excluded is not None
    ]
    allowed = np.ones(rows.shape, dtype=bool)
    if excluded:
        keys = owners[:, None] * trie.num_rows + rows
        allowed = ~np.isin(keys, np.concatenate(excluded))
    allowed &= ~is_removed(trie, rows)
    for b in np.unique(owners).tolist():
        own = requests[b].allowed
        if own is not None:
            mine = owners == b
            allowed[mine] &= own.at(rows[mine])
    return allowed


def _slates(
    queries: Queries, items: AssignedItems, requests: Seq[SlateQuery]
) -> dict[int, Retrieved]:
    """Returns the slate of each request that owns a query, by request number."""
    row, query, cosine = items.rows, items.queries, items.cosines
    owner = queries.owners[query]
    # 1. Items beyond the budget of their query are late: they fill places that remain free.
    order = np.lexsort((row, -cosine, query))
    late = _ranks(query[order]) >= queries.budgets[query[order]]
    order = order[np.lexsort((row[order], -cosine[order], late, owner[order]))]
    # 2. Choose k items per request under its caps, then sort by nearness.
    order = order[_choose(owner[order], row[order], requests)]
    order = order[np.lexsort((row[order], -cosine[order], owner[order]))]
    first, last = (
        np.searchsorted(owner[order], np.arange(len(requests)), side) for side in ("left", "right")
    )
    return {
        b: Retrieved(row[order[first[b] : last[b]]], cosine[order[first[b] : last[b]]])
        for b in np.unique(queries.owners).tolist()
    }


def _assign(
    queries: Queries, rows: np.ndarray, usable: np.ndarray, index: VectorIndex
) -> AssignedItems:
    """Gives each item to the nearest query of its request, the first of equally near ones.

    An item is compared with all queries of the request, since its nearest one may have found only
    nearer items. Sums run item by item, so a cosine does not depend on the others.

    Args:
        queries: n queries.
        rows: [n, F] item rows found.
        usable: [n, F] bool, whether a row may be returned.
        index: Has the vectors of the rows.
    """
    parts, unfilled = [], []
    for b in np.unique(queries.owners).tolist():
        own = np.flatnonzero(queries.owners == b)
        finder, column = usable[own].nonzero()
        found, place = np.unique(rows[own][finder, column], return_inverse=True)
        cosines = np.einsum("me,ne->mn", index.vectors(found), queries.vectors[own])
        best = cosines.argmax(1)
        parts.append((found, own[best], np.take_along_axis(cosines, best[:, None], 1)[:, 0]))
        num_own = np.bincount(finder[best[place] == finder], minlength=own.size)
        if (num_own < queries.budgets[own]).any():
            unfilled.append(b)
    row, query, cosine = (np.concatenate(column) for column in zip(*parts, strict=True))
    return AssignedItems(row, query, cosine, np.array(unfilled, np.int64))


def _choose(owner: np.ndarray, row: np.ndarray, requests: Seq[SlateQuery]) -> np.ndarray:
    """Returns [n] bool: the first k items of each owner, or the items that its caps choose."""
    wanted = np.array([request.k for request in requests])
    chosen: np.ndarray = _ranks(owner) < wanted[owner]
    for b in np.unique(owner).tolist():
        if requests[b].caps:
            mine = np.flatnonzero(owner == b)
            chosen[mine] = False
            chosen[mine[first_k(row[mine], requests[b].caps, requests[b].k)]] = True
    return np.asarray(chosen)


def _ranks(*keys: np.ndarray) -> np.ndarray:
    """Returns [n] each entry's index among the entries with equal keys, which are consecutive."""
    places = np.arange(keys[0].size)
    same = np.logical_and.reduce([key[1:] == key[:-1] for key in keys])
    first = np.concatenate([[True], ~same])[: places.size]
    return places - np.maximum.accumulate(np.where(first, places, 0))
