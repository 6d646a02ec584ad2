"""Drafts captured as CUDA graphs: new states are read and a whole tree is drafted by one launch.

A drafter that offers a function of fixed shapes (`Drafter.capturable`) is captured for some numbers
of texts, once for each of its forms: for texts that draw and for texts that do not. The function
reads the states of the last step's accepted path and drafts all levels of the form. A replay takes
the shallowest form that holds the drafts of its texts. Its inputs lie in buffers at fixed
addresses. One upload writes all of them but the states, which one gather for each layer takes from
the step. The drafts stay on the device, in a row for each text, where a captured step reads them
(`CapturedDrafts`). The host knows their numbers of nodes, and bounds of their depths, from the
budgets, so it reads nothing.

Fillers have row 0 of the slot table, which no text has. A row of states that a text has not filled
writes to the spare slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.engine.capture import (
    CapturedGraph,
    CaptureLimits,
    CudaRecorder,
    GraphSet,
    Recorder,
    is_cuda,
)
from recserve.engine.kv_cache import KVCache
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import NodeStates
from recserve.engine.text_trees import PARENTS, TOKENS, CapturedDrafts
from recserve.models.language_model import LanguageModel
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import (
    READ,
    CapturableDrafter,
    Drafter,
    DraftForm,
    DraftInputs,
    DraftPlan,
)

# The outcome of a draft of texts together. `replayed` used a graph. The others were launched,
# because of form: only `propose` makes such drafts, for example a request's static tree; size: no
# graph holds the texts or their new states.
DraftResult = Literal["replayed", "form", "size"]
DRAFT_RESULTS: tuple[DraftResult, ...] = get_args(DraftResult)


@dataclass(frozen=True)
class DraftLimits(CaptureLimits):
    """Which drafts are captured.

    Attributes:
        texts: Numbers of texts, ascending. More texts than the last are drafted in several replays.
    """

    texts: tuple[int, ...] = (1, 8, 32, 64)


@dataclass(frozen=True)
class DraftBucket:
    """What one graph of a draft is captured for.

    Attributes:
        drafter: Name of the drafter.
        form: What it computes.
        texts: Most texts.
        greedy: Whether no text draws.
        new_states: S, most new states of a text.
        bytes: Memory of the tensors that grow with the vocabulary.
    """

    drafter: str
    form: DraftForm
    texts: int
    greedy: bool
    new_states: int
    bytes: int

    @property
    def name(self) -> str:
        """`eagle tree 6x8` for levels and texts, `eagle tree 6x8+` for texts that draw, and
        `eagle read 8` for states alone.
        """
        levels = f"{self.form.depth}x" if self.form.depth else ""
        return f"{self.drafter} {self.form.name} {levels}{self.texts}{'' if self.greedy else '+'}"


def draft_buckets(
    drafters: Mapping[str, CapturableDrafter], limits: DraftLimits
) -> list[DraftBucket]:
    """Returns the drafts of all drafters in the order of capture.

    The shallow ones come last, because a deeper graph can make their drafts. They read as many
    states fewer as they have levels fewer, because a step accepts at most one node of each level.
    """

    def bucket(name: str, form: DraftForm, texts: int, greedy: bool) -> DraftBucket:
        drafter = drafters[name]
        new, size = drafter.most_new_states, 0
        if form.depth:
            new -= max(f.depth for f in drafter.forms if f.name == form.name) - form.depth
            size = drafter.min_bytes(form, greedy)
        return DraftBucket(name, form, texts, greedy, new, texts * size)

    buckets = [
        bucket(name, form, texts, greedy)
        for texts in limits.texts
        for name, drafter in drafters.items()
        if texts <= drafter.most_texts
        for form in (READ, *drafter.forms)
        for greedy in ((True, False) if form.depth else (True,))
    ]
    return sorted(buckets, key=lambda b: (b.form.depth > 0, -b.form.depth))


Array = TypeVar("Array", Tensor, NDArray[np.int64])
NUM_COLUMNS = 11  # of one number for each text


@dataclass(frozen=True)
class _DraftColumns(Generic[Array]):
    """Views of one int64 buffer. All fields but the last are as in `DraftInputs`.

    Attributes:
        temperatures: [B] bits of float64, like `top_p` and `min_p`.
        new_known: [B] 0 or 1.
        new_tokens: [B, S].
        new_nodes: [B, S] rows of the new states among those of the last step.
    """

    rows: Array
    lengths: Array
    temperatures: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array
    depths: Array
    num_nodes: Array
    new_counts: Array
    new_known: Array
    new_tokens: Array
    new_nodes: Array

    @staticmethod
    def of(block: Array, texts: int) -> _DraftColumns[Array]:
        """Returns the columns of a buffer for this many texts."""
        new: int = (block.shape[0] - NUM_COLUMNS * texts) // 2
        bounds: list[int] = [0, *accumulate([texts] * NUM_COLUMNS + [new] * 2)]
        parts = [block[start:stop] for start, stop in pairwise(bounds)]
        states = [part.reshape(texts, -1) for part in parts[NUM_COLUMNS:]]
        return _DraftColumns(*parts[:NUM_COLUMNS], *states)


@dataclass(frozen=True)
class _PlannedText:
    """A text of a captured draft.

    Attributes:
        sequence: The text.
        place: Its number among the texts of the call.
        plan: Its draft.
        num_new: Number of states that its drafter has not received.
    """

    sequence: TextSequence
    place: int
    plan: DraftPlan
    num_new: int


class DraftGraph(CapturedGraph[None]):
    """A draft that reads and writes fixed addresses, so that it can be captured."""

    bucket: DraftBucket

    def __init__(
        self,
        drafter: CapturableDrafter,
        table: Tensor,
        states: Tensor,
        captured: CapturedDrafts,
        bucket: DraftBucket,
    ) -> None:
        """Allocates the inputs.

        Args:
            drafter: The drafter.
            table: [R, W] slot table of the target's cache.
            states: [L, n, E], n >= B S, the buffer for new states of each layer that the drafter
                reads. Its graphs share it, since one runs at a time.
            captured: Receives the drafts.
            bucket: Form, and most texts.
        """
        self.drafter, self.table, self.captured, self.bucket = drafter, table, captured, bucket
        texts, new = bucket.texts, bucket.new_states
        size = texts * (NUM_COLUMNS + 2 * new)
        # Not pinned: the driver stages such a copy, so the next load may overwrite it at once.
        self._host = torch.zeros(size, dtype=torch.int64)
        self._block = torch.zeros(size, dtype=torch.int64, device=table.device)
        self._host_columns = _DraftColumns.of(self._host.numpy(), texts)
        self._columns = _DraftColumns.of(self._block, texts)
        self._states = states[:, : texts * new]
        self._state_size = states.shape[0] * states.shape[2]
        self.load([])

    def load(self, texts: Seq[_PlannedText]) -> None:
        """Writes texts that fit to the inputs. Their new states count as received."""
        columns, count, source = self._host_columns, len(texts), None
        contexts = [text.sequence.context for text in texts]
        for column, filler in ((columns.rows, 0), (columns.lengths, 1), (columns.new_counts, 0)):
            column[count:] = filler
        columns.num_nodes[count:] = columns.depths[count:] = 0
        columns.new_nodes[:] = 0  # any state; those that no text has are not read
        columns.rows[:count] = [context.row for context in contexts]
        columns.lengths[:count] = [len(context.tokens) for context in contexts]
        params = [context.params for context in contexts]
        columns.seeds[:count] = [p.seed for p in params]
        columns.temperatures.view(np.float64)[:count] = [p.temperature for p in params]
        columns.top_k[:count] = [p.top_k for p in params]
        columns.top_p.view(np.float64)[:count] = [p.top_p for p in params]
        columns.min_p.view(np.float64)[:count] = [p.min_p for p in params]
        columns.num_nodes[:count] = [text.plan.num_nodes for text in texts]
        columns.depths[:count] = [text.plan.depth for text in texts]
        for place, (text, context) in enumerate(zip(texts, contexts, strict=True)):
            first, rows = text.sequence.take_waiting()
            columns.new_counts[place] = new = 0 if rows is None else len(rows)
            if rows is not None:
                source = rows.source
                columns.new_known[place] = self.drafter.note_new(context, first)
                columns.new_tokens[place, :new] = context.tokens[-new:]
                columns.new_nodes[place, :new] = rows.nodes
        self._block.copy_(self._host, non_blocking=True)
        if source is not None:
            nodes = self._columns.new_nodes.view(-1)
            for layer, states in enumerate(source.layers_of(texts[0].sequence.drafter)):
                torch.index_select(states, 0, nodes, out=self._states[layer])

    def __call__(self) -> None:
        """Reads the loaded states, and writes the drafts."""
        columns, (texts, new) = self._columns, self._columns.new_tokens.shape
        real = torch.arange(new, device=self.table.device) < columns.new_counts[:, None]
        states = self._states.transpose(0, 1).reshape(texts, new, self._state_size)
        inputs = DraftInputs(
            table=self.table,
            rows=columns.rows,
            lengths=columns.lengths,
            temperatures=columns.temperatures.view(torch.float64).float(),
            top_k=columns.top_k,
            top_p=columns.top_p.view(torch.float64).float(),
            min_p=columns.min_p.view(torch.float64).float(),
            seeds=columns.seeds,
            depths=columns.depths,
            num_nodes=columns.num_nodes,
            new_counts=columns.new_counts,
            new_known=columns.new_known.bool(),
            new_tokens=torch.where(real, columns.new_tokens, 0),
            new_states=states.masked_fill(~real[..., None], 0.0),
            greedy=self.bucket.greedy,
            most_nodes=self.captured.most_nodes,
        )
        drafts = self.drafter.draft(inputs, self.bucket.form)
        if drafts is not None:
            depth = self.bucket.form.depth
            self.captured.write(columns.rows, *drafts, columns.num_nodes, depth)


class DraftGraphs(GraphSet[DraftGraph]):
    """The captured drafts of one language model."""

    @torch.inference_mode()
    def __init__(
        self,
        kv: KVCache,
        model: LanguageModel,
        drafters: Mapping[str, Drafter],
        captured_drafts: CapturedDrafts,
        limits: DraftLimits,
        recorder: Recorder,
    ) -> None:
        """Captures the drafts of all drafters that can be captured.

        Args:
            kv: The cache of the target.
            model: The target.
            drafters: Drafters by name. Those with keys and values of their own have their pools.
            captured_drafts: Receives the drafts, in a row for each row of the slot table.
            limits: What is captured, and how much time and memory that may take.
            recorder: Captures the drafts.
        """
        super().__init__(recorder, limits, DRAFT_RESULTS)
        self._table, self._empty = kv.slots, empty_draft(kv.slots.device)
        self._names, self._drafters = dict[int, str](), dict[str, CapturableDrafter]()
        self._drafts, self._states = captured_drafts, dict[str, Tensor]()
        for name, drafter in drafters.items():
            own = drafter.capturable
            if own is not None:
                self._names[id(drafter)], self._drafters[name] = name, own
                weight, new = model.tokens.weight, own.most_new_states * max(limits.texts)
                layers = len(drafter.hidden_layers)
                self._states[name] = weight.new_zeros(layers, new, weight.shape[1])
        buckets = draft_buckets(self._drafters, limits)
        self.use(self.capture(buckets, self._build, lambda b: b.bytes) or [], buckets)
        self._by_kind: dict[tuple[str, str, bool], list[DraftGraph]] = {}
        for graph in self.captured:
            bucket = graph.bucket
            key = bucket.drafter, bucket.form.name, bucket.greedy
            self._by_kind.setdefault(key, []).append(graph)

    def _build(self, bucket: DraftBucket) -> DraftGraph:
        drafter, states = self._drafters[bucket.drafter], self._states[bucket.drafter]
        return DraftGraph(drafter, self._table, states, self._drafts, bucket)

    def holds(self, drafter: Drafter) -> bool:
        """Whether drafts of a drafter are captured."""
        return id(drafter) in self._names

    @torch.inference_mode()
    def draft(self, texts: Seq[TextSequence], budgets: Seq[Budget]) -> list[TextDraft | None]:
        """Returns drafts of texts with one drafter, after it has read their new states.

        Returns:
            A draft for each text. None where no graph can make it, and nothing was read. The next
            draft of a text overwrites its memory.
        """
        name = self._names.get(id(texts[0].drafter))
        if name is None:
            return [None] * len(texts)
        drafts: list[TextDraft | None] = [None] * len(texts)
        source: NodeStates | None = None
        groups: dict[str, list[_PlannedText]] = {}
        drafter = self._drafters[name]
        for place, (text, budget) in enumerate(zip(texts, budgets, strict=True)):
            rows = text.waiting
            if rows is None and not drafter.is_ready(text.context):
                drafts[place] = self._empty
                continue
            if rows is not None:
                source = source or rows.source
                if rows.source is not source or len(rows) > drafter.most_new_states:
                    self.counts["size"] += 1
                    continue
            plan = drafter.plan(text.context, budget)
            if plan is None:
                self.counts["form"] += 1
            elif rows is None and plan.form is READ:
                drafts[place] = self._empty
            else:
                new = 0 if rows is None else len(rows)
                planned = _PlannedText(text, place, plan, new)
                groups.setdefault(plan.form.name, []).append(planned)
        reads = groups.pop(READ.name, [])
        if groups:  # states are read beside drafts
            next(iter(groups.values())).extend(reads)
        elif reads:
            groups[READ.name] = reads
        for form, own in groups.items():
            self._replay(name, form, own, drafts)
        return drafts

    def _replay(
        self,
        name: str,
        form: str,
        planned: Seq[_PlannedText],
        drafts: list[TextDraft | None],
    ) -> None:
        """Makes the drafts of forms with one name, in as many replays as needed, and enters them.

        Args:
            name: Name of the drafter.
            form: Name of the forms.
            planned: The texts.
            drafts: Receives the drafts.
        """
        while planned:
            graph = self._choose_graph(name, form, planned)
            if graph is None:
                self.counts["size"] += 1
                return
            some, planned = planned[: graph.bucket.texts], planned[graph.bucket.texts :]
            graph.load(some)
            graph.replay()
            self.counts["replayed"] += 1
            for text in some:
                drafts[text.place] = self._draft_of(text)

    def _choose_graph(self, name: str, form: str, planned: Seq[_PlannedText]) -> DraftGraph | None:
        """Returns the graph that holds most of the texts, of these the smallest and shallowest.

        None if no graph is as deep as the drafts, or has room for the new states of a text.
        """
        greedy = all(t.sequence.context.params.greedy for t in planned if t.plan.num_nodes)
        depth, count = max(text.plan.depth for text in planned), len(planned)
        new = max(text.num_new for text in planned)
        deep = (
            graph
            for graph in self._by_kind.get((name, form, greedy), ())
            if graph.bucket.form.depth >= depth and graph.bucket.new_states >= new
        )

        def cost(graph: DraftGraph) -> tuple[int, int, int]:
            texts = graph.bucket.texts
            return max(count - texts, 0), texts, graph.bucket.form.depth

        return min(deep, key=cost, default=None)

    def _draft_of(self, text: _PlannedText) -> TextDraft:
        plan, row, columns = text.plan, text.sequence.context.row, self._drafts.columns
        if not plan.num_nodes:
            return self._empty
        return TextDraft(
            columns[TOKENS, row, : plan.num_nodes],
            columns[PARENTS, row, : plan.num_nodes],
            plan.depth,
            may_fork=plan.form.forks,
            row=row,
        )


def cuda_drafts(
    kv: KVCache,
    model: LanguageModel,
    drafters: Mapping[str, Drafter],
    captured: CapturedDrafts | None,
    limits: DraftLimits,
) -> DraftGraphs | None:
    """Captures drafts on a CUDA device. Returns None if `captured` is None.

    Args:
        kv: The cache of the target.
        model: The target.
        drafters: Drafters by name.
        captured: Receives the drafts. None captures nothing.
        limits: What is captured, and how much time and memory that may take.
    """
    if captured is None:
        return None
    return DraftGraphs(kv, model, drafters, captured, limits, CudaRecorder())


def make_captured_drafts(
    kv: KVCache, enabled: bool | None, drafters: Mapping[str, Drafter], most_nodes: int
) -> CapturedDrafts | None:
    """Returns where captured drafts lie. None if none is captured: not on a CUDA device, not
    enabled, or without drafters that can be captured.

    Args:
        kv: The cache of the target.
        enabled: False disables graphs.
        drafters: Drafters by name.
        most_nodes: Nodes of the largest draft.
    """
    if enabled is False or not is_cuda(kv.slots.device):
        return None
    if all(drafter.capturable is None for drafter in drafters.values()):
        return None
    return CapturedDrafts.allocate(kv.slots.shape[0], most_nodes, kv.slots.device)
