"""Texts that step together, by the rule that judges them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from recserve.core.sampling_table import SamplingTable, sampling_table
from recserve.core.text import TextDraft
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import TextGroup
from recserve.verify.rules import GREEDY, SAMPLE


class TextGroups:
    """together: greedy texts are judged beside those that are drawn, by one rule; it costs them
    noise, and saves a second judgement.
    """

    def __init__(self, device: torch.device, together: bool) -> None:
        self.device, self.together = device, together
        self._tables: dict[str, tuple[tuple[int, ...], SamplingTable]] = {}

    def of(self, sequences: Seq[TextSequence], drafts: dict[int, TextDraft]) -> list[TextGroup]:
        """drafts: by context id, of at least these sequences."""
        rules: dict[str, list[TextSequence]] = {}
        for sequence in sequences:
            rules.setdefault(self._rule(sequence), []).append(sequence)
        return [
            TextGroup(rule, own, [drafts[s.context.id] for s in own], self._table(rule, own))
            for rule, own in rules.items()
        ]

    def _rule(self, sequence: TextSequence) -> str:
        if sequence.request.params.greedy:
            return SAMPLE if self.together else GREEDY
        return sequence.request.speculation.verifier

    def _table(self, rule: str, sequences: Seq[TextSequence]) -> SamplingTable:
        """The sampling parameters as columns, kept while the same texts step together."""
        ids = tuple(s.context.id for s in sequences)
        if rule not in self._tables or self._tables[rule][0] != ids:
            params = [s.request.params for s in sequences]
            self._tables[rule] = (ids, sampling_table(params, self.device))
        return self._tables[rule][1]
