"""A text step as one function of fixed shapes.

The step runs the forward pass, logits, sampling parameters, random draws, tree walk, moves of
accepted paths, and the draft heads that read its last states.

All inputs lie in buffers at fixed addresses, written by one upload before the step. The results are
read by one download after it. Between the two, the host reads nothing from the device, and no shape
depends on drafts, acceptance or lengths. The step can therefore be captured as a CUDA graph and
replayed.

A batch is padded with texts of one node, and with a last text that is a chain of the remaining
nodes. These have no root and write to the pool's spare slot. The probabilities that drafts were
drawn from are on the device already. One launch packs them, and the upload says which node each row
belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.engine.runtime.runner import Runner
from recserve.engine.text.device_rows import PAD_ROW, TextRow, TextRows
from recserve.engine.text.groups import TextGroup
from recserve.engine.text.sequence import TextSequence
from recserve.engine.text.step import StepOutputs, move_accepted, outputs_of, put_probs
from recserve.engine.text.step_states import taps_for
from recserve.engine.text.trees import (
    DEPTHS,
    ENDS,
    KINDS,
    PARENTS,
    TOKENS,
    PackedTrees,
    drawn_rows,
    pack_trees,
)
from recserve.kernels.acceptance.acceptance import DraftProbs
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import PrefixTable, TreeBatch
from recserve.models.drafters.gated_lora import GatedLora, MaskRows
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.speculation.draft import TextDraft
from recserve.speculation.drafter import Drafter, RankedHeads
from recserve.speculation.logits_processor import LogitsProcessor, Past, last_committed
from recserve.speculation.sampling_params import SamplingParams
from recserve.speculation.sampling_table import SamplingCapacity, SamplingTable, sampling_table
from recserve.speculation.verifier import ScoredTrees
from recserve.speculation.verifiers.registry import MIXED, SAMPLE, numbers_of, verify

FILLER = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class StepShape:
    """A bucket: the largest step that one graph holds.

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


Array = TypeVar("Array", Tensor, NDArray[np.int64])


@dataclass(frozen=True)
class _StepColumns(Generic[Array]):
    """Views of one int64 buffer. B counts the text that pads the buffer.

    Attributes:
        trees: [5, T] columns of the packed trees (trees.py).
        offsets: [B + 1] first node of each tree.
        rows, lengths, numbers, rules: [B] device row, committed tokens, output tokens and
            acceptance rule of each text.
        drawn: [T] row of each node's draft probabilities. [0] if no draft is drawn.
        last_tokens: [B, W] last committed tokens.
    """

    trees: Array
    offsets: Array
    rows: Array
    lengths: Array
    numbers: Array
    rules: Array
    drawn: Array
    last_tokens: Array


@dataclass(frozen=True)
class StepConfig:
    """What a step of fixed shapes does.

    Attributes:
        shape: Most nodes, texts and levels.
        capacity: Capacity for sampling parameters besides the temperature. None for texts whose
            only parameter is the temperature, which the fused kernel draws.
        heads: Heads that rank tokens for the next drafts. None if there are no heads.
        rule: Acceptance rule of all texts, or MIXED if each text has its own.
        draft_values: [R, V] float32, R >= `shape.drafted`, the buffer for the distributions that
            drafts were drawn from. None if no draft is drawn.
        readers: Drafters that read states of the target.
        masks: Mask tokens that the trees may have. None if they have none.
    """

    shape: StepShape
    capacity: SamplingCapacity | None
    heads: RankedHeads | None = None
    rule: str = SAMPLE
    draft_values: Tensor | None = None
    readers: tuple[Drafter, ...] = ()
    masks: GatedLora | None = None


