"""Queries that score or embed given tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recserve.core.request import Prefix, PromptQuery
from recserve.models.inputs import NodeInputs


def prefix_of(tokens: Sequence[int]) -> Prefix:
    """Returns a prefix of tokens."""
    keys = np.array(tokens, np.int64)
    return Prefix(NodeInputs(torch.from_numpy(keys)), keys)


def prompt_query(
    tokens: Sequence[int], num_top: int | None = None, mean: bool = False
) -> PromptQuery:
    """Returns a query about a prompt's own tokens."""
    return PromptQuery(prefix_of(()), np.array(tokens, np.int64), num_top, mean)
