"""Proposed items accepted where the target itself thinks them likely enough.

An item is accepted from a likelihood on, whatever else there is to choose from: so items that
training never saw, which no beam would keep, reach the slate. They keep the retriever's order,
because a likelihood ranks items it never saw behind all others. What is lacking is filled up with
the best beams. Source: SpecGR (Ding et al. 2024, arXiv 2410.02939), target-aware verification. Its
bound is a constant per dataset; ours is relative to an item drawn blindly, so that it means the
same in a catalogue of any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recserve.core.diversity import first_k
from recserve.core.finite import NotFinite
from recserve.core.request import Continuation, Slate, SlateQuery
from recserve.core.sequence import Sequence
from recserve.kernels.trie.trie_children import DEAD
from recserve.models.recommender import Recommender
from recserve.search.beams import Beams
from recserve.search.capped import answer, with_chosen
from recserve.search.scores import path_scores, root_scores

LIFT = 3.0  # accepted: so many times as likely as an item drawn blindly


@dataclass(frozen=True)
class Judged:
    """Verified items of B requests, in the order they were proposed.

    owners [n] request numbers, rows [n] item rows, log_probs [n] of their semantic ids, accepted
    [n] bool.
    """

    owners: np.ndarray
    rows: np.ndarray
    log_probs: np.ndarray
    accepted: np.ndarray

    def at(self, places: np.ndarray) -> Judged:
        """Those at the given places."""
        return Judged(
            self.owners[places], self.rows[places], self.log_probs[places], self.accepted[places]
        )

    def likeliest_first(self) -> Judged:
        """The same, by log-probability; equal ones in the order of item rows."""
        return self.at(np.lexsort((self.rows, -self.log_probs)))

    def and_then(self, later: Judged) -> Judged:
        """These and those."""
        return Judged(
            np.concatenate([self.owners, later.owners]),
            np.concatenate([self.rows, later.rows]),
            np.concatenate([self.log_probs, later.log_probs]),
            np.concatenate([self.accepted, later.accepted]),
        )


NONE_JUDGED = Judged(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, bool)
)


def judge(beams: Beams, owners: Tensor, rows: Tensor, model: Recommender) -> Judged:
    """Items all of whose prefixes are scored. owners, rows [n] as in DraftedItems."""
    nodes = beams.trie.nodes_of_items(rows)
    log_probs = root_scores(beams.trie, nodes, owners, beams.tails, model)
    log_probs = log_probs + path_scores(beams.trie, nodes, owners, beams.scored, model)
    accepted = log_probs >= math.log(LIFT / beams.trie.num_items)
    return _on_host(owners, rows, log_probs, accepted)


def lacking(judged: Judged, beams: Beams) -> list[int]:
    """Numbers of the requests with fewer than k accepted items that their caps allow."""
    numbers = []
    for b, sequence in enumerate(beams.sequences):
        request = _request(sequence)
        rows = with_chosen(sequence, judged.rows[judged.accepted & (judged.owners == b)])
        if first_k(rows, request.caps, request.k).size < request.k:
            numbers.append(b)
    return numbers


def only(beams: Beams, numbers: Seq[int]) -> Beams:
    """Beams that end for all requests but these."""
    ended = torch.ones(len(beams.sequences), dtype=torch.bool)
    ended[list(numbers)] = False
    dead = ended.to(beams.log_probs.device)[:, None]
    return replace(beams, log_probs=beams.log_probs.masked_fill(dead, DEAD))


def slates(beams: Beams, judged: Judged) -> list[Slate | Continuation | NotFinite]:
    """The accepted items of each request as they came, then the finished beams, likeliest first; k
    under its caps. What another search finds stands behind them in the same order.
    """
    alive = beams.alive()
    rows = beams.trie.items_of_leaves(torch.where(alive, beams.nodes, beams.trie.any_leaf))
    owners, rows, log_probs = alive.nonzero()[:, 0], rows.long()[alive], beams.log_probs[alive]
    found = _on_host(owners, rows, log_probs, torch.ones_like(rows, dtype=torch.bool))
    every = judged.at(judged.accepted).and_then(found.likeliest_first())
    answers: list[Slate | Continuation | NotFinite] = []
    counts = alive.sum(1).float()
    kept = (counts if beams.flaws is None else counts + beams.flaws).tolist()
    for b, sequence in enumerate(beams.sequences):
        if math.isnan(kept[b]):
            answers.append(NotFinite())
            continue
        mine = every.at(every.owners == b)
        mine = mine.at(np.sort(np.unique(mine.rows, return_index=True)[1]))
        complete = kept[b] < _request(sequence).width
        answers.append(
            answer(sequence, mine.rows, mine.log_probs, complete, exact=False, ranked=False)
        )
    return answers


def _on_host(owners: Tensor, rows: Tensor, log_probs: Tensor, accepted: Tensor) -> Judged:
    columns = (owners, rows, log_probs.float(), accepted)
    return Judged(*(column.cpu().numpy() for column in columns))


def _request(sequence: Sequence) -> SlateQuery:
    assert isinstance(sequence.request, SlateQuery)
    return sequence.request
