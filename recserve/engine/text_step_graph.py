"""Text steps captured as CUDA graphs at start, one for each bucket of nodes and texts.

A captured step is one function of fixed shapes: the forward pass, logits, sampling parameters,
random draws, tree walk, moves of accepted paths, and the draft heads that read its last states. Its
inputs lie in buffers at fixed addresses, written by one upload before the step. The results are
read by one download after it. Between the two, the host reads nothing from the device, and no shape
depends on drafts, acceptance or lengths. A step that fits no bucket launches its kernels one by
one.

A batch is padded with texts of one node, and with a last text that is a chain of the remaining
nodes. These have no prefix and write to the pool's spare slot. The probabilities that drafts were
drawn from are on the device already. One launch packs them, and the upload says which node each row
belongs to. Captured drafts are on the device too. The upload says where each of their nodes lies.

Most texts are verified by `sample`. If a drafter draws its tokens, steps verified by rejection are
captured too (`multi_step` verifies in the same way). Steps in which each text has its own rule are
captured last.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Generic, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.constraint import num_words
from recserve.engine.capture import (
    CapturedGraph,
    CaptureLimits,
    CudaRecorder,
    GraphSet,
    Recorder,
    is_cuda,
)
from recserve.engine.kv_cache import KVCache
from recserve.engine.runner import Runner
from recserve.engine.text_groups import GroupMasks, TextGroup
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import (
    StepInputs,
    StepOutputs,
    aux_states_for,
    put_probs,
    split_states,
    text_step,
)
from recserve.engine.text_trees import (
    DEPTHS,
    ENDS,
    KINDS,
    PARENTS,
    TOKENS,
    CapturedDrafts,
    PackedTrees,
    draft_places,
    drawn_rows,
    pack_trees,
)
from recserve.kernels.acceptance.acceptance import DraftProbs
from recserve.kernels.acceptance.masks import TokenMasks
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.speculation.draft import TextDraft
from recserve.speculation.drafter import Drafter, RankedHeads
from recserve.speculation.logits_processor import TextColumns, TokenCounts, last_committed
from recserve.speculation.sampling_params import SamplingParams
from recserve.speculation.sampling_table import SamplingCapacity, SamplingTable, sampling_table
from recserve.speculation.verifiers.registry import (
    GREEDY_COMPATIBLE,
    MIXABLE,
    MIXED,
    REJECTION,
    SAMPLE,
    numbers_of,
)

# The outcome of a step. `replayed` used a graph. The others were launched, because of
# prompt: prompt tokens in the forward pass; drawn: drafts with probabilities and no graph for them;
# parameters: sampling parameters over capacity; size: nodes and texts; rule: texts with the
# acceptance rule of a plug-in.
StepResult = Literal["replayed", "prompt", "drawn", "parameters", "size", "rule"]
STEP_RESULTS: tuple[StepResult, ...] = get_args(StepResult)
FILLER = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class StepShape:
    """The largest step that one graph holds.

    Attributes:
        nodes: T, nodes of all trees and of the padding.
        sequences: Most texts.
        depth: Most levels below a node 0.
    """

    nodes: int
    sequences: int
    depth: int

    @property
    def drafted(self) -> int:
        """Most nodes below the nodes 0."""
        return max(self.nodes - self.sequences - 1, 0)

    @property
    def for_chains(self) -> bool:
        """Whether chains can use all of the drafted nodes."""
        return 0 < self.drafted <= self.sequences * self.depth

    def holds(self, texts: int, nodes: int, depth: int) -> bool:
        """Returns whether trees fit, with one node for each missing text and one more.

        Args:
            texts: Number of trees.
            nodes: Nodes of all trees.
            depth: Most levels of a tree.
        """
        missing = self.sequences - texts
        return missing >= 0 and nodes + missing < self.nodes and depth <= self.depth


# (nodes, texts) for plain decoding, drafts of 7 nodes, trees of 64 for few texts, and drafts of 1
# and 3 nodes for 128. Texts that are missing count as a node.
BUCKETS = (
    *((2, 1), (16, 1), (16, 8), (40, 32), (72, 1), (72, 8), (72, 64), (136, 128), (264, 32)),
    *((264, 128), (520, 8), (520, 64), (520, 128), (1032, 128)),
)
SHAPES = tuple(StepShape(nodes, texts, min(nodes - 2, 16)) for nodes, texts in BUCKETS)
# Number of [T, V] float32 tensors that a step holds at once, with every parameter or with a rule
# other than `sample` (test_capture_memory.py). Graphs share memory, so the largest decides. The
# logits that a step returns lie in one more, which all graphs share.
TABLES = 10.25


@dataclass(frozen=True)
class TextStepLimits(CaptureLimits):
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
        all_parameters: Whether texts may have all sampling parameters, or a temperature only.
        drafter: The drafter whose heads end the step. None without heads.
        rule: Acceptance rule: SAMPLE, REJECTION or MIXED.
    """

    all_parameters: bool
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
        size = f"{self.shape.nodes}x{self.shape.sequences}{'+' if kind.all_parameters else ''}"
        name = kind.drafter if kind.rule == SAMPLE else kind.rule
        return size if name is None else f"{size} {name}"

    def bytes(self, vocabulary: int) -> int:
        """Returns the memory of the step's tensors that grow with the vocabulary."""
        plain = self.kind.rule == SAMPLE and not self.kind.all_parameters
        return int(4 * vocabulary * self.shape.nodes * (1 + (1 if plain else TABLES)))


