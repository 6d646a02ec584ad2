"""Proposes drafts for the texts that step: calls the drafters, as deep as the load allows."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from recserve.core.draft_policy import MAX_DEPTH, Cost, DepthPolicy
from recserve.core.plugins import request_error
from recserve.drafters.none import NoDrafter
from recserve.engine.draft_graph import DraftGraphs
from recserve.engine.runner import Runner
from recserve.engine.scheduler import Chunk
from recserve.engine.text_sequence import NO_BUDGET, TextSequence
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.tree import root_branch
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.adapters import DecoderAdapter
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.speculation.draft import Budget, DrafterError, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, StateSpan
from recserve.speculation.verifiers.registry import verifiers

log = logging.getLogger(__name__)

Refusal = tuple[TextSequence, Exception]


class DraftProposer:
    """Calls every drafter once per step, for all of its texts, as deep as the policy says.

    Under a rule by which drafts influence the text, the policy does not decide.

    Attributes:
        draft_nodes: Most nodes of a draft.
        policy: Chooses the depth of drafts, or pauses them.
        called: Texts whose drafter was called for this step.
        graphs: Captured drafts. None launches the kernels of every draft one by one.
    """

    def __init__(
        self,
        policy: DepthPolicy,
        draft_nodes: int,
        device: torch.device,
        graphs: DraftGraphs | None = None,
    ) -> None:
        self.policy, self.draft_nodes, self.graphs = policy, draft_nodes, graphs
        self.called: set[TextSequence] = set()
        self._started: set[int] = set()  # ids of texts that were passed to their drafter
        self._nothing = empty_draft()
        self._now = step_clock(device)
        self._num_texts = self._num_nodes = 0
        self._began_s = self._drafting_s = 0.0

    def propose(
        self, texts: Seq[TextSequence], prefill: int
    ) -> tuple[dict[TextSequence, TextDraft], list[Refusal]]:
        """Returns drafts for the texts, and the texts whose drafter or draft failed.

        Args:
            texts: All texts that step.
            prefill: Number of prompt tokens in the same forward pass.

        Returns:
            A draft for each text, empty if it has none. Then each text whose drafter raised an
            error or whose acceptance rule refuses the draft, with the error.
        """
        drafts = dict.fromkeys(texts, self._nothing)
        drafting = [s for s in texts if not isinstance(s.drafter, NoDrafter)]
        self.called.clear()
        self._began_s, self._drafting_s = self._now(), 0.0
        refusals: list[Refusal] = []
        for sequences, budgets in self._calls(drafting, len(texts), prefill):
            refusals += self._call(sequences[0].drafter, sequences, budgets, drafts)
        if self.graphs is not None:
            refusals += self._read_without_draft(texts, refusals)
        for sequence, _ in refusals:
            drafts.pop(sequence, None)
        if self.policy.has_cost:
            self._num_texts = len(drafts)
            drafted = sum(map(len, drafts.values())) if self.called else 0
            self._num_nodes = 0 if prefill else len(drafts) + drafted
        return drafts, refusals

    def read(
        self, texts: Seq[TextSequence], without_last: bool = False, may_wait: bool = False
    ) -> list[Refusal]:
        """Passes states to the drafters that have not received them.

        Args:
            texts: Texts with slots for all their tokens.
            without_last: Whether to hold back the state of the last computed token.
            may_wait: Whether to leave out states that `propose` passes on, with a captured draft.

        Returns:
            Each text whose drafter raised an error, with the error.
        """
        waits = may_wait and self.graphs is not None
        return self._read(
            [
                (sequence, sequence.take_unread(sequence.num_computed - without_last))
                for sequence in texts
                if not (waits and sequence.waiting is not None)
            ]
        )

    def read_ahead(self, chunks: Seq[Chunk[TextSequence]]) -> list[Refusal]:
        """Passes the next tokens of prompts to the drafters that read the states of no layer.

        Such a drafter drafts in the step that computes the end of a prompt.

        Args:
            chunks: What this step computes of each prompt.

        Returns:
            As `read`.
        """
        found = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.drafter.reads_states and not sequence.drafter.hidden_layers:
                found.append((sequence, sequence.take_ahead(sequence.num_computed + chunk.size)))
        return self._read(found)

    def _read(self, found: Seq[tuple[TextSequence, StateSpan | None]]) -> list[Refusal]:
        """Passes on what was found. Returns as `read`."""
        calls: dict[int, tuple[Drafter, list[TextSequence], list[StateSpan]]] = {}
        for sequence, part in found:
            if part is not None:
                drafter = sequence.drafter
                own = calls.setdefault(id(drafter), (drafter, [], []))
                own[1].append(sequence)
                own[2].append(part)
        refusals: list[Refusal] = []
        for drafter, sequences, parts in calls.values():
            try:
                drafter.read(parts)
            except BaseException as raised:
                error = request_error(raised)
                refusals += [(sequence, error) for sequence in sequences]
        return refusals

    def record_step(self) -> None:
        """Records the time of the step that verified the last drafts, once."""
        if self._num_nodes:
            taken_ms = (self._now() - self._began_s - self._drafting_s) * 1e3
            self.policy.record_step(self._num_texts, self._num_nodes, taken_ms)
            self._num_nodes = 0

    def note_nodes(self, added: int) -> None:
        """Notes that the step has more nodes than were proposed, or fewer if `added` < 0."""
        if self._num_nodes:
            self._num_nodes += added

    def step_failed(self) -> None:
        """Forgets the time of a step that raised an error."""
        self._num_nodes = 0

    def record_outcome(self, sequence: TextSequence, draft: TextDraft, accepted: int) -> None:
        """Records how many levels of a draft were accepted."""
        name = sequence.request.speculation.drafter
        self.policy.record(name).add(accepted, draft.levels, accepted)

    def forget(self, sequence: TextSequence) -> None:
        """Tells the drafter that the text has ended or was preempted."""
        try:
            sequence.drafter.forget(sequence.context.id)
        except BaseException as raised:
            name = sequence.drafter.name
            log.error(
                "the drafter %r failed to forget a text", name, exc_info=request_error(raised)
            )
        self._started.discard(sequence.context.id)

    def _calls(
        self, texts: Seq[TextSequence], num_texts: int, prefill: int
    ) -> list[tuple[list[TextSequence], list[Budget]]]:
        """Returns the texts to draft for by drafter, with their budgets.

        A text without a budget is passed to its drafter once, because some drafters learn from all
        texts.
        """
        depths: dict[str, int] = {}
        if self.policy.has_cost and texts:
            free = [s for s in texts if not shapes_the_text(s)]
            counts = Counter([s.request.speculation.drafter for s in free])
            depths = self.policy.depths(counts, num_texts, prefill)
        calls: dict[int, tuple[list[TextSequence], list[Budget]]] = {}
        for sequence in texts:
            budget = most = sequence.budget(self.draft_nodes)
            if not shapes_the_text(sequence):
                name = sequence.request.speculation.drafter
                budget = self._as_deep_as_pays(name, depths.get(name), most)
            sequence.paused = bool(most.num_nodes and not budget.num_nodes)
            if budget.num_nodes or sequence.context.id not in self._started:
                self._started.add(sequence.context.id)
                own = calls.setdefault(id(sequence.drafter), ([], []))
                own[0].append(sequence)
                own[1].append(budget)
        return list(calls.values())

    def _as_deep_as_pays(self, drafter: str, depth: int | None, most: Budget) -> Budget:
        """Returns the part of a budget that the policy grants. Without costs, `depth` is None."""
        if depth is None:
            return most if self.policy.record(drafter).allows() else NO_BUDGET
        if not depth:
            return NO_BUDGET
        nodes = min(self.policy.num_nodes(drafter, depth), most.num_nodes)
        return Budget(int(nodes), min(depth, most.depth) if depth < MAX_DEPTH else most.depth)

    def _call(
        self,
        drafter: Drafter,
        texts: Seq[TextSequence],
        budgets: Seq[Budget],
        drafts: dict[TextSequence, TextDraft],
    ) -> list[Refusal]:
        """Calls one drafter and enters its drafts into `drafts`."""
        began, name = self._now(), texts[0].request.speculation.drafter
        try:
            proposed, refusals = self._drafts_of(drafter, texts, budgets)
        except BaseException as raised:
            error = request_error(raised)
            return [(s, error) for s in texts]
        taken_s = self._now() - began
        self._drafting_s += taken_s
        within: list[tuple[int, int, int]] = []
        for sequence, budget, draft in zip(texts, budgets, proposed, strict=True):
            if draft is None:  # refused
                continue
            try:
                if draft.num_nodes > budget.num_nodes or draft.depth > budget.depth:
                    raise DrafterError(
                        f"the drafter {name!r} returned a draft of {draft.num_nodes} nodes and "
                        f"{draft.depth} levels; the budget was {budget.num_nodes} nodes and "
                        f"{budget.depth} levels"
                    )
                within.append((budget.depth, draft.num_nodes, draft.levels))
                request = sequence.request
                if not request.params.greedy:  # at temperature 0 every rule accepts by the argmax
                    verifiers()[request.speculation.verifier].check(draft)
            except BaseException as raised:
                error = request_error(raised)
                refusals.append((sequence, error))
                continue
            drafts[sequence] = draft
            self.called.add(sequence)
        self.policy.record_drafts(name, within, taken_s * 1e3)
        return refusals

    def _drafts_of(
        self, drafter: Drafter, texts: Seq[TextSequence], budgets: Seq[Budget]
    ) -> tuple[Seq[TextDraft | None], list[Refusal]]:
        """Returns drafts of a drafter's texts, captured where a graph holds them.

        A text whose new states the drafter failed to read has no draft, and an error.
        """
        if self.graphs is None:
            return self._launch(drafter, texts, budgets), []
        drafts = self.graphs.draft(texts, budgets)
        left = [place for place, draft in enumerate(drafts) if draft is None]
        if not left:
            return drafts, []
        refusals = self.read([texts[place] for place in left])
        refused = {sequence for sequence, _ in refusals}
        left = [place for place in left if texts[place] not in refused]
        if left:
            some = self._launch(drafter, [texts[i] for i in left], [budgets[i] for i in left])
            for place, draft in zip(left, some, strict=True):
                drafts[place] = draft
        return drafts, refusals

    def _launch(
        self, drafter: Drafter, texts: Seq[TextSequence], budgets: Seq[Budget]
    ) -> list[TextDraft]:
        drafts = drafter.propose([sequence.context for sequence in texts], budgets)
        if len(drafts) != len(texts):
            name = texts[0].request.speculation.drafter
            raise DrafterError(
                f"the drafter {name!r} returned {len(drafts)} drafts for {len(texts)} texts"
            )
        return drafts

    def _read_without_draft(
        self, texts: Seq[TextSequence], refusals: Seq[Refusal]
    ) -> list[Refusal]:
        """Passes on the states of texts whose drafter was not called, captured where possible."""
        assert self.graphs is not None
        refused = {sequence for sequence, _ in refusals}
        left: dict[int, list[TextSequence]] = {}
        for sequence in texts:
            if sequence.waiting is not None and sequence not in refused:
                left.setdefault(id(sequence.drafter), []).append(sequence)
        failed: list[Refusal] = []
        for own in left.values():
            try:
                self.graphs.draft(own, [NO_BUDGET] * len(own))
                failed += self.read(own)
            except BaseException as raised:
                error = request_error(raised)
                failed += [(sequence, error) for sequence in own]
        return failed


def shapes_the_text(sequence: TextSequence) -> bool:
    """Returns whether drafts influence the text, by its rule: then they are always made."""
    request = sequence.request
    rule = verifiers()[request.speculation.verifier]
    return not rule.exact or bool(rule.reads_probs and request.params.temperature)


SIZES = (1, 4, 16, 64)
PREFIX = 64
RUNS = 3


def step_clock(device: torch.device) -> Callable[[], float]:
    """Returns a clock in seconds. On a CPU it is the thread's clock, which excludes other
    processes.
    """
    return time.thread_time if device.type == "cpu" else time.perf_counter


@torch.inference_mode()
def text_step_cost(model: LanguageModel) -> Cost:
    """Measures the forward pass and logits of n tree nodes under a short prefix.

    The cost of a size is the fastest of RUNS runs after a warm-up run.
    """
    adapter, last = DecoderAdapter(model), SIZES[-1]
    runner = Runner(
        adapter, KVPool(adapter.kv_shape, PREFIX + last, 1, adapter.dtype, adapter.device)
    )
    device = runner.pool.keys.device
    slots, now = torch.arange(PREFIX + last, device=device), step_clock(device)

    def forward_ms(size: int) -> float:
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        tree = root_branch(tokens, torch.arange(size + 1, device=device))
        prefixes = Prefixes.of([slots[:PREFIX]])
        own = slots[PREFIX : PREFIX + size]
        batch = TreeBatch(tree, None, own, prefixes, inputs=NodeInputs(tokens))
        began = now()
        model.logits(runner.forward([batch])[0])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (now() - began) * 1e3

    times = [min([forward_ms(size) for _ in range(RUNS + 1)][1:]) for size in SIZES]
    return Cost(SIZES, tuple(times))
