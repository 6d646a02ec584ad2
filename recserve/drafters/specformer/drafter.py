"""SpecFormer: one pass of a small network drafts the tokens of several positions.

The network predicts each position without knowing the tokens before it. So the probability of a
path is the product of its tokens' probabilities, and the draft consists of the likeliest paths. A
request may name a static tree of ranks instead.

At a temperature above 0 the tokens of each position are ranked with the target's own noise.

A captured draft reads new states, and then drafts. `read` and `propose` launch the same parts of
it.

Source: SpecFormer (arXiv 2511.20340, section 3), which verifies a chain. The network is in
drafters/specformer/network.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recserve.drafters.shared.lattice_tree import (
    Lattice,
    lattice_drafts,
    lattice_nodes,
    lattice_sizes,
    most_candidates,
)
from recserve.drafters.shared.limits import limit_budget, only_chains
from recserve.drafters.shared.new_states import (
    MAX_TEXTS,
    LastValues,
    StateDrafter,
    last_rows,
    new_rows,
)
from recserve.drafters.shared.noisy import DraftedTexts, RankedColumns, likeliest, ranking_bytes
from recserve.drafters.shared.rank_tree import RankTree, expansion_tree, rank_tree
from recserve.drafters.specformer.files import load_specformer
from recserve.drafters.specformer.network import Specformer
from recserve.drafters.specformer.questions import specformer_questions
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.tree import chain, merge
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.attention import PagedAttention
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

WIDTH, NUM_NODES = 8, 24


class SpecformerDrafter(StateDrafter):
    """Drafts the likeliest paths through the slots of a SpecFormer network.

    Args:
        network: The network.
        target: The model that verifies. Its final norm and its head are the network's.
        width: Most children of a node.
        num_nodes: Nodes of a draft.

    Raises:
        ValueError: If the network is for another target.
    """

    name = "specformer"
    takes_tree = True

    def __init__(
        self,
        network: Specformer,
        target: LanguageModel,
        width: int = WIDTH,
        num_nodes: int = NUM_NODES,
    ) -> None:
        decoder, own = network.config.decoder, target.config.decoder
        if decoder.hidden_size != own.hidden_size:
            raise ValueError(
                f"the network is for hidden size {decoder.hidden_size}, the target has "
                f"{own.hidden_size}"
            )
        self.network, self.target = network, target
        most = most_candidates(network.config.num_slots)
        self.width, self.num_nodes = min(width, target.config.vocab_size, most), num_nodes
        self.hidden_layers = network.config.target_layers
        self.kv_shape = KVShape(1, decoder.num_kv_heads, decoder.head_dim)
        super().__init__()
        self._contexts_by_row = LastValues((decoder.hidden_size,), target.tokens.weight.dtype)

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> SpecformerDrafter:
        """Loads the network of one folder."""
        if len(folders) != 1:
            raise ValueError(
                "drafter 'specformer' needs the folder of its network (specformer=DIR)"
            )
        network = load_specformer(folders[0], target)
        pack_weights(network)
        return cls(network, target)

    @classmethod
    def open_questions(cls, folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
        """Returns what the files leave open, such as layers and the direction of attention."""
        return specformer_questions(folder, target)

    def attach(self, pool: KVPool) -> None:
        """Receives the pool of the network's keys and values."""
        self.pool = pool

    def check_tree(self, speculation: Speculation) -> None:
        """Raises ValueError for a request's tree that the slots cannot fill."""
        if speculation.tree is None:
            return
        tree = rank_tree(speculation.tree)
        slots, words = self.network.config.num_slots, self.target.config.vocab_size
        if tree.depth > slots or tree.width > words:
            raise ValueError(
                f"tree has {tree.depth} levels and ranks up to {tree.width - 1}; this network has "
                f"{slots} slots with {words} tokens each"
            )

    @torch.inference_mode()
    def read(self, parts: Seq[StateSpan]) -> None:
        """Computes the context of positions from the target's states there.

        The entry of position p lies in the slot of p + 1, as the protocol requires.
        """
        slots, trees, ends = [], [], []
        device, stop = self.pool.keys.device, 0
        for part in parts:
            first, size, own = part.first, part.states.shape[0], part.context.slots
            slots.append(own[first + 1 : first + 1 + size])
            trees.append(chain(slots[-1]))  # only the shape of these trees is read
            stop += size
            ends.append(stop - 1)
        prefixes = entries_before([part.context for part in parts], [part.first for part in parts])
        batch = TreeBatch(merge(trees), None, torch.cat(slots), prefixes)
        outputs = self.network.context(
            torch.cat([part.states for part in parts]),
            batch.positions(),
            PagedAttention(batch, self.pool),
            on_device(ends, device),
        )
        for part in parts:
            self._lengths[part.context.id] = part.first + part.states.shape[0] + 1
        rows = on_device([part.context.row for part in parts], device)
        self._contexts_by_row.of(prefixes.slots).index_copy_(0, rows, outputs)

    @torch.inference_mode()
    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns one draft per text; empty while the states of its last tokens are unknown."""
        drafts = [empty_draft(self.pool.keys.device)] * len(contexts)
        limits = [self._limit(c, b) for c, b in zip(contexts, budgets, strict=True)]
        rows = [
            i
            for i, (context, limit) in enumerate(zip(contexts, limits, strict=True))
            if self.is_ready(context) and limit.num_nodes and limit.depth
        ]
        for start in range(0, len(rows), MAX_TEXTS):
            some = rows[start : start + MAX_TEXTS]
            made = self._draft([contexts[i] for i in some], [limits[i] for i in some])
            for i, draft in zip(some, made, strict=True):
                drafts[i] = draft
        return drafts

    @property
    def capturable(self) -> CapturableDrafter | None:
        """The drafter itself."""
        return self

    @property
    def forms(self) -> Seq[DraftForm]:
        """Trees and chains over all slots."""
        slots = self.network.config.num_slots
        return DraftForm("tree", slots, forks=self.width > 1), DraftForm("chain", slots)

    @property
    def most_new_states(self) -> int:
        """A step accepts at most a node of each slot, and node 0."""
        return self.network.config.num_slots + 1

    def min_bytes(self, form: DraftForm, greedy: bool) -> int:
        """Returns the memory of the logits of all slots."""
        return ranking_bytes(form.depth, self.target.config.vocab_size)

    def plan(self, context: TextContext, budget: Budget) -> DraftPlan | None:
        """Plans a tree or a chain. A request's static tree is launched."""
        chains = only_chains(context)
        if context.speculation.tree is not None and not chains:
            return None
        most, (tree, chain) = self._limit(context, budget), self.forms
        form, width = (chain, 1) if chains else (tree, None)
        sizes = lattice_sizes(self.width, most.depth, most.num_nodes, width)
        count = min(most.num_nodes, sizes[most.depth])
        return DraftPlan(form, count, min(most.depth, count)) if count else DraftPlan(READ, 0, 0)

    def draft(self, inputs: DraftInputs, form: DraftForm) -> tuple[Tensor, Tensor] | None:
        """Computes the contexts of the new states, then drafts from the last one."""
        batch = new_rows(inputs, self.pool)
        new = self.network.context(
            inputs.new_states.flatten(0, 1),
            batch.positions(),
            PagedAttention(batch, self.pool),
            last_rows(inputs),
        )
        contexts = self._contexts_by_row.update(inputs, new)
        if not form.depth:
            return None
        drawn = DraftedTexts.of_inputs(inputs)
        ranked = self._rank(contexts, drawn, form.depth, self.width)
        lattice = Lattice(ranked.columns, ranked.values[:, :, None])
        most, width = inputs.most_nodes, None if form.forks else 1
        nodes = lattice_nodes(lattice, inputs.depths, inputs.num_nodes, most, width)
        return nodes.tokens, nodes.parents

    def _limit(self, context: TextContext, budget: Budget) -> Budget:
        """Returns the size of a text's draft: the engine's limit, the request's and its own."""
        paths, most = context.speculation.tree, self.num_nodes
        if paths is not None and not only_chains(context):
            most = len(paths)
        found = limit_budget(context, budget, most)
        return Budget(found.num_nodes, min(found.depth, self.network.config.num_slots))

    def _draft(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns the drafts of texts whose context is known."""
        shapes = [_shape(c, b) for c, b in zip(contexts, budgets, strict=True)]
        width = max(self.width, *(shape.width for shape in shapes if shape is not None), 1)
        table, device = contexts[0].table, self.pool.keys.device
        assert table is not None
        rows = on_device([context.row for context in contexts], device)
        ranked = self._rank(
            self._contexts_by_row.of(table)[rows],
            DraftedTexts.of(contexts, device),
            max(b.depth for b in budgets),
            width,
        )
        tokens, logprobs = ranked.columns, ranked.values
        free = [i for i, shape in enumerate(shapes) if shape is None]
        rows = on_device(np.array(free, np.int64), device)
        grown = iter(self._trees(tokens[rows], logprobs[rows], [budgets[i] for i in free]))
        return [
            next(grown) if shape is None else _fill(shape, own)
            for shape, own in zip(shapes, tokens, strict=True)
        ]

    def _trees(self, tokens: Tensor, logprobs: Tensor, budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns the likeliest nodes of each text.

        Args:
            tokens: [B, D, W] tokens of each slot, best first.
            logprobs: [B, D, W] their log-probabilities.
            budgets: Sizes of the drafts.
        """
        if not budgets:
            return []
        tokens, logprobs = tokens[..., : self.width], logprobs[..., : self.width]
        return lattice_drafts(Lattice(tokens, logprobs[:, :, None]), budgets)

    def _rank(self, contexts: Tensor, drawn: DraftedTexts, depth: int, width: int) -> RankedColumns:
        """Returns tokens and log-probabilities [B, depth, width] of each slot, best first.

        Args:
            contexts: [B, E] rows of the network's context.
            drawn: How the texts draw.
            depth: Number of slots.
            width: Tokens of a slot.
        """
        states = self.network.slots(contexts, depth)
        logits = self.target.logits(self.target.decoder.norm(states)).float()
        return likeliest(logits, drawn, torch.arange(depth, device=contexts.device), width)


def _shape(context: TextContext, budget: Budget) -> RankTree | None:
    """Returns a static tree within the budget: the request's, or a chain if its rule needs one.

    None means a tree of the likeliest nodes.
    """
    if only_chains(context):
        return expansion_tree([1] * min(budget.depth, budget.num_nodes))
    paths = context.speculation.tree
    return None if paths is None else rank_tree(paths).within(budget)


def _fill(shape: RankTree, tokens: Tensor) -> TextDraft:
    """Returns a static tree with the tokens [D, W] of the slots."""
    levels = on_device([len(path) - 1 for path in shape.paths], tokens.device)
    ranks = on_device([path[-1] for path in shape.paths], tokens.device)
    return TextDraft(tokens[levels, ranks], on_device(shape.parents(), tokens.device), shape.depth)
