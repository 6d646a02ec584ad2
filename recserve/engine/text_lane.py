"""Texts of one language model: admission, pages, steps, and setting aside what finds no page.

A text steps many times. Keys and values exist for all its committed tokens but the last, which is
node 0 of the step's tree; accepted nodes are moved to the slots right after it, and the slots of
the others are written again. Pages are taken as a text grows. When none is left, the text that
would be served last is set aside: what it computed goes to the prefix cache, from where it starts
again, recomputing only what was evicted meanwhile.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from recserve.core.request import DeadlineExceeded
from recserve.core.target import TokenCounts
from recserve.core.text import Drafter, TextContext, TextOutcome, empty_draft
from recserve.core.text_request import Completion, TextRequest
from recserve.engine.graphs import StepGraphs
from recserve.engine.lane import RequestTooLarge
from recserve.engine.runner import Piece, Runner
from recserve.engine.text_drafting import TextDrafting
from recserve.engine.text_groups import TextGroups
from recserve.engine.text_pages import TextPages
from recserve.engine.text_prefill import Chunk, chunks, is_coming
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import (
    Kept,
    TextGroup,
    move_accepted,
    move_paths,
    outputs_of,
    token_logprobs,
)
from recserve.engine.text_trees import TreePacker
from recserve.kernels.tree import CANDIDATE
from recserve.models.language_model import LanguageModel
from recserve.verify.rules import check_rule

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
        # Both in the order in which they are served: by priority, then by age. Those aside wait for
        # pages, or for another text to compute what they begin with.
        self.running: list[TextSequence] = []
        self.aside: list[TextSequence] = []
        self._drafting = TextDrafting(model, self.limits.draft_nodes, self.limits.load_aware)
        self._pack = TreePacker(runner.pool.keys.device)
        self._ids = count()
        self.graphs = graphs
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
        sequence.timing.queue_ms = (time.monotonic() - submitted_s) * 1e3
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
            # The next replay writes where these lie.
            hidden = replayed.hidden.clone()
            done = self._commit(groups[0], replayed.kept(), hidden, replayed.logits)
        ended = time.perf_counter()
        self._drafting.stepped()
        first = {part.sequence.context.id for part in parts}
        for part in parts:
            part.sequence.timing.prefill_ms += (ended - drafted) * 1e3
        for group in groups:
            for sequence, draft in zip(group.sequences, group.drafts, strict=True):
                timing = sequence.timing
                timing.draft_ms += (drafted - began) * 1e3
                if sequence.context.id not in first:
                    timing.verify_ms += (ended - drafted) * 1e3
                timing.forwards += 1
                timing.nodes += 1 + len(draft)
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
            done += self._commit(group, self._judge(group, piece, own, logits), own, logits)
        return done

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
        rows = {part.sequence.context.id: part.size for part in parts}
        stepping = [s for s in self.running if s.missing == rows.get(s.context.id, 0)]
        drafts, refused = self._drafting.propose(stepping, sum(rows.values()))
        self._drop([sequence for sequence, _ in refused])
        failed += refused
        for sequence in stepping:
            draft = drafts.get(sequence.context.id)
            if draft and not self.pages.grow(sequence, sequence.length + len(draft)):
                drafts[sequence.context.id] = empty_draft()
        return self._grouping.of([s for s in stepping if s.context.id in drafts], drafts)

    def _judge(self, group: TextGroup, piece: Piece, hidden: Tensor, logits: Tensor) -> Kept:
        """Judge a group's trees, keep the paths."""
        kept = group.keep_likeliest(logits)
        if kept is not None:
            move_paths(self.runner.pool, kept.paths, piece.slots)
            return kept
        accepted = group.judge(piece.tree, logits)
        if not group.chains:
            move_accepted(self.runner.pool, piece.tree, accepted, piece.slots)
        return outputs_of(piece.tree, accepted, logits, hidden).kept()

    def _commit(self, group: TextGroup, kept: Kept, hidden: Tensor, logits: Tensor) -> list[Answer]:
        """The answers of the texts that ended; drafters hear of the others.

        hidden [T, E], logits [T, V]: of the group's nodes, and of what fills up behind them.
        """
        sizes = [1 + len(draft) for draft in group.drafts]
        sizes.append(hidden.shape[0] - sum(sizes))
        # One call for all texts: a view of each takes longer than all that is done with it here.
        own_hidden, own_logits = hidden.split_with_sizes(sizes), logits.split_with_sizes(sizes)
        done: list[Answer] = []
        outcomes: dict[int, tuple[Drafter, list[TextOutcome]]] = {}
        start = 0
        for number, (sequence, draft) in enumerate(zip(group.sequences, group.drafts, strict=True)):
            path, tokens = kept.paths[number], kept.tokens[number]
            first, start = start, start + sizes[number]
            try:
                top = sequence.request.params.logprobs
                logprobs = [] if top is None else token_logprobs(logits[path], tokens, top)
                before = sequence.length
                added = sequence.commit(tokens, logprobs)
            except Exception as error:
                self._drop([sequence])
                done.append((sequence, error))
                continue
            used = min(len(path) - 1, len(added))
            ranked = None if kept.ranked is None else kept.ranked[number]
            sequence.computed(before + used, hidden[path[used]], ranked)
            if len(draft):
                kinds = draft.kinds
                drafted = len(draft) if kinds is None else int((kinds == CANDIDATE).sum())
                sequence.counts.add(drafted, used)
                self._drafting.judged(sequence, draft, len(path) - 1)
            if sequence.finish_reason is not None:
                done.append((sequence, sequence.completion()))
                self.pages.keep(sequence)
                self._drop([sequence])
            elif sequence.context.id in self._drafting.asked:
                accepted = tuple(node - first - 1 for node in path[1:])
                outcome = TextOutcome(
                    sequence.context, draft, accepted, added, own_hidden[number], own_logits[number]
                )
                outcomes.setdefault(id(sequence.drafter), (sequence.drafter, []))[1].append(outcome)
        for drafter, own_outcomes in outcomes.values():
            drafter.commit(own_outcomes)
        return done

    def _bring_in(self) -> None:
        """Those aside, in order, until one finds no pages."""
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
        for sequence in tuple(self.running):
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
            self._drafting.forget(sequence)
            if self.graphs is not None:
                self.graphs.forget(sequence)
        gone = {s.context.id for s in sequences}
        self.running = [s for s in self.running if s.context.id not in gone]
        self.aside = [s for s in self.aside if s.context.id not in gone]


def _turn(sequence: TextSequence) -> tuple[int, float]:
    return sequence.request.priority, sequence.submitted_s
