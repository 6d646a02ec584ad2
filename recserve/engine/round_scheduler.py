"""The scheduler of item requests: one model's admission, pages, steps and delivery."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recserve.core.client import Client
from recserve.core.errors import DeadlineExceeded
from recserve.core.finite import NotFinite, all_finite
from recserve.core.plugins import request_error
from recserve.core.request import (
    Continuation,
    LikelihoodQuery,
    PrefixKeys,
    PrewarmQuery,
    Request,
    Result,
    SlateQuery,
)
from recserve.core.sequence import CachedPrefix, SearchSequence
from recserve.core.strategy import Draft, Strategy
from recserve.engine.beam_search_graph import BeamSearchGraphs
from recserve.engine.capture import GraphSet, PrefillGraphs
from recserve.engine.kv_cache import KVCache
from recserve.engine.runner import Runner
from recserve.engine.scheduler import Chunk, Scheduler, has_expired
from recserve.engine.search_batch import (
    Round,
    SearchBatch,
    check_result,
    computed_nodes,
    zero_nonfinite,
)
from recserve.kernels.host import on_device
from recserve.kernels.tree import AUXILIARY, CANDIDATE, chain
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.inputs import NodeInputs

log = logging.getLogger(__name__)


class StrategyError(RuntimeError):
    """A strategy broke its contract with the scheduler. Its requests fail, and no others."""


class RoundScheduler(Scheduler[SearchSequence, SearchBatch]):
    """Item requests: the members of a batch are fixed until its end, and have all their pages.

    Attributes:
        batches: Requests whose search runs.
        cold: Admitted requests whose prefix still needs a forward pass.
        warm: Admitted requests whose prefix is computed.
        step_tokens: Most tokens that a step computes, so that other requests need not wait. Longer
            prefixes and drafts are computed in several steps. Prefix tokens that see each other are
            computed in one. None computes everything at once.
        admitted_tokens: Most tokens that the admitted requests have still to compute. Those that
            wait in the queue hold no pages, and leave it when they expire. None sets no bound.
        searches: Captured searches. None: all searches are launched.
        prefills: Captured prefills. None: all prefills are launched.
    """

    delays_background = True

    def __init__(
        self,
        runner: Runner,
        kv: KVCache | None = None,
        step_tokens: int | None = None,
        admitted_tokens: int | None = None,
    ) -> None:
        super().__init__(runner, kv)
        self.step_tokens, self.admitted_tokens = step_tokens, admitted_tokens
        self.batches: list[SearchBatch] = []
        self._admitted: dict[SearchSequence, None] = {}  # in the order of admission
        self.cold: list[SearchSequence] = []
        self.warm: list[SearchSequence] = []
        self.searches: BeamSearchGraphs | None = None
        self.prefills: PrefillGraphs | None = None

    @property
    def graph_sets(self) -> Mapping[str, GraphSet[Any]]:
        """The captured searches and prefills."""
        sets = {"searches": self.searches, "prefills": self.prefills}
        return {kind: graphs for kind, graphs in sets.items() if graphs is not None}

    @property
    def admitted(self) -> list[SearchSequence]:
        """Running requests that have pages."""
        return list(self._admitted)

    @property
    def num_admitted(self) -> int:
        """Number of running requests that have pages."""
        return len(self._admitted)

    def sequence_of(
        self,
        request: Request,
        future: Future[Result],
        method: Strategy,
        model: str,
        client: Client,
    ) -> SearchSequence:
        """As Scheduler."""
        return SearchSequence(
            request=request,
            future=future,
            submitted_s=time.monotonic(),
            model=model,
            client=client,
            background=isinstance(request, PrewarmQuery),
            strategy=method,
        )

    def check(self, sequence: SearchSequence) -> None:
        """Raises RequestTooLarge if the request needs more pages than the pool has."""
        rows = len(sequence.request.prefix.inputs)
        self._check_pages(self._num_pages(sequence), f"a history of {rows} rows and its trees")

    def admit(self, sequence: SearchSequence) -> bool:
        """Takes a request in and reserves all pages that it will need. Returns False if too few
        are free, or if the admitted requests suffice for the next steps.
        """
        kv, request, timing = self.kv, sequence.request, sequence.timing
        capacity, rows = sequence.strategy.tree_capacity(request), request.prefix.keys.shape[0]
        placement = kv.place(sequence, _keys(sequence), capacity, separate=True)
        if placement is None:
            return False
        length, cached = placement
        below = slice(kv.pages_of(rows) * kv.page_size, len(sequence.pages) * kv.page_size)
        if self.admitted_tokens is not None and self.num_admitted:
            tokens = rows - length + below.stop - below.start
            if self._num_open_tokens() + tokens > self.admitted_tokens:
                kv.release(sequence)
                return False
        sequence.tree_slots = sequence.slots[below]
        sequence.take_cached(rows, length, cached or CachedPrefix())
        timing.queue_ms = (time.monotonic() - sequence.submitted_s) * 1e3
        timing.prefix_cached, timing.prefix_computed = length, rows - length
        self._admitted[sequence] = None
        (self.warm if sequence.computed else self.cold).append(sequence)
        return True

    def pages_to_admit(self, sequence: SearchSequence) -> int:
        """Returns how many free pages the request needs if nothing is cached. 0 if the admitted
        requests suffice for the next steps.
        """
        pages = self._num_pages(sequence) + 1  # for a page to copy, as for texts
        if self.admitted_tokens is not None and self.num_admitted:
            tokens = self._num_open_tokens() + pages * self.kv.page_size
            if tokens > self.admitted_tokens:
                return 0
        return pages

    def settle(self) -> None:
        """Starts the requests with computed prefixes, and ends those that are finished or late."""
        warm, self.warm = self.warm, []
        if self.cold or self.batches:
            self._end_late()
        if warm:
            self._start(warm)
        if self.batches:
            self._finish()

    def schedule(self) -> tuple[list[Chunk[SearchSequence]], list[SearchBatch]]:
        """Proposes trees for all batches, and returns `step_tokens` tokens of prefixes and trees.

        Prefixes come first. A prefix or a round that is longer continues in the next step.
        """
        self._propose([batch for batch in self.batches if batch.state is not None])
        chunks, left = self._next_chunks()
        batches = list[SearchBatch]()
        for batch in self.batches:
            if batch.round is None:  # `replay` decides about it
                batches.append(batch)
            elif left is None or left > 0:
                size = batch.round.take(left)
                left = None if left is None else left - size
                batches.append(batch)
        return chunks, batches

    def _propose(self, batches: Seq[SearchBatch]) -> None:
        """Starts a round of the batches that are between two rounds."""
        new = [batch for batch in batches if batch.round is None]
        for batch, draft in [(batch, batch.strategy.propose(batch.state)) for batch in new]:
            batch.round = Round(draft, self._place(batch, draft))

    def replay(
        self, chunks: Seq[Chunk[SearchSequence]], trees: Seq[SearchBatch]
    ) -> tuple[Seq[Chunk[SearchSequence]], Seq[SearchBatch]]:
        """Replays whole searches, and a prefill if nothing else is left. Returns the rest.

        A search that no graph holds starts here, and its first round joins the rest.
        """
        if self.searches is not None:
            new = [batch for batch in trees if batch.state is None]
            trees = [batch for batch in trees if batch.state is not None]
            launched = [batch for batch in new if not self._replay_search(self.searches, batch)]
            began = time.perf_counter()
            self._propose(launched)
            spent_ms = (time.perf_counter() - began) * 1e3
            for batch in launched:
                for sequence in batch.sequences:
                    sequence.timing.draft_ms += spent_ms
                    sequence.timing.verify_ms -= spent_ms  # the step counts all of its replays
                left = self._num_left(chunks, trees)
                if batch.round is not None and (left is None or left > 0):
                    batch.round.take(left)
                    trees.append(batch)
        if self.prefills is not None and chunks:
            if len(chunks) > 1 or trees:
                self.prefills.counts["company"] += 1
            elif (states := self.prefills.replay(self.chunk_batch(chunks[0]))) is not None:
                self.finish_prefill(chunks, [states])
                chunks = ()
        return chunks, trees

    def _replay_search(self, searches: BeamSearchGraphs, batch: SearchBatch) -> bool:
        """Replays the search of one batch, or starts it if no graph holds it.

        If that fails, each of its requests starts alone. Returns whether no node is left to score.
        """
        strategy, sequences = batch.strategy, batch.sequences
        try:
            assert strategy.captured_search is not None
            search = searches.replay(strategy.captured_search, sequences)
            if search is not None:
                batch.state = strategy.after_replay(sequences, search)
                return True
            batch.state = strategy.start(sequences)
            return strategy.is_finished(batch.state)
        except BaseException as raised:
            error = request_error(raised)
            log.exception("a search failed to start")
            self.batches = [one for one in self.batches if one is not batch]
            self._start_alone(strategy, sequences, error)
            return True

    def tree_batch(self, trees: SearchBatch) -> TreeBatch:
        """Returns the nodes that the step computes."""
        assert trees.round is not None and trees.round.part is not None
        return trees.round.part

    def finish_prefill(self, chunks: Seq[Chunk[SearchSequence]], states: Seq[Tensor]) -> None:
        """Caches complete prefixes, whose requests may start. Prefixes that are not finite fail."""
        nonfinite = list[SearchSequence]()
        for chunk, own in zip(chunks, states, strict=True):
            sequence, stop = chunk.sequence, chunk.sequence.num_computed + chunk.size
            # On a CUDA device, the check would make the host wait. There the result shows it.
            if not own.is_cuda and not all_finite(own):
                nonfinite.append(sequence)
            elif stop < sequence.prefix_length:
                sequence.num_computed = stop
                continue
            else:
                self._store_prefix(sequence, own)
                self.warm.append(sequence)
            self.cold.remove(sequence)
        self._end([(sequence, NotFinite()) for sequence in nonfinite])

    def verify(self, trees: SearchBatch, batch: TreeBatch, states: Tensor) -> None:
        """Hands the states of a round to the strategy, once all of its nodes are computed."""
        assert trees.round is not None
        for sequence in trees.sequences:
            sequence.timing.forwards += 1
        whole = trees.round.add(zero_nonfinite(trees.sequences, batch, states, self.runner.pool))
        if whole is not None:
            draft, slots = trees.round.draft, trees.round.batch.slots
            trees.state = trees.strategy.verify(trees.state, draft, slots, whole)
            trees.round = None

    def drop_all(self) -> list[SearchSequence]:
        """Removes all running requests, releases their pages, and returns them."""
        dropped = self.admitted
        self.cold, self.warm, self.batches = [], [], []
        self._remove(dropped)
        for sequence in dropped:
            sequence.restart()
        return dropped

    def drop_cancelled(self) -> None:
        """Removes cancelled requests. A batch is removed once all of its requests are
        cancelled.
        """
        gone = [s for s in (*self.cold, *self.warm) if s.future.cancelled()]
        self.cold = [s for s in self.cold if not s.future.cancelled()]
        self.warm = [s for s in self.warm if not s.future.cancelled()]
        running = []
        for batch in self.batches:
            if all(s.future.cancelled() for s in batch.sequences):
                gone += batch.sequences
            else:
                running.append(batch)
        self.batches = running
        self._remove(gone)

    def _remove(self, sequences: Seq[SearchSequence]) -> None:
        """Releases the pages. A request that is not finite leaves no prefix in the prefix cache."""
        for sequence in sequences:
            if sequence.nonfinite:
                log.error("the model's output for a request is not finite; its prefix is dropped")
                self.kv.discard(_keys(sequence), sequence.pages)
            self.kv.release(sequence)
            self._admitted.pop(sequence, None)

    def _next_chunks(self) -> tuple[list[Chunk[SearchSequence]], int | None]:
        """Returns the parts of prefixes that the next step computes, and how many tokens it has
        left for trees. None: the step has no bound.
        """
        left, chunks = self.step_tokens, []
        for sequence in self.cold:
            stop = sequence.prefix_length
            if left is not None:
                if left <= 0:
                    break
                least = sequence.request.prefix.shared
                stop = min(stop, max(sequence.num_computed + left, least))
                left -= stop - sequence.num_computed
            chunks.append(Chunk(sequence, stop - sequence.num_computed))
        return chunks, left

    def _num_left(self, chunks: Seq[Chunk[SearchSequence]], trees: Seq[SearchBatch]) -> int | None:
        """Returns how many more tokens a step with these prefixes and trees may have."""
        if self.step_tokens is None:
            return None
        taken = sum(chunk.size for chunk in chunks)
        return self.step_tokens - taken - sum(len(self.tree_batch(b).inputs) for b in trees)

    def _num_pages(self, sequence: SearchSequence) -> int:
        """Returns the number of pages of a request's prefix and trees."""
        request = sequence.request
        capacity = sequence.strategy.tree_capacity(request)
        return self.kv.pages_of(len(request.prefix.inputs)) + self.kv.pages_of(capacity)

    def _num_open_tokens(self) -> int:
        """Returns how many tokens of the admitted requests are not computed, in whole pages."""
        return sum(s.prefix_length - s.num_computed + s.tree_slots.shape[0] for s in self._admitted)

    def _end_late(self) -> None:
        """Ends requests between two parts of their prefix or of a round, once they are late.

        A round ends only if nobody waits for any of its results.
        """
        running: list[SearchBatch] = []
        late = [sequence for sequence in self.cold if has_expired(sequence.request)]
        if late:
            self.cold = [sequence for sequence in self.cold if sequence not in late]
        for batch in self.batches:
            gone = (batch.round is not None or batch.state is None) and all(
                s.future.cancelled() or has_expired(s.request) for s in batch.sequences
            )
            if gone:
                late += batch.sequences
            else:
                running.append(batch)
        self.batches = running
        if late:
            error = DeadlineExceeded("the deadline passed while the request ran")
            self._end([(sequence, error) for sequence in late])

    def _start(self, ready: list[SearchSequence]) -> None:
        """Groups requests with computed prefixes into batches."""
        if len(ready) == 1:
            self._start_group(ready[0].strategy, ready)
            return
        groups: dict[tuple[Strategy, int], list[SearchSequence]] = {}
        for sequence in ready:
            request = sequence.request
            by_trie = isinstance(request, SlateQuery | LikelihoodQuery)
            trie = id(request.trie) if by_trie else 0  # type: ignore[union-attr]
            groups.setdefault((sequence.strategy, trie), []).append(sequence)
        for (strategy, _), sequences in groups.items():
            self._start_group(strategy, sequences)

    def _start_group(self, strategy: Strategy, sequences: list[SearchSequence]) -> None:
        """Starts one batch, unless `replay` may have a graph of its search. If that fails, each
        request starts alone.
        """
        began, timing = time.perf_counter(), sequences[0].timing
        drafted_ms = timing.draft_ms
        try:
            captured = self.searches is not None and strategy.captured_search is not None
            waits = captured and strategy.can_replay(sequences)
            state = None if waits else strategy.start(sequences)
            self.batches.append(SearchBatch(strategy, sequences, state))
            spent_ms = (time.perf_counter() - began) * 1e3 - (timing.draft_ms - drafted_ms)
            for sequence in sequences:
                sequence.timing.verify_ms += spent_ms
        except BaseException as raised:
            error = request_error(raised)
            self._start_alone(strategy, sequences, error)

    def _start_alone(
        self, strategy: Strategy, sequences: list[SearchSequence], error: Exception
    ) -> None:
        """Starts each request of a group alone after an error. One that was alone gets it."""
        if len(sequences) == 1:
            self._end([(sequences[0], error)])
            return
        for sequence in sequences:
            self._start_group(strategy, [sequence])

    def _finish(self) -> None:
        """Ends the requests of finished batches. A batch that raises an error fails alone."""
        batches, self.batches = self.batches, []
        for batch in batches:
            began = time.perf_counter()
            try:
                if batch.state is None or not batch.strategy.is_finished(batch.state):
                    self.batches.append(batch)
                    continue
                results = self._results_of(batch)
                spent_ms = (time.perf_counter() - began) * 1e3
                for sequence in batch.sequences:
                    sequence.timing.verify_ms += spent_ms
            except BaseException as raised:
                error = request_error(raised)
                log.exception("a strategy failed to finish its requests")
                results = [error] * len(batch.sequences)
            self._settle(batch, results)

    def _results_of(self, batch: SearchBatch) -> list[Result | Continuation | Exception]:
        """Returns a result for each request of a finished batch."""
        results = batch.strategy.finish(batch.state)
        if len(results) != len(batch.sequences):
            raise StrategyError(
                f"the strategy {type(batch.strategy).__name__} returned {len(results)} results "
                f"for {len(batch.sequences)} requests"
            )
        return [
            NotFinite() if sequence.nonfinite else check_result(result)
            for sequence, result in zip(batch.sequences, results, strict=True)
        ]

    def _settle(self, batch: SearchBatch, results: Seq[Result | Continuation | Exception]) -> None:
        """Ends the requests with a result. Those that continue with another search are warm."""
        for sequence, result in zip(batch.sequences, results, strict=True):
            if not isinstance(result, Continuation):
                self._end([(sequence, result)])
            elif has_expired(sequence.request):
                late = DeadlineExceeded("the deadline passed between two searches")
                self._end([(sequence, late)])
            else:
                sequence.search_again(result)
                self.warm.append(sequence)

    def _place(self, batch: SearchBatch, draft: Draft) -> TreeBatch:
        """Assigns a slot to every node of a draft. Nodes computed earlier keep their slots."""
        counts = computed_nodes(draft)
        parts = []
        for sequence, count in zip(batch.sequences, counts, strict=True):
            parts.append(sequence.take_tree_slots(count))
            sequence.timing.nodes += count
            sequence.rounds += count > 0
        slots = new = parts[0] if len(parts) == 1 else torch.cat(parts)
        if draft.queries is not None and draft.scored is not None:
            # Nodes neither scored nor computed have no descendants: any valid slot will do.
            slots = draft.scored.clamp(min=0)
            slots[draft.queries] = new
        if batch.prefixes is None:
            lengths = [sequence.prefix_length for sequence in batch.sequences]
            batch.prefixes = self.kv.before(batch.sequences, lengths)
        return TreeBatch(
            draft.tree, draft.queries, slots, batch.prefixes, counts, inputs=draft.inputs
        )

    def chunk_batch(self, chunk: Chunk[SearchSequence]) -> TreeBatch:
        """Returns the next tokens of a prefix as a chain. Placeholders follow the last one."""
        sequence, stop = chunk.sequence, chunk.sequence.num_computed + chunk.size
        prefix, start = sequence.request.prefix, sequence.num_computed
        inputs, slots = prefix.inputs.select(slice(start, stop)), sequence.slots
        places, kinds = slots[start:stop], None
        num_states = min(len(inputs), 1)
        if sequence.placeholders is not None and stop == sequence.prefix_length:
            count = len(sequence.placeholders)
            num_states += count
            kinds = torch.full((len(inputs) + count,), AUXILIARY, device=slots.device)
            kinds[: len(inputs)] = CANDIDATE
            inputs = NodeInputs.cat([inputs, sequence.placeholders])
            places = torch.cat([places, sequence.tree_slots[:count]])
        tree = replace(chain(inputs.tokens), kinds=kinds)
        if start < prefix.shared:
            shared = on_device([prefix.shared], inputs.tokens.device)
            tree = replace(tree, shared=shared)
        prefixes = self.kv.before([sequence], [start])
        return TreeBatch(
            tree, None, places, prefixes, [len(inputs)], inputs=inputs, num_states=num_states
        )

    def _store_prefix(self, sequence: SearchSequence, states: Tensor) -> None:
        """Caches a computed prefix."""
        if sequence.num_computed < sequence.prefix_length:
            sequence.last_hidden, states = states[0].clone(), states[1:]
        if sequence.placeholders is not None:
            # Nothing reads the keys and values again: trees overwrite them.
            sequence.placeholder_states = states.clone()
            sequence.timing.nodes += states.shape[0]
        sequence.num_computed = sequence.prefix_length
        cached = sequence.cached_prefix
        cached.last_hidden = sequence.last_hidden
        cached.placeholder_states = sequence.placeholder_states
        pages = sequence.pages[: self.kv.pages_of(sequence.prefix_length)]
        self.kv.prefixes.insert(_keys(sequence), pages, cached)


def _keys(sequence: SearchSequence) -> PrefixKeys:
    prefix = sequence.request.prefix
    return PrefixKeys(prefix.keys, prefix.shared, salt=sequence.client.salt)
