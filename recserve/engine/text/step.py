"""One step of some texts: their drafts as one packed batch, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.finite import all_finite
from recserve.engine.text.trees import drawn_rows
from recserve.kernels import dispatch
from recserve.kernels.accept_reference import DraftProbs
from recserve.kernels.host import on_device
from recserve.kernels.paged_kv import KVPool
from recserve.kernels.tree import TokenTree
from recserve.speculation.completion import TokenLogprobs
from recserve.speculation.draft import TextDraft
from recserve.speculation.verifier import Accepted


@dataclass(frozen=True)
class VerifiedPaths:
    """What is kept of the trees of B texts, on the host.

    paths: the packed nodes of each, node 0 first. tokens: what is written, the bonus token last.
    ranked [B, K, W]: the tokens of K heads that ended the step, or None. flawed: numbers of the
    texts whose logits on the path are not finite, whose tokens mean nothing.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    ranked: NDArray[np.int64] | None = None
    flawed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class FoundColumns:
    """Where a step's results lie in the columns of `StepOutputs.found`.

    Attributes:
        depth: D, most levels below a node 0.
    """

    depth: int

    @property
    def nodes(self) -> slice:
        """Accepted packed nodes [D + 1], node 0 first, -1 after the last."""
        return slice(0, self.depth + 1)

    @property
    def length(self) -> int:
        """Number of accepted nodes, node 0 excluded."""
        return self.depth + 1

    @property
    def bonus(self) -> int:
        """The bonus token."""
        return self.depth + 2

    @property
    def tokens(self) -> slice:
        """Tokens of the accepted nodes [D + 1], meaningless after the last."""
        return slice(self.depth + 3, 2 * self.depth + 4)

    @property
    def flawed(self) -> int:
        """1 where logits of accepted nodes are not finite, else 0."""
        return 2 * self.depth + 4

    @property
    def ranked(self) -> slice:
        """Tokens that K heads rank for the next draft [K * W]; empty without heads."""
        return slice(2 * self.depth + 5, None)


@dataclass(frozen=True)
class StepOutputs:
    """What a step finds for B texts, on the device.

    Attributes:
        found: [B, 2 D + 5 + K W] int64, in one tensor so that one copy brings it to the host.
        columns: Names of the columns of `found`.
        logits: [T, V] raw logits of all nodes.
        hidden: [T, E] final hidden states of all nodes.
        num_heads: K, or 0 without heads.
    """

    found: Tensor
    columns: FoundColumns
    logits: Tensor
    hidden: Tensor
    num_heads: int = 0

    @property
    def tokens(self) -> Tensor:
        """[B, D + 1] of the accepted nodes, meaningless after the last."""
        return self.found[:, self.columns.tokens]

    def paths(self) -> VerifiedPaths:
        """The one look at the device in a step: what was written decides what is done next."""
        at, found, ranked = self.columns, self.found.cpu(), None
        if self.num_heads:
            own = found[:, at.ranked].numpy().copy()
            ranked = own.reshape(len(found), self.num_heads, -1)
            found = found[:, : at.ranked.start]
        length_at, bonus_at, flawed_at = at.length, at.bonus, at.flawed
        first_token = at.tokens.start + 1  # of node 0 the token is known
        paths, tokens, flawed = [], [], []
        for number, row in enumerate(found.tolist()):
            if row[flawed_at]:
                flawed.append(number)
            length = row[length_at]
            paths.append(row[: length + 1])
            written = row[first_token : first_token + length]
            written.append(row[bonus_at])
            tokens.append(written)
        return VerifiedPaths(paths, tokens, ranked, frozenset(flawed))


def draft_probs(drafts: Seq[TextDraft], device: torch.device) -> DraftProbs | None:
    """q of every packed node, in float32 whatever the logits are: tokens were drawn from just that.
    None if all were chosen.
    """
    drawn = [draft.probs for draft in drafts if draft.probs is not None]
    if not drawn:
        return None
    values = torch.empty(sum(map(len, drawn)), drawn[0].shape[1], device=device)
    put_probs(drafts, values)
    return DraftProbs(values, on_device(drawn_rows(drafts), device))


def put_probs(drafts: Seq[TextDraft], values: Tensor) -> None:
    """Probs of those drafts that were drawn to the first rows of `values` [R, V]."""
    drawn = [
        draft.probs.to(values.device, non_blocking=True)
        for draft in drafts
        if draft.probs is not None
    ]
    if drawn:
        torch.cat(drawn, out=values[: sum(map(len, drawn))])


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


def move_paths(pool: KVPool, paths: Seq[Seq[int]], slots: Tensor) -> None:
    """The same for paths that are known on the host; nothing where they lie right already."""
    moves = [(node, path[0] + n) for path in paths for n, node in enumerate(path)]
    moves = [(node, place) for node, place in moves if node != place]
    if moves:
        nodes, places = torch.tensor(moves, device=slots.device).unbind(1)
        pool.copy_slots(slots[nodes], slots[places])


def outputs_of(tree: TokenTree, accepted: Accepted, logits: Tensor, hidden: Tensor) -> StepOutputs:
    """In shapes that depend on the tree's and the accepted nodes' alone."""
    nodes = accepted.nodes.clamp(min=0)
    # The largest of a row with NaN is NaN.
    fits = torch.isfinite(logits.amax(1))[nodes] | (accepted.nodes < 0)
    flawed = ~fits.all(1, keepdim=True)
    found = [accepted.nodes, accepted.lengths[:, None], accepted.bonus[:, None]]
    found += [tree.tokens[nodes], flawed.long()]
    columns = FoundColumns(accepted.nodes.shape[1] - 1)
    return StepOutputs(torch.cat(found, 1), columns, logits, hidden)


def flawed_texts(logits: Tensor, chosen: Seq[int], paths: Seq[Seq[int]]) -> frozenset[int]:
    """Numbers of the texts with logits on their path [T, V] that are not finite. chosen [T]: the
    largest of each row, which is NaN or infinite where any number of it decides nothing.
    """
    largest = logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    if all_finite(largest):
        return frozenset()
    fine = torch.isfinite(largest).tolist()
    return frozenset(n for n, path in enumerate(paths) if not all(fine[node] for node in path))


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
