"""Prefix templates: how the history of a user becomes the tokens of a prefix.

A template is a part of its model, because a network reads only the form that it was trained with.
`HistoryTemplate` is that of `models/recommender.py`:

- Token 0 begins the sequence.
- Code c of level l is token `1 + sum(codebook_sizes[:l]) + c`.
- A whole item, in the `items` form, is token `1 + sum(codebook_sizes) + row`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from recserve.models.config import RecommenderConfig

BOS = 0
Ints = NDArray[np.int64]
InputForm = Literal["codes", "items"]


class CodeTable(Protocol):
    """Semantic ids [I, L] by item row: an array, or a live catalogue's."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


class PrefixTemplate(Protocol):
    """How a history becomes the tokens of a prefix. Nothing else knows their form.

    The search begins after the last token. The tokens of codes below it are `level_offsets` of the
    model's configuration.
    """

    @property
    def max_items(self) -> int:
        """Most events of a history in a prefix. The callers cut longer histories."""
        ...

    @property
    def first_item(self) -> int | None:
        """Token of item row 0, after all other tokens. None if no token stands for an item."""
        ...

    @property
    def block(self) -> int:
        """Number of events by which the window of a longer history slides.

        A larger one leaves a prefix cached for several events; 1 gives exactly the last events.
        """
        ...

    @property
    def grows(self) -> bool:
        """Whether the tokens of a longer history begin with those of a shorter one.

        A template that ends prefixes with tokens of their own does not grow.
        """
        ...

    def tokens(self, rows: np.ndarray, codes: CodeTable, user: str | None = None) -> Ints:
        """Returns int64 tokens, at least one.

        Args:
            rows: [n] item rows of the events, oldest first.
            codes: [I, L] semantic ids of the catalogue version.
            user: Id of the user. None if the request names none.

        Raises:
            ValueError: If a row is out of range.
        """
        ...


class HistoryTemplate:
    """The begin token and the items, either L code tokens each or one token each.

    Attributes:
        max_items: Most events in a prefix.
        first_item: Token of item row 0 in the `items` form. None in the `codes` form.
        block: A quarter of `max_items`.
        grows: True.
    """

    grows = True

    def __init__(self, codebook_sizes: tuple[int, ...], form: InputForm, max_items: int) -> None:
        self.max_items, self.block = max_items, max(1, max_items // 4)
        offsets = np.concatenate([[0], np.cumsum(codebook_sizes)]).astype(np.int64) + BOS + 1
        self.first_item = int(offsets[-1]) if form == "items" else None
        self._offsets = offsets[:-1]

    @staticmethod
    def of(config: RecommenderConfig) -> HistoryTemplate:
        """Returns the template of a recommender."""
        return HistoryTemplate(config.codebook_sizes, config.input, config.max_history_items)

    def tokens(self, rows: np.ndarray, codes: CodeTable, user: str | None = None) -> Ints:
        """Returns [1 + n * L] tokens of the `codes` form, [1 + n] of `items`. No user has tokens.

        See `PrefixTemplate`.
        """
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= len(codes)):
            raise ValueError(
                f"item rows span {int(rows.min())}..{int(rows.max())}; the catalogue has "
                f"{len(codes)}"
            )
        if self.first_item is None:
            tokens = (codes[rows] + self._offsets).ravel()
        else:
            tokens = rows.astype(np.int64) + self.first_item
        return np.concatenate([np.array([BOS], dtype=np.int64), tokens])
