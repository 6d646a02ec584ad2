"""Drafts of the texts that step: asked of their drafters, within what the load allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from recserve.engine.text.budget import Asking, DraftBudget
from recserve.engine.text.text_cost import step_clock, text_cost
from recserve.engine.text.text_sequence import TextSequence
from recserve.models.language_model import LanguageModel
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter
from recserve.speculation.verifiers.registry import verifiers

NOBODY = Counter[str]()


class TextDrafting:
    """draft_nodes: most nodes of a draft. load_aware: drafts are as large as the load lets them
    pay, which is measured when the first text is drafted for.
    """

    def __init__(self, model: LanguageModel, draft_nodes: int, load_aware: bool) -> None:
        self.model, self.draft_nodes, self.load_aware = model, draft_nodes, load_aware
        self._budget: DraftBudget | None = None
        self._met: set[int] = set()
        self._nothing = empty_draft()
        self.asked: set[TextSequence] = set()  # whose drafter was called for this step
        self._now = step_clock(model.tokens.weight.device)
        self._nodes, self._drafted = 0, NOBODY
        self._began_s, self._drafting_s = 0.0, 0.0

    def propose(
        self, texts: Seq[TextSequence], prefill: int
    ) -> tuple[dict[TextSequence, TextDraft], list[tuple[TextSequence, Exception]]]:
        """Drafts, and the texts whose drafter failed or drafted what their rule refuses. prefill:
        other nodes of the same forward.
        """
        drafts = dict.fromkeys(texts, self._nothing)
        drafting = [s for s in texts if not s.drafter.idle]
        failed: list[tuple[TextSequence, Exception]] = []
        self.asked.clear()
        self._began_s, self._drafting_s = self._now(), 0.0
        if drafting and not self._rests(drafting, prefill, len(texts) - len(drafting)):
            failed = self._draft(drafting, prefill, len(texts) - len(drafting), drafts)
        if self._budget is not None:
            self._drafted, self._nodes = NOBODY, 0 if prefill else len(drafts)
            if self.asked:
                self._drafted = Counter(
                    s.request.speculation.drafter for s in drafting if drafts.get(s)
                )
                self._nodes = 0 if prefill else len(drafts) + sum(map(len, drafts.values()))
        return drafts, failed

    def _draft(
        self,
        texts: Seq[TextSequence],
        prefill: int,
        num_plain: int,
        drafts: dict[TextSequence, TextDraft],
    ) -> list[tuple[TextSequence, Exception]]:
        """Put drafts in; texts whose drafts failed are left out, and returned."""
        budgets = self._budgets(texts, prefill, num_plain)
        asked: dict[int, tuple[Drafter, list[TextSequence], list[Budget]]] = {}
        for sequence, budget in zip(texts, budgets, strict=True):
            # A drafter hears of every text once at least: there are some that learn from all.
            if budget.num_nodes or sequence.context.id not in self._met:
                self._met.add(sequence.context.id)
                own = asked.setdefault(id(sequence.drafter), (sequence.drafter, [], []))
                own[1].append(sequence)
                own[2].append(budget)
        failed: list[tuple[TextSequence, Exception]] = []
        for drafter, sequences, own_budgets in asked.values():
            failed += self._ask(drafter, sequences, own_budgets, drafts)
        for sequence, _ in failed:
            drafts.pop(sequence, None)
        return failed

    def _ask(
        self,
        drafter: Drafter,
        texts: Seq[TextSequence],
        budgets: Seq[Budget],
        drafts: dict[TextSequence, TextDraft],
    ) -> list[tuple[TextSequence, Exception]]:
        failed: list[tuple[TextSequence, Exception]] = []
        began = self._now()
        try:
            proposed = drafter.propose([s.context for s in texts], budgets)
        except Exception as error:
            return [(s, error) for s in texts]
        taken_s = self._now() - began
        self._drafting_s += taken_s
        for sequence, budget, draft in zip(texts, budgets, proposed, strict=True):
            assert draft.num_nodes <= budget.num_nodes and draft.depth <= budget.depth
            try:
                verifiers()[sequence.request.speculation.verifier].check(draft)
            except ValueError as error:
                failed.append((sequence, error))
                continue
            drafts[sequence] = draft
            self.asked.add(sequence)
            if self._budget is not None:
                self._budget.proposed(self._asking(sequence), budget, len(draft), draft.depth)
        free = sum([budget.num_nodes > 0 for budget in budgets])
        if self._budget is not None and free:
            name = texts[0].request.speculation.drafter
            self._budget.timed(name, max(draft.depth for draft in proposed), free, taken_s * 1e3)
        return failed

    def stepped(self) -> None:
        """The step of the last drafts is done: what it took is remembered."""
        if self._budget is not None and self._nodes:
            taken_ms = (self._now() - self._began_s - self._drafting_s) * 1e3
            self._budget.stepped(self._nodes, self._drafted, taken_ms)

    def judged(self, sequence: TextSequence, draft: TextDraft, kept: int) -> None:
        """What was kept of a draft that was not empty."""
        if self._budget is not None:
            self._budget.judged(self._asking(sequence), len(draft), draft.depth, kept)

    def forget(self, sequence: TextSequence) -> None:
        """The text ended, or was set aside."""
        sequence.drafter.forget(sequence.context.id)
        self._met.discard(sequence.context.id)
        if self._budget is not None:
            self._budget.forget(sequence.context.id)

    def _rests(self, texts: Seq[TextSequence], prefill: int, num_plain: int) -> bool:
        """Whether nobody would be asked, for the same reasons as in the step before."""
        return (
            self._budget is not None
            and self._budget.rests(len(texts), prefill, num_plain)
            and all(s.context.id in self._met for s in texts)
        )

    def _budgets(self, texts: Seq[TextSequence], prefill: int, num_plain: int) -> list[Budget]:
        """All they ask for, unless the load counts."""
        if not self.load_aware:
            return [sequence.budget(self.draft_nodes) for sequence in texts]
        if self._budget is None:
            self._budget = DraftBudget(text_cost(self.model))
        return self._budget.spend([self._asking(s) for s in texts], prefill, num_plain)

    def _asking(self, sequence: TextSequence) -> Asking:
        drafter = sequence.request.speculation.drafter
        return Asking(sequence.context.id, drafter, sequence.budget(self.draft_nodes))
