"""Text steps captured as CUDA graphs at start, one for each bucket of nodes and texts.

A replayed step is one upload, one launch and one download for any draft. A step that fits no bucket
launches its kernels one by one. Most texts are verified by `sample`. If a drafter draws its tokens,
steps verified by rejection are captured too (`multi_step` verifies in the same way). Steps in which
each text has its own rule are captured last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from recserve.engine.runtime.cuda_graphs import (
    CapturedGraph,
    CaptureLimits,
    CudaRecorder,
    GraphCapture,
    is_cuda,
    missing_names,
)
from recserve.engine.runtime.runner import Runner
from recserve.engine.text.device_rows import TextRow, TextRows
from recserve.engine.text.graph_step import StepConfig, StepShape, TextStepGraph
from recserve.engine.text.groups import TextGroup
from recserve.engine.text.sequence import TextSequence
from recserve.engine.text.step import StepOutputs
from recserve.engine.text.step_states import masks_of
from recserve.models.language_model import LanguageModel
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_table import SamplingCapacity, SamplingTable
from recserve.speculation.verifiers.registry import (
    GREEDY_COMPATIBLE,
    MIXABLE,
    MIXED,
    REJECTION,
    SAMPLE,
)

StepFunction = Callable[[], StepOutputs]
# The outcome of a step. `replayed` used a graph. The others were launched, because of
# prompt: prompt tokens in the forward pass; drawn: drafts with probabilities and no graph for them;
# parameters: sampling parameters over capacity; size: nodes and texts; rows: no free device row;
# rule: texts with the acceptance rule of a plug-in.
StepResult = Literal["replayed", "prompt", "drawn", "parameters", "size", "rows", "rule"]
STEP_RESULTS: tuple[StepResult, ...] = get_args(StepResult)
# (nodes, texts) for plain decoding, drafts of about 8 nodes, and trees of 64 for few texts.
BUCKETS = ((2, 1), (16, 1), (16, 8), (40, 32), (72, 1), (72, 8), (72, 64), (264, 32), (520, 8))
SHAPES = tuple(StepShape(nodes, texts, min(nodes - 2, 16)) for nodes, texts in BUCKETS)
# Number of [T, V] float32 tensors that a step holds at once, with every parameter or with a rule
# other than `sample` (test_capture_memory.py). Graphs share memory, so the largest decides.
TABLES = 10.25


@dataclass(frozen=True)
class GraphLimits(CaptureLimits):
    """Which text steps are captured.

    Attributes:
        shapes: In the order of capture. Each is captured first for texts whose only parameter is
            the temperature.
        capacity: Capacity for the sampling parameters of the texts of a step.
    """

    shapes: tuple[StepShape, ...] = SHAPES
    capacity: SamplingCapacity = SamplingCapacity()


@dataclass(frozen=True)
class StepKind:
    """What a captured step does, regardless of its shape.

    Attributes:
        everything: Whether texts may have all sampling parameters, or a temperature only.
        drafter: The drafter whose heads end the step. None without heads.
        rule: Acceptance rule: SAMPLE, REJECTION or MIXED.
    """

    everything: bool
    drafter: str | None = None
    rule: str = SAMPLE


@dataclass(frozen=True)
class StepBucket:
    """What one graph of a text step is captured for.

    Attributes:
        shape: The largest step that fits.
        kind: What the step does.
    """

    shape: StepShape
    kind: StepKind

    @property
    def name(self) -> str:
        """`72x8` for nodes and texts, followed by the kind.

        `72x8+` has all parameters, `72x8+ medusa` has heads, and `72x8+ rejection` names a rule
        other than `sample`.
        """
        kind = self.kind
        size = f"{self.shape.nodes}x{self.shape.sequences}{'+' if kind.everything else ''}"
        name = kind.drafter if kind.rule == SAMPLE else kind.rule
        return size if name is None else f"{size} {name}"

    def bytes(self, vocabulary: int) -> int:
        """Returns the memory of the step's tensors that grow with the vocabulary."""
        plain = self.kind.rule == SAMPLE and not self.kind.everything
        return int(4 * vocabulary * self.shape.nodes * (1 if plain else TABLES))


CapturedStep = CapturedGraph[StepBucket, TextStepGraph, StepOutputs]


@dataclass(frozen=True)
class Replayed:
    """A replayed step.

    Attributes:
        outputs: Its results, in memory that the next replay overwrites.
        rows: Device rows of its texts.
    """

    outputs: StepOutputs
    rows: list[TextRow]


