"""Acceptance rules of text by name."""

from __future__ import annotations

from recserve.core.text import Accepted, ScoredTrees, Verifier
from recserve.core.text_request import SamplingParams
from recserve.verify.block import BlockRule
from recserve.verify.greedy import GreedyRule
from recserve.verify.multi_step import MultiStepRule
from recserve.verify.rejection import RejectionRule
from recserve.verify.sample import SampleRule
from recserve.verify.typical import TypicalRule

GREEDY, SAMPLE = "greedy", "sample"
REJECTION, MULTI_STEP = "rejection", "multi_step"
RULES: dict[str, Verifier] = {
    "block": BlockRule(),
    GREEDY: GreedyRule(),
    MULTI_STEP: MultiStepRule(),
    REJECTION: RejectionRule(),
    SAMPLE: SampleRule(),
    "typical": TypicalRule(),
}
# They judge drafts of every kind, and keep the likeliest tokens of texts at temperature 0.
FOR_ALL = frozenset({MULTI_STEP, REJECTION, SAMPLE})


def check_rule(name: str, params: SamplingParams) -> None:
    """Raises ValueError for a rule that is not there, or not for these parameters."""
    if name not in RULES:
        raise ValueError(f"verifier is {name!r}; choose one of {sorted(RULES)}")
    if name == GREEDY and not params.greedy:
        raise ValueError(
            f"the rule 'greedy' is for temperature 0, not {params.temperature}; ask for 'sample'"
        )


def verify(name: str, scored: ScoredTrees) -> Accepted:
    """Judge trees by a rule; at temperature 0 all of them are the greedy rule."""
    return RULES[GREEDY if scored.greedy else name].verify(scored)
