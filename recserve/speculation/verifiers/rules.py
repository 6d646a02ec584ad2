"""Acceptance rules of text by name."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from recserve.speculation.text import Accepted, ScoredTrees, Verifier
from recserve.speculation.text_request import SamplingParams
from recserve.speculation.verifiers.block import BlockRule
from recserve.speculation.verifiers.greedy import GreedyRule
from recserve.speculation.verifiers.multi_step import MultiStepRule
from recserve.speculation.verifiers.rejection import RejectionRule
from recserve.speculation.verifiers.sample import SampleRule
from recserve.speculation.verifiers.typical import TypicalRule

GREEDY, SAMPLE = "greedy", "sample"
REJECTION, MULTI_STEP = "rejection", "multi_step"
BLOCK, TYPICAL = "block", "typical"
MIXED = "mixed"  # no rule: each text is judged by its own
RULES: dict[str, Verifier] = {
    BLOCK: BlockRule(),
    GREEDY: GreedyRule(),
    MULTI_STEP: MultiStepRule(),
    REJECTION: RejectionRule(),
    SAMPLE: SampleRule(),
    TYPICAL: TypicalRule(),
}
# They judge drafts of every kind, and keep the likeliest tokens of texts at temperature 0.
FOR_ALL = frozenset({MULTI_STEP, REJECTION, SAMPLE})
# What judges each of several texts, by number; `multi_step` judges as `rejection` does.
EACH = (SAMPLE, REJECTION, BLOCK, TYPICAL)


def check_rule(name: str, params: SamplingParams) -> None:
    """Raises ValueError for a rule that is not there, or not for these parameters."""
    if name not in RULES:
        raise ValueError(f"verifier is {name!r}; choose one of {sorted(RULES)}")
    if name == GREEDY and not params.greedy:
        raise ValueError(
            f"the rule 'greedy' is for temperature 0, not {params.temperature}; ask for 'sample'"
        )


def verify(name: str, scored: ScoredTrees) -> Accepted:
    """Judge trees by a rule, or MIXED, each by its own; at temperature 0 all are the greedy one."""
    if name == MIXED and not scored.greedy:
        return _verify_each(scored)
    return RULES[GREEDY if scored.greedy else name].verify(scored)


def numbers_of(rules: Seq[str]) -> list[int]:
    """As `ScoredTrees.rules`."""
    return [EACH.index(REJECTION if rule == MULTI_STEP else rule) for rule in rules]


def _verify_each(scored: ScoredTrees) -> Accepted:
    """All rules are worked out for all trees, so that no shape depends on who asks for which; what
    a rule makes of a tree that is not for it is not kept.
    """
    numbers = scored.rules
    assert numbers is not None, "nobody says whose rule is which"
    trees = torch.arange(numbers.shape[0], device=numbers.device)
    rows = scored.target(torch.arange(scored.tree.num_nodes, device=numbers.device))
    known = replace(scored, target=lambda nodes: rows[nodes])
    found = [RULES[name].verify(known) for name in EACH]
    return Accepted(
        torch.stack([each.nodes for each in found])[numbers, trees],
        torch.stack([each.lengths for each in found])[numbers, trees],
        torch.stack([each.bonus for each in found])[numbers, trees],
    )
