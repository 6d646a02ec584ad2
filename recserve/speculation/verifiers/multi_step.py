"""Multi-step speculative sampling: tries several drawn children per node, one after another.

The rule is exact if every child was drawn from the distribution that it is compared with. Siblings
may be drawn independently, or without replacement; then q gives the earlier siblings probability 0.
Chosen children, such as the top k, come from no distribution. Comparing them with q anyway accepts
likely tokens too often.

Sources: SpecInfer (arXiv 2305.09781, algorithm 2); without replacement: Jeon et al. 2024 (arXiv
2402.14160), Sequoia (arXiv 2402.12374, algorithm 2).
"""

from __future__ import annotations

from recserve.speculation.draft import TextDraft
from recserve.speculation.verifier import Accepted, ScoredTrees, UnfitDraft, Verifier
from recserve.speculation.verifiers.rejection import verify_drawn


class MultiStepRule(Verifier):
    """The rule for trees of drawn nodes."""

    name = "multi_step"
    reads_probs = True
    needs_probs = True

    def check(self, draft: TextDraft) -> None:
        """Raises UnfitDraft if the draft was chosen."""
        if len(draft) and draft.probs is None:
            raise UnfitDraft(
                "the rule 'multi_step' needs a drawn draft with its distributions; this draft was "
                "chosen (top-k, lookup), so the rule would be biased; use 'sample'"
            )

    def verify(self, scored: ScoredTrees) -> Accepted:
        """Returns the path of accepted children, and a draw from the residual after it."""
        return verify_drawn(scored)
