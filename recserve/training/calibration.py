"""Calibration of a draft head: where it ranks the beams of validation users."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.beams import Beams
from recserve.core.drafting import Draft
from recserve.core.sequence import Sequence
from recserve.draft.beam import wanted
from recserve.draft.nezha import likely_beams
from recserve.engine.strategies.beam import BeamStrategy
from recserve.kernels.trie import Trie
from recserve.models.drafters.calibration import Calibration, DraftPlan
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.training.cases import Cases
from recserve.training.slates import SlateOptions, Slates

WIDTHS = (10, 50, 200)
USERS = 150
REACH = 8  # widest draft, in beam widths
COVERED = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)


@dataclass(frozen=True)
class _Level:
    """One level of B users. needed [B]: prefixes that beam search scores. worst [B]: how far down
    the head's list the last of its beams stands that fork below. listed [B, R]: how many of the
    head's first 1, 2, ... prefixes fork, so that drafting them costs a node.
    """

    needed: Tensor
    worst: Tensor
    listed: Tensor


class _Observer(BeamStrategy):
    """Beam search that writes down where the head ranks the beams."""

    def __init__(self, model: Recommender, head: SelfDraftHead, width: int) -> None:
        super().__init__(model)
        self.head, self.reach = head, REACH * width
        self.likely: dict[int, list[Beams]] = {}
        self.users: list[dict[int, _Level]] = []

    def start(self, sequences: Seq[Sequence]) -> Beams:
        """As beam search."""
        beams = super().start(sequences)
        by_level = [[self.reach] * len(sequences)] * self.model.config.num_levels
        self.likely[id(beams.sequences)] = list(likely_beams(beams, self.head, by_level))
        self.users.append({})
        return beams

    def propose(self, state: Beams) -> Draft:
        """As beam search; what it needs is looked up in the head's list."""
        drafted = next(d for d in self.likely[id(state.sequences)] if d.level == state.level)
        trie = state.trie
        below = trie.leaves(state.nodes)
        looked_for = (below.last - below.first > 1) & state.alive()
        same = drafted.nodes[:, None, :] == state.nodes[:, :, None]
        rank = torch.where(same.any(-1), same.int().argmax(-1) + 1, self.reach + 1)
        self.users[-1][state.level] = _Level(
            wanted(state, self.skip_single).sum(1),
            torch.where(looked_for, rank, 0).amax(1),
            wanted(drafted, self.skip_single).cumsum(1),
        )
        return super().propose(state)


def calibrate(
    head: SelfDraftHead,
    target: Recommender,
    trie: Trie,
    codes: NDArray[np.generic],
    cases: Cases,
) -> Calibration:
    """Plans for each of WIDTHS: the widths that hold all true beams of a level for a share of the
    users, the same share at each level, and what they cost these users in nodes and rounds.

    cases: up to USERS of them are asked.
    """
    cases = cases.sample(USERS)
    plans = {}
    for width in WIDTHS:
        observer = _Observer(target, head, width)
        slates = Slates(target, trie, codes)
        slates.engine.offer("beam", observer)
        for which in cases.batches(slates.engine.config.max_running):
            slates.answers(cases, which, 10, SlateOptions(width))
        levels = target.config.num_levels
        users = [_padded(found, levels, observer.reach) for found in observer.users]
        plans[width] = _plans([torch.cat(part, dim=1) for part in zip(*users, strict=True)], width)
    return Calibration(plans)


def _padded(found: dict[int, _Level], levels: int, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """needed, worst [L, B] and listed [L, B, R], 0 at levels that beam search passed over."""
    size = next((level.needed.shape[0] for level in found.values()), 0)
    needed, worst = torch.zeros(2, levels, size, dtype=torch.int64)
    listed = torch.zeros(levels, size, reach, dtype=torch.int64)
    for number, level in found.items():
        needed[number], worst[number] = level.needed, level.worst
        listed[number, :, : level.listed.shape[1]] = level.listed
        listed[number, :, level.listed.shape[1] :] = level.listed[:, -1:]
    return needed, worst, listed


def _plans(observed: list[Tensor], width: int) -> tuple[DraftPlan, ...]:
    """observed: needed, worst [L, U] and listed [L, U, R]."""
    needed, worst, listed = observed
    rounds = (needed > 0).sum(0).double()
    if not rounds.numel():
        return (DraftPlan((), 0.0, 0.0, 1.0),)
    nodes = float(needed.sum(0).double().mean())
    proved = float((rounds <= 1).double().mean())
    plans = [DraftPlan((), nodes, max(float(rounds.mean()) - 1, 0.0), proved)]
    for share in COVERED:
        kept = torch.quantile(worst.double(), share, dim=1, interpolation="higher").long()
        kept = kept.clamp(min=width, max=listed.shape[2])
        kept[:2] = 0
        missed = (worst > kept[:, None])[2:].sum(0).double()
        ahead = listed[2:].gather(2, (kept[2:, None, None] - 1).expand(-1, listed.shape[1], 1))
        plan = DraftPlan(
            tuple(round(count / width, 4) for count in kept.tolist()),
            float((needed[1] + ahead[..., 0].sum(0)).double().mean()),
            float(missed.mean()),
            float((missed == 0).double().mean()),
        )
        if plan.spreads != plans[-1].spreads:
            plans.append(plan)
    return tuple(plans)
