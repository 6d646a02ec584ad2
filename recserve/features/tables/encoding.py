"""A history as tokens: the root of a recommender.

Token 0 begins the sequence; code c of level l is `1 + sum(codebook_sizes[:l]) + c`; a whole item,
in the
`items` form, is `1 + sum(codebook_sizes) + row`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from recserve.features.catalog.row_tables import Table

BOS = 0
InputForm = Literal["codes", "items"]


def window_start(num_events: int, max_items: int, block: int) -> int:
    """First event of the window that the model reads.

    A long history slides by whole blocks: the start stays the same for `block` events, and with
    it the cached root. The window holds between `max_items - block + 1` and `max_items` events.
    Raises ValueError unless 1 <= block <= max_items.
    """
    if not 1 <= block <= max_items:
        raise ValueError(f"block is {block}; expected 1..max_items, which is {max_items}")
    return max(0, -(-(num_events - max_items) // block) * block)


def level_offsets(codebook_sizes: tuple[int, ...]) -> np.ndarray:
    """[L + 1] int64 token of code 0 of each level; the last is the number of code tokens."""
    return np.concatenate([[0], np.cumsum(codebook_sizes)]).astype(np.int64) + 1


def root_tokens(
    rows: np.ndarray, codes: Table, codebook_sizes: tuple[int, ...], form: InputForm
) -> np.ndarray:
    """Tokens of a history, int64, BOS first: [1 + n * L] as `codes`, [1 + n] as `items`.

    rows: [n] item rows, oldest first. codes: [I, L], disambiguation level included.
    Raises ValueError if a row is out of range or the form is unknown.
    """
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= len(codes)):
        raise ValueError(
            f"item rows span {int(rows.min())}..{int(rows.max())}; the catalogue has {len(codes)}"
        )
    offsets = level_offsets(codebook_sizes)
    if form == "items":
        tokens = rows.astype(np.int64) + offsets[-1]
    elif form == "codes":
        tokens = (codes[rows] + offsets[:-1]).ravel()
    else:
        raise ValueError(f"form is {form!r}; expected 'codes' or 'items'")
    return np.concatenate([np.array([BOS], dtype=np.int64), tokens])
