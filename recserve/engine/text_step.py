"""One step of some texts: their drafts as one packed batch, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.core.sampling_table import SamplingTable
from recserve.core.target import Target
from recserve.core.text import Accepted, ScoredTrees, TextDraft
from recserve.core.text_request import TokenLogprobs
from recserve.engine.runner import Piece
from recserve.engine.text_sequence import TextSequence
from recserve.kernels.tree import CANDIDATE, TokenTree
from recserve.models.inputs import NodeInputs
from recserve.verify.rules import verify


@dataclass(frozen=True)
class TextGroup:
    """Texts judged by one rule, with their drafts, in the same order."""

    rule: str
    sequences: list[TextSequence]
    drafts: list[TextDraft]
    table: SamplingTable

    def piece(self, device: torch.device) -> Piece:
        """The packed trees, placed where their path will stay if it is the first of each."""
        tree = self.tree(device)
        roots = tuple(s.slots[: s.length - 1] for s in self.sequences)
        return Piece(tree, NodeInputs(tree.tokens), None, self.slots(), roots)

    def tree(self, device: torch.device) -> TokenTree:
        """The packed trees."""
        last = [s.context.tokens[-1] for s in self.sequences]
        return under_last_tokens(last, self.drafts, device)

    def slots(self) -> Tensor:
        """[T] the slot of each node."""
        slots = [
            s.slots[s.length - 1 : s.length + len(d)]
            for s, d in zip(self.sequences, self.drafts, strict=True)
        ]
        return torch.cat(slots)

    def judge(self, tree: TokenTree, logits: Tensor) -> Accepted:
        """What is kept. logits [T, V] raw."""
        depth = max(draft.depth for draft in self.drafts)
        contexts = [s.context for s in self.sequences]
        counts = [s.token_counts for s in self.sequences]
        lengths = torch.tensor([s.length for s in self.sequences], device=logits.device)
        scored = ScoredTrees(
            tree,
            depth,
            Target(logits, tree, depth, self.table, contexts, counts),
            self.table.seeds,
            lengths,
            tuple(draft.drawing for draft in self.drafts),
            logits.shape[1],
            draft_probs(self.drafts, logits),
            self.table.greedy,
        )
        return verify(self.rule, scored)


def under_last_tokens(
    last: Seq[int], drafts: Seq[TextDraft], device: torch.device | str
) -> TokenTree:
    """Trees of node 0, the last committed token, and the draft below it.

    last [B] tokens. Returns B trees of `1 + n` nodes each, packed, on the device.
    """
    sizes = torch.tensor([len(draft) for draft in drafts])
    starts = torch.arange(len(drafts)) + sizes.cumsum(0) - sizes
    total = int(sizes.sum()) + len(drafts)
    offsets = torch.cat([starts, torch.tensor([total])]).to(device)
    tokens = torch.empty(total, dtype=torch.int64, device=device)
    tokens[offsets[:-1]] = torch.tensor(last, dtype=torch.int64, device=device)
    parents = torch.full_like(tokens, -1)
    depths, size = torch.zeros_like(tokens), torch.ones_like(tokens)
    kinds: Tensor | None = None
    if total > len(drafts):
        owners = torch.arange(len(drafts)).repeat_interleave(sizes)
        places = (torch.arange(total - len(drafts)) + owners + 1).to(device)
        tokens[places] = _column([draft.tokens for draft in drafts], device)
        above = _column([draft.parents for draft in drafts], device)
        parents[places] = above + starts[owners].to(device) + 1
        if any(draft.kinds is not None for draft in drafts):
            kinds = torch.full_like(tokens, CANDIDATE)
            neutral = [torch.full_like(draft.tokens, CANDIDATE) for draft in drafts]
            pairs = zip(drafts, neutral, strict=True)
            kinds[places] = _column([n if d.kinds is None else d.kinds for d, n in pairs], device)
    node = parents
    for _ in range(max(draft.depth for draft in drafts)):
        inside = node >= 0
        depths += inside
        size.index_add_(0, node.clamp(min=0), inside.to(size.dtype))
        node = torch.where(inside, parents[node.clamp(min=0)], -1)
    ends = torch.arange(total, device=device) + size
    return TokenTree(tokens, parents, depths, ends, offsets, kinds)


def _column(parts: Seq[Tensor], device: torch.device | str) -> Tensor:
    """All parts on the device, in as few copies as their places allow."""
    parts = [part for part in parts if part.shape[0]]
    if len({part.device for part in parts}) == 1:
        return torch.cat(parts).to(device)
    return torch.cat([part.to(device) for part in parts])


def draft_probs(drafts: Seq[TextDraft], logits: Tensor) -> Tensor | None:
    """[T, V] q of every node, zeros at node 0 and in drafts that were chosen; None if all were."""
    if all(draft.probs is None for draft in drafts):
        return None
    rows = []
    for draft in drafts:
        rows.append(logits.new_zeros(1, logits.shape[1]))
        own = logits.new_zeros(len(draft), logits.shape[1]) if draft.probs is None else draft.probs
        rows.append(own.to(logits.device, logits.dtype))
    return torch.cat(rows)


def moves(tree: TokenTree, accepted: Accepted, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [n] that hold accepted nodes, and where these belong: right after node 0 of their tree.

    slots [T]: of the packed nodes.
    """
    nodes = accepted.nodes[:, 1:]
    step = torch.arange(1, nodes.shape[1] + 1, device=nodes.device)
    place = tree.offsets[:-1, None] + step
    astray = (nodes >= 0) & (nodes != place)
    return slots[nodes[astray]], slots[place[astray]]


def token_logprobs(logits: Tensor, tokens: Seq[int], top: int) -> list[TokenLogprobs]:
    """What is reported of written tokens. logits [n, V] raw, the row that each was drawn from."""
    log_p = logits.float().log_softmax(-1)
    chosen = log_p.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = log_p.topk(min(top, log_p.shape[1]), dim=1)
    return [
        TokenLogprobs(own, tuple(names), tuple(values))
        for own, names, values in zip(
            chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
