"""Beam search down a trie on a CPU, in C: several levels in one call.

In torch a level is thirty small operators, which take longer to call than to compute. The same is
true for a step of a draft head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.cpu.half_panels import HalfPanels
from recserve.kernels.cpu.int8_panels import Int8Panels
from recserve.kernels.cpu.native import FLOAT, TYPES, N, P, Panels, Product, compiled
from recserve.kernels.trie.leaf_filter import LeafFilter
from recserve.kernels.trie.native_trie import NativeTrie, Prefixes

UNNEEDED, KNOWN, MISSING = range(3)
ANY = -1


@dataclass(frozen=True)
class LevelCodes:
    """Codes of a level [C, E], in the layouts for products with few codes and with all codes."""

    rows: Tensor
    panels: Panels | Int8Panels | HalfPanels

    @staticmethod
    def of(codes: Tensor, panels: Panels | Int8Panels | HalfPanels | None = None) -> LevelCodes:
        """Lays out codes [C, E], which must not change. panels: the packed codes if they exist."""
        return LevelCodes(codes.detach().contiguous(), panels or Panels.of(codes, None))


@dataclass(frozen=True)
class Cell:
    """One step of a recurrent head: tanh(inputs[code] + states U).

    Attributes:
        weight: U.
        inputs: [C, E].
    """

    weight: Panels
    inputs: Tensor


@dataclass(frozen=True)
class Limits:
    """Beam widths, bounds and filters of B requests.

    Attributes:
        widths: Beam width of each request.
        places: Rank (from 0) of the score that bounds the search. Negative means no bound.
        filters: Leaves that each request allows. None means all leaves.
    """

    widths: Sequence[int]
    places: Sequence[int]
    filters: Sequence[LeafFilter | None]


@dataclass(frozen=True)
class DenseCandidateScores:
    """Items of the dense head that compete with the finished beams.

    Attributes:
        rows: [B, R] int64 item rows.
        valid: [B, R].
        scores: [B, R].
        share: [B, 1] most that the dense head adds to an item that is no dense candidate.
        weights: [B, 1] weight of the dense score.
        dense: [B, I] dense scores of all items.
        leaf_rows: [I] int32 or int64 item row at each leaf rank.
    """

    rows: Tensor
    valid: Tensor
    scores: Tensor
    share: Tensor
    weights: Tensor
    dense: Tensor
    leaf_rows: Tensor


@dataclass(frozen=True)
class States:
    """Final hidden states.

    Attributes:
        last_hidden: [B, E] of the last root tokens.
        keys: [n] int64 ascending keys of scored prefixes: `request number * nodes of the trie +
            trie node`.
        hidden: [n, E] of these prefixes.
        contexts: [B, L, E] that a draft head reads at each level in addition to its own state.
    """

    last_hidden: Tensor
    keys: Tensor | None = None
    hidden: Tensor | None = None
    contexts: Tensor | None = None


@dataclass(frozen=True)
class Levels:
    """Beams of each level 0 : L + 1, best first, filled from the first level of a search to
    `reached`.

    Attributes:
        log_probs: [L + 1, B, W], -inf where there is no beam.
        paths: [L + 1, B, W, L] int64 nodes of each beam's prefixes, as many as the level.
        scored: [L + 1, B, W] uint8: UNNEEDED, or KNOWN or MISSING for a needed state.
        used: [L + 1] columns in use, at least 1.
        lost: [B] best score of a beam whose state was missing, -inf where none was.
        reached: The last level that all requests reached.
    """

    log_probs: Tensor
    paths: Tensor
    scored: Tensor
    used: Sequence[int]
    lost: Sequence[float]
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


def passed_prefixes(
    found: Levels, first: int, all_nodes: int, which: int, floors: Sequence[float]
) -> Tensor:
    """Returns the keys [n] of beams, each with all nodes above it; duplicates occur.

    Args:
        found: Result of a search.
        first: First level. The last level that was reached is not included.
        all_nodes: Nodes of the trie.
        which: KNOWN or MISSING of `scored`, or ANY.
        floors: [B] scores. Beams with lower scores are left out.
    """
    paths, limits = found.paths, (FLOAT * len(floors))(*floors)
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
    return keys[: compiled().passed_prefixes(ctypes.addressof(passed))]


class NativeSearch:
    """Beam search by the logits of one model's states, or by a draft head."""

    def __init__(self, levels: Sequence[LevelCodes], cells: Sequence[Cell] = ()) -> None:
        """Collects the addresses of the weights.

        Args:
            levels: [L] codes of each level.
            cells: [L - 1] of a recurrent head; empty without one.
        """
        # C reads these by address, so they must live as long as this object
        self._read = tuple(levels), tuple(cells)
        self._heads = (Product * len(levels))(*(level.panels.product for level in levels))
        self._codes = (P * len(levels))(*(level.rows.data_ptr() for level in levels))
        self._cells = (Product * len(cells))(*(cell.weight.product for cell in cells))
        self._inputs = (P * len(cells))(*(cell.inputs.data_ptr() for cell in cells))

    def __call__(
        self,
        trie: NativeTrie,
        beams: Prefixes,
        limits: Limits,
        states: States,
        until: int,
        dense_candidates: DenseCandidateScores | None = None,
        stops: bool = False,
    ) -> Levels:
        """Searches from the given beams on.

        Args:
            trie: The catalogue's trie.
            beams: Beams of the first level.
            limits: Beam widths, bounds and filters of the requests.
            states: Hidden states.
            until: The last level.
            dense_candidates: Items that compete with the finished beams. None means that there are
                none.
            stops: Whether to stop at the first level at which a state is missing. Otherwise beams
                without a state have no children.
        """
        batch, width, level = beams.paths.shape
        depth, columns = len(self._heads), max(width, *limits.widths)
        log_probs = torch.empty(depth + 1, batch, columns)
        paths = torch.empty(depth + 1, batch, columns, depth, dtype=torch.int64)
        scored = torch.empty(depth + 1, batch, columns, dtype=torch.uint8)
        used, lost = (N * (depth + 1))(), (FLOAT * batch)()
        last_hidden, scores = states.last_hidden.contiguous(), beams.log_probs.contiguous()
        asked, competing = _requests(limits), _dense_candidates(dense_candidates)
        s = _Search(
            trie.address,
            ctypes.addressof(asked.requests),
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
            scores.data_ptr(),
            beams.paths.data_ptr(),
            *beams.distances,
            last_hidden.data_ptr(),
        )
        s.columns, s.log_probs, s.paths = columns, log_probs.data_ptr(), paths.data_ptr()
        s.scored, s.used = scored.data_ptr(), ctypes.addressof(used)
        s.lost = ctypes.addressof(lost)
        hidden, keys, contexts = states.hidden, states.keys, states.contexts
        if hidden is not None and keys is not None:
            hidden = hidden.contiguous()
            s.hidden, s.keys, s.num_keys = hidden.data_ptr(), keys.data_ptr(), keys.shape[0]
        if contexts is not None:
            assert contexts.stride(2) == 1, "the last dimension of contexts must be contiguous"
            if len(self._cells):
                s.cells, s.inputs = ctypes.addressof(self._cells), ctypes.addressof(self._inputs)
            s.contexts = contexts.data_ptr()
            s.next_request, s.next_level, _ = contexts.stride()
        reached = compiled().trie_search(ctypes.addressof(s))
        return Levels(log_probs, paths, scored, list(used), list(lost), reached)


