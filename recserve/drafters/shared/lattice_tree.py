"""Draft trees from a lattice: the likeliest paths through the candidates of consecutive slots.

    slot 0    slot 1    slot 2        A node is a path from the first slot to a candidate. Its score
      a  ---- c  ---- e               is the sum of the log-probabilities of its tokens, each given
      b  -++- d  -++- f               the token before it.

A node is never likelier than its parent, so the likeliest nodes form a tree. They are found level
by level: a node among the n likeliest has its ancestors among them, and at its level at most n
nodes. All texts are searched at once. No shape depends on values, so a captured draft searches in
the same way.

If the log-probabilities do not depend on the predecessor, this is DDTree. With one node per level
it is the greedy walk of DFlash2 and DSpark.

Sources: DDTree (arXiv 2604.12989); JetSpec (arXiv 2606.18394), section on tree construction.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.drafters.shared.score_tree import BestNodes
from recserve.kernels.host import on_device
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


def lattice_sizes(
    num_candidates: int, depth: int, most: int, width: int | None = None
) -> list[int]:
    """Returns the number of nodes that are kept within each depth, from 0 on.

    Args:
        num_candidates: C, candidates of a slot.
        depth: Number of slots.
        most: Nodes of the largest draft.
        width: As for `lattice_drafts`.
    """
    sizes, last = [0], 1
    for level in range(depth):
        last = min(max(most - level, 1) if width is None else width, last * num_candidates)
        sizes.append(sizes[-1] + last)
    return sizes


def lattice_drafts(
    lattice: Lattice, budgets: Seq[Budget], width: int | None = None
) -> list[TextDraft]:
    """Returns the likeliest nodes of each text within its budget, as a draft.

    The host reads nothing from a device. So the depth of a draft that lies there is a bound.

    Args:
        lattice: The candidates of all texts.
        budgets: Budget of each text.
        width: Most nodes that a level keeps; 1 gives chains. None means as many as matter.

    Returns:
        One draft per text.
    """
    device, (num_texts, num_slots, num_candidates) = lattice.tokens.device, lattice.tokens.shape
    depths = [max(min(budget.depth, num_slots), 0) for budget in budgets]
    deepest, most = max(depths), max(budget.num_nodes for budget in budgets)
    sizes = lattice_sizes(num_candidates, deepest, most, width)
    counts = [
        max(min(budget.num_nodes, sizes[depth]), 0)
        for budget, depth in zip(budgets, depths, strict=True)
    ]
    if not any(counts):
        return [empty_draft(device)] * num_texts
    if deepest < num_slots:
        lattice = Lattice(lattice.tokens[:, :deepest], lattice.logprobs[:, :deepest])
    limits = on_device([depths, counts], device)
    nodes = lattice_nodes(lattice, limits[0], limits[1], max(counts), width)
    may_fork = device.type != "cpu" and width != 1
    if device.type == "cpu":  # reading is free
        depths = (nodes.levels.amax(1) + 1).tolist()
    columns = nodes.tokens.unbind(), nodes.parents.unbind(), depths, counts
    return [
        TextDraft(tokens[:count], parents[:count], min(depth, count), may_fork=may_fork)
        for tokens, parents, depth, count in zip(*columns, strict=True)
    ]


def lattice_nodes(
    lattice: Lattice, depths: Tensor, counts: Tensor, most: int, width: int | None = None
) -> BestNodes:
    """Returns the likeliest nodes of each text, on the lattice's device.

    Of nodes with the same score those at smaller depths come first, and at the same depth those
    with the smaller rank where their paths first differ.

    Args:
        lattice: The candidates of all texts.
        depths: [B] most levels.
        counts: [B] number of nodes; there are as many within these levels.
        most: N, largest number of nodes.
        width: As for `lattice_drafts`.
    """
    device = lattice.tokens.device
    levels = _levels(lattice, most, width)
    pool = _Paths(
        keys=torch.cat([level.keys for level in levels], dim=1),
        parents=torch.cat([level.parents for level in levels], dim=1),
        columns=torch.cat([level.columns for level in levels], dim=1),
        scores=torch.cat([level.scores for level in levels], dim=1),
    )
    numbers = torch.cat(
        [
            torch.full((level.keys.shape[1],), number, device=device)
            for number, level in enumerate(levels)
        ]
    )
    scores = pool.scores.masked_fill(numbers >= depths[:, None], float("-inf"))
    order = _largest(scores, min(most, scores.shape[1]))
    left_out = torch.arange(order.shape[1], device=device) >= counts[:, None]
    chosen = pool.select(order)
    # Nodes that are left out get keys behind all others, and so they lie behind them.
    keys, preorder = chosen.keys.masked_fill(left_out, torch.iinfo(torch.int64).max).sort(dim=1)
    own = order.gather(1, preorder)
    chosen, number = chosen.select(preorder), numbers[own]
    parents = torch.searchsorted(keys, chosen.parents).masked_fill(chosen.parents == 0, -1)
    texts = torch.arange(keys.shape[0], device=device)[:, None]
    tokens = lattice.tokens[texts, number, chosen.columns]
    return BestNodes(tokens, parents, number.masked_fill(left_out, -1), own)


def _levels(lattice: Lattice, most: int, width: int | None) -> list[_Paths]:
    """Returns the likeliest nodes of each level, by ascending key."""
    device, (num_texts, num_slots, count) = lattice.tokens.device, lattice.tokens.shape
    ranks, base = torch.arange(count, device=device), count + 1
    root = torch.zeros(num_texts, 1, dtype=torch.int64, device=device)
    above = _Paths(root, root, root, root.float())
    found = []
    for level in range(num_slots):
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
