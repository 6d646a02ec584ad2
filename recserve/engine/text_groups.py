"""Texts that step together, by what judges them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from recserve.core.sampling_table import SamplingTable, sampling_table
from recserve.core.text import TextContext, TextDraft
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import TextGroup
from recserve.verify.rules import FOR_ALL, GREEDY, MIXED, SAMPLE


@dataclass(frozen=True)
class _Part:
    """What a group is beside its drafts, kept while the same texts step together."""

    rule: str
    rules: tuple[str, ...]
    sequences: list[TextSequence]
    contexts: list[TextContext]
    table: SamplingTable


class TextGroups:
    """together: all texts are one group, each judged by its own rule; greedy ones by that of the
    others, if those have one for all, which costs them noise and saves a second judgement.
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
                part.rule, part.rules, part.sequences, own, part.table, part.contexts, sizes, depth
            )
            groups.append(group)
        return groups

    def _parted(self, sequences: Seq[TextSequence]) -> list[_Part]:
        greedy, asked = self._rule_of_greedy(sequences), [s.request for s in sequences]
        rules = [greedy if r.params.greedy else r.speculation.verifier for r in asked]
        groups: dict[str, list[TextSequence]] = {}
        if self.together and len(set(rules)) > 1:
            groups[MIXED] = list(sequences)
        else:
            for sequence, rule in zip(sequences, rules, strict=True):
                groups.setdefault(rule, []).append(sequence)
        before = {part.rule: part for part in self._parts}
        parts = []
        for rule, own in groups.items():
            part = before.get(rule)
            if part is None or part.sequences != own:
                table = sampling_table([s.request.params for s in own], self.device)
                each = tuple(rules) if rule == MIXED else (rule,) * len(own)
                part = _Part(rule, each, own, [s.context for s in own], table)
            parts.append(part)
        return parts

    def _rule_of_greedy(self, sequences: Seq[TextSequence]) -> str:
        if not self.together:
            return GREEDY
        requests = [sequence.request for sequence in sequences]
        drawn = {r.speculation.verifier for r in requests if not r.params.greedy}
        return drawn.pop() if len(drawn) == 1 and drawn <= FOR_ALL else SAMPLE
