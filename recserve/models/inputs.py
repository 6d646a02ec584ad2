"""Inputs of a model: packed columns with one row per prefix token or tree node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NodeInputs:
    """Columns of n rows. Only the ranker uses columns other than `tokens`; they are None elsewhere.

    Attributes:
        tokens: [n] int64 token numbers (recommender, text) or item rows (ranker).
        groups: [n] int64 token group of MTGR: 0 profile, 1 long history, 2 recent events, 3
            candidate.
        types: [n] int64 event type.
        times: [n] int64 microseconds, or position.
        dense: [n, F] float32 side information and cross features.
    """

    tokens: Tensor
    groups: Tensor | None = None
    types: Tensor | None = None
    times: Tensor | None = None
    dense: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, index: Tensor | slice) -> NodeInputs:
        """Returns the rows at `index`, in that order."""
        kept: dict[str, Any] = {}
        for f in fields(self):
            column = getattr(self, f.name)
            kept[f.name] = None if column is None else column[index]
        return replace(self, **kept)

    @staticmethod
    def cat(parts: Sequence[NodeInputs]) -> NodeInputs:
        """Concatenates rows in order. A column must be present in all parts or in none."""
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, Any] = {}
        for f in fields(NodeInputs):
            values = [getattr(part, f.name) for part in parts]
            columns[f.name] = None if values[0] is None else torch.cat(values)
        return replace(parts[0], **columns)
