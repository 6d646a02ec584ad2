"""The registry of acceptance rules. A new rule is one file, and one line in BUILT_IN."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

import torch

from recserve.core.plugins import with_plugins
from recserve.speculation.sampling_params import SamplingParams
from recserve.speculation.verifier import Accepted, ScoredTrees, Verifier
from recserve.speculation.verifiers.block import BlockRule
from recserve.speculation.verifiers.greedy import GreedyRule
from recserve.speculation.verifiers.multi_step import MultiStepRule
from recserve.speculation.verifiers.rejection import RejectionRule
from recserve.speculation.verifiers.sample import SampleRule
from recserve.speculation.verifiers.typical import TypicalRule

ENTRY_POINTS = "recserve.verifiers"
GREEDY, SAMPLE = GreedyRule.name, SampleRule.name
REJECTION, MULTI_STEP = RejectionRule.name, MultiStepRule.name
MIXED = "mixed"  # not a rule: each text has its own
BUILT_IN: tuple[type[Verifier], ...] = (
    BlockRule,
    GreedyRule,
    MultiStepRule,
    RejectionRule,
    SampleRule,
    TypicalRule,
)
# Rules that a mixed step evaluates for all its texts. `rejection` stands for `multi_step`, because
# both run the same algorithm. `greedy` is left out, because at temperature 0 each rule equals it. A
# plug-in's rule is left out, because it may be written for the texts alone that name it.
MIXED_RULES = (SAMPLE, *(r.name for r in BUILT_IN if r.name not in (GREEDY, MULTI_STEP, SAMPLE)))
# Rules of the texts that a mixed step can have.
MIXABLE = frozenset(rule.name for rule in BUILT_IN)
# Greedy texts can share a step with these rules. Their `verify` handles every kind of draft, and at
# temperature 0 it accepts only the likeliest token.
GREEDY_COMPATIBLE = frozenset({MULTI_STEP, REJECTION, SAMPLE})


@cache
def verifiers() -> Mapping[str, Verifier]:
    """Returns one object per rule by name, installed plugins last.

    Raises:
        PluginError: If an installed distribution registers an unusable rule.
    """
    return {name: cls() for name, cls in with_plugins(ENTRY_POINTS, Verifier, BUILT_IN).items()}


def check_rule(name: str, params: SamplingParams) -> None:
    """Raises ValueError if the rule does not exist or does not fit the parameters."""
    if name not in verifiers():
        raise ValueError(f"verifier is {name!r}; choose one of {sorted(verifiers())}")
    if name == GREEDY and not params.greedy:
        raise ValueError(
            f"the rule 'greedy' is for temperature 0, not {params.temperature}; use 'sample'"
        )


def verify(name: str, scored: ScoredTrees) -> Accepted:
    """Verifies trees by a rule, or by each tree's own rule if the name is MIXED.

    At temperature 0 every rule equals the greedy one.
    """
    if name == MIXED and not scored.greedy:
        return _verify_each(scored)
    return verifiers()[GREEDY if scored.greedy else name].verify(scored)


def numbers_of(rules: Seq[str]) -> list[int]:
    """Returns the numbers of rules, as `ScoredTrees.rules` needs them."""
    return [MIXED_RULES.index(REJECTION if rule == MULTI_STEP else rule) for rule in rules]


def _verify_each(scored: ScoredTrees) -> Accepted:
    """Evaluates MIXED_RULES for all trees, and selects the result of each tree's own rule.

    This way no shape depends on the requests. Results of rules that do not fit a tree are
    discarded.
    """
    numbers = scored.rules
    assert numbers is not None, "a mixed step needs the rule of each tree"
    trees = torch.arange(numbers.shape[0], device=numbers.device)
    rows = scored.target(torch.arange(scored.tree.num_nodes, device=numbers.device))
    known = replace(scored, target=lambda nodes: rows[nodes])
    found = [verifiers()[name].verify(known) for name in MIXED_RULES]
    return Accepted(
        torch.stack([each.nodes for each in found])[numbers, trees],
        torch.stack([each.lengths for each in found])[numbers, trees],
        torch.stack([each.bonus for each in found])[numbers, trees],
    )