class TextStepGraphs:
    """The captured steps of one language model.

    Attributes:
        counts: Number of steps by outcome, as in STEP_RESULTS.
        captured: The graphs, from small to large within each kind.
        missing: Names of buckets without a graph. The log says why.
        latest: The replay of the latest replayed step.
    """

    @torch.inference_mode()
    def __init__(
        self,
        runner: Runner,
        model: LanguageModel,
        max_texts: int,
        limits: GraphLimits,
        record: Callable[[StepFunction], StepFunction],
        taken: Callable[[], int] = lambda: 0,
        drafters: Mapping[str, Drafter] | None = None,
    ) -> None:
        """Captures all graphs that the limits allow.

        Args:
            runner: The runner of the model.
            model: The language model.
            max_texts: Most texts that run at once.
            limits: What is captured, and how much time and memory that may take.
            record: Captures a step and returns its replay.
            taken: Returns the bytes that captures have taken so far.
            drafters: Drafters by name. Steps for drafters with ranked heads are captured once more,
                with the heads. If a drafter draws, steps are captured once more, verified by
                rejection.
        """
        self.runner, self.model, self.capacity = runner, model, limits.capacity
        size = runner.pool.page_size
        largest = max(shape.nodes for shape in limits.shapes)
        pages = -(-(model.config.decoder.max_positions + largest) // size)
        states = model.tokens.weight[:0]
        vocabulary = model.config.vocab_size
        self.rows = TextRows(runner.pool, max_texts + 1, pages * size, vocabulary, states)
        self.latest: StepFunction | None = None
        self.counts: dict[StepResult, int] = dict.fromkeys(STEP_RESULTS, 0)
        found = {name: drafter.ranked_heads for name, drafter in (drafters or {}).items()}
        self._heads = {name: heads for name, heads in found.items() if heads is not None}
        self._names = {id((drafters or {})[name]): name for name in self._heads}
        self._parameter_check: tuple[SamplingTable | None, bool | None] = (None, None)
        readers = [d for d in (drafters or {}).values() if d.reads_states]
        self._readers, self._masks = tuple(readers), masks_of((drafters or {}).values())
        self._draws = any(drafter.draws for drafter in (drafters or {}).values())
        self._most_drafted = max(shape.drafted for shape in limits.shapes)
        self._draft_values: Tensor | None = None
        wanted = self._buckets(limits.shapes)
        capture = GraphCapture[StepBucket, TextStepGraph, StepOutputs](
            self._built, record, taken, limits, lambda bucket: bucket.bytes(vocabulary)
        )
        made = capture(wanted) or []
        self.missing = missing_names(wanted, made)
        made.sort(key=lambda graph: (graph.bucket.shape.nodes, graph.bucket.shape.sequences))
        self._by_kind: dict[StepKind, list[CapturedStep]] = {b.kind: [] for b in wanted}
        for graph in made:
            self._by_kind[graph.bucket.kind].append(graph)
        self.captured = [graph for graphs in self._by_kind.values() for graph in graphs]

    def _buckets(self, shapes: Seq[StepShape]) -> list[StepBucket]:
        """Returns all buckets in the order of capture.

        Texts without a draft need no heads. Drawn drafts are mostly chains, so graphs for them only
        hold as many nodes as chains have.
        """
        sampled = [
            StepBucket(shape, StepKind(everything, drafter))
            for drafter in (None, *self._heads)
            for everything in (False, True)
            for shape in shapes
            if drafter is None or shape.depth
        ]
        rejected = [
            StepBucket(shape, StepKind(everything, rule=REJECTION))
            for everything in (False, True)
            for shape in shapes
            if self._draws and shape.for_chains
        ]
        own = StepKind(True, rule=MIXED)
        return sampled + rejected + [StepBucket(shape, own) for shape in shapes if shape.depth]

    def _built(self, bucket: StepBucket) -> TextStepGraph:
        """Builds the step of a bucket."""
        kind = bucket.kind
        drawn = self._draws and kind.rule != SAMPLE
        config = StepConfig(
            shape=bucket.shape,
            capacity=self.capacity if kind.everything else None,
            heads=None if kind.drafter is None else self._heads[kind.drafter],
            rule=kind.rule,
            draft_values=self._place_for_probs(bucket.shape) if drawn else None,
            readers=self._readers,
            masks=self._masks if bucket.shape.depth else None,
        )
        return TextStepGraph(self.runner, self.model, self.rows, config)

    def _place_for_probs(self, shape: StepShape) -> Tensor:
        """Returns [shape.drafted, V] float32 of a buffer that all steps share, since one runs at
        a time.
        """
        if self._draft_values is None:
            size = self._most_drafted, self.rows.seen.shape[1]
            self._draft_values = torch.empty(size, device=self.rows.seen.device)
        return self._draft_values[: shape.drafted]

    def step(self, groups: Seq[TextGroup], with_prompts: bool) -> Replayed | None:
        """Replays the step of a group, in the smallest bucket that holds it.

        Args:
            groups: One group, as TextGroups forms them for graphs, and one for each rule of a
                plug-in. Empty if there are only prompts.
            with_prompts: Whether the forward pass also computes prompt tokens.

        Returns:
            None if no graph can run the step.
        """
        result: StepResult = "prompt"
        replayed: Replayed | None = None
        if not with_prompts:
            own = any(group.rule != MIXED and group.rule not in MIXABLE for group in groups)
            result, replayed = ("rule", None) if own else self._replay(*groups)
        self.counts[result] += 1
        return replayed

    def _replay(self, group: TextGroup) -> tuple[StepResult, Replayed | None]:
        drawn = group.rule != SAMPLE and any(draft.probs is not None for draft in group.drafts)
        if drawn and self._draft_values is None:
            return "drawn", None
        everything = self._needs_everything(group)
        if everything is None:
            return "parameters", None
        best = self._smallest(group, everything)
        if best is None:
            return "size", None
        rows = best.function.load(group)
        if rows is None:
            return "rows", None
        self.latest = best.replay
        return "replayed", Replayed(best.replay(), rows)

    def _needs_everything(self, group: TextGroup) -> bool | None:
        """Returns whether texts have parameters besides the temperature, or None if over
        capacity.

        The result is computed once for as long as the same texts step.
        """
        table, needs = self._parameter_check
        if table is not group.table:
            needs = not group.table.plain or group.table.truncates
            if needs and not self.capacity.holds([context.params for context in group.contexts]):
                needs = None
            self._parameter_check = group.table, needs
        return needs

    def _smallest(self, group: TextGroup, everything: bool) -> CapturedStep | None:
        """Returns the smallest bucket that holds a group, of the first kind that has one."""
        texts, depth = len(group.sizes), group.depth
        nodes = texts + sum(group.sizes)
        for kind in self._kinds(group, everything):
            for graph in self._by_kind.get(kind, ()):
                if graph.bucket.shape.holds(texts, nodes, depth):
                    return graph
        return None

    def _kinds(self, group: TextGroup, everything: bool) -> list[StepKind]:
        """Returns the kinds that can run a group, from the least additional work to the most.

        Kinds with heads are included if the heads belong to all texts with drafts.
        """
        if group.rule != SAMPLE:
            mixed = [StepKind(True, rule=MIXED)]
            if group.rule not in GREEDY_COMPATIBLE:
                return mixed
            return [StepKind(everything, rule=REJECTION), *mixed]
        kinds = [StepKind(everything)]
        if self._names and group.depth:
            drafted = zip(group.sequences, group.sizes, strict=True)
            drafters = {id(text.drafter) for text, size in drafted if size}
            name = self._names.get(drafters.pop()) if len(drafters) == 1 else None
            if name is not None:
                kinds.insert(0, StepKind(everything, name))
        return kinds

    def forget(self, text: TextSequence) -> None:
        """Frees the device row of a text that has ended or was preempted."""
        self.rows.forget(text)


def cuda_graphs(
    runner: Runner,
    model: LanguageModel,
    max_texts: int,
    wanted: bool | None,
    limits: GraphLimits,
    drafters: Mapping[str, Drafter],
) -> TextStepGraphs | None:
    """Captures the steps of a model on a CUDA device.

    Args:
        runner: The runner of the model.
        model: The language model.
        max_texts: Most texts that run at once.
        wanted: False disables graphs. None enables them on a CUDA device.
        limits: What is captured.
        drafters: Drafters by name.

    Returns:
        None if graphs are disabled or the device is not CUDA.

    Raises:
        ValueError: If `wanted` is True and the model is not on a CUDA device.
    """
    device = runner.pool.keys.device
    if is_cuda(device) and wanted is not False:
        recorder = CudaRecorder()
        return TextStepGraphs(
            runner, model, max_texts, limits, recorder, lambda: recorder.bytes, drafters
        )
    if wanted:
        raise ValueError(f"graphs is true, which needs a CUDA device; the model is on {device}")
    return None
