"""No draft: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from recserve.speculation.text import Budget, TextContext, TextDraft, TextOutcome, empty_draft


class NoDrafter:
    """Every step is a single node."""

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Empty drafts."""
        return [empty_draft() for _ in contexts]

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Nothing to learn."""

    def forget(self, context_id: int) -> None:
        """Nothing to forget."""
