"""The scheduler of texts: admission, pages, steps and preemption for one language model.

A text steps many times. Keys and values exist for all its committed tokens except the last, which
is node 0 of the step's tree. Accepted nodes move to the slots right after it. Pages are allocated
as a text grows. When none is left, the text that would be served last is preempted: its computed
tokens go to the prefix cache. It resumes from there and computes only what was evicted meanwhile.
When all places are taken, it gives its place to a request that is served earlier, in the same way.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from recserve.core.client import Client
from recserve.core.constraint import ConstraintError, Matcher, NoTokenLeft
from recserve.core.draft_policy import DepthPolicy, DraftHealth
from recserve.core.errors import DeadlineExceeded
from recserve.core.finite import NotFinite, all_finite
from recserve.core.plugins import request_error
from recserve.core.sequence import Sequence
from recserve.drafters.registry import check_speculation
from recserve.engine.capture import GraphSet, PrefillGraphs
from recserve.engine.constrained_drafts import UNKNOWN, ConstrainedDraft, constrain, fill_late
from recserve.engine.draft_graph import DraftGraphs
from recserve.engine.draft_proposer import DraftProposer, Refusal, shapes_the_text
from recserve.engine.kv_cache import KVCache
from recserve.engine.runner import Runner
from recserve.engine.scheduler import Chunk, Scheduler, service_order
from recserve.engine.text_groups import TextGroup, TextGroups
from recserve.engine.text_sequence import TextSequence, context_of
from recserve.engine.text_step import (
    NodeStates,
    StateRows,
    StepOutputs,
    aux_states_for,
    split_states,
    text_step,
    token_logprobs,
)
from recserve.engine.text_step_graph import TextStepGraphs
from recserve.engine.text_trees import TreePacker
from recserve.kernels.host import on_device
from recserve.kernels.tree import chain
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.speculation.completion import Completion, TextQuery, TokenLogprobs
from recserve.speculation.draft import TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, TextOutcome
from recserve.speculation.logits_processor import TokenCounts
from recserve.speculation.verifiers.registry import check_rule, verifiers

log = logging.getLogger(__name__)

# Masks of smaller vocabularies take less time than passing them to another thread.
LATE_VOCABULARY = 8192


class PromptTooLong(ValueError):
    """A prompt leaves no position for a token of output."""


@dataclass(frozen=True)
class TextLimits:
    """Limits of a text scheduler.

    Attributes:
        prefill_tokens: Most prompt tokens computed in a step, over all texts.
        draft_nodes: Most nodes of a draft.
    """

    prefill_tokens: int = 512
    draft_nodes: int = 64


def check_query(query: TextQuery, config: LanguageModelConfig) -> None:
    """Checks a request against the model's vocabulary and positions, and its rule's parameters.

    Raises:
        PromptTooLong: If the prompt leaves no position for a token of output.
        ValueError: If the prompt is empty, a token id is not in the vocabulary, every token may be
            banned, the acceptance rule does not allow the sampling parameters, or a constrained
            text would not stop at its end tokens.
    """
    prompt, params = query.prompt, query.params
    positions = config.decoder.max_positions
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
                f"{name} names tokens {low}..{high}; the vocabulary has {config.vocab_size} tokens"
            )
    if params.may_ban_all(config.vocab_size):
        raise ValueError(
            "bad_words, and stop_token_ids before min_tokens, ban every token; leave at least one "
            f"of the {config.vocab_size}"
        )
    check_rule(query.speculation.verifier, params)
    if query.constraint is not None:
        missing = set(query.constraint.end_tokens).difference(params.stop_token_ids)
        if missing:
            raise ValueError(f"stop_token_ids lacks the constraint's end tokens {sorted(missing)}")


class InvalidPath(RuntimeError):
    """An acceptance rule broke its contract. The text fails, and no others."""


class TextScheduler(Scheduler[TextSequence, TextGroup]):
    """Texts: they join and leave in every step, and their pages grow.

    Attributes:
        limits: Most prompt tokens of a step and most nodes of a draft.
        running: Texts that have pages, by priority and then by age.
        preempted: Texts that wait for pages or for another text that computes their beginning.
        graphs: Captured steps. None launches the kernels of every step one by one.
        drafts: Captured drafts. None launches the kernels of every draft one by one.
        prefills: Captured prefills. None: all prefills are launched.
    """

    def __init__(
        self,
        runner: Runner,
        model: LanguageModel,
        limits: TextLimits | None = None,
        graphs: TextStepGraphs | None = None,
        policy: DepthPolicy | None = None,
        kv: KVCache | None = None,
        drafts: DraftGraphs | None = None,
    ) -> None:
        """Drafts as `policy` says; None drafts whenever a draft is accepted at all.

        `kv` is the cache of the runner's pool that `graphs` and `drafts` read. None makes one.
        """
        limits = limits or TextLimits()
        longest = model.config.decoder.max_positions + limits.draft_nodes
        super().__init__(runner, kv or KVCache(runner.pool, longest=longest))
        self.model, self.limits = model, limits
        self.running: list[TextSequence] = []
        self.preempted: list[TextSequence] = []
        self._proposer = DraftProposer(
            policy or DepthPolicy(), self.limits.draft_nodes, runner.pool.keys.device, drafts
        )
        self._pack = TreePacker(runner.pool.keys.device)
        self._ids, self.graphs, self.drafts = count(), graphs, drafts
        self.prefills: PrefillGraphs | None = None
        self._earliest_s = math.inf  # no text has an earlier deadline
        self._nonfinite: list[TextSequence] = []  # prompts with states that are not finite
        self._limited: list[TextSequence] = []  # texts with a limited room in this step
        self._constrains = False  # whether an admitted text may have a constraint
        self._filled: Future[None] | None = None  # when the last masks are filled
        self._text_groups = TextGroups(runner.pool.keys.device, together=graphs is not None)

    @cached_property
    def token_counts(self) -> TokenCounts:
        """Token counts of all rows. They take memory once a text has penalties, or a graph."""
        if self.graphs is not None:
            return self.graphs.token_counts
        rows, device = self.kv.slots.shape[0], self.kv.slots.device
        return TokenCounts(rows, self.model.config.vocab_size, device)

    @cached_property
    def _filler(self) -> ThreadPoolExecutor:
        """The thread that fills masks beside the forward pass."""
        return ThreadPoolExecutor(1, "masks")

    @cached_property
    def _restarts(self) -> ThreadPoolExecutor:
        """The thread that makes matchers anew, once a text needs one."""
        return ThreadPoolExecutor(1, "matchers")

    @property
    def admitted(self) -> list[TextSequence]:
        """Running texts that have pages or wait for them."""
        return self.running + self.preempted

    @property
    def num_admitted(self) -> int:
        """Number of running texts that have pages or wait for them."""
        return len(self.running) + len(self.preempted)

    def sequence_of(
        self,
        request: TextQuery,
        future: Future[Completion],
        method: Drafter,
        model: str,
        client: Client,
    ) -> TextSequence:
        """As Scheduler."""
        return TextSequence(
            request=request,
            future=future,
            submitted_s=time.monotonic(),
            model=model,
            client=client,
            context=context_of(request, next(self._ids), client.salt),
            drafter=method,
            limit=self.model.config.decoder.max_positions,
        )

    def check(self, sequence: TextSequence) -> None:
        """Raises ValueError if the request cannot run, even alone."""
        config, request = self.model.config, sequence.request
        check_query(request, config)
        check_speculation(request.speculation, sequence.drafter, request.params.greedy)
        length = request.prompt.shape[0] + request.params.max_tokens
        pages = self.kv.pages_of(min(length, config.decoder.max_positions))
        self._check_pages(pages, f"a prompt and max_tokens of {length} tokens")

    def admit(self, sequence: TextSequence) -> bool:
        """Takes a request if its pages are free or another text computes its beginning.

        Returns:
            False if the pages are not free.
        """
        request = sequence.request
        if self._place(sequence):
            insort(self.running, sequence, key=service_order)
        elif sequence.waits:
            insort(self.preempted, sequence, key=service_order)
        else:
            return False
        if request.deadline_s is not None:
            self._earliest_s = min(self._earliest_s, request.deadline_s)
        if request.constraint is not None:
            self._constrains = True
        if not sequence.timing.queue_ms:
            sequence.timing.queue_ms = (time.monotonic() - sequence.submitted_s) * 1e3
        return True

    def settle(self) -> None:
        """Ends texts whose deadline has passed, and those whose prompt is not finite."""
        self._proposer.record_step()
        if self._nonfinite:
            nonfinite, self._nonfinite = self._nonfinite, []
            self._end([(sequence, NotFinite()) for sequence in nonfinite if sequence.pages])
        now = time.monotonic()
        if now <= self._earliest_s:
            return
        deadlines = [(s, d) for s in self.admitted if (d := s.request.deadline_s) is not None]
        late = [s for s, deadline_s in deadlines if now > deadline_s]
        self._earliest_s = min((d for _, d in deadlines if now <= d), default=math.inf)
        error = "the deadline passed while the text was written"
        self._end([(s, DeadlineExceeded(error)) for s in late])

    def schedule(self) -> tuple[list[Chunk[TextSequence]], list[TextGroup]]:
        """Returns the next tokens of prompts, and the texts that step with their drafts.

        A text whose prompt ends takes its first step in the same forward pass.
        """
        self._resume()
        self._preempt_for_pages()
        self._end(self._proposer.read(self.running, may_wait=True))
        parts = chunks(self.running, self.limits.prefill_tokens)
        self._end(self._proposer.read_ahead(parts))
        groups = self._groups(parts)
        return [part for part in parts if part.sequence.pages], groups

    def chunk_batch(self, chunk: Chunk[TextSequence]) -> TreeBatch:
        """Returns the tokens of a prompt as a chain under those before them.

        Only the last state is read, unless the drafter reads all of them.
        """
        sequence, drafter = chunk.sequence, chunk.sequence.drafter
        slots, start = sequence.slots, sequence.num_computed
        stop = start + chunk.size
        tokens = on_device(sequence.context.tokens[start:stop], slots.device)
        return TreeBatch(
            chain(tokens),
            None,
            slots[start:stop],
            self.kv.before([sequence], [start]),
            inputs=NodeInputs(tokens),
            num_states=None if drafter.reads_states and drafter.hidden_layers else 1,
        )

    def tree_batch(self, trees: TextGroup) -> TreeBatch:
        """Returns the texts' trees with their slots. Node 0 is the last committed token.

        A path of first children already lies in its final slots.
        """
        tree = self._pack(trees.last_tokens, trees.drafts)
        lengths = [len(context.tokens) - 1 for context in trees.contexts]
        prefixes = self.kv.before(trees.sequences, lengths)
        slots = prefixes.slots_after(tree)
        return TreeBatch(tree, None, slots, prefixes, inputs=NodeInputs(tree.tokens))

    def _compute(
        self, chunks: Seq[Chunk[TextSequence]], trees: Seq[TextGroup], began: float
    ) -> None:
        """Runs one forward pass, and counts its tokens where `step_sizes` asks for it."""
        if self.step_sizes is None:
            super()._compute(chunks, trees, began)
            return
        texts = [text for group in trees for text in group.sequences]
        tokens = -sum(len(text.context.tokens) for text in texts if text.timing.forwards)
        super()._compute(chunks, trees, began)
        if texts:
            self.step_sizes[tokens + sum(len(text.context.tokens) for text in texts)] += 1

    def forward(self, parts: Seq[TreeBatch]) -> list[NodeStates]:
        """Returns the states of each part, with those between layers that drafters read."""
        aux_states = aux_states_for([text.drafter for text in self.running])
        return split_states(self.runner.forward(parts, aux_states), aux_states)

    @property
    def graph_sets(self) -> Mapping[str, GraphSet[Any]]:
        """The captured steps, drafts and prefills."""
        sets = {"steps": self.graphs, "drafts": self.drafts, "prefills": self.prefills}
        return {kind: graphs for kind, graphs in sets.items() if graphs is not None}

    def replay(
        self, chunks: Seq[Chunk[TextSequence]], trees: Seq[TextGroup]
    ) -> tuple[Seq[Chunk[TextSequence]], Seq[TextGroup]]:
        """Replays the prefill of one text, then the step of a group if a graph holds it."""
        if self.prefills is not None and chunks:
            if len(chunks) > 1:
                self.prefills.counts["company"] += 1
            elif (states := self.prefills.replay(self.chunk_batch(chunks[0]))) is not None:
                self.finish_prefill(chunks, [NodeStates(states)])
                chunks = ()
        if self.graphs is None or not (chunks or trees):
            return chunks, trees
        outputs = self.graphs.step(trees, bool(chunks))
        if outputs is None:
            return chunks, trees
        self._commit(trees[0], outputs)
        return (), ()

    def finish_prefill(self, chunks: Seq[Chunk[TextSequence]], states: Seq[NodeStates]) -> None:
        """Caches what is computed of each prompt, with the drafter's entries.

        On a CUDA device, a check for finite values would make the host wait. There the text's first
        logits show it.
        """
        for chunk, own in zip(chunks, states, strict=True):
            sequence, last_hidden = chunk.sequence, own.final[-1]
            if sequence.drafter.reads_states:
                sequence.states = own.read_by(sequence.drafter, slice(None))
            sequence.nonfinite = not last_hidden.is_cuda and not all_finite(last_hidden)
            sequence.mark_computed(sequence.num_computed + chunk.size, last_hidden)
        self._end(self._proposer.read([chunk.sequence for chunk in chunks]))
        for sequence in [chunk.sequence for chunk in chunks if chunk.sequence.pages]:
            self._insert_prefix(sequence)
            if sequence.nonfinite:
                self._nonfinite.append(sequence)

    def verify(self, trees: TextGroup, batch: TreeBatch, states: NodeStates) -> None:
        """Verifies the drafts of a group, and commits what it accepts."""
        counts = None
        if not trees.table.plain and any(c.params.counts_tokens for c in trees.contexts):
            counts = self.token_counts
        self._commit(
            trees, text_step(self.model, self.runner.pool, batch, trees.inputs(counts), states)
        )

    def draft_health(self) -> dict[str, DraftHealth]:
        """Returns the acceptance of recent drafts by drafter; safe to call from any thread."""
        return self._proposer.policy.health()

    def drop_all(self) -> list[TextSequence]:
        """Removes all texts, releases their pages, and returns them."""
        self._proposer.step_failed()
        dropped = self.admitted
        self._remove(dropped)
        return dropped

    def give_way(self, other: Sequence) -> TextSequence | None:
        """Removes and returns the text that is served last, if `other` is served before it.

        Its computed tokens stay in the prefix cache.
        """
        last = max([*self.running[-1:], *self.preempted[-1:]], key=service_order, default=None)
        if last is None or service_order(last) <= service_order(other):
            return None
        if last.pages:
            self._preempt(last)
        self.preempted.remove(last)
        return last

    def lacks_pages_before(self, other: Sequence) -> bool:
        """Returns whether a text that is served before `other` waits for pages."""
        for text in self.preempted:
            if not text.waits and service_order(text) <= service_order(other):
                return True
        return super().lacks_pages_before(other)

    def pages_to_admit(self, sequence: TextSequence) -> int:
        """Returns how many free pages the text needs if nothing is cached."""
        # A partly filled page of the cache is copied. The copy and the page are in use together.
        return self.kv.pages_of(sequence.length) + 1

    def free_pages(self, count: int, other: Sequence) -> bool:
        """Preempts texts that are served after `other`, last first, until `count` pages are free.

        Returns False, and preempts none, if these texts have too few pages, or if `count` pages are
        free already.
        """
        kv = self.kv
        if self.isolating or kv.num_available >= count:
            return False
        later = [s for s in self.running if service_order(s) > service_order(other)]
        held = [page for sequence in later for page in sequence.pages]
        if kv.num_available + kv.allocator.num_released(held) < count:
            return False
        while kv.num_available < count:
            self._preempt(later.pop())
        return True

    def pause(self) -> list[TextSequence]:
        """Removes and returns all texts; their computed tokens stay in the prefix cache."""
        for sequence in self.running:
            self._cache_prefix(sequence)
        return self.drop_all()

    def drop_cancelled(self) -> None:
        """Removes the texts whose futures were cancelled."""
        self._remove([s for s in self.admitted if s.future.cancelled()])

    def readmit(self, sequence: TextSequence) -> bool:
        """Continues a dropped text after the tokens that it has committed."""
        sequence.restart()
        if sequence.request.constraint is not None:
            self._constrains = True
        insort(self.preempted, sequence, key=service_order)
        return True

    def _groups(self, parts: Seq[Chunk[TextSequence]]) -> list[TextGroup]:
        """Returns the texts that step with their drafts, grouped by acceptance rule."""
        stepping: Seq[TextSequence] = self.running
        if parts:
            rows = {part.sequence: part.size for part in parts}
            stepping = [s for s in self.running if s.missing == rows.get(s, 0)]
        self._limit_drafts(stepping)
        drafts, refusals = self._proposer.propose(stepping, sum(part.size for part in parts))
        constrained = self._constrain(drafts, refusals) if self._constrains else None
        if len(drafts) < len(stepping):
            stepping = [s for s in stepping if s in drafts]
            self._end(refusals)
        self._grow_for(drafts, constrained or {})
        if not constrained:
            return self._text_groups.of(stepping, drafts)
        late = [own for own in constrained.values() if own.late is not None]
        self._filled = self._filler.submit(fill_late, late) if late else None
        groups = self._text_groups.of(stepping, drafts)
        return [group.constrained(constrained, self._filled) for group in groups]

    def _limit_drafts(self, texts: Seq[TextSequence]) -> None:
        """Limits drafts that influence their texts, if pages may be lacking, before they are drawn.

        What is drawn decides how large such a draft is. If the room depended on its size, tokens
        that are drawn in small drafts would be tried more often, and the text would not have the
        target's distribution. So these texts share the free pages equally, and take theirs before
        other texts.
        """
        for text in self._limited:
            text.room = None
        self._limited.clear()
        free, page_size = self.kv.num_available, self.kv.page_size
        if free >= len(texts) * self.kv.pages_of(self.limits.draft_nodes):
            return
        self._limited += [text for text in texts if shapes_the_text(text)]
        for place, text in enumerate(self._limited):
            pages = (free - place - 1) // len(self._limited) + 1  # sums up to all of them
            text.room = text.capacity + pages * page_size - text.length

    def _grow_for(
        self,
        drafts: dict[TextSequence, TextDraft],
        constrained: dict[TextSequence, ConstrainedDraft],
    ) -> None:
        """Gives texts pages for their drafts, or leaves a draft out if no page is free."""
        texts: Collection[TextSequence] = self._proposer.called
        if constrained or self._limited:
            texts = dict.fromkeys([*self._limited, *texts, *constrained])
        for text in texts:
            draft = drafts.get(text)
            if draft is None or self._grow(text, text.length + draft.num_nodes):
                continue
            drafts[text] = empty_draft()
            if text in constrained:
                constrained[text] = constrained[text].without_draft()

    def _constrain(
        self, drafts: dict[TextSequence, TextDraft], refusals: list[Refusal]
    ) -> dict[TextSequence, ConstrainedDraft]:
        """Returns the drafts of constrained texts, without what is forbidden and with what is sure.

        A text whose matcher meets a limit waits until another thread has made it anew.

        Args:
            drafts: The proposed drafts. Those of texts that wait or cannot go on are removed.
            refusals: Receives these texts with their errors.
        """
        texts = [s for s in drafts if s.request.constraint is not None]
        if not texts:
            self._constrains = any(s.request.constraint is not None for s in self.admitted)
        found: dict[TextSequence, ConstrainedDraft] = {}
        vocab_size = self.model.config.vocab_size
        late = vocab_size >= LATE_VOCABULARY and self.graphs is None
        if self._filled is not None:  # a step that failed may not have waited for it
            wait([self._filled])
        for sequence in texts:
            request, proposed = sequence.request, drafts[sequence]
            compares = proposed.probs is not None and not request.params.greedy
            try:
                own = constrain(
                    sequence.match(),
                    proposed,
                    sequence.budget(self.limits.draft_nodes),
                    vocab_size,
                    request.params.stop_token_ids,
                    compares and verifiers()[request.speculation.verifier].reads_probs,
                    late and not sequence.fills_early,
                )
            except Exception as error:
                if isinstance(error, ConstraintError) and not isinstance(error, NoTokenLeft):
                    self._restart_matcher(sequence)
                else:
                    refusals.append((sequence, error))
                del drafts[sequence]
                self._proposer.called.discard(sequence)
                continue
            found[sequence], drafts[sequence] = own, own.draft
            self._proposer.note_nodes(own.draft.num_nodes - proposed.num_nodes)
        return found

    def _restart_matcher(self, sequence: TextSequence) -> None:
        """Preempts a text until another thread has made its matcher anew."""
        constraint, context = sequence.request.constraint, sequence.context
        assert constraint is not None
        output = context.tokens[context.num_prompt :]
        sequence.matcher, sequence.waits = None, True
        sequence.new_matcher = self._restarts.submit(constraint.restart, output)
        self._preempt(sequence)

    def _lacks_matcher(self, sequence: TextSequence, made: Future[Matcher]) -> bool:
        """Returns whether a text still waits for its matcher, or has ended at a limit."""
        if not self.running:  # nothing else to do; other models step soon
            wait([made], 1e-3)
        if not made.done():
            return True
        sequence.new_matcher, error = None, made.exception()
        if error is not None:
            self._end([(sequence, request_error(error))])
            return True
        sequence.matcher = made.result()
        return False

    def _commit(self, group: TextGroup, outputs: StepOutputs) -> None:
        """Appends the accepted tokens, passes outcomes to the drafters, and ends finished texts.

        The nodes of the outputs are those of the group, followed by padding after a replay.
        """
        verified, states, last_hidden = outputs.paths(), outputs.states, outputs.last_hidden
        logits = outputs.logits
        outcomes: dict[int, tuple[Drafter, list[TextOutcome]]] = {}
        first, hidden, masks = 0, states.final, group.masks
        for number, sequence in enumerate(group.sequences):
            path, tokens = verified.paths[number], verified.tokens[number]
            draft, before = group.drafts[number], len(sequence.context.tokens)
            sequence.timing.forwards += 1
            sequence.timing.nodes += 1 + draft.num_nodes
            constrained = None if masks is None else masks.drafts.get(number)
            cut = False
            if constrained is not None and constrained.late and not constrained.bits.any():
                sequence.fills_early = True  # the next step says why
                first += 1
                continue
            try:
                sequence.nonfinite |= number in verified.nonfinite
                if sequence.nonfinite:
                    raise NotFinite
                if not 0 < len(path) <= 1 + draft.depth:
                    raise InvalidPath(
                        f"the acceptance rule {group.rules[number]!r} returned no path of 0 to "
                        f"{draft.depth} nodes of the draft"
                    )
                if constrained is not None and constrained.rows[path[-1] - first] == UNKNOWN:
                    # The draw behind the path had no mask. The next step draws that token.
                    cut, path, tokens = True, path[:-1], tokens[:-1]
                top = sequence.request.params.logprobs
                logprobs = () if top is None else token_logprobs(logits, path, tokens, top)
                if constrained is None:
                    added = sequence.commit(tokens, draft, logprobs)
                else:
                    nodes = [node - first for node in path]
                    added = commit_constrained(sequence, constrained, nodes, tokens, logprobs)
            except BaseException as raised:
                error = request_error(raised)
                self._end([(sequence, error)])
                first += 1 + draft.num_nodes
                continue
            used, ended = min(len(path) - 1, len(added)), sequence.finish_reason is not None
            state = hidden[path[used]] if ended or last_hidden is None else last_hidden[number]
            ranked = None if verified.ranked is None else verified.ranked[number]
            if cut:
                state, ranked = hidden[path[used]].clone(), None
                if sequence.request.params.counts_tokens:  # they have the draw
                    self.token_counts.start(sequence.row, sequence.context)
            sequence.mark_computed(before + used, state, ranked)
            if sequence.drafter.reads_states:
                nodes, drafter = path[: used + 1], sequence.drafter
                if self.drafts is not None and self.drafts.holds(drafter):
                    sequence.states = StateRows(states, drafter, nodes)
                else:
                    sequence.states = states.read_by(drafter, nodes)
            accepted: tuple[int, ...] | None = None
            if constrained is not None:
                accepted = constrained.accepted([node - first - 1 for node in path[1:]])
                if constrained.proposed.num_nodes:
                    self._proposer.record_outcome(sequence, constrained.proposed, len(accepted))
            elif draft.num_nodes:
                self._proposer.record_outcome(sequence, draft, len(path) - 1)
            if ended:
                self._cache_prefix(sequence)
                self._end([(sequence, sequence.completion())])
            elif sequence in self._proposer.called:
                rows = None
                if constrained is None:
                    accepted = tuple([node - first - 1 for node in path[1:]])
                else:
                    draft, rows = constrained.proposed, constrained.step_rows(first)
                outcome = TextOutcome(
                    context=sequence.context,
                    draft=draft,
                    accepted=accepted or (),
                    all_hidden=hidden,
                    all_logits=logits,
                    first=first,
                    rows=rows,
                )
                drafter = sequence.drafter
                outcomes.setdefault(id(drafter), (drafter, []))[1].append(outcome)
            first += 1 + group.drafts[number].num_nodes
        for drafter, own_outcomes in outcomes.values():
            drafter.commit(own_outcomes)

    def _resume(self) -> None:
        """Resumes preempted texts in order, until one finds no pages."""
        left: list[TextSequence] = []
        for sequence in list(self.preempted):
            made = sequence.new_matcher
            if made is not None and self._lacks_matcher(sequence, made):
                continue
            if all(s.waits for s in left) and self._place(sequence):
                self.preempted.remove(sequence)
                insort(self.running, sequence, key=service_order)
            else:
                left.append(sequence)

    def _place(self, sequence: TextSequence) -> bool:
        """Gives a text its pages, unless none is free or another text computes its beginning."""
        before = self.running[
            : bisect_right(self.running, service_order(sequence), key=service_order)
        ]
        sequence.waits = computed_by_another(sequence, before, self.kv.page_size)
        if sequence.waits:
            return False
        placement = self.kv.place(sequence, sequence.prefix(sequence.length - 1), 1, separate=False)
        if placement is None:
            return False
        sequence.capacity = len(sequence.pages) * self.kv.page_size
        sequence.context.table, sequence.context.row = self.kv.slots, sequence.row
        if sequence.request.params.counts_tokens:
            self.token_counts.start(sequence.row, sequence.context)
        sequence.restore(*placement)
        if not sequence.timing.forwards:
            sequence.timing.prefix_cached = sequence.num_computed
            sequence.timing.prefix_computed = sequence.missing
        return True

    def _grow(self, sequence: TextSequence, tokens: int) -> bool:
        """Gives a text pages for this many tokens. Returns False if that needs a preemption."""
        if tokens <= sequence.capacity:
            return True
        if not self.kv.grow(sequence, self.kv.pages_of(tokens) - len(sequence.pages)):
            return False
        sequence.capacity = len(sequence.pages) * self.kv.page_size
        return True

    def _preempt_for_pages(self) -> None:
        """Gives every text that steps a slot for node 0, and preempts texts served last."""
        for sequence in [s for s in self.running if len(s.context.tokens) > s.capacity]:
            while sequence.pages and not self._grow(sequence, sequence.length):
                self._preempt(self.running[-1])

    def _preempt(self, sequence: TextSequence) -> None:
        self._cache_prefix(sequence)
        self._remove([sequence])
        sequence.num_computed = 0
        sequence.timing.preemptions += 1
        insort(self.preempted, sequence, key=service_order)

    def _cache_prefix(self, sequence: TextSequence) -> None:
        """Stores a text's computed tokens, with the drafter's entries of all of them."""
        if not self._proposer.read([sequence], without_last=True):
            self._insert_prefix(sequence)

    def _insert_prefix(self, sequence: TextSequence) -> None:
        length = sequence.num_computed
        if sequence.last_hidden is not None and not sequence.nonfinite:
            pages = sequence.pages[: self.kv.pages_of(length)]
            self.kv.prefixes.insert(sequence.prefix(length), pages, sequence.to_cache())

    def _remove(self, sequences: Seq[TextSequence]) -> None:
        """Removes texts, and releases their pages and their drafters' state.

        A text that is not finite leaves nothing in the prefix cache.
        """
        if not sequences:
            return
        for sequence in sequences:
            if sequence.nonfinite:
                log.error("the model's output for a text is not finite; its prefix is dropped")
                self.kv.discard(sequence.prefix(sequence.length), sequence.pages)
            self._proposer.forget(sequence)
            self.kv.release(sequence)
            sequence.capacity = 0
        gone = set(sequences)
        self.running = [s for s in self.running if s not in gone]
        self.preempted = [s for s in self.preempted if s not in gone]


def commit_constrained(
    sequence: TextSequence,
    constrained: ConstrainedDraft,
    nodes: Seq[int],
    tokens: list[int],
    logprobs: Seq[TokenLogprobs],
) -> Seq[int]:
    """Commits tokens of a constrained text, and advances its matcher over them.

    Args:
        sequence: The text.
        constrained: Its draft.
        nodes: Node that each token was drawn at, as `ConstrainedDraft.count_allowed`.
        tokens: The tokens.
        logprobs: Their log-probabilities. Empty if not requested.

    Raises:
        NoTokenLeft: If the text reaches a place where no token is left.
    """
    context, params = sequence.context, sequence.request.params
    written = context.tokens
    allowed = constrained.count_allowed(nodes, tokens, written, context.num_prompt, params)
    added: Seq[int] = ()
    if allowed:
        added = sequence.commit(tokens[:allowed], constrained.draft, logprobs[:allowed])
        if sequence.finish_reason is None:
            matcher = sequence.match()
            try:
                for token in added:
                    matcher.advance(token)
            except ConstraintError:
                sequence.matcher = None  # before the next step it is made anew
    if allowed < len(tokens) and sequence.finish_reason is None:
        raise NoTokenLeft(
            f"no token is left after {context.num_output} tokens: the constraint allows only "
            "tokens that bad_words, or min_tokens before the end of the text, ban"
        )
    return added


def chunks(texts: Iterable[TextSequence], most: int) -> list[Chunk[TextSequence]]:
    """Returns the chunks of one step with at most `most` tokens, in the order of the texts."""
    left, found = most, []
    for text in texts:
        if text.ready:
            continue
        size = min(text.missing, left)
        if size:
            found.append(Chunk(text, size))
            left -= size
    return found


def computed_by_another(text: TextSequence, others: Iterable[TextSequence], page_size: int) -> bool:
    """Returns whether another text will soon compute at least one page of this text's beginning.

    Waiting for it takes no more time than computing the page twice.
    """
    rows = text.context.tokens[:-1]
    return any(
        not other.ready
        and other.client.salt == text.client.salt
        and shared_rows(rows, other.context.tokens[:-1], page_size)
        >= other.num_computed + page_size
        for other in others
    )


def shared_rows(rows: Seq[int], other: Seq[int], page_size: int) -> int:
    """Returns how many rows at the beginning could come from the other text's pages.

    These are whole pages, and the last partial page if one of the texts ends in it.
    """
    size, shared = min(len(rows), len(other)), 0
    while shared < size:
        stop = min(shared + page_size, size)
        if rows[shared:stop] != other[shared:stop]:
            break
        shared = stop
    return shared
