"""Proposes drafts for the texts that step: calls the drafters, as deep as the load allows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as Seq

from recserve.core.acceptance_watch import DraftHealth, DraftWatch
from recserve.engine.text.draft_allocation import DraftAllocation
from recserve.engine.text.sequence import NO_BUDGET, TextSequence
from recserve.engine.text.step_cost import step_clock, text_step_cost
from recserve.models.language_model import LanguageModel
from recserve.speculation.draft import Budget, DrafterError, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, StateSpan
from recserve.speculation.drafters.none import NoDrafter
from recserve.speculation.verifiers.registry import verifiers

log = logging.getLogger(__name__)

# Fewer accepted tokens per draft pay for no draft: even a free one makes the step's tree larger.
BREAK_EVEN = 0.05
Refused = tuple[TextSequence, Exception]


class DraftProposer:
    """Calls every drafter once per step, for all of its texts.

    With `load_aware`, the depth of drafts follows the load. The cost of a step is then measured
    before the first draft. Otherwise a drafter whose drafts do not pay is paused. Under a rule by
    which drafts influence the text, it is not.

    Attributes:
        draft_nodes: Most nodes of a draft.
        load_aware: Whether the depth of drafts follows the load.
        called: Texts whose drafter was called for this step.
    """

    def __init__(self, model: LanguageModel, draft_nodes: int, load_aware: bool) -> None:
        self.model, self.draft_nodes, self.load_aware = model, draft_nodes, load_aware
        self.called: set[TextSequence] = set()  # texts whose drafter was called for this step
        self._allocation: DraftAllocation | None = None
        self._watches: dict[str, DraftWatch] = {}
        self._started: set[int] = set()  # ids of texts that were passed to their drafter
        self._nothing = empty_draft()
        self._now = step_clock(model.tokens.weight.device)
        self._num_texts = self._num_nodes = 0
        self._began_s = self._drafting_s = 0.0

    def propose(
        self, texts: Seq[TextSequence], prefill: int
    ) -> tuple[dict[TextSequence, TextDraft], list[Refused]]:
        """Returns drafts for the texts, and the texts whose drafter or draft failed.

        Args:
            texts: All texts that step.
            prefill: Number of prompt tokens in the same forward pass.

        Returns:
            A draft for each text, empty if it has none. Then each text whose drafter raised an
            error or whose acceptance rule refuses the draft, with the error.
        """
        drafts = dict.fromkeys(texts, self._nothing)
        drafting = [s for s in texts if not isinstance(s.drafter, NoDrafter)]
        self.called.clear()
        self._began_s, self._drafting_s = self._now(), 0.0
        refused: list[Refused] = []
        for sequences, budgets in self._calls(drafting, len(texts), prefill):
            refused += self._call(sequences[0].drafter, sequences, budgets, drafts)
        for sequence, _ in refused:
            drafts.pop(sequence, None)
        if self._allocation is not None:
            self._num_texts = len(drafts)
            drafted = sum(map(len, drafts.values())) if self.called else 0
            self._num_nodes = 0 if prefill else len(drafts) + drafted
        return drafts, refused

    def read(self, texts: Seq[TextSequence], without_last: bool = False) -> list[Refused]:
        """Passes states to the drafters that have not received them.

        Args:
            texts: Texts with slots for all their tokens.
            without_last: Whether to hold back the state of the last computed token.

        Returns:
            Each text whose drafter raised an error, with the error.
        """
        calls: dict[int, tuple[Drafter, list[TextSequence], list[StateSpan]]] = {}
        for sequence in texts:
            part = sequence.unread(sequence.num_computed - without_last)
            if part is not None:
                drafter = sequence.drafter
                own = calls.setdefault(id(drafter), (drafter, [], []))
                own[1].append(sequence)
                own[2].append(part)
        refused: list[Refused] = []
        for drafter, sequences, parts in calls.values():
            try:
                drafter.read(parts)
            except Exception as error:
                refused += [(sequence, error) for sequence in sequences]
        return refused

    def stepped(self) -> None:
        """Records the time of the step that verified the last drafts."""
        if self._allocation is not None and self._num_nodes:
            taken_ms = (self._now() - self._began_s - self._drafting_s) * 1e3
            self._allocation.stepped(self._num_texts, self._num_nodes, taken_ms)

    def health(self) -> dict[str, DraftHealth]:
        """Returns the acceptance of recent drafts by drafter; safe to call from any thread."""
        return {name: watch.health() for name, watch in list(self._watches.items())}

    def verified(self, sequence: TextSequence, draft: TextDraft, accepted: int) -> None:
        """Records how many levels of a draft were accepted."""
        self._watch(sequence).add(accepted, draft.levels, accepted)
        if self._allocation is not None:
            name = sequence.request.speculation.drafter
            self._allocation.verified(name, draft.levels, accepted)

    def forget(self, sequence: TextSequence) -> None:
        """Tells the drafter that the text has ended or was preempted."""
        try:
            sequence.drafter.forget(sequence.context.id)
        except Exception:
            log.exception("the drafter %r failed to forget a text", sequence.drafter.name)
        self._started.discard(sequence.context.id)

    def _calls(
        self, texts: Seq[TextSequence], num_texts: int, prefill: int
    ) -> list[tuple[list[TextSequence], list[Budget]]]:
        """Returns the texts to draft for by drafter, with their budgets.

        A text without a budget is passed to its drafter once, because some drafters learn from all
        texts.
        """
        depths = self._depths(texts, num_texts, prefill)
        calls: dict[int, tuple[list[TextSequence], list[Budget]]] = {}
        for sequence in texts:
            budget = sequence.budget(self.draft_nodes)
            if self._allocation is not None:
                name = sequence.request.speculation.drafter
                depth = depths[name]
                budget = self._allocation.budget(name, depth, budget) if depth else NO_BUDGET
            elif not self._pays(sequence):
                budget = NO_BUDGET
            if budget.num_nodes or sequence.context.id not in self._started:
                self._started.add(sequence.context.id)
                own = calls.setdefault(id(sequence.drafter), ([], []))
                own[0].append(sequence)
                own[1].append(budget)
        return list(calls.values())

    def _watch(self, sequence: TextSequence) -> DraftWatch:
        name = sequence.request.speculation.drafter
        if name not in self._watches:
            self._watches[name] = DraftWatch(name, BREAK_EVEN, pauses=not self.load_aware)
        return self._watches[name]

    def _pays(self, sequence: TextSequence) -> bool:
        """Returns whether a text may draft: its drafter is not paused, or its rule forbids that."""
        request = sequence.request
        rule = verifiers()[request.speculation.verifier]
        if not rule.exact or (rule.reads_probs and request.params.temperature):
            return True
        return self._watch(sequence).allows()

    def _depths(self, texts: Seq[TextSequence], num_texts: int, prefill: int) -> dict[str, int]:
        """Returns the depth of drafts by drafter, or nothing if the load does not matter."""
        if not self.load_aware or not texts:
            return {}
        if self._allocation is None:
            self._allocation = DraftAllocation(text_step_cost(self.model))
        counts = Counter([s.request.speculation.drafter for s in texts])
        return self._allocation.depths(counts, num_texts, prefill)

    def _call(
        self,
        drafter: Drafter,
        texts: Seq[TextSequence],
        budgets: Seq[Budget],
        drafts: dict[TextSequence, TextDraft],
    ) -> list[Refused]:
        """Calls one drafter and enters its drafts into `drafts`."""
        began, name = self._now(), texts[0].request.speculation.drafter
        try:
            proposed = drafter.propose([s.context for s in texts], budgets)
            if len(proposed) != len(texts):
                raise DrafterError(
                    f"the drafter {name!r} returned {len(proposed)} drafts for {len(texts)} texts"
                )
        except Exception as error:
            return [(s, error) for s in texts]
        taken_s = self._now() - began
        self._drafting_s += taken_s
        refused: list[Refused] = []
        within: list[tuple[Budget, TextDraft]] = []
        for sequence, budget, draft in zip(texts, budgets, proposed, strict=True):
            try:
                if draft.num_nodes > budget.num_nodes or draft.depth > budget.depth:
                    raise DrafterError(
                        f"the drafter {name!r} returned a draft of {draft.num_nodes} nodes and "
                        f"{draft.depth} levels; the budget was {budget.num_nodes} nodes and "
                        f"{budget.depth} levels"
                    )
                within.append((budget, draft))
                verifiers()[sequence.request.speculation.verifier].check(draft)
            except Exception as error:
                refused.append((sequence, error))
                continue
            drafts[sequence] = draft
            self.called.add(sequence)
        if self._allocation is not None and any(budget.num_nodes for budget, _ in within):
            limits, sound = [budget for budget, _ in within], [draft for _, draft in within]
            self._allocation.drafted(name, limits, sound, taken_s * 1e3)
        return refused
