"""Texts that step together, by what judges them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import is_

import torch

from recserve.engine.text.sequence import TextSequence
from recserve.engine.text.step import TextGroup
from recserve.speculation.draft import TextDraft, empty_draft
from recserve.speculation.sampling_table import sampling_table
from recserve.speculation.verifiers.registry import GREEDY, GREEDY_COMPATIBLE, MIXED, SAMPLE


class TextGroups:
    """together: all texts are one group, each judged by its own rule; greedy ones by that of the
    others, if those have one for all, which costs them noise and saves a second judgement.
    """

    def __init__(self, device: torch.device, together: bool) -> None:
        self.device, self.together = device, together
        self._stepped: list[TextSequence] = []
        # As where no text has a draft, kept while the same texts step together.
        self._bare: list[TextGroup] = []

    def of(
        self, sequences: Seq[TextSequence], drafts: dict[TextSequence, TextDraft]
    ) -> list[TextGroup]:
        """drafts: of at least these sequences."""
        if self._stepped != sequences:
            self._bare, self._stepped = self._parted(sequences), list(sequences)
        groups = []
        for bare in self._bare:
            own = [drafts[sequence] for sequence in bare.sequences]
            if all(map(is_, own, bare.drafts)):
                groups.append(bare)
                continue
            sizes = tuple([draft.num_nodes for draft in own])
            depth = max([draft.depth for draft in own])
            group = TextGroup(
                bare.rule, bare.rules, bare.sequences, own, bare.table, bare.contexts, sizes, depth
            )
            groups.append(group)
        return groups

    def _parted(self, sequences: Seq[TextSequence]) -> list[TextGroup]:
        greedy, asked = self._rule_of_greedy(sequences), [s.request for s in sequences]
        rules = [greedy if r.params.greedy else r.speculation.verifier for r in asked]
        groups: dict[str, list[TextSequence]] = {}
        if self.together and len(set(rules)) > 1:
            groups[MIXED] = list(sequences)
        else:
            for sequence, rule in zip(sequences, rules, strict=True):
                groups.setdefault(rule, []).append(sequence)
        before = {bare.rule: bare for bare in self._bare}
        bares = []
        for rule, own in groups.items():
            bare = before.get(rule)
            if bare is None or bare.sequences != own:
                table = sampling_table([s.request.params for s in own], self.device)
                each = tuple(rules) if rule == MIXED else (rule,) * len(own)
                contexts, none = [s.context for s in own], [empty_draft()] * len(own)
                bare = TextGroup(rule, each, own, none, table, contexts, (0,) * len(own), 0)
            bares.append(bare)
        return bares

    def _rule_of_greedy(self, sequences: Seq[TextSequence]) -> str:
        if not self.together:
            return GREEDY
        requests = [sequence.request for sequence in sequences]
        drawn = {r.speculation.verifier for r in requests if not r.params.greedy}
        return drawn.pop() if len(drawn) == 1 and drawn <= GREEDY_COMPATIBLE else SAMPLE