class TextStepGraph:
    """A text step that reads and writes fixed addresses, so that it can be captured."""

    def __init__(
        self, runner: Runner, model: LanguageModel, rows: TextRows, config: StepConfig
    ) -> None:
        self.runner, self.model, self.rows = runner, model, rows
        self.shape, self.capacity, self.heads = config.shape, config.capacity, config.heads
        self.rule, self.draft_values = config.rule, config.draft_values
        self.readers, self.masks = config.readers, config.masks
        device = rows.slots.device
        texts = self.shape.sequences + 1
        past = 0 if self.capacity is None else self.capacity.bad_word_length - 1
        has_values = self.draft_values is not None
        size = (5 + has_values) * self.shape.nodes + 1 + texts * (5 + past)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._block = torch.zeros(size, dtype=torch.int64, device=device)
        self._columns = self._split(self._block)
        self._host_columns = self._split(self._host.numpy())
        self._table = self._sampling([], device)
        self._loaded: Seq[TextSequence] = ()
        self._fill(pack_trees([], [], (), self.shape.nodes, texts), [])

    def load(self, group: TextGroup) -> list[TextRow] | None:
        """Writes a group that fits to the step's buffers. Returns None if a text finds no free
        row.
        """
        rows = self.rows.of(group.sequences)
        if rows is None:
            return None
        columns, count = self._host_columns, len(rows)
        contexts = group.contexts
        if self._loaded is not group.sequences:
            columns.rows[count:], columns.lengths[count:] = PAD_ROW, 1
            self._table.copy_(self._sampling([c.params for c in contexts], "cpu"))
            if self.rule == MIXED:
                columns.rules[:count] = numbers_of(group.rules)
            self._loaded = group.sequences
        columns.rows[:count] = [row.number for row in rows]
        columns.lengths[:count] = [len(context.tokens) for context in contexts]
        # Only min_tokens and bad_words read these columns.
        if group.table.stops is not None:
            columns.numbers[:count] = [context.num_output for context in contexts]
        if group.table.bad_words is not None:
            width = columns.last_tokens.shape[1]
            columns.last_tokens[:count] = [last_committed(context, width) for context in contexts]
        last, texts = [context.tokens[-1] for context in contexts], self.shape.sequences + 1
        packed = pack_trees(last, group.drafts, group.sizes, self.shape.nodes, texts)
        self._fill(packed, group.drafts)
        return rows

    def __call__(self) -> StepOutputs:
        """Runs the step on the loaded group."""
        columns, table = self._columns, self._table
        trees = columns.trees
        tree = TokenTree(
            tokens=trees[TOKENS],
            parents=trees[PARENTS],
            depths=trees[DEPTHS],
            ends=trees[ENDS],
            offsets=columns.offsets,
            kinds=trees[KINDS],
        )
        roots = PrefixTable(self.rows.slots, columns.rows, columns.lengths - 1)
        owners = tree.tree_ids()
        index = torch.arange(tree.num_nodes, device=owners.device)
        # Node n of a tree lies in slot (root length + n) of its text.
        place = roots.lengths[owners] + index - columns.offsets[owners]
        slots = self.rows.slots[columns.rows[owners], place]
        batch = TreeBatch(tree, None, slots, roots, fillers=1)
        taps, gate = taps_for(self.readers), None
        if self.masks is not None:
            gate = MaskRows.of(self.masks, trees[KINDS], fixed=True)
        hidden = self.runner.hidden(batch, NodeInputs(tree.tokens), None, taps, gate)
        logits = self.model.logits(hidden)
        past = None
        if self.capacity is not None:
            seen, written = self.rows.seen[columns.rows], self.rows.written[columns.rows]
            past = Past(columns.numbers, columns.last_tokens, seen, written)
        values, probs = self.draft_values, None
        if values is not None:
            probs = DraftProbs(values, columns.drawn)
        scored = ScoredTrees(
            tree=tree,
            depth=self.shape.depth,
            target=LogitsProcessor(logits, tree, self.shape.depth, table, past, fixed=True),
            seeds=table.seeds,
            lengths=columns.lengths,
            vocab_size=logits.shape[1],
            probs=probs,
            logits=logits if past is None else None,
            temperatures=table.temperature,
            everywhere=True,
            rules=columns.rules,
        )
        accepted = verify(self.rule, scored)
        if self.shape.depth:
            move_accepted(self.runner.pool, tree, accepted, slots)
        outputs = outputs_of(tree, accepted, logits, hidden)
        texts = self.shape.sequences
        ends = hidden[accepted.nodes.gather(1, accepted.lengths[:, None])[:, 0]]
        self.rows.last_hidden.index_copy_(0, columns.rows, ends)
        if past is not None:
            tokens = torch.cat([outputs.tokens[:, 1:], accepted.bonus[:, None]], 1)
            written = torch.cat([accepted.nodes[:, 1:], accepted.bonus[:, None]], 1) >= 0
            self.rows.count(columns.rows, tokens, written)
        outputs = replace(outputs, found=outputs.found[:texts], taps=taps)
        if self.heads is None:
            return outputs
        ranked = self.heads.ranked(
            ends[:texts],
            (columns.lengths + accepted.lengths + 1)[:texts],
            table.temperature[:texts],
            table.seeds[:texts],
            self.heads.num_ranks,
        )
        found = torch.cat([outputs.found, ranked.transpose(0, 1).flatten(1)], dim=1)
        return replace(outputs, found=found, num_heads=self.heads.num_heads)

    def _fill(self, packed: PackedTrees, drafts: Seq[TextDraft]) -> None:
        """Uploads all columns in one copy, and adds the parts of drafts that are on the device."""
        self._host_columns.trees[:] = packed.columns
        self._host_columns.offsets[:] = packed.offsets
        if self.draft_values is not None:
            self._host_columns.drawn[:] = drawn_rows(drafts, self.shape.nodes)
            put_probs(drafts, self.draft_values)
        self._block.copy_(self._host, non_blocking=True)
        packed.complete(self._columns.trees)

    def _split(self, block: Array) -> _StepColumns[Array]:
        """Returns the columns as views of a buffer."""
        nodes, texts = self.shape.nodes, self.shape.sequences + 1
        some = 0 if self.draft_values is None else nodes
        sizes: list[int] = [5 * nodes, texts + 1, texts, texts, texts, texts, some]
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
            last_tokens=parts[7].reshape(texts, -1),
        )

    def _sampling(self, params: list[SamplingParams], device: torch.device | str) -> SamplingTable:
        """Returns a sampling table whose columns have the same shapes for all parameters."""
        missing = self.shape.sequences + 1 - len(params)
        table = sampling_table([*params, *[FILLER] * missing], device, self.capacity)
        return table if self.capacity is not None else replace(table, greedy=False)
