"""EAGLE: a small network drafts a tree from the target's states.

Each level of the tree extends the `width` likeliest nodes of the level before by `width` tokens
each. Of all these nodes the draft keeps the likeliest, by the product of probabilities along the
path (noisy.py says which). A node is never likelier than its parent, so the nodes that remain form
a tree. A request may name a static tree instead (EAGLE-1).

P-EAGLE's network computes the outputs of all levels in one forward pass. Its levels are
independent of each other, and the tree grows from them in the same way.

A captured draft reads the states of a step and grows all levels in one function of fixed shapes.
`read` and `propose` launch the same parts of it.

At a temperature above 0 the tokens of each position are ranked with the target's own noise.

Sources: EAGLE-2 (arXiv 2406.16858, section 4) for the tree, EAGLE-1 (arXiv 2401.15077) for static
trees; drafters/eagle/network.py for the networks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from recserve.drafters.eagle.files import load_eagle
from recserve.drafters.eagle.questions import eagle_questions
from recserve.drafters.shared.feature_network import FeatureNetwork, MaskRow, RowsBefore
from recserve.drafters.shared.layer_views import attend_committed, attend_drafted, attend_new
from recserve.drafters.shared.limits import limit_budget, only_chains
from recserve.drafters.shared.new_states import (
    MAX_TEXTS,
    DraftStart,
    LastValues,
    StateDrafter,
    capture_depths,
    entries_within,
    last_rows,
    new_rows,
)
from recserve.drafters.shared.noisy import DraftedTexts, likeliest, ranking_bytes
from recserve.drafters.shared.rank_tree import RankTree, rank_tree
from recserve.drafters.shared.score_tree import MAX_KEY, ScoreTree, tree_sizes
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.tree import chain, chains, merge
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.language_model import LanguageModel
from recserve.models.packing import pack_weights
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import (
    READ,
    CapturableDrafter,
    DraftForm,
    DraftInputs,
    DraftPlan,
    StateSpan,
    TextContext,
    entries_before,
)
from recserve.speculation.open_question import CheckpointAmbiguity
from recserve.speculation.sampling_params import Speculation

WIDTH, DEPTH, NUM_NODES = 8, 6, 40


_requested_tree = lru_cache(maxsize=256)(rank_tree)


class EagleDrafter(StateDrafter):
    """Drafts dynamic trees, or a request's static tree, with an EAGLE network.

    Args:
        network: The network.
        target: The model that verifies. Its embedding is the network's.
        width: Children of a node, and nodes that each level extends.
        depth: Levels of the tree.
        num_nodes: Nodes of the tree.

    Raises:
        ValueError: If the network is for another target.
    """

    name = "eagle"
    takes_tree = True

    def __init__(
        self,
        network: FeatureNetwork,
        target: LanguageModel,
        width: int = WIDTH,
        depth: int = DEPTH,
        num_nodes: int = NUM_NODES,
    ) -> None:
        config, own = network.config, target.config
        given, expected = (config.target_size, config.vocab_size), own.decoder.hidden_size
        if given != (expected, own.vocab_size):
            raise ValueError(
                f"the head is for hidden size {given[0]} and {given[1]} tokens, the target has "
                f"{expected} and {own.vocab_size}"
            )
        self.network, self.target = network, target
        self.width, self.depth, self.num_nodes = width, depth, num_nodes
        self.hidden_layers = config.target_layers
        decoder = config.decoder
        self.kv_shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.scratch_slots = MAX_TEXTS * width * depth
        super().__init__()

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> EagleDrafter:
        """Loads the network of one folder."""
        if len(folders) != 1:
            name = cls.name
            raise ValueError(f"drafter {name!r} needs the folder of its network ({name}=DIR)")
        network = cls._load(folders[0], target)
        assert isinstance(network, nn.Module)
        pack_weights(network)
        return cls(network, target)

    @staticmethod
    def _load(folder: Path, target: LanguageModel) -> FeatureNetwork:
        return load_eagle(folder, target)

    @classmethod
    def open_questions(cls, folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
        """Returns what the files leave open: layers, norms and rotary positions."""
        return eagle_questions(folder, target)

    def attach(self, pool: KVPool) -> None:
        """Receives the pool of the network's keys and values."""
        self.pool = pool
        self._last = LastValues((self.network.config.output_size,), pool.keys.dtype)

    @torch.inference_mode()
    def read(self, parts: Seq[StateSpan]) -> None:
        """Computes the entries of committed tokens from the target's states before them."""
        tokens, slots, trees = [], [], []
        ends, known = list[int](), list[int]()
        device, stop = self.pool.keys.device, 0
        for part in parts:
            first, size, own = part.first, part.states.shape[0], part.context.slots
            tokens.append(on_device(part.context.tokens[first + 1 : first + 1 + size], device))
            trees.append(chain(tokens[-1]))
            slots.append(own[first + 1 : first + 1 + size])
            known.append(self._lengths.get(part.context.id) == first + 1)
            self._lengths[part.context.id] = first + size + 1
            stop += size
            ends.append(stop - 1)
        prefixes = entries_before([part.context for part in parts], [part.first for part in parts])
        batch = TreeBatch(merge(trees), None, torch.cat(slots), prefixes)
        last = self._last.of(prefixes.slots)
        own_rows = [part.context.row for part in parts]
        columns = on_device([own_rows, ends, known], device)
        rows = columns[0]
        outputs = self.network.committed(
            torch.cat([part.states for part in parts]),
            self.network.embed(torch.cat(tokens), self.target),
            batch.positions(),
            attend_committed(batch, parts, self.network.config.views, self.pool),
            RowsBefore(batch.tree.offsets[:-1], last, rows, columns[2].bool()),
        )
        last.index_copy_(0, rows, outputs[columns[1]])

    @torch.inference_mode()
    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns one tree per text; empty while the states of its last tokens are unknown."""
        drafts = [empty_draft(self.pool.keys.device)] * len(contexts)
        groups: dict[tuple[int, RankTree | None], list[int]] = {}
        limits = []
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            shape = self._shape(context)
            width = 1 if only_chains(context) else self.width if shape is None else shape.width
            nodes, depth = self.num_nodes, self.depth
            if shape is not None:
                nodes, depth = len(shape), shape.depth
            most = limit_budget(context, budget, nodes)
            limits.append(Budget(most.num_nodes, min(most.depth, depth)))
            if self.is_ready(context) and limits[i].num_nodes and limits[i].depth:
                groups.setdefault((width, shape), []).append(i)
        for (width, shape), rows in groups.items():
            count = self._num_together(shape)
            for start in range(0, len(rows), count):
                some = rows[start : start + count]
                texts = self._start([contexts[i] for i in some])
                tree = self._grow(texts, max(limits[i].depth for i in some), width, shape)
                for i, draft in zip(some, tree.drafts([limits[i] for i in some]), strict=True):
                    drafts[i] = draft
        return drafts

    @property
    def capturable(self) -> CapturableDrafter | None:
        """The drafter itself."""
        return self

    @cached_property
    def _in_one_pass(self) -> bool:
        """Whether one pass computes all levels, as P-EAGLE's."""
        return self.network.mask_row(self.target) is not None

    @cached_property
    def forms(self) -> Seq[DraftForm]:
        """Trees and chains of all levels, and of fewer unless one pass computes all levels."""
        depths = [self.depth] if self._in_one_pass else capture_depths(self.depth)
        kinds = ("tree", self.width > 1), ("chain", False)
        return tuple(DraftForm(name, depth, forks) for depth in depths for name, forks in kinds)

    def min_bytes(self, form: DraftForm, greedy: bool) -> int:
        """Returns the memory of the logits of a level."""
        rows = self.width if form.forks and form.depth > 1 and not self._in_one_pass else 1
        return ranking_bytes(rows, self.network.config.draft_vocab_size)

    @property
    def most_new_states(self) -> int:
        """A step accepts at most a node of each level, and node 0."""
        return self.depth + 1

    def plan(self, context: TextContext, budget: Budget) -> DraftPlan | None:
        """Plans a tree or a chain. Static trees are launched."""
        if self._shape(context) is not None:
            return None
        most = limit_budget(context, budget, self.num_nodes)
        depth, (tree, chain_) = min(most.depth, self.depth), self.forms[:2]
        form, width = (chain_, 1) if only_chains(context) else (tree, self.width)
        count = min(most.num_nodes, tree_sizes(width, depth)[depth])
        return DraftPlan(form, count, min(depth, count)) if count else DraftPlan(READ, 0, 0)

    def draft(self, inputs: DraftInputs, form: DraftForm) -> tuple[Tensor, Tensor] | None:
        """Reads the new states, then grows all levels."""
        outputs = self._read_new(inputs)
        if not form.depth:
            return None
        texts = DraftStart(
            drawn=DraftedTexts.of_inputs(inputs),
            prefixes=entries_within(inputs, inputs.lengths - 1),
            outputs=outputs,
            fixed_shapes=True,
        )
        tree = self._grow(texts, form.depth, self.width if form.forks else 1, None)
        best = tree.best(inputs.depths, inputs.num_nodes, inputs.most_nodes)
        return best.tokens, best.parents

    def _read_new(self, inputs: DraftInputs) -> Tensor:
        """Computes the entries of the new states. Returns the last output [B, O] of each text."""
        batch, views = new_rows(inputs, self.pool), self.network.config.views
        last = self._last.of(inputs.table)
        outputs = self.network.committed(
            inputs.new_states.flatten(0, 1),
            self.network.embed(inputs.new_tokens.flatten(), self.target),
            batch.positions(),
            attend_new(batch, inputs.new_counts, views, self.pool),
            RowsBefore(batch.tree.offsets[:-1], last, inputs.rows, inputs.new_known),
        )
        return self._last.update(inputs, outputs[last_rows(inputs)])

    def check_tree(self, speculation: Speculation) -> None:
        """Raises ValueError if a request's tree has more nodes than the drafter can compute."""
        if speculation.tree is None:
            return
        tree = rank_tree(speculation.tree)
        words = self.network.config.draft_vocab_size
        keys = (tree.width + 1) ** tree.depth * MAX_TEXTS
        if not self._num_together(tree) or keys > MAX_KEY or tree.width > words:
            raise ValueError(
                f"tree has {tree.depth} levels, ranks up to {tree.width - 1} and up to "
                f"{tree.num_parents} nodes with children on a level; drafter {self.name!r} has "
                "no memory for it"
            )

    def _shape(self, context: TextContext) -> RankTree | None:
        """Returns the request's static tree; None if it has none or may not fork."""
        paths = context.speculation.tree
        return None if not paths or only_chains(context) else _requested_tree(paths)

    def _num_together(self, shape: RankTree | None) -> int:
        """Returns how many texts fit into the scratch memory."""
        if shape is None:
            return MAX_TEXTS
        return min(MAX_TEXTS, self.scratch_slots // (shape.num_parents * shape.depth))

    def _start(self, contexts: Seq[TextContext]) -> DraftStart:
        prefixes = entries_before(contexts, [len(context.tokens) - 1 for context in contexts])
        return DraftStart.of(contexts, prefixes, self._last)

    def _grow(self, texts: DraftStart, depth: int, width: int, shape: RankTree | None) -> ScoreTree:
        """Expands trees level by level."""
        tree = ScoreTree(len(texts.prefixes), width, depth, self.pool.keys.device, shape)
        outputs, scratch = texts.outputs[:, None], self.pool.first_scratch_slot
        parents = tree.grow(*self._children(outputs, texts, 0, width))
        mask = self.network.mask_row(self.target) if depth > 1 else None
        ahead = None if mask is None else self._all_levels(mask, texts, depth)
        for level in range(1, depth):
            places = parents[..., None].expand(-1, -1, outputs.shape[-1])
            if ahead is None:
                batch = tree.frontier(texts.prefixes, scratch, texts.fixed_shapes)
                features = outputs.gather(1, places).flatten(0, 1)
                embedded = self.network.embed(tree.frontier_tokens.flatten(), self.target)
                computed = self._run(features, embedded, batch)
                outputs = computed.view(len(texts.prefixes), -1, computed.shape[-1])
                tokens, logprobs = self._children(outputs, texts, level, width)
            else:
                found = self._children(ahead[:, level - 1 : level], texts, level, width)
                tokens, logprobs = (x.expand(-1, parents.shape[1], -1) for x in found)
            parents = tree.grow(tokens, logprobs)
        return tree

    def _all_levels(self, mask: MaskRow, texts: DraftStart, depth: int) -> Tensor:
        """Returns the outputs [B, depth - 1, E] of P-EAGLE's rows below the committed tokens."""
        device, count, rows = self.pool.keys.device, len(texts.prefixes), depth - 1
        first = self.pool.first_scratch_slot
        slots = torch.arange(first, first + count * rows, device=device)
        features, embedded = (x.expand(count * rows, -1) for x in (mask.feature, mask.embedded))
        batch = TreeBatch(
            chains(count, rows, device),
            None,
            slots,
            texts.prefixes,
            [rows] * count,
            fixed_shapes=texts.fixed_shapes,
        )
        return self._run(features, embedded, batch).view(count, rows, -1)

    def _run(self, features: Tensor, embedded: Tensor, batch: TreeBatch) -> Tensor:
        """Returns the outputs [n, O] of the computed nodes."""
        attend = attend_drafted(batch, self.network.config.views, self.pool)
        return self.network(features, embedded, batch.positions(), attend)

    def _children(
        self, outputs: Tensor, texts: DraftStart, level: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probabilities [B, W, width] of the children of W nodes per text.

        Args:
            outputs: [B, W, E] outputs of the nodes.
            texts: The texts.
            level: Levels above the children.
            width: Children of a node.
        """
        network = self.network
        logits = network.logits(outputs, self.target, level)
        found = likeliest(logits, texts.drawn, level, width, network.targets)
        return network.targets(found.columns), found.values