Array = TypeVar("Array", Tensor, NDArray[np.int64])


@dataclass(frozen=True)
class _StepColumns(Generic[Array]):
    """Views of one int64 buffer. B counts the text that pads the buffer.

    Attributes:
        trees: [5, T] columns of the packed trees (text_trees.py).
        offsets: [B + 1] first node of each tree.
        rows, lengths, numbers, last_tokens: As in `TextColumns`.
        rules: [B] number of each text's acceptance rule.
        drawn: [T] row of each node's draft probabilities. [0] if no draft is drawn.
        masks: [T] row of each node's mask of allowed tokens. [0] without masks.
        places: [T] where each node of a captured draft lies. [0] if no draft is captured.
    """

    trees: Array
    offsets: Array
    rows: Array
    lengths: Array
    numbers: Array
    rules: Array
    drawn: Array
    masks: Array
    places: Array
    last_tokens: Array


class TextStepGraph(CapturedGraph[StepOutputs]):
    """A text step that reads and writes fixed addresses, so that it can be captured."""

    bucket: StepBucket

    def __init__(
        self,
        runner: Runner,
        kv: KVCache,
        model: LanguageModel,
        counts: TokenCounts,
        last_hidden: Tensor,
        logits: Tensor,
        bucket: StepBucket,
        *,
        capacity: SamplingCapacity | None,
        heads: RankedHeads | None,
        draft_values: Tensor | None,
        mask_bits: Tensor | None,
        readers: Seq[Drafter],
        captured: CapturedDrafts | None,
    ) -> None:
        """Allocates the buffers.

        Args:
            runner: The runner of the model.
            kv: The cache, whose slot table the step reads.
            model: The language model.
            counts: Token counts of all rows.
            last_hidden: [R, E] receives the state at the last accepted token of each row's text.
            logits: [R, V], R >= `shape.nodes`, receives the logits of all nodes.
            bucket: Most nodes, texts and levels, and the acceptance rule.
            capacity: Capacity for sampling parameters besides the temperature. None for texts whose
                only parameter is the temperature, which the fused kernel draws.
            heads: Heads that rank tokens for the next drafts. None if there are no heads.
            draft_values: [R, V] float32, R >= `shape.drafted`, the buffer for the distributions
                that drafts were drawn from. None if no draft is drawn.
            mask_bits: [R, W] int32, R >= `shape.nodes`, the buffer for the masks of constrained
                texts. None if no text has a constraint.
            readers: Drafters that read states of the target.
            captured: Captured drafts. None if no draft is captured.
        """
        self.runner, self.kv, self.model = runner, kv, model
        self.counts, self.last_hidden = counts, last_hidden
        self.logits = logits[: bucket.shape.nodes]
        self.bucket, self.shape, self.rule = bucket, bucket.shape, bucket.kind.rule
        self.capacity, self.heads, self.draft_values = capacity, heads, draft_values
        self.mask_bits, self.readers, self.captured = mask_bits, readers, captured
        device = kv.slots.device
        texts = self.shape.sequences + 1
        past = 0 if self.capacity is None else self.capacity.bad_word_length - 1
        some = sum(part is not None for part in (draft_values, mask_bits, captured))
        size = (5 + some) * self.shape.nodes + 1 + texts * (5 + past)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._block = torch.zeros(size, dtype=torch.int64, device=device)
        self._columns = self._split(self._block)
        self._host_columns = self._split(self._host.numpy())
        self._table = self._make_table([], device)
        self._texts: Seq[TextSequence] = ()
        self._host_columns.lengths[:] = 1
        self._host_columns.masks[:] = self._host_columns.places[:] = -1
        self._has_masks = False
        self._fill(pack_trees([], [], (), self.shape.nodes, texts), [])

    def load(self, group: TextGroup) -> None:
        """Writes a group that fits to the step's buffers."""
        contexts, columns = group.contexts, self._host_columns
        count = len(contexts)
        if self._texts is not group.sequences:
            columns.rows[count:], columns.lengths[count:] = 0, 1
            self._table.copy_(self._make_table([c.params for c in contexts], "cpu"))
            if self.rule == MIXED:
                columns.rules[:count] = numbers_of(group.rules)
            self._texts = group.sequences
        columns.rows[:count] = [context.row for context in contexts]
        columns.lengths[:count] = [len(context.tokens) for context in contexts]
        # Only min_tokens and bad_words read these columns.
        if group.table.stops is not None:
            columns.numbers[:count] = [context.num_output for context in contexts]
        if group.table.bad_words is not None:
            width = columns.last_tokens.shape[1]
            columns.last_tokens[:count] = [last_committed(context, width) for context in contexts]
        if group.masks is not None or self._has_masks:
            self._load_masks(group.masks)
        nodes, texts = self.shape.nodes, self.shape.sequences + 1
        place = self.captured is not None
        trees = pack_trees(group.last_tokens, group.drafts, group.sizes, nodes, texts, place)
        self._fill(trees, group.drafts)

    def _load_masks(self, masks: GroupMasks | None) -> None:
        """Writes the masks of a group. None: no text of it has a constraint."""
        rows, self._has_masks = self._host_columns.masks, masks is not None
        rows[:] = -1
        if masks is not None:
            assert self.mask_bits is not None
            rows[: len(masks.rows)] = masks.rows
            bits = torch.from_numpy(masks.bits)
            self.mask_bits[: len(masks.bits)].copy_(bits, non_blocking=True)

    def __call__(self) -> StepOutputs:
        """Runs the step on the loaded group.

        Besides `text_step` it stores the last state of each text and all logits, and runs the
        heads.
        """
        columns, table = self._columns, self._table
        trees = columns.trees
        if self.captured is not None:
            trees = self.captured.put(trees, columns.places)
        tree = TokenTree(
            tokens=trees[TOKENS],
            parents=trees[PARENTS],
            depths=trees[DEPTHS],
            ends=trees[ENDS],
            offsets=columns.offsets,
            kinds=trees[KINDS] if self.shape.depth else None,  # without drafts all are alike
        )
        width, starts = self.kv.width, columns.rows * self.kv.width
        prefixes = Prefixes.on_device(self.kv.slots, starts, columns.lengths - 1, width)
        slots = prefixes.slots_after(tree)
        batch = TreeBatch(tree, None, slots, prefixes, fillers=1, fixed_shapes=True)
        aux_states = aux_states_for(self.readers)
        hidden = self.runner.compute(batch, NodeInputs(tree.tokens), aux_states=aux_states)
        c, values, bits = columns, self.draft_values, self.mask_bits
        inputs = StepInputs(
            rule=self.rule,
            depth=self.shape.depth,
            forks=self.shape.depth > 0,
            table=table,
            texts=TextColumns(c.lengths, c.rows, c.numbers, c.last_tokens),
            counts=None if self.capacity is None else self.counts,
            probs=None if values is None else DraftProbs(values, c.drawn),
            rules=c.rules,
            masks=None if bits is None else TokenMasks(bits, c.masks),
        )
        (states,) = split_states([hidden], aux_states)
        outputs = text_step(self.model, self.runner.pool, batch, inputs, states)
        accepted, texts = outputs.accepted, self.shape.sequences
        ends = hidden[accepted.nodes.gather(1, accepted.lengths[:, None])[:, 0]]
        self.last_hidden.index_copy_(0, columns.rows, ends)
        self.logits.copy_(outputs.logits)
        outputs = replace(outputs, results=outputs.results[:texts], logits=self.logits)
        if self.heads is None:
            return outputs
        ranked = self.heads.ranked(
            ends[:texts],
            (columns.lengths + accepted.lengths + 1)[:texts],
            table.temperature[:texts],
            table.seeds[:texts],
            self.heads.num_ranks,
        )
        results = torch.cat([outputs.results, ranked.transpose(0, 1).flatten(1)], dim=1)
        return replace(outputs, results=results, num_heads=self.heads.num_heads)

    def _fill(self, trees: PackedTrees, drafts: Seq[TextDraft]) -> None:
        """Uploads all columns in one copy, and adds the parts of drafts that are on the device."""
        self._host_columns.trees[:] = trees.columns
        self._host_columns.offsets[:] = trees.offsets
        if self.draft_values is not None:
            self._host_columns.drawn[:] = drawn_rows(drafts, self.shape.nodes)
            put_probs(drafts, self.draft_values)
        if self.captured is not None:
            places = draft_places(drafts, self.captured.most_nodes, self.shape.nodes)
            self._host_columns.places[:] = places
        self._block.copy_(self._host, non_blocking=True)
        trees.complete(self._columns.trees)

    def _split(self, block: Array) -> _StepColumns[Array]:
        """Returns the columns as views of a buffer."""
        nodes, texts = self.shape.nodes, self.shape.sequences + 1
        drawn = 0 if self.draft_values is None else nodes
        masked = 0 if self.mask_bits is None else nodes
        placed = 0 if self.captured is None else nodes
        some: list[int] = [texts, texts, texts, texts, drawn, masked, placed]
        sizes: list[int] = [5 * nodes, texts + 1, *some]
        bounds: list[int] = [0, *accumulate(sizes), block.shape[0]]
        parts = [block[start:stop] for start, stop in pairwise(bounds)]
        return _StepColumns(
            trees=parts[0].reshape(5, nodes),
            offsets=parts[1],
            rows=parts[2],
            lengths=parts[3],
            numbers=parts[4],
            rules=parts[5],
            drawn=parts[6],
            masks=parts[7],
            places=parts[8],
            last_tokens=parts[9].reshape(texts, -1),
        )

    def _make_table(
        self, params: list[SamplingParams], device: torch.device | str
    ) -> SamplingTable:
        """Returns a sampling table whose columns have the same shapes for all parameters."""
        missing = self.shape.sequences + 1 - len(params)
        table = sampling_table([*params, *[FILLER] * missing], device, self.capacity)
        return table if self.capacity is not None else replace(table, greedy=False)


