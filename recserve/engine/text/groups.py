"""Groups of texts that one acceptance rule verifies together."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import is_

import torch
from torch import Tensor

from recserve.engine.runtime.runner import BatchSlice
from recserve.engine.text.sequence import TextSequence
from recserve.engine.text.step import (
    VerifiedPaths,
    draft_probs,
    flawed_texts,
    move_accepted,
    move_paths,
    outputs_of,
)
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.host import on_device
from recserve.kernels.tree import TokenTree
from recserve.models.inputs import NodeInputs
from recserve.speculation.draft import TextDraft, empty_draft
from recserve.speculation.drafter import TextContext
from recserve.speculation.logits_processor import LogitsProcessor, past_of
from recserve.speculation.sampling import largest_on_host
from recserve.speculation.sampling_table import SamplingTable, sampling_table
from recserve.speculation.verifier import Accepted, ScoredTrees
from recserve.speculation.verifiers.path import path_of
from recserve.speculation.verifiers.registry import (
    GREEDY,
    GREEDY_COMPATIBLE,
    MIXABLE,
    MIXED,
    SAMPLE,
    numbers_of,
    verify,
)


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
    """

    rule: str
    rules: tuple[str, ...]
    sequences: list[TextSequence]
    drafts: list[TextDraft]
    table: SamplingTable
    contexts: list[TextContext]
    sizes: tuple[int, ...]
    depth: int

    def piece(self, tree: TokenTree) -> BatchSlice:
        """Returns the packed trees with slots. A path of first children already lies in its
        final slots.
        """
        roots = tuple(s.slots[: s.length - 1] for s in self.sequences)
        return BatchSlice(
            tree=tree,
            inputs=NodeInputs(tree.tokens),
            queries=None,
            slots=self.slots(),
            prefix_slots=roots,
        )

    @property
    def last_tokens(self) -> list[int]:
        """[B] token of node 0 of every tree."""
        return [context.tokens[-1] for context in self.contexts]

    def slots(self) -> Tensor:
        """Returns [T] pool slot of each node."""
        slots = [
            s.slots[s.length - 1 : s.length + len(d)]
            for s, d in zip(self.sequences, self.drafts, strict=True)
        ]
        return slots[0] if len(slots) == 1 else torch.cat(slots)

    @property
    def chains(self) -> bool:
        """Whether no draft forks. Every accepted path then lies in its final slots already."""
        return all(draft.depth == len(draft) for draft in self.drafts)

    def verify(
        self, pool: KVPool, piece: BatchSlice, hidden: Tensor, logits: Tensor
    ) -> VerifiedPaths:
        """Verifies the trees and moves accepted paths to their final slots.

        Args:
            pool: The key-value pool.
            piece: The trees that were computed.
            hidden: [T, E] final hidden states.
            logits: [T, V] raw logits.
        """
        greedy = self.accept_greedy(logits)
        if greedy is not None:
            move_paths(pool, greedy.paths, piece.slots)
            return greedy
        accepted = self.accept(piece.tree, logits)
        if not self.chains:
            move_accepted(pool, piece.tree, accepted, piece.slots)
        return outputs_of(piece.tree, accepted, logits, hidden).paths()

    def accept_greedy(self, logits: Tensor) -> VerifiedPaths | None:
        """Returns the accepted paths of greedy texts, computed on the host.

        After a forward pass on the CPU, a few Python numbers cost less than tensor operators.

        Args:
            logits: [T, V] raw logits.

        Returns:
            None if other sampling parameters apply or the logits are on a device.
        """
        if logits.is_cuda or not (self.table.greedy and self.table.plain):
            return None
        chosen, start = largest_on_host(logits), 0
        paths, tokens = [], []
        for draft in self.drafts:
            path = path_of(chosen, draft, start)
            paths.append(path)
            tokens.append([chosen[node] for node in path])
            start += 1 + len(draft)
        return VerifiedPaths(paths, tokens, flawed=flawed_texts(logits, chosen, paths))

    def accept(self, tree: TokenTree, logits: Tensor) -> Accepted:
        """Returns accepted nodes and bonus tokens for raw logits [T, V]."""
        depth = self.depth
        table, everywhere = self.table, logits.is_cuda
        past = past_of(table, self.contexts, [s.token_counts for s in self.sequences])
        lengths = on_device([s.length for s in self.sequences], logits.device)
        alone = past is None and (table.greedy or not table.truncates)
        scored = ScoredTrees(
            tree=tree,
            depth=depth,
            target=LogitsProcessor(logits, tree, depth, table, past, everywhere),
            seeds=table.seeds,
            lengths=lengths,
            vocab_size=logits.shape[1],
            probs=draft_probs(self.drafts, logits.device),
            greedy=table.greedy,
            logits=logits if alone else None,
            temperatures=table.temperature,
            everywhere=everywhere,
            rules=on_device(numbers_of(self.rules), logits.device) if self.rule == MIXED else None,
        )
        return verify(self.rule, scored)


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
        self._stepped: list[TextSequence] = []
        # Groups with empty drafts, reused while the same texts step.
        self._bare: list[TextGroup] = []

    def of(
        self, sequences: Seq[TextSequence], drafts: dict[TextSequence, TextDraft]
    ) -> list[TextGroup]:
        """Returns the groups of texts that step. `drafts` has a draft for each of them."""
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
            groups.append(replace(bare, drafts=own, sizes=sizes, depth=depth))
        return groups

    def _parted(self, sequences: Seq[TextSequence]) -> list[TextGroup]:
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
