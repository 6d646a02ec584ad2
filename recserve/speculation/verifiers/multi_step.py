"""Multi-step speculative sampling: several drawn children per node, tried one after another.

Exact where every child was drawn from the distribution it is compared with: independently of its
siblings, or without replacement (then that distribution is q without the elder ones). Children
that were chosen, such as the top k, are drawn from no distribution; comparing them with q anyway
keeps likely tokens too often.
Sources: SpecInfer (arXiv 2305.09781, algorithm 2); without replacement: Jeon et al. 2024 (arXiv
2402.14160), Sequoia (arXiv 2402.12374, algorithm 2).
"""

from __future__ import annotations

from recserve.speculation.draft import TextDraft
from recserve.speculation.verifier import Accepted, ScoredTrees, UnfitDraft, Verifier
from recserve.speculation.verifiers.rejection import verify_drawn


class MultiStepRule(Verifier):
    """For trees whose nodes were drawn."""

    name = "multi_step"
    reads_probs = True

    def check(self, draft: TextDraft) -> None:
        """Raises ValueError for a draft that was chosen."""
        if len(draft) and draft.probs is None:
            raise UnfitDraft(
                "the rule 'multi_step' needs a draft that was drawn, with its distributions; this "
                "one was chosen (top-k, lookup), on which the rule is biased; ask for 'sample'"
            )

    def verify(self, scored: ScoredTrees) -> Accepted:
        """The path of accepted children, and a draw from what is left of the target after it."""
        return verify_drawn(scored)
