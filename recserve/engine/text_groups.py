"""Texts that step together, by the rule that judges them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from recserve.core.sampling_table import SamplingTable, sampling_table
from recserve.core.text import TextContext, TextDraft
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import TextGroup
from recserve.verify.rules import FOR_ALL, GREEDY, SAMPLE


@dataclass(frozen=True)
class _Part:
    """What a group is beside its drafts, kept while the same texts step together."""

    rule: str
    sequences: list[TextSequence]
    contexts: list[TextContext]
    table: SamplingTable


class TextGroups:
    """together: greedy texts are judged beside those that are drawn, by their rule if they have one
    for all; it costs them noise, and saves a second judgement.
    """

    def __init__(self, device: torch.device, together: bool) -> None:
        self.device, self.together = device, together
        self._stepped: list[TextSequence] = []
        self._parts: list[_Part] = []

    def of(
        self, sequences: Seq[TextSequence], drafts: dict[TextSequence, TextDraft]
    ) -> list[TextGroup]:
        """drafts: of at least these sequences."""
        if self._stepped != sequences:
            self._parts, self._stepped = self._parted(sequences), list(sequences)
        groups = []
        for part in self._parts:
            own = [drafts[sequence] for sequence in part.sequences]
            sizes = tuple([draft.num_nodes for draft in own])
            depth = max([draft.depth for draft in own])
            group = TextGroup(
                part.rule, part.sequences, own, part.table, part.contexts, sizes, depth
            )
            groups.append(group)
        return groups

    def _parted(self, sequences: Seq[TextSequence]) -> list[_Part]:
        greedy = self._rule_of_greedy(sequences)
        rules: dict[str, list[TextSequence]] = {}
        for sequence in sequences:
            request = sequence.request
            rule = greedy if request.params.greedy else request.speculation.verifier
            rules.setdefault(rule, []).append(sequence)
        before = {part.rule: part for part in self._parts}
        parts = []
        for rule, own in rules.items():
            part = before.get(rule)
            if part is None or part.sequences != own:
                table = sampling_table([s.request.params for s in own], self.device)
                part = _Part(rule, own, [s.context for s in own], table)
            parts.append(part)
        return parts

    def _rule_of_greedy(self, sequences: Seq[TextSequence]) -> str:
        if not self.together:
            return GREEDY
        requests = [sequence.request for sequence in sequences]
        drawn = {r.speculation.verifier for r in requests if not r.params.greedy}
        return drawn.pop() if len(drawn) == 1 and drawn <= FOR_ALL else SAMPLE
