"""Texts of one language model: admission, pages, steps, and setting aside what finds no page.

A text steps many times. Keys and values exist for all its committed tokens but the last, which is
node 0 of the step's tree; accepted nodes are moved to the slots right after it, and the slots of
the others are written again. Pages are taken as a text grows. When none is left, the text that
would be served last is preempted: its pages go to the prefix cache, and it resumes from there.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right, insort
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from recserve.core.finite import NotFinite
from recserve.core.request import DeadlineExceeded
from recserve.engine.runtime.runner import Runner
from recserve.engine.runtime.scheduler import RequestTooLarge, Scheduler
from recserve.engine.text.draft_proposer import DraftProposer
from recserve.engine.text.step_graphs import StepGraphs
from recserve.engine.text.text_groups import TextGroups
from recserve.engine.text.text_pages import TextPages
from recserve.engine.text.text_prefill import Chunk, chunks, is_coming
from recserve.engine.text.text_sequence import TextSequence
from recserve.engine.text.text_step import Kept, TextGroup, token_logprobs
from recserve.engine.text.text_trees import TreePacker
from recserve.models.language_model import LanguageModel
from recserve.speculation.completion import Completion, TextRequest
from recserve.speculation.draft import empty_draft
from recserve.speculation.drafter import Drafter, TextContext, TextOutcome
from recserve.speculation.logits_processor import TokenCounts
from recserve.speculation.verifiers.registry import check_rule

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


class TextLane(Scheduler[TextRequest, Completion, Drafter]):
    """The side of the engine that writes text."""

    def __init__(
        self,
        runner: Runner,
        model: LanguageModel,
        limits: TextLimits | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        """graphs: recorded steps; None: every step is launched as it comes."""
        self.runner, self.model = runner, model
        self.limits = limits or TextLimits()
        self.pages = TextPages(runner.pool)
        self.allocator, self.cache = self.pages.allocator, self.pages.cache
        # Both by priority, then by age; `aside` waits for pages or for a prefix of another text.
        self.running: list[TextSequence] = []
        self.aside: list[TextSequence] = []
        self._proposer = DraftProposer(model, self.limits.draft_nodes, self.limits.load_aware)
        self._pack = TreePacker(runner.pool.keys.device)
        self._ids = count()
        self.graphs = graphs
        self._earliest_s = math.inf  # no deadline is before it
        self._grouping = TextGroups(runner.pool.keys.device, together=graphs is not None)

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
        """Take a request in if pages for its prompt can be had now, or another text is computing
        what it begins with, and nobody else waits for pages.
        """
        if any(not s.waits for s in self.aside):
            return False
        prompt = request.prompt.tolist()
        device = self.runner.pool.keys.device
        context = TextContext(
            next(self._ids), prompt, len(prompt), request.params, request.speculation
        )
        sequence = TextSequence(
            request, future, submitted_s, context, drafter, self.model.config.decoder.max_positions
        )
        if self._place(sequence):
            insort(self.running, sequence, key=_turn)
        elif sequence.waits:
            insort(self.aside, sequence, key=_turn)
        else:
            return False
        if request.params.counts_tokens:
            sequence.token_counts = TokenCounts(prompt, self.model.config.vocab_size, device)
        if request.deadline_s is not None:
            self._earliest_s = min(self._earliest_s, request.deadline_s)
        sequence.timing.queue_ms = (time.monotonic() - submitted_s) * 1e3
        return True

    def begin(self) -> list[Answer]:
        """Nothing is answered without a forward but what is too late."""
        now = time.monotonic()
        if now <= self._earliest_s:
            return []
        deadlines = [
            (s, s.request.deadline_s)
            for s in self.running + self.aside
            if s.request.deadline_s is not None
        ]
        late = [s for s, deadline_s in deadlines if now > deadline_s]
        self._earliest_s = min((d for _, d in deadlines if now <= d), default=math.inf)
        self._drop(late)
        return [
            (s, DeadlineExceeded("the deadline passed while the text was written")) for s in late
        ]

    def step(self) -> list[Answer]:
        """One forward over everything that waits for one; the answers it completed.

        A text whose prompt ends in this step makes its first step in the same forward: the keys and
        values of the prompt are written, layer by layer, before its tree attends to them.
        """
        self._bring_in()
        self._make_room()
        began = time.perf_counter()
        failed: list[Answer] = []
        parts = chunks(self.running, self.limits.prefill_tokens)
        groups = self._groups(parts, failed)
        parts = [part for part in parts if part.sequence.pages]
        drafted = time.perf_counter()
        if not groups and not parts:
            return failed
        replayed = None if self.graphs is None else self.graphs.step(groups, bool(parts))
        if replayed is None:
            done = self._launch(groups, parts)
        else:
            outputs = replayed.outputs
            tails = [row.tail for row in replayed.rows]
            done = self._commit(groups[0], outputs.kept(), outputs.hidden, outputs.logits, tails)
        self._proposer.stepped()
        draft_ms, forward_ms = (drafted - began) * 1e3, (time.perf_counter() - drafted) * 1e3
        first = {part.sequence for part in parts}
        for sequence in first:
            sequence.timing.prefill_ms += forward_ms
        for group in groups:
            for sequence, size in zip(group.sequences, group.sizes, strict=True):
                timing = sequence.timing
                timing.draft_ms += draft_ms
                if sequence not in first:
                    timing.verify_ms += forward_ms
                timing.forwards += 1
                timing.nodes += 1 + size
        return failed + done

    def _launch(self, groups: Seq[TextGroup], parts: Seq[Chunk]) -> list[Answer]:
        """One forward over the groups' trees and the chunks of prompts."""
        pieces = [group.piece(self._pack(group.last_tokens, group.drafts)) for group in groups]
        hidden = self.runner.forward([*pieces, *(part.piece() for part in parts)])
        for part, state in zip(parts, hidden[len(groups) :], strict=True):
            part.done(state[0])
            self.pages.keep(part.sequence)
        done: list[Answer] = []
        for group, piece, own in zip(groups, pieces, hidden, strict=False):
            logits = self.model.logits(own)
            kept = group.keep(self.runner.pool, piece, own, logits)
            done += self._commit(group, kept, own, logits)
        flawed = [part.sequence for part in parts if part.sequence.flawed and part.sequence.pages]
        self._drop(flawed)
        return done + [(sequence, NotFinite()) for sequence in flawed]

    def drop_all(self) -> list[TextSequence]:
        """Forget everything that runs; the sequences are released and returned."""
        dropped = self.running + self.aside
        self._drop(dropped)
        return dropped

    def drop_ended(self) -> None:
        """Stop the texts whose futures were cancelled."""
        self._drop([s for s in self.running + self.aside if s.future.cancelled()])

    def _groups(self, parts: Seq[Chunk], failed: list[Answer]) -> list[TextGroup]:
        """Drafts of the texts that step, grouped by the rule that judges them: of those that are
        ready, and of those whose chunk makes them so.
        """
        stepping: Seq[TextSequence] = self.running
        if parts:
            rows = {part.sequence: part.size for part in parts}
            stepping = [s for s in self.running if s.missing == rows.get(s, 0)]
        drafts, refused = self._proposer.propose(stepping, sum(part.size for part in parts))
        if refused:
            stepping = [s for s in stepping if s in drafts]
            self._drop([sequence for sequence, _ in refused])
            failed += refused
        for sequence in self._proposer.called:
            needed = sequence.length + drafts[sequence].num_nodes
            if needed > sequence.room and not self.pages.grow(sequence, needed):
                drafts[sequence] = empty_draft()
        return self._grouping.of(stepping, drafts)

    def _commit(
        self,
        group: TextGroup,
        kept: Kept,
        hidden: Tensor,
        logits: Tensor,
        tails: Seq[Tensor] | None = None,
    ) -> list[Answer]:
        """The answers of the texts that ended; drafters hear of the others.

        hidden [T, E], logits [T, V]: of the group's nodes, and of what fills up behind them. tails:
        of a replay, [E] for each text: its state at the last node that was kept.
        """
        done: list[Answer] = []
        outcomes: dict[int, tuple[Drafter, list[TextOutcome]]] = {}
        counted, asked = tails is not None, self._proposer.called
        first = 0
        for number, sequence in enumerate(group.sequences):
            draft, path, tokens = group.drafts[number], kept.paths[number], kept.tokens[number]
            before = len(sequence.context.tokens)
            try:
                sequence.flawed |= number in kept.flawed
                if sequence.flawed:
                    raise NotFinite
                top = sequence.request.params.logprobs
                logprobs = () if top is None else token_logprobs(logits[path], tokens, top)
                added = sequence.commit(tokens, logprobs, counted)
            except Exception as error:
                self._drop([sequence])
                done.append((sequence, error))
                first += 1 + draft.num_nodes
                continue
            used, ended = min(len(path) - 1, len(added)), sequence.finish_reason is not None
            tail = hidden[path[used]] if ended or tails is None else tails[number]
            ranked = None if kept.ranked is None else kept.ranked[number]
            sequence.computed(before + used, tail, ranked)
            if draft.num_nodes:
                sequence.counts.add(draft.num_candidates, used)
                self._proposer.verified(sequence, draft, len(path) - 1)
            if ended:
                done.append((sequence, sequence.completion()))
                self.pages.keep(sequence)
                self._drop([sequence])
            elif sequence in asked:
                accepted = tuple([node - first - 1 for node in path[1:]])
                outcome = TextOutcome(
                    sequence.context, draft, accepted, tuple(added), hidden, logits, first
                )
                drafter = sequence.drafter
                outcomes.setdefault(id(drafter), (drafter, []))[1].append(outcome)
            first += 1 + draft.num_nodes
        for drafter, own_outcomes in outcomes.values():
            drafter.commit(own_outcomes)
        return done

    def _bring_in(self) -> None:
        """Those aside, in order, until one finds no pages."""
        if not self.aside:
            return
        waiting, self.aside = self.aside, []
        for sequence in waiting:
            found = all(s.waits for s in self.aside) and self._place(sequence)
            insort(self.running if found else self.aside, sequence, key=_turn)

    def _place(self, sequence: TextSequence) -> bool:
        """Pages for it, unless there are none or what it begins with is coming."""
        before = self.running[: bisect_right(self.running, _turn(sequence), key=_turn)]
        sequence.waits = is_coming(sequence, before, self.pages.size)
        if sequence.waits or not self.pages.place(sequence):
            return False
        if not sequence.timing.forwards:
            sequence.timing.root_cached = sequence.num_computed
            sequence.timing.root_computed = sequence.missing
        return True

    def _make_room(self) -> None:
        """Every text that steps gets a slot for node 0; those served last give theirs up."""
        for sequence in [s for s in self.running if len(s.context.tokens) > s.room]:
            while sequence.pages and not self.pages.grow(sequence, sequence.length):
                self._set_aside(self.running[-1])

    def _set_aside(self, sequence: TextSequence) -> None:
        self.pages.keep(sequence)
        self._drop([sequence])
        sequence.num_computed = 0
        insort(self.aside, sequence, key=_turn)

    def _drop(self, sequences: Seq[TextSequence]) -> None:
        """Out of the lane: pages given back, drafters told."""
        if not sequences:
            return
        for sequence in sequences:
            self.pages.release(sequence)
            self._proposer.forget(sequence)
            if self.graphs is not None:
                self.graphs.forget(sequence)
        gone = set(sequences)
        self.running = [s for s in self.running if s not in gone]
        self.aside = [s for s in self.aside if s not in gone]


def _turn(sequence: TextSequence) -> tuple[int, float]:
    return sequence.request.priority, sequence.submitted_s
