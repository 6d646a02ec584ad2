"""Texts of one language model: admission, pages, steps, and setting aside what finds no page.

A text steps many times. Keys and values exist for all its committed tokens but the last, which is
node 0 of the step's tree; accepted nodes are moved to the slots right after it, and the slots of
the others are written again. Pages are taken as a text grows. When none is left, the text that
would be served last is set aside: what it computed goes to the prefix cache, from where it starts
again, recomputing only what was evicted meanwhile.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from recserve.core.request import DeadlineExceeded
from recserve.core.sampling_table import SamplingTable, sampling_table
from recserve.core.target import TokenCounts
from recserve.core.text import Drafter, TextContext, TextDraft, TextOutcome, empty_draft
from recserve.core.text_request import Completion, TextRequest
from recserve.engine.lane import RequestTooLarge
from recserve.engine.runner import Piece, Runner
from recserve.engine.text_drafting import TextDrafting
from recserve.engine.text_pages import TextPages
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import TextGroup, moves, token_logprobs
from recserve.kernels.tree import CANDIDATE, TokenTree, chain
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.verify.rules import GREEDY, check_rule

Answer = tuple[TextSequence, Completion | Exception]


class PromptTooLong(ValueError):
    """A prompt leaves no position for a token of output."""


@dataclass(frozen=True)
class TextLimits:
    """prefill_tokens: most prompt tokens computed in a step, over all texts. draft_nodes: most
    nodes of a draft. load_aware: drafts are as large as the load lets them pay, or none.
    """

    prefill_tokens: int = 512
    draft_nodes: int = 64
    load_aware: bool = False


class TextLane:
    """The side of the engine that writes text."""

    def __init__(
        self, runner: Runner, model: LanguageModel, limits: TextLimits | None = None
    ) -> None:
        self.runner, self.model = runner, model
        self.limits = limits or TextLimits()
        self.pages = TextPages(runner.pool)
        self.allocator, self.cache = self.pages.allocator, self.pages.cache
        # Both in the order in which they are served: by priority, then by age.
        self.running: list[TextSequence] = []
        self.aside: list[TextSequence] = []
        self._drafting = TextDrafting(model, self.limits.draft_nodes, self.limits.load_aware)
        self._ids = count()
        self._tables: dict[str, tuple[tuple[int, ...], SamplingTable]] = {}

    @property
    def num_running(self) -> int:
        """Requests admitted and not answered."""
        return len(self.running) + len(self.aside)

    def check(self, request: TextRequest, drafter: Drafter) -> None:
        """Raises ValueError for a request that could not run even alone."""
        config, params = self.model.config, request.params
        prompt, positions = request.prompt, config.decoder.max_positions
        if prompt.ndim != 1 or not prompt.shape[0]:
            raise ValueError(f"prompt is {prompt.shape}; it must be [n] with at least one token")
        if prompt.shape[0] >= positions:
            raise PromptTooLong(
                f"the prompt has {prompt.shape[0]} tokens; the model has {positions} positions and "
                "needs one for the output"
            )
        named = [*params.logit_bias, *params.stop_token_ids]
        named += [token for word in params.bad_words for token in word]
        for name, low, high in (
            ("prompt", int(prompt.min()), int(prompt.max())),
            ("a sampling parameter", min(named, default=0), max(named, default=0)),
        ):
            if low < 0 or high >= config.vocab_size:
                raise ValueError(
                    f"{name} names tokens {low}..{high}; the vocabulary has {config.vocab_size}"
                )
        check_rule(request.speculation.verifier, params)
        pages = self.pages.pages_of(min(prompt.shape[0] + params.max_tokens, positions))
        if pages > self.allocator.num_pages:
            raise RequestTooLarge(
                f"prompt and max_tokens need {pages} pages of {self.pages.size} tokens, the pool "
                f"has {self.allocator.num_pages}; ask for less or give the engine more"
            )

    def admit(
        self, request: TextRequest, future: Future[Any], submitted_s: float, drafter: Drafter
    ) -> bool:
        """Take a request in if pages for its prompt can be had now and nothing is set aside."""
        if self.aside:
            return False
        prompt = request.prompt.tolist()
        device = self.runner.pool.keys.device
        context = TextContext(
            next(self._ids), prompt, len(prompt), request.params, request.speculation
        )
        sequence = TextSequence(
            request, future, submitted_s, context, drafter, self.model.config.decoder.max_positions
        )
        if not self.pages.place(sequence):
            return False
        if request.params.counts_tokens:
            sequence.token_counts = TokenCounts(prompt, self.model.config.vocab_size, device)
        sequence.timing.queue_ms = (time.monotonic() - submitted_s) * 1e3
        sequence.timing.root_cached = sequence.num_computed
        sequence.timing.root_computed = len(prompt) - 1 - sequence.num_computed
        self._serve(self.running, sequence)
        return True

    def begin(self) -> list[Answer]:
        """Nothing is answered without a forward but what is too late."""
        now = time.monotonic()
        late = [
            s
            for s in self.running + self.aside
            if s.request.deadline_s is not None and now > s.request.deadline_s
        ]
        self._drop(late)
        return [
            (s, DeadlineExceeded("the deadline passed while the text was written")) for s in late
        ]

    def step(self) -> list[Answer]:
        """One forward over everything that waits for one; the answers it completed."""
        while self.aside and self.pages.place(self.aside[0]):
            self._serve(self.running, self.aside.pop(0))
        self._make_room()
        began = time.perf_counter()
        failed: list[Answer] = []
        chunks = self._chunks()
        prefill = sum(size for _, size in chunks)
        groups = self._groups([s for s in self.running if s.ready], prefill, failed)
        drafted = time.perf_counter()
        device = self.runner.pool.keys.device
        pieces = [group.piece(device) for group in groups]
        trees = [piece.tree for piece in pieces]
        pieces += [self._prefill_piece(sequence, size) for sequence, size in chunks]
        if not pieces:
            return failed
        hidden = self.runner.forward(pieces)
        states = hidden[: len(groups)]
        begun: dict[int, Tensor] = {}
        for (sequence, size), state in zip(chunks, hidden[len(groups) :], strict=True):
            if sequence.num_computed + size == sequence.length:
                # The last token is node 0 of a first step, made together with the prompt.
                begun[sequence.context.id], state = state[1:], state[:1]
                size -= 1
            sequence.num_computed += size
            sequence.context.hidden = state[0].clone()
            if sequence.ready:
                self.pages.keep(sequence)
        first = [sequence for sequence, _ in chunks if sequence.context.id in begun]
        for group in self._by_rule(first, {s.context.id: empty_draft() for s in first}):
            trees.append(group.tree(device))
            states.append(torch.cat([begun[s.context.id] for s in group.sequences]))
            groups.append(group)
        done: list[Answer] = []
        for group, tree, own in zip(groups, trees, states, strict=True):
            done += self._commit(group, tree, own)
        ended = time.perf_counter()
        self._drafting.stepped()
        for sequence, _ in chunks:
            sequence.timing.prefill_ms += (ended - drafted) * 1e3
        for group in groups:
            for sequence, draft in zip(group.sequences, group.drafts, strict=True):
                if sequence.context.id not in begun:
                    sequence.timing.draft_ms += (drafted - began) * 1e3
                    sequence.timing.verify_ms += (ended - drafted) * 1e3
                sequence.timing.forwards += 1
                sequence.timing.nodes += 1 + len(draft)
        return failed + done

    def drop_all(self) -> list[TextSequence]:
        """Forget everything that runs; the sequences are released and returned."""
        dropped = self.running + self.aside
        self._drop(dropped)
        return dropped

    def drop_ended(self) -> None:
        """Stop the texts whose futures were cancelled."""
        self._drop([s for s in self.running + self.aside if s.future.cancelled()])

    def _groups(
        self, ready: Seq[TextSequence], prefill: int, failed: list[Answer]
    ) -> list[TextGroup]:
        """Drafts of the texts that may step, grouped by the rule that judges them."""
        drafts, refused = self._drafting.propose(ready, prefill)
        self._drop([sequence for sequence, _ in refused])
        failed += refused
        for sequence in ready:
            draft = drafts.get(sequence.context.id)
            if draft and not self.pages.grow(sequence, sequence.length + len(draft)):
                drafts[sequence.context.id] = empty_draft()
        return self._by_rule([s for s in ready if s.context.id in drafts], drafts)

    def _by_rule(
        self, sequences: Seq[TextSequence], drafts: dict[int, TextDraft]
    ) -> list[TextGroup]:
        rules: dict[str, list[TextSequence]] = {}
        for sequence in sequences:
            request = sequence.request
            rule = GREEDY if request.params.greedy else request.speculation.verifier
            rules.setdefault(rule, []).append(sequence)
        return [
            TextGroup(rule, own, [drafts[s.context.id] for s in own], self._table(rule, own))
            for rule, own in rules.items()
        ]

    def _table(self, rule: str, sequences: Seq[TextSequence]) -> SamplingTable:
        """The sampling parameters as columns, kept while the same texts step together."""
        ids = tuple(s.context.id for s in sequences)
        if rule not in self._tables or self._tables[rule][0] != ids:
            params = [s.request.params for s in sequences]
            self._tables[rule] = (ids, sampling_table(params, self.runner.pool.keys.device))
        return self._tables[rule][1]

    def _commit(self, group: TextGroup, tree: TokenTree, hidden: Tensor) -> list[Answer]:
        """Judge a group's trees, keep the paths; the answers of the texts that ended."""
        logits = self.model.logits(hidden)
        accepted = group.judge(tree, logits)
        if len(group.sequences) < tree.num_nodes:
            source, target = moves(tree, accepted, group.slots())
            if source.shape[0]:
                self.runner.pool.copy_slots(source, target)
        # The one look at the device in a step: what was written decides what is done next.
        nodes = torch.cat([accepted.nodes, accepted.lengths[:, None], accepted.bonus[:, None]], 1)
        tokens = tree.tokens[accepted.nodes.clamp(min=0)]
        table = torch.cat([nodes, tokens], 1).tolist()
        width = accepted.nodes.shape[1]
        done: list[Answer] = []
        outcomes: dict[int, tuple[Drafter, list[TextOutcome]]] = {}
        start = 0
        for sequence, draft, row in zip(group.sequences, group.drafts, table, strict=True):
            length, bonus = row[width], row[width + 1]
            path, found = row[: length + 1], [*row[width + 3 : width + 3 + length], bonus]
            own = slice(start, start + 1 + len(draft))
            try:
                top = sequence.request.params.logprobs
                logprobs = [] if top is None else token_logprobs(logits[path], found, top)
                before = sequence.length
                added = sequence.commit(found, logprobs)
            except Exception as error:
                self._drop([sequence])
                done.append((sequence, error))
                start = own.stop
                continue
            used = min(length, len(added))
            sequence.num_computed = before + used
            sequence.context.hidden = hidden[path[used]].clone()
            if len(draft):
                kinds = draft.kinds
                drafted = len(draft) if kinds is None else int((kinds == CANDIDATE).sum())
                sequence.counts.add(drafted, used)
                self._drafting.judged(sequence, draft, length)
            if sequence.finish_reason is not None:
                done.append((sequence, sequence.completion()))
                self.pages.keep(sequence)
                self._drop([sequence])
            else:
                kept = tuple(node - start - 1 for node in path[1:])
                outcome = TextOutcome(
                    sequence.context, draft, kept, added, hidden[own], logits[own]
                )
                outcomes.setdefault(id(sequence.drafter), (sequence.drafter, []))[1].append(outcome)
            start = own.stop
        for drafter, own_outcomes in outcomes.values():
            drafter.commit(own_outcomes)
        return done

    def _chunks(self) -> list[tuple[TextSequence, int]]:
        """Who computes how many committed tokens in this step, first come first served: of those
        that are not ready, and of these all up to the last token if there is room for them.
        """
        left = self.limits.prefill_tokens
        chunks = []
        for sequence in self.running:
            size = min(sequence.length - sequence.num_computed, left)
            if size > 0 and not sequence.ready:
                chunks.append((sequence, size))
                left -= size
        return chunks

    def _prefill_piece(self, sequence: TextSequence, size: int) -> Piece:
        start = sequence.num_computed
        tokens = torch.tensor(
            sequence.context.tokens[start : start + size], device=sequence.slots.device
        )
        slots = sequence.slots
        own = slots[start : start + size]
        read = 2 if start + size == sequence.length else 1
        return Piece(chain(tokens), NodeInputs(tokens), None, own, (slots[:start],), read)

    def _make_room(self) -> None:
        """Every text that steps gets a slot for node 0; those served last give theirs up."""
        for sequence in tuple(self.running):
            while sequence.pages and not self.pages.grow(sequence, sequence.length):
                self._set_aside(self.running[-1])

    def _set_aside(self, sequence: TextSequence) -> None:
        self.pages.keep(sequence)
        self._drop([sequence])
        sequence.num_computed = 0
        self._serve(self.aside, sequence)

    def _drop(self, sequences: Seq[TextSequence]) -> None:
        """Out of the lane: pages given back, drafters told."""
        for sequence in sequences:
            self.pages.release(sequence)
            self._drafting.forget(sequence)
        gone = {s.context.id for s in sequences}
        self.running = [s for s in self.running if s.context.id not in gone]
        self.aside = [s for s in self.aside if s.context.id not in gone]

    @staticmethod
    def _serve(line: list[TextSequence], sequence: TextSequence) -> None:
        insort(line, sequence, key=lambda s: (s.request.priority, s.submitted_s))
