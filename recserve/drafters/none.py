"""The drafter of plain decoding, which proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext


class NoDrafter(Drafter):
    """Proposes nothing, so every step scores a single node."""

    name = "none"
    idle = True

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns empty drafts."""
        return [empty_draft() for _ in contexts]
