"""Nearest items of a request's vectors: how many places each vector gets, and who takes them.

The k places of a slate are split over (outcome, time offset) by their shares; vectors that nearly
coincide become one, their places added; an index finds the items near each. An item belongs to the
vector that it is nearest to; a vector's places go to its nearest items, places that stay free to
the nearest of the rest. Everything depends on the request alone, never on its company.
Source: PinRec, arXiv 2504.10507, budgets per outcome and embedding compression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from recserve.core.allowed import is_gone
from recserve.core.diversity import first_k
from recserve.core.finite import NotFinite
from recserve.core.request import SlateQuery, VectorIndex
from recserve.kernels.host import on_device
from recserve.kernels.trie.trie_view import gone_rows
from recserve.models.dense_retriever import DenseRetriever

MERGE_COSINE = 0.98  # cosine from which two vectors are one
OVERFETCH = 3  # items found per place, excluded ones not counted
DEPTH_FACTOR = 8  # how much deeper a search goes where too few of the found were allowed


@dataclass(frozen=True)
class Queries:
    """What to search with. vectors [n, E], owners [n] request numbers, ascending, budgets [n]."""

    vectors: np.ndarray
    owners: np.ndarray
    budgets: np.ndarray

    def of(self, requests: np.ndarray) -> Queries:
        """Those of some requests, whose numbers stay."""
        kept = np.isin(self.owners, requests)
        return Queries(self.vectors[kept], self.owners[kept], self.budgets[kept])


@dataclass(frozen=True)
class Retrieved:
    """Items of one request, nearest first, ties by row. rows [n] int64, cosines [n] float32."""

    rows: np.ndarray
    cosines: np.ndarray


def nearest(
    retriever: DenseRetriever, last_hidden: Tensor, requests: Seq[SlateQuery]
) -> list[Retrieved]:
    """What the retriever finds for requests of one catalogue version: k items each, as `retrieve`.

    last_hidden [B, E]: hidden state of the last root token of each. Raises ValueError for a request
    without an index, or a mix of outcomes of another length.
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
    return retrieve(queries_of(vectors, budgets[:, used]), index, requests)


def _shares(request: SlateQuery, default: tuple[float, ...]) -> np.ndarray:
    """[O] share of each outcome. Raises ValueError for a mix of another length."""
    shares = np.array(default) if request.outcome is None else request.outcome
    if shares.shape != (len(default),):
        raise ValueError(f"outcome is {shares.shape}; the retriever has {len(default)} outcomes")
    return np.asarray(shares / shares.sum())


