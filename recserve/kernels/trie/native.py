"""The trie's work on a CPU in C: beam search, token trees of its nodes, bits of filters.

In torch a level of beam search is thirty small operators, and the trees of a round are a hundred.
They take longer to call than to compute. Here several levels, or all trees, are one call. The
references are in `level_search.py` and `search/beam_search.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from recserve.kernels.linear.panels import LinearStruct, Panels
from recserve.kernels.native.native import FLOAT, TYPES, N, P, get_library
from recserve.kernels.tree import TokenTree
from recserve.kernels.trie.trie import LeafBits, LeafFilter, Trie


class BeamKind(IntEnum):
    """Which beams to score: those with a child, with several children, with several items."""

    ALIVE = 0
    FORKED = 1
    OPEN = 2


class StateKind(IntEnum):
    """What a search says of the state of a beam. ANY selects all."""

    ANY = -1
    UNNEEDED = 0
    KNOWN = 1
    MISSING = 2


@dataclass(frozen=True)
class PathTrees:
    """Token trees of a set of trie nodes.

    `queries` and `slots` are None if no node was scored before; then every node is a query.

    Attributes:
        tree: The trees; their tokens are the model's.
        query_keys: [Tq] keys of the nodes that were not scored before.
        query_tokens: [Tq] tokens of these nodes.
        queries: [Tq] packed indices of these nodes.
        slots: [T] slots of nodes that were scored before, -1 for the others.
    """

    tree: TokenTree
    query_keys: Tensor
    query_tokens: Tensor
    queries: Tensor | None = None
    slots: Tensor | None = None


@dataclass(frozen=True)
class LevelCodes:
    """Codes of a level [C, E], in the layouts for products with few codes and with all codes."""

    rows: Tensor
    panels: Panels

    @staticmethod
    def of(codes: Tensor, panels: Panels | None = None) -> LevelCodes:
        """Lays out codes [C, E], which must not change. panels: the packed codes if they exist."""
        return LevelCodes(codes.detach().contiguous(), panels or Panels.of(codes, None))


@dataclass(frozen=True)
class RecurrentCell:
    """One step of a recurrent head: tanh(inputs[code] + states U).

    Attributes:
        weight: U.
        inputs: [C, E].
    """

    weight: Panels
    inputs: Tensor


class ScoredCandidates(Protocol):
    """Items of the dense head that compete with the finished beams."""

    @property
    def rows(self) -> Tensor:
        """[B, R] int64 item rows."""

    @property
    def valid(self) -> Tensor:
        """[B, R] bool."""

    @property
    def scores(self) -> Tensor:
        """[B, R] final scores."""

    @property
    def share(self) -> Tensor:
        """[B, 1] most that the dense head adds to an item that is no dense candidate."""

    @property
    def weights(self) -> Tensor:
        """[B, 1] weight of the dense score."""

    @property
    def dense(self) -> Tensor:
        """[B, I] dense scores of all items."""


@dataclass(frozen=True)
class DescentResult:
    """Beams of each level 0 : L + 1, best first, filled from the first level of a search to
    `reached`.

    Attributes:
        log_probs: [L + 1, B, W], -inf where there is no beam.
        paths: [L + 1, B, W, L] int64 nodes of each beam's prefixes, as many as the level.
        scored: [L + 1, B, W] uint8: UNNEEDED, or KNOWN or MISSING for a needed state.
        used: [L + 1] columns in use, at least 1.
        thresholds: [B] best score of a beam whose state was missing, -inf where none was.
        reached: The last level that all requests reached.
    """

    log_probs: Tensor
    paths: Tensor
    scored: Tensor
    used: Sequence[int]
    thresholds: Sequence[float]
    reached: int


class _Ranks(ctypes.Structure):
    _fields_ = [("ranks", P), ("count", N)]


class _Request(ctypes.Structure):
    _fields_ = [
        ("width", N),
        ("place", N),
        ("excluded", P),
        ("num_excluded", N),
        ("all", N),
        ("words", P),
        ("counts", P),
        ("added", _Ranks),
    ]


class _DenseCandidates(ctypes.Structure):
    _fields_ = [
        ("count", N),
        *((name, P) for name in ("rows", "valid", "scores", "share", "weights", "dense")),
        ("num_rows", N),
        ("leaf_rows", P),
        ("wide_leaf_rows", P),
    ]


class _Search(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("trie", "requests", "dense_candidates", "heads", "codes")),
        *((name, N) for name in ("type", "size", "levels", "batch", "level", "until", "stops")),
        ("width", N),
        *((name, P) for name in ("scores", "first_paths")),
        *((name, N) for name in ("path_request", "path_beam")),
        *((name, P) for name in ("last_hidden", "hidden", "keys")),
        ("num_keys", N),
        *((name, P) for name in ("cells", "inputs", "contexts")),
        *((name, N) for name in ("next_request", "next_level", "columns")),
        *((name, P) for name in ("log_probs", "paths", "scored", "used", "lost")),
    ]


class _Passed(ctypes.Structure):
    _fields_ = [
        *((name, N) for name in ("all_nodes", "batch", "columns", "levels", "first", "last")),
        *((name, P) for name in ("log_probs", "paths", "scored")),
        ("which", N),
        *((name, P) for name in ("floors", "keys")),
    ]


class _Wanted(ctypes.Structure):
    _fields_ = [
        ("trie", P),
        *((name, N) for name in ("batch", "columns", "level", "which")),
        *((name, P) for name in ("log_probs", "paths")),
        *((name, N) for name in ("path_request", "path_beam")),
        ("scored_keys", P),
        ("num_scored", N),
        *((name, P) for name in ("below", "keys")),
    ]


class _Layout(ctypes.Structure):
    _fields_ = [
        ("trie", P),
        *((name, N) for name in ("num_trees", "num_keys")),
        *((name, P) for name in ("keys", "tokens", "scored_keys", "scored_slots")),
        ("num_scored", N),
        *((name, P) for name in ("node_tokens", "parents", "depths", "ends", "offsets")),
        ("query_keys", P),
        ("num_queries", N),
        *((name, P) for name in ("slots", "query_tokens", "queries")),
    ]


def wanted_prefixes(
    trie: Trie,
    log_probs: Tensor,
    paths: Tensor,
    which: BeamKind,
    scored_keys: Tensor,
    below: Sequence[int],
) -> Tensor:
    """Runs `level_search.wanted_prefixes` in C. Keys come in another order, some more than once."""
    log_probs, limits = log_probs.contiguous(), (N * len(below))(*below)
    keys = torch.empty(paths.numel() + sum(below), dtype=torch.int64)
    wanted = _Wanted(
        trie.address,
        *paths.shape,
        which,
        log_probs.data_ptr(),
        paths.data_ptr(),
        *_distances(paths),
        scored_keys.data_ptr(),
        scored_keys.shape[0],
        ctypes.addressof(limits),
        keys.data_ptr(),
    )
    return keys[: get_library().wanted_prefixes(ctypes.addressof(wanted))]


def lay_out(
    trie: Trie,
    keys: Tensor,
    num_trees: int,
    level_offsets: Tensor,
    scored_keys: Tensor,
    scored_slots: Tensor,
) -> PathTrees:
    """Runs `level_search.lay_out` in C."""
    keys, count, known = keys.contiguous(), keys.shape[0], scored_keys.shape[0]
    found = torch.empty(8 if known else 5, count, dtype=torch.int64)
    offsets = torch.empty(num_trees + 1, dtype=torch.int64)
    places = [found.data_ptr() + 8 * count * column for column in range(8)]
    layout = _Layout(
        trie.address,
        num_trees,
        count,
        keys.data_ptr(),
        level_offsets.data_ptr(),
        scored_keys.data_ptr(),
        scored_slots.data_ptr(),
        known,
        *places[:4],
        offsets.data_ptr(),
        places[4],
        0,
        *places[5:],
    )
    nodes = get_library().trie_layout(ctypes.addressof(layout))
    tokens, parents, depths, ends, query_keys, *more = found[:, :nodes].unbind()
    tree = TokenTree(tokens, parents, depths, ends, offsets)
    if not known:
        return PathTrees(tree, query_keys, tokens)
    slots, query_tokens, queries = more
    own = layout.num_queries
    return PathTrees(tree, query_keys[:own], query_tokens[:own], queries[:own], slots)


def scored_table(
    keys: Tensor,
    slots: Tensor,
    hidden: Tensor,
    added_keys: Tensor,
    added_slots: Tensor,
    added_hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `level_search.scored_table` in C."""
    added_hidden = added_hidden.contiguous()
    count, size = keys.shape[0] + added_keys.shape[0], added_hidden.shape[1]
    all_keys = torch.empty(count, dtype=torch.int64)
    all_slots = torch.empty(count, dtype=torch.int64)
    all_hidden = torch.empty(count, size, dtype=added_hidden.dtype)
    get_library().scored_table(
        keys.shape[0],
        keys.data_ptr(),
        slots.data_ptr(),
        hidden.data_ptr(),
        added_keys.shape[0],
        added_keys.data_ptr(),
        added_slots.data_ptr(),
        added_hidden.data_ptr(),
        all_keys.data_ptr(),
        all_slots.data_ptr(),
        all_hidden.data_ptr(),
        size * added_hidden.itemsize,
    )
    return all_keys, all_slots, all_hidden


