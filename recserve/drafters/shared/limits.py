"""Limits that a request sets for its drafts: the size, and whether they fork or are drawn."""

from __future__ import annotations

from recserve.speculation.draft import Budget
from recserve.speculation.drafter import TextContext
from recserve.speculation.verifiers.registry import verifiers


def limit_budget(context: TextContext, budget: Budget, own: int) -> Budget:
    """Returns the budget, limited to the number of nodes that the request allows.

    Args:
        context: The sequence.
        budget: The engine's limit.
        own: Nodes that the drafter uses if the request sets no number.
    """
    requested = context.speculation.num_tokens
    most = own if requested is None else requested
    if 0 <= budget.num_nodes <= most and budget.depth >= 0:
        return budget
    return Budget(max(min(budget.num_nodes, most), 0), max(budget.depth, 0))


def only_chains(context: TextContext) -> bool:
    """Returns True if the request's acceptance rule refuses forks and auxiliary nodes."""
    return verifiers()[context.speculation.verifier].only_chains


def wants_drawn(context: TextContext) -> bool:
    """Returns True if the request's acceptance rule benefits from drawn tokens, or needs them."""
    return verifiers()[context.speculation.verifier].reads_probs
