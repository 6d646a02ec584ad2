"""What a request's words allow its draft to be: how many nodes, forks or not, drawn or chosen."""

from __future__ import annotations

from recserve.speculation.text import Budget, TextContext, budget_of

# Rules that judge chains only, and rules that compare the target with what a draft was drawn from.
CHAIN_RULES = frozenset({"rejection", "block"})
DRAWN_RULES = frozenset({"rejection", "block", "multi_step"})


def allowed(context: TextContext, budget: Budget, own: int) -> Budget:
    """The budget, and no more nodes than the request asks for, or than the drafter's own number."""
    asked = context.speculation.num_tokens
    most = own if asked is None else asked
    if 0 <= budget.num_nodes <= most and budget.depth >= 0:
        return budget
    return budget_of(max(min(budget.num_nodes, most), 0), max(budget.depth, 0))


def only_chains(context: TextContext) -> bool:
    """Whether the rule that judges the draft refuses forks and auxiliary nodes."""
    return context.speculation.verifier in CHAIN_RULES


def wants_drawn(context: TextContext) -> bool:
    """Whether the rule that judges the draft gains from drawn tokens, or needs them."""
    return context.speculation.verifier in DRAWN_RULES