@dataclass(frozen=True)
class _SearchArguments:
    """Structs of the requests, and the lists that they point to."""

    requests: ctypes.Array[_Request]
    lists: list[ctypes.Array[_Ranks]]


def _requests(limits: Limits) -> _SearchArguments:
    requests, lists = (_Request * len(limits.widths))(), []
    columns = zip(requests, limits.widths, limits.places, limits.filters, strict=True)
    for request, width, place, allowed in columns:
        request.width, request.place = width, place
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
    return _SearchArguments(requests, lists)


def _ranks(ascending: Tensor) -> _Ranks:
    return _Ranks(ascending.data_ptr(), ascending.shape[0])


def _dense_candidates(dense_candidates: DenseCandidateScores | None) -> _DenseCandidates:
    if dense_candidates is None:
        return _DenseCandidates()
    leaf_rows = "leaf_rows" if dense_candidates.leaf_rows.dtype == torch.int32 else "wide_leaf_rows"
    names = ("rows", "valid", "scores", "share", "weights", "dense")
    return _DenseCandidates(
        count=dense_candidates.rows.shape[1],
        num_rows=dense_candidates.dense.shape[1],
        **{name: getattr(dense_candidates, name).data_ptr() for name in names},
        **{leaf_rows: dense_candidates.leaf_rows.data_ptr()},
    )