def leaf_bits(rows: np.ndarray, leaf_rows: Tensor) -> LeafBits:
    """Runs `level_search.leaf_bits` in C: one pass over the leaves."""
    rows, leaf_rows = np.ascontiguousarray(rows), leaf_rows.contiguous()
    leaves = leaf_rows.shape[0]
    words = torch.empty(1, leaves // 32 + 1, dtype=torch.int32)
    counts = torch.empty_like(words)
    get_library().leaf_bits(
        rows.ctypes.data, leaf_rows.data_ptr(), leaves, words.data_ptr(), counts.data_ptr()
    )
    return LeafBits(words, counts)


def passed_prefixes(
    found: DescentResult, first: int, all_nodes: int, which: StateKind, item_scores: Sequence[float]
) -> Tensor:
    """Returns the keys [n] of beams, each with all nodes above it; duplicates occur.

    Args:
        found: Result of a search.
        first: First level. The last level that was reached is not included.
        all_nodes: Nodes of the trie.
        which: KNOWN or MISSING of `scored`, or ANY.
        item_scores: [B]. Beams with lower scores are left out.
    """
    paths, limits = found.paths, (FLOAT * len(item_scores))(*item_scores)
    keys = torch.empty(paths[first : found.reached].numel(), dtype=torch.int64)
    passed = _Passed(
        all_nodes,
        *paths.shape[1:],
        first,
        found.reached,
        found.log_probs.data_ptr(),
        paths.data_ptr(),
        found.scored.data_ptr(),
        which,
        ctypes.addressof(limits),
        keys.data_ptr(),
    )
    return keys[: get_library().passed_prefixes(ctypes.addressof(passed))]


class NativeDescent:
    """Beam search by the logits of one model's states, or by a draft head."""

    def __init__(self, levels: Sequence[LevelCodes], cells: Sequence[RecurrentCell] = ()) -> None:
        """Collects the addresses of the weights.

        Args:
            levels: [L] codes of each level.
            cells: [L - 1] of a recurrent head; empty without one.
        """
        # C reads these by address, so they must live as long as this object
        self._read = tuple(levels), tuple(cells)
        self._heads = (LinearStruct * len(levels))(*(level.panels.product for level in levels))
        self._codes = (P * len(levels))(*(level.rows.data_ptr() for level in levels))
        self._cells = (LinearStruct * len(cells))(*(cell.weight.product for cell in cells))
        self._inputs = (P * len(cells))(*(cell.inputs.data_ptr() for cell in cells))

    def __call__(
        self,
        trie: Trie,
        log_probs: Tensor,
        paths: Tensor,
        last_hidden: Tensor,
        until: int,
        *,
        widths: Sequence[int],
        threshold_ranks: Sequence[int],
        filters: Sequence[LeafFilter | None],
        scored_keys: Tensor | None = None,
        scored_hidden: Tensor | None = None,
        contexts: Tensor | None = None,
        dense_candidates: ScoredCandidates | None = None,
        stops: bool = False,
    ) -> DescentResult:
        """Searches from the given beams on.

        Args:
            trie: The catalogue's trie.
            log_probs: [B, W] of the first beams, -inf where there is no beam.
            paths: [B, W, level] int64 nodes of each beam's prefixes; the last one is its own.
            last_hidden: [B, E] final hidden states of the last prefix tokens.
            until: The last level.
            widths: Beam width of each request.
            threshold_ranks: Rank (from 0) of the score that sets the threshold of a level, for each
                request. Negative means none.
            filters: Leaves that each request allows. None means all leaves.
            scored_keys: [n] int64 ascending keys of scored prefixes: `request number * nodes of the
                trie + trie node`.
            scored_hidden: [n, E] final hidden states of these prefixes.
            contexts: [B, L, E] that a draft head reads at each level in addition to its own state.
            dense_candidates: Items that compete with the finished beams. None means that there are
                none.
            stops: Whether to stop at the first level at which a state is missing. Otherwise beams
                without a state have no children.
        """
        batch, width, level = paths.shape
        depth, columns = len(self._heads), max(width, *widths)
        found_log_probs = torch.empty(depth + 1, batch, columns)
        found_paths = torch.empty(depth + 1, batch, columns, depth, dtype=torch.int64)
        scored = torch.empty(depth + 1, batch, columns, dtype=torch.uint8)
        used, lost = (N * (depth + 1))(), (FLOAT * batch)()
        last_hidden, log_probs = last_hidden.contiguous(), log_probs.contiguous()
        requests, _lists = _requests(widths, threshold_ranks, filters)
        competing = _competing(dense_candidates, trie)
        s = _Search(
            trie.address,
            ctypes.addressof(requests),
            ctypes.addressof(competing),
            ctypes.addressof(self._heads),
            ctypes.addressof(self._codes),
            TYPES[last_hidden.dtype],
            last_hidden.shape[1],
            depth,
            batch,
            level,
            until,
            stops,
            width,
            log_probs.data_ptr(),
            paths.data_ptr(),
            *_distances(paths),
            last_hidden.data_ptr(),
        )
        s.columns, s.log_probs = columns, found_log_probs.data_ptr()
        s.paths, s.scored = found_paths.data_ptr(), scored.data_ptr()
        s.used, s.lost = ctypes.addressof(used), ctypes.addressof(lost)
        if scored_hidden is not None and scored_keys is not None:
            scored_hidden = scored_hidden.contiguous()
            s.hidden, s.keys = scored_hidden.data_ptr(), scored_keys.data_ptr()
            s.num_keys = scored_keys.shape[0]
        if contexts is not None:
            assert contexts.stride(2) == 1, "the last dimension of contexts must be contiguous"
            if len(self._cells):
                s.cells, s.inputs = ctypes.addressof(self._cells), ctypes.addressof(self._inputs)
            s.contexts = contexts.data_ptr()
            s.next_request, s.next_level, _ = contexts.stride()
        reached = get_library().trie_search(ctypes.addressof(s))
        return DescentResult(found_log_probs, found_paths, scored, list(used), list(lost), reached)


def _distances(paths: Tensor) -> tuple[int, int]:
    """Returns the elements between the paths [B, W, level] of two requests, and of two beams."""
    request, beam, node = paths.stride()
    assert node == 1 or paths.shape[2] < 2, "the last dimension of paths must be contiguous"
    return request, beam


def _requests(
    widths: Sequence[int], threshold_ranks: Sequence[int], filters: Sequence[LeafFilter | None]
) -> tuple[ctypes.Array[_Request], list[ctypes.Array[_Ranks]]]:
    """Returns structs of the requests, and the lists that they point to."""
    requests, lists = (_Request * len(widths))(), []
    each_request = zip(requests, widths, threshold_ranks, filters, strict=True)
    for request, width, rank, allowed in each_request:
        request.width, request.place = width, rank
        request.all = allowed is None or allowed.all
        if allowed is None:
            continue
        if (bits := allowed.bits) is not None:
            request.words, request.counts = bits.words.data_ptr(), bits.counts.data_ptr()
        if allowed.added is not None:
            request.added = _ranks(allowed.added)
        ranks = [_ranks(each) for each in allowed.excluded]
        lists.append((_Ranks * len(ranks))(*ranks))
        request.excluded, request.num_excluded = ctypes.addressof(lists[-1]), len(ranks)
    return requests, lists


def _ranks(ascending: Tensor) -> _Ranks:
    return _Ranks(ascending.data_ptr(), ascending.shape[0])


def _competing(candidates: ScoredCandidates | None, trie: Trie) -> _DenseCandidates:
    if candidates is None:
        return _DenseCandidates()
    leaf_rows = trie.leaf_rows
    names = ("rows", "valid", "scores", "share", "weights", "dense")
    return _DenseCandidates(
        count=candidates.rows.shape[1],
        num_rows=candidates.dense.shape[1],
        **{name: getattr(candidates, name).data_ptr() for name in names},
        **{
            "leaf_rows"
            if leaf_rows.dtype == torch.int32
            else "wide_leaf_rows": leaf_rows.data_ptr()
        },
    )
