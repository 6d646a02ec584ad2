"""Nearest neighbours of vectors made from the root's last state; nothing is scored in a tree."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from recserve.core.request import RecommendRequest, Result, Slate
from recserve.core.sequence import Sequence
from recserve.draft.dense import Retrieved, queries_of, retrieve, split_budgets
from recserve.engine.strategies.at_once import AtOnce
from recserve.engine.strategies.beam import request_of
from recserve.kernels.host import on_device
from recserve.models.dense_retriever import DenseRetriever


@dataclass(frozen=True)
class Retrievals:
    """Requests and the items that were found for them."""

    sequences: tuple[Sequence, ...]
    found: list[Retrieved]


class DenseStrategy(AtOnce):
    """One vector per outcome and time offset, the nearest items of all of them; no round at all.

    Scores are cosines times the retriever's scale: the logits of its training softmax.
    """

    def __init__(self, retriever: DenseRetriever) -> None:
        self.retriever = retriever
        self.scale = np.float32(retriever.scale.item())

    def start(self, sequences: Seq[Sequence]) -> Retrievals:
        """All of the work: one pass through the head, one search for all requests."""
        began = time.perf_counter()
        requests = [request_of(sequence) for sequence in sequences]
        index = requests[0].index
        if index is None:
            raise ValueError("strategy 'dense' needs the index of the catalogue's item vectors")
        config = self.retriever.config
        shares = np.stack([_shares(r, config.outcome_shares) for r in requests])
        pairs = shares[:, :, None] * np.array(config.offset_shares)
        places = np.array([request.k for request in requests])
        budgets = split_budgets(pairs.reshape(len(requests), -1), places)
        used = np.flatnonzero(budgets.any(0))
        tails = torch.stack([s.tail for s in sequences if s.tail is not None])
        outcomes, offsets = (
            on_device(part, tails.device) for part in np.divmod(used, len(config.offset_bounds))
        )
        vectors = self.retriever.queries(tails[:, None], outcomes, offsets)
        found = retrieve(queries_of(vectors, budgets[:, used]), index, requests)
        for sequence in sequences:
            sequence.timing.draft_ms += (time.perf_counter() - began) * 1e3
        return Retrievals(tuple(sequences), found)

    def finish(self, state: Retrievals) -> list[Result]:
        """Slates, not those of beam search."""
        return [
            Slate(found.rows, found.cosines * self.scale, False, 0, sequence.timing)
            for found, sequence in zip(state.found, state.sequences, strict=True)
        ]


def _shares(request: RecommendRequest, default: tuple[float, ...]) -> np.ndarray:
    """[O] share of each outcome. Raises ValueError for a mix of another length."""
    shares = np.array(default) if request.outcome is None else request.outcome
    if shares.shape != (len(default),):
        raise ValueError(f"outcome is {shares.shape}; the retriever has {len(default)} outcomes")
    return np.asarray(shares / shares.sum())
