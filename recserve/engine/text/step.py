"""The results of one text step, and the moves of accepted paths."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.finite import all_finite
from recserve.engine.text.trees import drawn_rows
from recserve.kernels.acceptance.acceptance import DraftProbs
from recserve.kernels.cache import moves as path_moves
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree
from recserve.models.decoder import AuxHiddenStates
from recserve.speculation.completion import TokenLogprobs
from recserve.speculation.draft import TextDraft
from recserve.speculation.verifier import Accepted


@dataclass(frozen=True)
class VerifiedPaths:
    """The accepted paths of B texts, on the host.

    Attributes:
        paths: The packed nodes of each path, node 0 first.
        tokens: The tokens of each path, the bonus token last.
        ranked: [B, K, W] tokens that K heads ranked at the end of the step. None without heads.
        flawed: Numbers of the texts whose logits on the path are not finite. Their tokens mean
            nothing.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    ranked: NDArray[np.int64] | None = None
    flawed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step for B texts, on the device.

    Attributes:
        found: [B, 2 D + 5 + K W] int64 results, in one tensor so that one copy brings them to the
            host. Columns of a text, in order:
            - D + 1 accepted packed nodes: node 0 first, -1 after the last.
            - The number of accepted nodes, without node 0.
            - The bonus token.
            - D + 1 tokens of the accepted nodes. Values after the last have no meaning.
            - 1 if logits of accepted nodes are not finite, else 0.
            - K W tokens that K heads rank for the next draft.
        depth: D, most levels below a node 0.
        logits: [T, V] raw logits of all nodes.
        hidden: [T, E] final hidden states of all nodes.
        num_heads: K, or 0 without heads.
        taps: States between layers. None if no drafter reads them.
    """

    found: Tensor
    depth: int
    logits: Tensor
    hidden: Tensor
    num_heads: int = 0
    taps: AuxHiddenStates | None = None

    @property
    def tokens(self) -> Tensor:
        """[B, D + 1] tokens of the accepted nodes. Values after the last have no meaning."""
        return self.found[:, self.depth + 3 : 2 * self.depth + 4]

    def paths(self) -> VerifiedPaths:
        """Copies the results to the host and returns the accepted paths.

        This is the only read of the device in a step, because the accepted tokens decide the next
        step.
        """
        found, ranked, nodes = self.found.cpu(), None, self.depth + 1
        flawed_at = 2 * nodes + 2
        if self.num_heads:
            own = found[:, flawed_at + 1 :].numpy().copy()
            ranked = own.reshape(len(found), self.num_heads, -1)
            found = found[:, : flawed_at + 1]
        first_token = nodes + 3  # the token of node 0 was committed before
        paths, tokens, flawed = [], [], []
        for number, row in enumerate(found.tolist()):
            if row[flawed_at]:
                flawed.append(number)
            length, bonus = row[nodes : nodes + 2]
            paths.append(row[: length + 1])
            written = row[first_token : first_token + length]
            written.append(bonus)
            tokens.append(written)
        return VerifiedPaths(paths, tokens, ranked, frozenset(flawed))


def draft_probs(drafts: Seq[TextDraft], device: torch.device) -> DraftProbs | None:
    """Returns the draft probabilities of every packed node, or None if no draft was drawn.

    They are float32 for any logits, because the draft's tokens were drawn from those exact values.
    """
    drawn = [draft.probs for draft in drafts if draft.probs is not None]
    if not drawn:
        return None
    values = torch.empty(sum(map(len, drawn)), drawn[0].shape[1], device=device)
    put_probs(drafts, values)
    return DraftProbs(values, on_device(drawn_rows(drafts), device))


def put_probs(drafts: Seq[TextDraft], values: Tensor) -> None:
    """Copies the probabilities of drawn drafts to the first rows of `values` [R, V]."""
    drawn = [
        draft.probs.to(values.device, non_blocking=True)
        for draft in drafts
        if draft.probs is not None
    ]
    if drawn:
        torch.cat(drawn, out=values[: sum(map(len, drawn))])


def move_accepted(pool: KVPool, tree: TokenTree, accepted: Accepted, slots: Tensor) -> None:
    """Moves keys and values of accepted paths to the slots right after node 0 of their trees.

    Args:
        pool: The key-value pool.
        tree: The packed trees.
        accepted: The accepted nodes.
        slots: [T] slot of each packed node.
    """
    nodes = accepted.nodes[:, 1:]
    step = torch.arange(1, nodes.shape[1] + 1, device=nodes.device)
    # Places after the end of a path are not read, so any valid index will do.
    place = (tree.offsets[:-1, None] + step).clamp(max=tree.num_nodes - 1)
    sources, targets = slots[nodes.clamp(min=0)], slots[place]
    path_moves.move_paths(pool.keys, pool.values, sources, targets, accepted.lengths)


def move_paths(pool: KVPool, paths: Seq[Seq[int]], slots: Tensor) -> None:
    """Moves keys and values of paths that the host knows, if they are not in place already."""
    moves = [(node, path[0] + n) for path in paths for n, node in enumerate(path)]
    moves = [(node, place) for node, place in moves if node != place]
    if moves:
        nodes, places = on_device(moves, slots.device).unbind(1)
        pool.copy_slots(slots[nodes], slots[places])


def outputs_of(tree: TokenTree, accepted: Accepted, logits: Tensor, hidden: Tensor) -> StepOutputs:
    """Returns the results of a step. Their shapes depend only on those of the tree and the
    nodes.
    """
    nodes = accepted.nodes.clamp(min=0)
    # amax of a row with NaN is NaN.
    fits = torch.isfinite(logits.amax(1))[nodes] | (accepted.nodes < 0)
    flawed = ~fits.all(1, keepdim=True)
    found = [accepted.nodes, accepted.lengths[:, None], accepted.bonus[:, None]]
    found += [tree.tokens[nodes], flawed.long()]
    return StepOutputs(torch.cat(found, 1), accepted.nodes.shape[1] - 1, logits, hidden)


def flawed_texts(logits: Tensor, chosen: Seq[int], paths: Seq[Seq[int]]) -> frozenset[int]:
    """Returns the numbers of texts whose path has logits that are not finite.

    Args:
        logits: [T, V] raw logits.
        chosen: [T] token with the largest logit of each row. That logit is NaN or infinite if the
            row is not usable.
        paths: Packed nodes of each text's path.
    """
    largest = logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    if all_finite(largest):
        return frozenset()
    fine = torch.isfinite(largest).tolist()
    return frozenset(n for n, path in enumerate(paths) if not all(fine[node] for node in path))


def token_logprobs(
    logits: Tensor, rows: Seq[int], tokens: Seq[int], top: int
) -> list[TokenLogprobs]:
    """Returns the log-probabilities to report for written tokens.

    Args:
        logits: [T, V] raw logits.
        rows: The n rows that the tokens were drawn from.
        tokens: The n tokens.
        top: Number of most likely tokens to report besides each token.
    """
    log_p = logits[on_device(rows, logits.device)].float().log_softmax(-1)
    chosen = log_p.gather(1, on_device(tokens, logits.device)[:, None])[:, 0].tolist()
    best = log_p.topk(min(top, log_p.shape[1]), dim=1)
    return [
        TokenLogprobs(own, tuple(names), tuple(values))
        for own, names, values in zip(
            chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
