"""Groups of texts that one acceptance rule verifies together."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.engine.constrained_drafts import NO_MASK, ConstrainedDraft
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import StepInputs, draft_probs
from recserve.kernels.acceptance.masks import TokenMasks
from recserve.kernels.host import on_device
from recserve.speculation.draft import TextDraft, empty_draft
from recserve.speculation.drafter import TextContext
from recserve.speculation.logits_processor import TextColumns, TokenCounts
from recserve.speculation.sampling_table import SamplingTable, sampling_table
from recserve.speculation.verifiers.registry import (
    GREEDY,
    GREEDY_COMPATIBLE,
    MIXABLE,
    MIXED,
    SAMPLE,
    numbers_of,
)


@dataclass(frozen=True)
class GroupMasks:
    """Masks of the constrained texts of a group, on the host.

    Attributes:
        drafts: Draft of each constrained text, by its number in the group.
        rows: As in `TokenMasks`, for the packed nodes of the group.
        filled: Done when all masks are filled. None if they are.
    """

    drafts: Mapping[int, ConstrainedDraft]
    rows: NDArray[np.int64]
    filled: Future[None] | None

    @cached_property
    def bits(self) -> NDArray[np.int32]:
        """As in `TokenMasks`. It waits for masks that are being filled."""
        if self.filled is not None:
            self.filled.result()
        return np.concatenate([draft.bits for draft in self.drafts.values()])


@dataclass(frozen=True)
class TextGroup:
    """Texts that are verified together, with their drafts. All lists have the same order.

    Attributes:
        rule: Acceptance rule of all texts, or MIXED.
        rules: Acceptance rule of each text.
        sequences: The texts. The list object stays the same while the same texts step.
        drafts: Draft of each text.
        table: Sampling parameters.
        contexts: Context of each text. The list object stays the same while the same texts step.
        sizes: Nodes of each draft.
        depth: Most levels below a node 0.
        forks: Whether a draft forks. The paths of others lie in their final slots already.
        masks: Masks of constrained texts. None: no text has a constraint.
    """

    rule: str
    rules: tuple[str, ...]
    sequences: list[TextSequence]
    drafts: list[TextDraft]
    table: SamplingTable
    contexts: list[TextContext]
    sizes: tuple[int, ...]
    depth: int
    forks: bool = False
    masks: GroupMasks | None = None

    @property
    def last_tokens(self) -> list[int]:
        """[B] token of node 0 of every tree."""
        return [context.tokens[-1] for context in self.contexts]

    def inputs(self, counts: TokenCounts | None) -> StepInputs:
        """Returns what the step of the group reads besides its nodes and their states.

        Args:
            counts: Token counts of all rows. None if no text of the group has penalties.
        """
        table, device, masks = self.table, self.table.seeds.device, self.masks
        if masks is not None:
            bits, rows = on_device(masks.bits, device), on_device(masks.rows, device)
        return StepInputs(
            rule=self.rule,
            depth=self.depth,
            forks=self.forks,
            table=table,
            texts=TextColumns.of(self.contexts, table),
            counts=counts,
            probs=None if table.greedy else draft_probs(self.drafts, device),
            rules=on_device(numbers_of(self.rules), device) if self.rule == MIXED else None,
            masks=None if masks is None else TokenMasks(bits, rows),
        )

    def constrained(
        self, drafts: Mapping[TextSequence, ConstrainedDraft], filled: Future[None] | None
    ) -> TextGroup:
        """Returns the group with the masks of its constrained texts, which have these drafts.

        `filled` is as in `GroupMasks`.
        """
        own: dict[int, ConstrainedDraft] = {}
        rows: list[int] = []
        num_masks = 0
        for number, (sequence, size) in enumerate(zip(self.sequences, self.sizes, strict=True)):
            draft = drafts.get(sequence)
            if draft is None:
                rows += [NO_MASK] * (1 + size)
            else:
                own[number] = draft
                rows += [NO_MASK if row < 0 else num_masks + row for row in draft.rows]
                num_masks += len(draft.bits)
        if not own:
            return self
        return replace(self, masks=GroupMasks(own, np.array(rows, np.int64), filled))


class TextGroups:
    """Groups texts by acceptance rule, and reuses the groups while the same texts step.

    With `together`, all texts of built-in rules form one group in which each has its own rule.
    Greedy texts then use the rule of the others if that rule verifies them too. This costs noise
    and saves a second verification. A rule of a plug-in verifies only the texts that name it.

    Attributes:
        device: Device of the sampling tables.
        together: Whether texts of different rules form one group.
    """

    def __init__(self, device: torch.device, together: bool) -> None:
        self.device, self.together = device, together
        self._last_texts: list[TextSequence] = []
        # Groups with empty drafts, reused while the same texts step.
        self._bare: list[TextGroup] = []

    def of(
        self, sequences: Seq[TextSequence], drafts: dict[TextSequence, TextDraft]
    ) -> list[TextGroup]:
        """Returns the groups of texts that step. `drafts` has a draft for each of them."""
        if self._last_texts != sequences:
            self._bare, self._last_texts = self._split(sequences), list(sequences)
        groups = []
        for bare in self._bare:
            own = [drafts[sequence] for sequence in bare.sequences]
            if all(map(is_, own, bare.drafts)):
                groups.append(bare)
                continue
            sizes = tuple([draft.num_nodes for draft in own])
            depth = max([draft.depth for draft in own])
            forks = not all([draft.is_chain for draft in own])
            groups.append(replace(bare, drafts=own, sizes=sizes, depth=depth, forks=forks))
        return groups

    def _split(self, sequences: Seq[TextSequence]) -> list[TextGroup]:
        greedy, requests = self._rule_of_greedy(sequences), [s.request for s in sequences]
        rules = [greedy if r.params.greedy else r.speculation.verifier for r in requests]
        mixes = self.together and len(MIXABLE.intersection(rules)) > 1
        groups: dict[str, list[TextSequence]] = {}
        for sequence, rule in zip(sequences, rules, strict=True):
            name = MIXED if mixes and rule in MIXABLE else rule
            groups.setdefault(name, []).append(sequence)
        before = {bare.rule: bare for bare in self._bare}
        bares = []
        for rule, own in groups.items():
            bare = before.get(rule)
            if bare is None or bare.sequences != own:
                table = sampling_table([s.request.params for s in own], self.device)
                each = (rule,) * len(own)
                if rule == MIXED:
                    each = tuple(name for name in rules if name in MIXABLE)
                contexts, none = [s.context for s in own], [empty_draft()] * len(own)
                bare = TextGroup(
                    rule=rule,
                    rules=each,
                    sequences=own,
                    drafts=none,
                    table=table,
                    contexts=contexts,
                    sizes=(0,) * len(own),
                    depth=0,
                )
            bares.append(bare)
        return bares

    def _rule_of_greedy(self, sequences: Seq[TextSequence]) -> str:
        if not self.together:
            return GREEDY
        requests = [sequence.request for sequence in sequences]
        drawn = {r.speculation.verifier for r in requests if not r.params.greedy} & MIXABLE
        return drawn.pop() if len(drawn) == 1 and drawn <= GREEDY_COMPATIBLE else SAMPLE
