"""Full beam search as a verifier: children of the scored prefixes, the best W of them kept.

Ties go to the lower trie node, which is the lexicographically smaller semantic id.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recserve.core.beams import Beams, nothing_scored
from recserve.core.filtering import leaf_filter
from recserve.core.request import RecommendRequest
from recserve.core.selection import DEAD, keep_best
from recserve.core.sequence import Sequence
from recserve.draft.beam import wanted
from recserve.draft.prefixes import PrefixDraft
from recserve.models.recommender import Recommender


def start(sequences: tuple[Sequence, ...], model: Recommender) -> Beams:
    """Level 1 beams of requests over one trie, from the hidden state of their last root token."""
    beams = begin(sequences)
    rows = torch.arange(len(sequences), device=beams.tails.device)
    return advance(expand(beams, rows, beams.tails, model), model)


def begin(sequences: tuple[Sequence, ...]) -> Beams:
    """Level 0: the empty prefix of each request."""
    requests = [_request(s) for s in sequences]
    trie = requests[0].trie
    tails = torch.stack([s.tail for s in sequences if s.tail is not None])
    assert tails.shape[0] == len(sequences), "a root is not computed"
    top = torch.zeros(len(sequences), 1, dtype=torch.int64, device=tails.device)
    return Beams(
        sequences,
        tuple(leaf_filter(trie, r.excluded, r.allowed) for r in requests),
        trie,
        0,
        top,
        torch.zeros(top.shape, device=tails.device),
        top[..., :0, None].reshape(len(sequences), 1, 0),
        top,
        tails,
        nothing_scored(tails),
        torch.zeros(len(sequences), dtype=torch.int64, device=tails.device),
    )


def verify(
    beams: Beams, draft: PrefixDraft, slots: Tensor, hidden: Tensor, model: Recommender
) -> Beams:
    """Beams as many levels deeper as the scored prefixes prove.

    slots [T]: pool slot of every node of the draft; hidden [Tq, E] of its computed nodes.
    """
    return advance(record(beams, draft, slots, hidden), model)


def record(beams: Beams, draft: PrefixDraft, slots: Tensor, hidden: Tensor) -> Beams:
    """Beams that know the scored prefixes of a draft.

    slots [T]: pool slot of every node of the draft; hidden [Tq, E] of its computed nodes.
    """
    assert draft.queries is not None and draft.query_keys is not None
    scored = beams.scored.add(draft.query_keys, slots[draft.queries], hidden)
    owners = draft.query_keys // beams.trie.num_nodes
    worked = torch.bincount(owners, minlength=len(beams.sequences)).clamp(max=1)
    return replace(beams, scored=scored, rounds=beams.rounds + worked)


def advance(beams: Beams, model: Recommender) -> Beams:
    """Level by level while every beam that must be scored is scored: then the best W children are
    those of full beam search, whoever drafted them.
    """
    while not beams.finished and (deeper := one_level_deeper(beams, model)) is not None:
        beams = deeper
    return beams


def one_level_deeper(beams: Beams, model: Recommender) -> Beams | None:
    """None where a beam that must be scored is not."""
    skip_single = model.config.normalization == "children"
    rows = wanted(beams, skip_single).flatten().nonzero().flatten()
    found = beams.scored.find(beams.keys(beams.nodes).flatten()[rows])
    if bool((found < 0).any()):
        return None
    return expand(beams, rows, beams.scored.hidden[found], model)


def expand(beams: Beams, rows: Tensor, hidden: Tensor, model: Recommender) -> Beams:
    """All allowed children of all beams, the best W of each request.

    rows [P]: beams scored by the model, as indices into [B * W]; hidden [P, E] at their last node.
    """
    batch, width = beams.nodes.shape
    trie = beams.trie
    children = trie.children(beams.nodes.flatten())
    gain = torch.zeros(children.nodes.shape, device=beams.log_probs.device)
    if rows.shape[0]:
        codes, valid = children.codes[rows].long(), children.valid[rows]
        gain[rows] = level_log_probs(model, hidden, beams.level, codes, valid)
    widths = [beam_width(_request(s)) for s in beams.sequences]
    total = (beams.log_probs.flatten()[:, None] + gain).masked_fill(~children.valid, DEAD)
    return keep_best(beams, children.nodes.view(batch, -1), total.view(batch, -1), widths)


def level_log_probs(
    model: Recommender, hidden: Tensor, level: int, codes: Tensor, valid: Tensor
) -> Tensor:
    """Log-probabilities of the given codes at one level.

    hidden [n, E], codes and valid [n, M] -> [n, M] float32, meaningless where not valid. Normalised
    over the valid codes of the row, or over the whole vocabulary, as the model was trained.
    """
    if model.config.normalization == "children":
        logits = model.level_logits(hidden, level).float().gather(1, codes)
        return logits.masked_fill(~valid, DEAD).log_softmax(-1)
    logits = model.full_logits(hidden).float()
    return logits.log_softmax(-1).gather(1, codes + model.config.level_offsets[level])


def beam_width(request: RecommendRequest) -> int:
    """Beams kept: as asked, and never fewer than the items wanted."""
    return max(request.beam_width, request.k)


def _request(sequence: Sequence) -> RecommendRequest:
    assert isinstance(sequence.request, RecommendRequest)
    return sequence.request
