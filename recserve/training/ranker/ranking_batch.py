"""Padded batches of the ranker: prefixes, their candidates and the attention mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.features.ranking.ranking import Columns, RankingPrefix, visible_rows
from recserve.models.inputs import NodeInputs
from recserve.models.ranker import node_inputs


@dataclass(frozen=True)
class RankingBatch:
    """B prefixes with their candidates, padded to N rows; candidates follow the prefix's padding.

    Attributes:
        inputs: Columns [B, N].
        limits: [B, N] number of leading rows that each row sees, besides itself.
        candidates: [M] positions of the candidates in the flattened [B * N], prefix after prefix.
        labels: [M, 2] click and conversion.
        weights: [M] weight of each candidate; None: 1 each.
        ranks: [M] rank at which a candidate was shown, 0 if it was not; None without impressions.
    """

    inputs: NodeInputs
    limits: Tensor
    candidates: Tensor
    labels: Tensor
    weights: Tensor | None = None
    ranks: Tensor | None = None

    def mask(self) -> Tensor:
        """Returns the [B, 1, N, N] bool mask; True where the row sees the column."""
        index = torch.arange(self.limits.shape[1], device=self.limits.device)
        itself = index[:, None] == index[None, :]
        return ((index < self.limits[..., None]) | itself)[:, None]

    def to(self, device: torch.device | str) -> RankingBatch:
        """Returns the batch on another device."""
        moved = {k: v.to(device) for k, v in vars(self.inputs).items()}
        return RankingBatch(
            NodeInputs(**moved),
            self.limits.to(device),
            self.candidates.to(device),
            self.labels.to(device),
            None if self.weights is None else self.weights.to(device),
            None if self.ranks is None else self.ranks.to(device),
        )


def pack(
    prefixes: list[RankingPrefix],
    candidates: Columns,
    limits: np.ndarray,
    sizes: np.ndarray,
    labels: np.ndarray,
) -> RankingBatch:
    """Pads B prefixes and their candidates into one batch.

    Args:
        prefixes: The B prefixes.
        candidates: Columns of M candidates, prefix after prefix.
        limits: [M] number of prefix rows that each candidate sees.
        sizes: [B] number of candidates of each prefix.
        labels: [M, 2] click and conversion.
    """
    prefix_width, width = max(map(len, prefixes)), int(sizes.max())
    shape = (len(prefixes), prefix_width + width)
    owner = np.repeat(np.arange(sizes.size), sizes)
    # Candidate c of a prefix goes to column prefix_width + c.
    place = prefix_width + np.arange(owner.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    columns = {}
    for name, values in candidates.arrays().items():
        whole = np.zeros((*shape, *values.shape[1:]), dtype=values.dtype)
        for row, prefix in zip(whole, prefixes, strict=True):
            row[: len(prefix)] = getattr(prefix.columns, name)
        whole[owner, place] = values
        columns[name] = whole
    seen = np.zeros(shape, dtype=np.int64)
    for row, prefix in zip(seen, prefixes, strict=True):
        row[: len(prefix)] = visible_rows(prefix)
    seen[owner, place] = limits
    return RankingBatch(
        node_inputs(columns),
        torch.from_numpy(seen),
        torch.from_numpy(owner * shape[1] + place),
        torch.from_numpy(labels),
    )
