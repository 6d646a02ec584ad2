"""One step of some texts: their drafts as one packed batch, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recserve.core.sampling_table import SamplingTable
from recserve.core.target import Target, past_of
from recserve.core.text import Accepted, ScoredTrees, TextDraft
from recserve.core.text_request import TokenLogprobs
from recserve.engine.runner import Piece
from recserve.engine.text_sequence import TextSequence
from recserve.kernels import dispatch
from recserve.kernels.paged_kv import KVPool
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

    def piece(self, tree: TokenTree) -> Piece:
        """The packed trees, placed where their path will stay if it is the first of each."""
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
        return slots[0] if len(slots) == 1 else torch.cat(slots)

    @property
    def chains(self) -> bool:
        """Whether no draft forks, so that every path that is accepted lies right already."""
        return all(draft.depth == len(draft) for draft in self.drafts)

    def judge(self, tree: TokenTree, logits: Tensor) -> Accepted:
        """What is kept. logits [T, V] raw."""
        depth = max(draft.depth for draft in self.drafts)
        table, everywhere = self.table, logits.is_cuda
        past = past_of(
            table,
            [s.context for s in self.sequences],
            [s.token_counts for s in self.sequences],
        )
        lengths = torch.tensor([s.length for s in self.sequences], device=logits.device)
        alone = past is None and (table.greedy or not table.truncates)
        scored = ScoredTrees(
            tree,
            depth,
            Target(logits, tree, depth, table, past, everywhere),
            table.seeds,
            lengths,
            tuple(draft.drawing for draft in self.drafts),
            logits.shape[1],
            draft_probs(self.drafts, logits),
            table.greedy,
            logits if alone else None,
            table.temperature,
            everywhere,
        )
        return verify(self.rule, scored)


def under_last_tokens(
    last: Seq[int], drafts: Seq[TextDraft], device: torch.device | str
) -> TokenTree:
    """Trees of node 0, the last committed token, and the draft below it.

    last [B] tokens. Returns B trees of `1 + n` nodes each, packed, on the device.
    """
    deepest = max(draft.depth for draft in drafts)
    if not deepest:
        return _roots_alone(torch.tensor(last, device=device))
    sizes = np.array([1 + len(draft) for draft in drafts])
    stops = sizes.cumsum()
    offsets = np.concatenate([[0], stops])
    columns = np.empty((5, int(stops[-1])), np.int64)
    tokens, parents, depths, ends, kinds = columns
    index, first = np.arange(columns.shape[1]), offsets[:-1].repeat(sizes)
    # All that a chain is follows from its length; what forks is told below.
    depths[:] = index - first
    ends[:] = stops.repeat(sizes)
    parents[:] = np.where(depths > 0, index - 1, -1)
    tokens[offsets[:-1]] = last
    kinds[:] = CANDIDATE
    late: list[tuple[Tensor, int, slice]] = []
    forks = False
    for start, draft in zip(offsets.tolist(), drafts, strict=False):
        own = slice(start + 1, start + 1 + len(draft))
        told = [(draft.tokens, 0, 0)] if len(draft) else []
        if draft.depth < len(draft):
            told.append((draft.parents, 1, start + 1))
            forks = True
        if draft.kinds is not None:
            told.append((draft.kinds, 4, 0))
        for column, row, shift in told:
            if column.device.type == "cpu":
                columns[row, own] = column.numpy() + shift
            else:
                late.append((column + shift, row, own))
    known = not any(row == 1 for _, row, _ in late)
    if forks and known:
        depths[:], ends[:] = _shape(torch.from_numpy(parents), deepest)
    packed = torch.from_numpy(columns).to(device)
    for column, row, own in late:
        packed[row, own] = column
    if forks and not known:
        packed[2], packed[3] = _shape(packed[1], deepest)
    named = any(draft.kinds is not None for draft in drafts)
    bounds = torch.from_numpy(offsets).to(device)
    return TokenTree(
        packed[0], packed[1], packed[2], packed[3], bounds, packed[4] if named else None
    )


def _roots_alone(tokens: Tensor) -> TokenTree:
    """One node a tree: plain decoding."""
    bounds = torch.arange(tokens.shape[0] + 1, device=tokens.device)
    depths = torch.zeros_like(tokens)
    return TokenTree(tokens, depths - 1, depths, bounds[1:], bounds)


def _shape(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Depths and ends [T] of trees in preorder, of at most `depth` levels below their roots."""
    node, depths, sizes = parents, torch.zeros_like(parents), torch.ones_like(parents)
    for _ in range(depth):
        inside = node >= 0
        depths += inside
        sizes.index_add_(0, node.clamp(min=0), inside.to(sizes.dtype))
        node = torch.where(inside, parents[node.clamp(min=0)], -1)
    return depths, torch.arange(parents.shape[0], device=parents.device) + sizes


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


def move_accepted(pool: KVPool, tree: TokenTree, accepted: Accepted, slots: Tensor) -> None:
    """Keys and values of the accepted paths to the slots right after node 0 of their trees.

    slots [T]: of the packed nodes.
    """
    nodes = accepted.nodes[:, 1:]
    step = torch.arange(1, nodes.shape[1] + 1, device=nodes.device)
    # Behind the end of a path any place will do: it is not read.
    place = (tree.offsets[:-1, None] + step).clamp(max=tree.num_nodes - 1)
    sources, targets = slots[nodes.clamp(min=0)], slots[place]
    dispatch.move_paths(pool.keys, pool.values, sources, targets, accepted.lengths)


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
