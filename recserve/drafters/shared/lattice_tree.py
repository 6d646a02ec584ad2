"""Draft trees from a lattice: the likeliest paths through the candidates of consecutive slots.

    slot 0    slot 1    slot 2        A node is a path from the first slot to a candidate. Its score
      a  ---- c  ---- e               is the sum of the log-probabilities of its tokens, each given
      b  -++- d  -++- f               the token before it.

A node is never likelier than its parent, so the likeliest nodes form a tree. They are found level
by level: a node among the n likeliest has its ancestors among them, and at its level at most n
nodes. All texts are searched at once.

If the log-probabilities do not depend on the predecessor, this is DDTree. With one node per level
it is the greedy walk of DFlash2 and DSpark.

Sources: DDTree (arXiv 2604.12989); JetSpec (arXiv 2606.18394), section on tree construction.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.speculation.draft import Budget, TextDraft, empty_draft


@dataclass(frozen=True)
class Lattice:
    """Candidates of K slots of B texts, and their log-probabilities.

    Attributes:
        tokens: [B, K, C] tokens of the candidates; those of a slot differ.
        logprobs: [B, K, P, C] float32, at most 0: log-probability of a candidate given the
            candidate p of the slot before. P is C, or 1 if the slots are independent. Slot 0 reads
            p = 0.
    """

    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class _Paths:
    """Nodes of B texts: n for each text.

    A key holds the rank of the candidate, plus one, at each level, as digits of a number. Keys in
    ascending order are a depth-first preorder.

    Attributes:
        keys: [B, n].
        parents: [B, n] keys of the parents; 0 is the root.
        columns: [B, n] candidates.
        scores: [B, n].
    """

    keys: Tensor
    parents: Tensor
    columns: Tensor
    scores: Tensor

    def select(self, index: Tensor) -> _Paths:
        """Returns the nodes [B, m] of an index [B, m]."""
        return _Paths(**{name: column.gather(1, index) for name, column in vars(self).items()})


def most_candidates(num_slots: int) -> int:
    """Returns the largest number of candidates per slot whose paths have keys of 62 bits."""
    most = int(2.0 ** (62 / num_slots))
    while most**num_slots > 2**62:
        most -= 1
    return most - 1


def lattice_drafts(
    lattice: Lattice, budgets: Seq[Budget], width: int | None = None
) -> list[TextDraft]:
    """Returns the likeliest nodes of each text within its budget, as a draft.

    Of nodes with the same score those at smaller depths come first, and at the same depth those
    with the smaller rank where their paths first differ.

    Args:
        lattice: The candidates of all texts.
        budgets: Budget of each text.
        width: Most nodes that a level keeps; 1 gives chains. None means as many as matter.

    Returns:
        One draft per text.
    """
    device, (num_texts, num_slots, _) = lattice.tokens.device, lattice.tokens.shape
    depths = [min(budget.depth, num_slots) for budget in budgets]
    most = max(budget.num_nodes for budget in budgets)
    if most < 1 or max(depths) < 1:
        return [empty_draft(device)] * num_texts
    levels = _levels(lattice, max(depths), most, width)
    sizes = [level.keys.shape[1] for level in levels]
    pool = _Paths(
        keys=torch.cat([level.keys for level in levels], dim=1),
        parents=torch.cat([level.parents for level in levels], dim=1),
        columns=torch.cat([level.columns for level in levels], dim=1),
        scores=torch.cat([level.scores for level in levels], dim=1),
    )
    numbers = torch.tensor([n for n, size in enumerate(sizes) for _ in range(size)])
    numbers = numbers.to(device, non_blocking=True)
    limits = torch.tensor(depths).to(device, non_blocking=True)
    counts = [
        max(min(budget.num_nodes, sum(sizes[:depth])), 0)
        for budget, depth in zip(budgets, depths, strict=True)
    ]
    scores = pool.scores.masked_fill(numbers >= limits[:, None], float("-inf"))
    order = _largest(scores, max(counts))
    rank = torch.arange(order.shape[1], device=device)
    outside = rank >= torch.tensor(counts).to(device, non_blocking=True)[:, None]
    chosen, depth = pool.select(order), numbers[order]
    # Nodes outside the budget get keys behind all others.
    keys, preorder = chosen.keys.masked_fill(outside, torch.iinfo(torch.int64).max).sort(dim=1)
    chosen, depth = chosen.select(preorder), depth.gather(1, preorder)
    parents = torch.searchsorted(keys, chosen.parents).masked_fill(chosen.parents == 0, -1)
    tokens = lattice.tokens[torch.arange(num_texts, device=device)[:, None], depth, chosen.columns]
    inside = rank < torch.tensor(counts).to(device, non_blocking=True)[:, None]
    # The host needs the depths: the one wait of a draft.
    deepest = torch.where(inside, depth + 1, 0).amax(1).tolist()
    return [
        TextDraft(tokens[text, :count], parents[text, :count], deepest[text])
        for text, count in enumerate(counts)
    ]


def _levels(lattice: Lattice, depth: int, most: int, width: int | None) -> list[_Paths]:
    """Returns the likeliest nodes of each level, by ascending key."""
    device, (num_texts, num_slots, count) = lattice.tokens.device, lattice.tokens.shape
    ranks, base = torch.arange(count, device=device), count + 1
    root = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)
    above = _Paths(root, root, root, root.float())
    found = []
    for level in range(depth):
        given = lattice.logprobs[:, level]
        if level and given.shape[1] > 1:
            given = given.gather(1, above.columns[..., None].expand(-1, -1, count))
        elif given.shape[1] > 1:
            given = given[:, :1]
        unit = base ** (num_slots - 1 - level)
        children = _Paths(
            keys=(above.keys[..., None] + (ranks + 1) * unit).flatten(1),
            parents=above.keys[..., None].expand(-1, -1, count).flatten(1),
            columns=ranks.expand(num_texts, above.keys.shape[1], -1).flatten(1),
            scores=(above.scores[..., None] + given).flatten(1),
        )
        # A node of this level has `level` ancestors, which are among the likeliest too.
        keep = min(max(most - level, 1) if width is None else width, children.keys.shape[1])
        above = children.select(_largest(children.scores, keep).sort(dim=1).values)
        found.append(above)
    return found


def _largest(scores: Tensor, count: int) -> Tensor:
    """Returns indices [B, count] of the largest scores [B, n], smaller indices first among equals.

    `topk` leaves the order of equal values open. So score and index are packed into one integer.
    """
    bits = scores.contiguous().view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    size = scores.shape[1]
    packed = order * size - torch.arange(size, device=scores.device)
    return packed.topk(count, dim=1).indices
