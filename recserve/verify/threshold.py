"""Proposed items accepted where the target itself thinks them likely enough.

An item is accepted from a likelihood on, whatever else there is to choose from: so items that
training never saw, which no beam would keep, reach the slate. What is lacking is filled up with the
best beams. Source: SpecGR (Ding et al. 2024, arXiv 2410.02939), target-aware verification. Its
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

from recserve.core.beams import Beams
from recserve.core.diversity import first_k
from recserve.core.request import RecommendRequest, Slate
from recserve.core.sequence import Sequence
from recserve.kernels.trie_children import DEAD
from recserve.models.recommender import Recommender
from recserve.verify.scores import path_scores, root_scores

LIFT = 3.0  # accepted: so many times as likely as an item drawn blindly


@dataclass(frozen=True)
class Judged:
    """Verified items of B requests, in the order they were proposed.

    owners [n] request numbers, rows [n] item rows, log_probs [n] of their semantic ids, accepted
    [n].
    """

    owners: np.ndarray
    rows: np.ndarray
    log_probs: np.ndarray
    accepted: np.ndarray

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
    scores = root_scores(beams.trie, nodes, owners, beams.tails, model)
    scores = (scores + path_scores(beams.trie, nodes, owners, beams.scored, model)).float()
    accepted = scores >= math.log(LIFT / beams.trie.num_items)
    host = [part.cpu().numpy() for part in (owners, rows, scores, accepted)]
    return Judged(*host)


def lacking(judged: Judged, beams: Beams) -> list[int]:
    """Numbers of the requests with fewer than k accepted items that their caps allow."""
    numbers = []
    for b, sequence in enumerate(beams.sequences):
        request = _request(sequence)
        rows = judged.rows[judged.accepted & (judged.owners == b)]
        if first_k(rows, request.caps, request.k).size < request.k:
            numbers.append(b)
    return numbers


def only(beams: Beams, numbers: Seq[int]) -> Beams:
    """Beams that end for all requests but these."""
    ended = torch.ones(len(beams.sequences), dtype=torch.bool)
    ended[list(numbers)] = False
    dead = ended.to(beams.log_probs.device)[:, None]
    return replace(beams, log_probs=beams.log_probs.masked_fill(dead, DEAD))


def slates(beams: Beams, judged: Judged, dense: Tensor | None) -> list[Slate]:
    """The accepted items of each request, then the finished beams, both best first; k under its
    caps.

    dense [B, rows]: log-probability of every item under the dense head, which a request's
    `dense_weight` adds; None: none does. Equal scores in the order of item rows.
    """
    alive = beams.alive()
    leaves = torch.where(alive, beams.nodes, beams.trie.any_leaf)
    owners, rows = alive.nonzero()[:, 0], beams.trie.items_of_leaves(leaves).long()[alive]
    ended = Judged(*(x.cpu().numpy() for x in (owners, rows, beams.log_probs[alive], rows < 0)))
    every = judged.and_then(ended)
    scores = every.log_probs
    if dense is not None:
        at = (torch.from_numpy(x).to(dense.device) for x in (every.owners, every.rows))
        weights = np.array([_request(s).dense_weight for s in beams.sequences], np.float32)
        scores = scores + weights[every.owners] * dense[tuple(at)].float().cpu().numpy()
    standing = np.arange(scores.size) >= judged.rows.size
    standing |= every.accepted
    order = np.lexsort((every.rows, -scores, ~every.accepted))
    order = order[standing[order]]
    answers, rounds = [], beams.rounds.tolist()
    for b, sequence in enumerate(beams.sequences):
        mine = order[every.owners[order] == b]
        mine = mine[np.sort(np.unique(every.rows[mine], return_index=True)[1])]
        mine = mine[first_k(every.rows[mine], _request(sequence).caps, _request(sequence).k)]
        slate = Slate(every.rows[mine], scores[mine], False, rounds[b], sequence.timing)
        answers.append(slate)
    return answers


def _request(sequence: Sequence) -> RecommendRequest:
    assert isinstance(sequence.request, RecommendRequest)
    return sequence.request
