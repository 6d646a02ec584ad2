"""Encodes a history as tokens, which form the recommender's prefix.

Token ids are laid out as follows:

- Token 0 begins the sequence.
- Code c of level l is token `1 + sum(codebook_sizes[:l]) + c`.
- A whole item, in the `items` form, is token `1 + sum(codebook_sizes) + row`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from recserve.features.tables.arrays import Table

BOS = 0
InputForm = Literal["codes", "items"]


def window_start(num_events: int, max_items: int, block: int) -> int:
    """Returns the first event of the window that the model reads.

    The window of a long history moves by whole blocks. Its start stays the same for `block` events,
    and so the cached prefix stays valid. The window then holds between `max_items - block + 1` and
    `max_items` events.

    Args:
        num_events: Length of the history.
        max_items: Largest window, in events.
        block: Events by which the window moves.

    Raises:
        ValueError: Unless 1 <= block <= max_items.
    """
    if not 1 <= block <= max_items:
        raise ValueError(f"block is {block}; expected 1..{max_items} (max_items)")
    # Round the number of events before the window up to whole blocks.
    return max(0, -(-(num_events - max_items) // block) * block)


def level_offsets(codebook_sizes: tuple[int, ...]) -> np.ndarray:
    """Returns [L + 1] int64: the token of each level's code 0, then the end of the code tokens."""
    return np.concatenate([[0], np.cumsum(codebook_sizes)]).astype(np.int64) + 1


def history_tokens(
    rows: np.ndarray, codes: Table, codebook_sizes: tuple[int, ...], form: InputForm
) -> np.ndarray:
    """Returns the tokens of a history, BOS first.

    Args:
        rows: [n] item rows, oldest first.
        codes: [I, L] semantic ids, disambiguation level included.
        codebook_sizes: Codes of each of the L levels.
        form: `codes` writes L tokens per item, `items` writes one.

    Returns:
        int64 tokens, [1 + n * L] for `codes` and [1 + n] for `items`.

    Raises:
        ValueError: If a row is out of range or the form is unknown.
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