class TextStepGraphs(GraphSet[TextStepGraph]):
    """The captured steps of one language model.

    Attributes:
        captured: The graphs, from small to large within each kind.
    """

    @torch.inference_mode()
    def __init__(
        self,
        runner: Runner,
        kv: KVCache,
        model: LanguageModel,
        limits: TextStepLimits,
        recorder: Recorder,
        drafters: Mapping[str, Drafter] | None = None,
        captured: CapturedDrafts | None = None,
    ) -> None:
        """Captures all graphs that the limits allow.

        Args:
            runner: The runner of the model.
            kv: The cache of the model. Its rows have room for the nodes of a step.
            model: The language model.
            limits: What is captured, and how much time and memory that may take.
            recorder: Captures the steps.
            drafters: Drafters by name. Steps for drafters with ranked heads are captured once more,
                with the heads. If a drafter draws, steps are captured once more, verified by
                rejection.
            captured: Where captured drafts lie. None if no draft is captured.
        """
        super().__init__(recorder, limits, STEP_RESULTS)
        self.runner, self.kv, self.model, self._captured = runner, kv, model, captured
        self.capacity, drafters = limits.capacity, drafters or {}
        largest, vocabulary = max(s.nodes for s in limits.shapes), model.config.vocab_size
        assert kv.width >= largest, f"{largest} nodes of a step, {kv.width} slots of a row"
        rows, weight = kv.slots.shape[0], model.tokens.weight
        self.token_counts = TokenCounts(rows, vocabulary, weight.device)
        self._last_hidden = weight.new_zeros(rows, weight.shape[1])
        self._last = self._last_hidden.unbind()  # a view of each row, made once
        heads = {name: drafter.ranked_heads for name, drafter in drafters.items()}
        self._heads = {name: own for name, own in heads.items() if own is not None}
        self._names = {id(drafters[name]): name for name in self._heads}
        self._parameter_check: tuple[SamplingTable | None, bool | None] = (None, None)
        self._readers = tuple(d for d in drafters.values() if d.reads_states)
        self._draws = any(drafter.draws for drafter in drafters.values())
        self._draft_values: Tensor | None = None
        words = num_words(vocabulary)
        self._mask_bits = torch.zeros(largest, words, dtype=torch.int32, device=weight.device)
        buckets = self._buckets(limits.shapes)
        fitting = [bucket for bucket in buckets if bucket.bytes(vocabulary) <= limits.bytes]
        drafted = (bucket.shape.drafted for bucket in fitting if bucket.kind.rule != SAMPLE)
        self._most_drafted = max(drafted, default=0)
        like = model.logits(weight.new_zeros(1, weight.shape[1]))
        most = max((bucket.shape.nodes for bucket in fitting), default=0)
        self._logits = like.new_empty(most, vocabulary)
        graphs = self.capture(buckets, self._build, lambda bucket: bucket.bytes(vocabulary)) or []
        graphs.sort(key=lambda graph: (graph.shape.nodes, graph.shape.sequences))
        self._by_kind: dict[StepKind, list[TextStepGraph]] = {b.kind: [] for b in buckets}
        for graph in graphs:
            self._by_kind[graph.bucket.kind].append(graph)
        self.use([graph for own in self._by_kind.values() for graph in own], buckets)

    def _buckets(self, shapes: Seq[StepShape]) -> list[StepBucket]:
        """Returns all buckets in the order of capture.

        Texts without a draft need no heads. Drawn drafts are mostly chains, so graphs for them only
        hold as many nodes as chains have.
        """
        sampled = [
            StepBucket(shape, StepKind(all_parameters, drafter))
            for drafter in (None, *self._heads)
            for all_parameters in (False, True)
            for shape in shapes
            if drafter is None or shape.depth
        ]
        rejected = [
            StepBucket(shape, StepKind(all_parameters, rule=REJECTION))
            for all_parameters in (False, True)
            for shape in shapes
            if self._draws and shape.for_chains
        ]
        own = StepKind(True, rule=MIXED)
        return sampled + rejected + [StepBucket(shape, own) for shape in shapes if shape.depth]

    def _build(self, bucket: StepBucket) -> TextStepGraph:
        """Builds the step of a bucket."""
        kind = bucket.kind
        drawn = self._draws and kind.rule != SAMPLE
        return TextStepGraph(
            self.runner,
            self.kv,
            self.model,
            self.token_counts,
            self._last_hidden,
            self._logits,
            bucket,
            capacity=self.capacity if kind.all_parameters else None,
            heads=None if kind.drafter is None else self._heads[kind.drafter],
            draft_values=self._probs_buffer(bucket.shape) if drawn else None,
            mask_bits=self._mask_bits if kind.all_parameters else None,
            readers=self._readers,
            captured=self._captured if bucket.shape.depth else None,
        )

    def _probs_buffer(self, shape: StepShape) -> Tensor:
        """Returns [shape.drafted, V] float32 of a buffer that all steps share, since one runs at
        a time.
        """
        if self._draft_values is None:
            size = self._most_drafted, self.model.config.vocab_size
            self._draft_values = torch.empty(size, device=self.kv.slots.device)
        return self._draft_values[: shape.drafted]

    def step(self, groups: Seq[TextGroup], with_prompts: bool) -> StepOutputs | None:
        """Replays the step of a group, in the smallest bucket that holds it.

        Args:
            groups: One group, as TextGroups forms them for graphs, and one for each rule of a
                plug-in. Empty if there are only prompts.
            with_prompts: Whether the forward pass also computes prompt tokens.

        Returns:
            The results, which the next replay overwrites. None if no graph can run the step.
        """
        graph: TextStepGraph | StepResult = "prompt"
        if not with_prompts:
            own = any(group.rule != MIXED and group.rule not in MIXABLE for group in groups)
            graph = "rule" if own else self._choose_graph(*groups)
        if isinstance(graph, TextStepGraph):
            graph.load(groups[0])
            self.counts["replayed"] += 1
            last = [self._last[text.row] for text in groups[0].sequences]
            return replace(graph.replay(), last_hidden=last)
        self.counts[graph] += 1
        return None

    def _choose_graph(self, group: TextGroup) -> TextStepGraph | StepResult:
        """Returns the smallest graph that holds a group, of the first kind that has one, or the
        reason why there is none.
        """
        drawn = group.rule != SAMPLE and any(draft.probs is not None for draft in group.drafts)
        if drawn and self._draft_values is None:
            return "drawn"
        all_parameters = self._needs_all_parameters(group)
        if all_parameters is None:
            return "parameters"
        all_parameters |= group.masks is not None
        texts, depth = len(group.sizes), group.depth
        nodes = texts + sum(group.sizes)
        for kind in self._kinds(group, all_parameters):
            for graph in self._by_kind.get(kind, ()):
                if graph.shape.holds(texts, nodes, depth):
                    return graph
        return "size"

    def _needs_all_parameters(self, group: TextGroup) -> bool | None:
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

    def _kinds(self, group: TextGroup, all_parameters: bool) -> list[StepKind]:
        """Returns the kinds that can run a group, from the least additional work to the most.

        Kinds with heads are included if the heads belong to all texts with drafts.
        """
        if group.rule != SAMPLE:
            mixed = [StepKind(True, rule=MIXED)]
            if group.rule not in GREEDY_COMPATIBLE:
                return mixed
            return [StepKind(all_parameters, rule=REJECTION), *mixed]
        kinds = [StepKind(all_parameters)]
        if self._names and group.depth:
            drafted = zip(group.sequences, group.sizes, strict=True)
            drafters = {id(text.drafter) for text, size in drafted if size}
            name = self._names.get(drafters.pop()) if len(drafters) == 1 else None
            if name is not None:
                kinds.insert(0, StepKind(all_parameters, name))
        return kinds


def cuda_steps(
    runner: Runner,
    kv: KVCache,
    model: LanguageModel,
    enabled: bool | None,
    limits: TextStepLimits,
    drafters: Mapping[str, Drafter],
    captured: CapturedDrafts | None = None,
) -> TextStepGraphs | None:
    """Captures the steps of a model on a CUDA device.

    Args:
        runner: The runner of the model.
        kv: The cache of the model.
        model: The language model.
        enabled: False disables graphs. None enables them on a CUDA device.
        limits: What is captured.
        drafters: Drafters by name.
        captured: Where captured drafts lie. None if no draft is captured.

    Returns:
        None if graphs are disabled or the device is not CUDA.

    Raises:
        ValueError: If `enabled` is True and the model is not on a CUDA device.
    """
    device = runner.pool.keys.device
    if is_cuda(device) and enabled is not False:
        return TextStepGraphs(runner, kv, model, limits, CudaRecorder(), drafters, captured)
    if enabled:
        raise ValueError(f"graphs is true, which needs a CUDA device; the model is on {device}")
    return None