def split_budgets(shares: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[B, V] int64: places [B] in proportion to shares [B, V], by largest remainder.

    Rows of shares have sum 1. Ties go to the earlier vector.
    """
    exact = shares * places[:, None]
    whole = np.floor(exact + 1e-9).astype(np.int64)
    left = places - whole.sum(1)
    order = np.argsort(whole - exact, axis=1, kind="stable")
    ranks = np.argsort(order, axis=1, kind="stable")
    return np.asarray(whole + (ranks < left[:, None]))


def merge_alike(vectors: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """[B, V] budgets after vectors of nearly one direction became one; 0 where merged away.

    vectors [B, V, E] of length 1. A vector joins the first one, by falling budget, that it is
    alike to, and goes with it where that one joins another.
    """
    order = np.argsort(-budgets, axis=1, kind="stable")
    sorted_vectors = np.take_along_axis(vectors, order[..., None], axis=1)
    alike = np.tril(sorted_vectors @ sorted_vectors.swapaxes(1, 2) >= MERGE_COSINE, -1)
    leaders = np.where(alike.any(2), alike.argmax(2), np.arange(budgets.shape[1]))
    for _ in range(budgets.shape[1].bit_length()):
        leaders = np.take_along_axis(leaders, leaders, axis=1)
    leaders = np.take_along_axis(order, leaders, axis=1)
    merged = np.zeros_like(budgets)
    owners = np.arange(len(budgets))[:, None]
    np.add.at(merged, (owners, leaders), np.take_along_axis(budgets, order, axis=1))
    return merged


def queries_of(vectors: Tensor, budgets: np.ndarray) -> Queries:
    """Vectors with a place to fill, alike ones merged. vectors [B, V, E], budgets [B, V].

    Raises NotFinite if a vector is not finite; requests that start together then start alone.
    """
    host = vectors.float().cpu().numpy()  # the one wait for the device: faiss reads host memory
    if not np.isfinite(host).all():
        raise NotFinite
    budgets = merge_alike(host, budgets)
    owners, which = budgets.nonzero()
    return Queries(host[owners, which], owners, budgets[owners, which])


def retrieve(queries: Queries, index: VectorIndex, requests: Seq[SlateQuery]) -> list[Retrieved]:
    """The items of each request: k of them wherever k are allowed (and its caps leave k).

    One search for all requests; where too few of the found items were allowed, a deeper one for
    those that lack some, at last through the whole catalogue.
    """
    found: dict[int, Retrieved] = {}
    depths = np.array([first_depth(request, index.num_items) for request in requests])
    waiting = np.arange(len(requests))
    while waiting.size:
        part = queries.of(waiting)
        rows, cosines = index.search(part.vectors, int(depths[waiting].max()))
        usable = (rows >= 0) & (np.arange(rows.shape[1]) < depths[part.owners][:, None])
        usable &= _allowed(rows, part.owners, requests)
        slates = _slates(part, rows, cosines, usable, requests)
        found |= slates
        enough = [slates[b].rows.size >= requests[b].k for b in waiting.tolist()]
        waiting = waiting[~np.array(enough) & (depths[waiting] < index.num_items)]
        depths = np.minimum(depths * DEPTH_FACTOR, index.num_items)
    return [found[b] for b in range(len(requests))]


def first_depth(request: SlateQuery, num_items: int) -> int:
    """Items to find per vector in an index of so many, so that likely enough of them are allowed.

    As large a share is taken to be gone or filtered away near a vector as in the whole index.
    """
    trie = request.trie
    gone = gone_rows(trie)
    num_gone = 0 if gone is None else gone.shape[0]
    wanted = OVERFETCH * request.k * num_items / max(trie.num_rows - num_gone, 1)
    if request.allowed is not None:
        wanted *= trie.num_rows / max(request.allowed.count, 1)
    excluded = 0 if request.excluded is None else request.excluded.size
    return max(1, min(num_items, math.ceil(wanted) + excluded))


def _allowed(rows: np.ndarray, owners: np.ndarray, requests: Seq[SlateQuery]) -> np.ndarray:
    """[n, F] bool: not excluded, gone or filtered away. rows [n, F], owners [n]."""
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
    allowed &= ~is_gone(trie, rows)
    for b in np.unique(owners).tolist():
        own = requests[b].allowed
        if own is not None:
            mine = owners == b
            allowed[mine] &= own.at(rows[mine])
    return allowed


def _slates(
    queries: Queries,
    rows: np.ndarray,
    cosines: np.ndarray,
    usable: np.ndarray,
    requests: Seq[SlateQuery],
) -> dict[int, Retrieved]:
    """The slate of each request that owns a query. rows, cosines, usable [n, F]."""
    query, column = usable.nonzero()
    row, cosine = rows[query, column], cosines[query, column]
    owner = queries.owners[query]
    order = np.lexsort((query, -cosine, row, owner))
    order = order[_ranks(owner[order], row[order]) == 0]
    order = order[np.lexsort((row[order], -cosine[order], query[order]))]
    late = _ranks(query[order]) >= queries.budgets[query[order]]
    order = order[np.lexsort((row[order], -cosine[order], late, owner[order]))]
    order = order[_chosen(owner[order], row[order], requests)]
    order = order[np.lexsort((row[order], -cosine[order], owner[order]))]
    first, last = (
        np.searchsorted(owner[order], np.arange(len(requests)), side) for side in ("left", "right")
    )
    return {
        b: Retrieved(row[order[first[b] : last[b]]], cosine[order[first[b] : last[b]]])
        for b in np.unique(queries.owners).tolist()
    }


def _chosen(owner: np.ndarray, row: np.ndarray, requests: Seq[SlateQuery]) -> np.ndarray:
    """[n] bool: the first k items of each owner, those that its caps leave out not counted."""
    wanted = np.array([request.k for request in requests])
    chosen: np.ndarray = _ranks(owner) < wanted[owner]
    for b in np.unique(owner).tolist():
        if requests[b].caps:
            mine = np.flatnonzero(owner == b)
            chosen[mine] = False
            chosen[mine[first_k(row[mine], requests[b].caps, requests[b].k)]] = True
    return np.asarray(chosen)


def _ranks(*keys: np.ndarray) -> np.ndarray:
    """[n] place of each entry among those before it with the same keys, which lie together."""
    places = np.arange(keys[0].size)
    same = np.logical_and.reduce([key[1:] == key[:-1] for key in keys])
    first = np.concatenate([[True], ~same])[: places.size]
    return places - np.maximum.accumulate(np.where(first, places, 0))
