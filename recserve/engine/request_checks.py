"""Checks the numbers of a query when it is submitted, whoever made it.

A query of the service has passed the schemas before. One that Python code makes has not, and a
number that no search expects may keep the engine's thread for ever.
"""

from __future__ import annotations

import numpy as np

from recserve.core.field_checks import MAX_INT, check_array, check_float, check_int, check_ints
from recserve.core.request import (
    LikelihoodQuery,
    Prefix,
    PromptQuery,
    RankQuery,
    Request,
    SlateQuery,
    TextScoreQuery,
)
from recserve.speculation.completion import TextQuery


def check_numbers(request: Request | TextQuery) -> None:
    """Raises ValueError if a number of a query is out of its range. The message names the field."""
    if request.deadline_s is not None:
        check_float("deadline_s", request.deadline_s)
    match request:
        case SlateQuery():
            _check_slate(request)
        case LikelihoodQuery():
            check_ints("rows", request.rows, 0, request.trie.num_rows - 1)
        case RankQuery():
            if request.prefix_limits is not None:
                most = len(request.prefix.inputs)
                check_ints("prefix_limits", request.prefix_limits, 0, most)
                _check_size("prefix_limits", request.prefix_limits, len(request.candidates))
        case TextScoreQuery():
            _check_texts(request)
        case PromptQuery():
            check_ints("tokens", request.tokens, 0, MAX_INT)
            if not request.tokens.size:
                raise ValueError("tokens: expected at least one, got none")
            if request.num_top is not None:
                check_int("num_top", request.num_top, 0)
            check_int("group", request.group, 0)
        case TextQuery():
            check_int("priority", request.priority, -MAX_INT)
            check_int("group", request.group, 0)
            return  # its prompt is checked by its scheduler, and it has no prefix
    _check_prefix(request.prefix)


def _check_slate(request: SlateQuery) -> None:
    check_int("k", request.k, 1)
    check_int("beam_width", request.beam_width, 1)
    check_float("dense_weight", request.dense_weight, 0.0, 100.0)
    if request.excluded is not None:
        check_array("excluded", request.excluded)  # the search checks the rows themselves
    if (unwanted := request.unwanted) is not None:
        check_ints("unwanted.rows", unwanted.rows, 0, request.trie.num_rows - 1)
        _check_size("unwanted.amounts", unwanted.amounts, unwanted.rows.size)
    if request.scoring is not None:
        if request.strategy != "beam":
            raise ValueError(f"scoring: only strategy 'beam' has it, got {request.strategy!r}")
        if request.scoring.length_penalty and request.dense_weight:
            raise ValueError("scoring: a length_penalty needs dense_weight 0")
    for cap in request.caps:
        check_int("caps.limit", cap.limit, 1)
    if (shares := request.outcome) is not None:
        for share in np.ravel(shares):
            check_float("outcome", float(share), 0.0)
        if not np.sum(shares) > 0:
            raise ValueError(f"outcome: expected a share above 0, got {np.ravel(shares).tolist()}")


def _check_texts(request: TextScoreQuery) -> None:
    check_ints("tokens", request.tokens, 0, MAX_INT)
    check_ints("offsets", request.offsets, 0, request.tokens.size)
    offsets = request.offsets
    if offsets.size < 2 or offsets[0] or offsets[-1] != request.tokens.size:
        raise ValueError(f"offsets: expected 0 to {request.tokens.size}, got {offsets.tolist()}")
    if (np.diff(offsets) < 1).any():
        raise ValueError("offsets: expected ascending starts, one for each text with a token")
    for label in request.labels:
        check_int("labels", label, 0)
    check_int("group", request.group, 0)


def _check_prefix(prefix: Prefix) -> None:
    rows = len(prefix.inputs)
    _check_size("prefix.keys", prefix.keys, rows)
    check_int("prefix.shared", prefix.shared, 0, rows)


def _check_size(name: str, values: np.ndarray, size: int) -> None:
    if len(values) != size:
        raise ValueError(f"{name}: expected {size} values, got {len(values)}")
