"""Block drafters: one forward pass of the network, then a tree over the candidates of all slots.

The checkpoint decides the variant: DFlash, JetSpec, DSpark or DFlash2. DFlash and JetSpec give
independent slots. DSpark's Markov head and DFlash2's selector also score pairs of neighbouring
candidates. See lattice_tree.py for the tree and drafters/block/network.py for the networks.

The keys and values of position p in the network's context come from the target's state at p. They
lie in the slot of p + 1, as the protocol of `Drafter` asks.

At a temperature above 0 the candidates of each position are ranked with the target's own noise.

A captured draft stores the entries of new states, and then drafts. `read` and `propose` launch the
same parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.drafters.block.files import load_block
from recserve.drafters.block.heads import pair_scores
from recserve.drafters.block.network import Block
from recserve.drafters.block.questions import block_questions
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
    entries_within,
    last_rows,
    new_rows,
)
from recserve.drafters.shared.noisy import LEAST_SCALE, DraftedTexts, noisy_logits, ranking_bytes
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.tree import chains
from recserve.kernels.tree_batch import Prefixes, TreeBatch
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

NUM_CANDIDATES, NUM_NODES = 16, 32


@dataclass(frozen=True)
class _Drafted:
    """Texts that are drafted together.

    Attributes:
        anchors: [B] last committed token.
        drawn: How they draw.
        known: Where the entries of each text lie, one for each position before the anchor.
        fixed_shapes: As in `TreeBatch`.
    """

    anchors: Tensor
    drawn: DraftedTexts
    known: Prefixes
    fixed_shapes: bool = False


@dataclass(frozen=True)
class _Ranked:
    """The best columns of each slot.

    Attributes:
        columns: [B, K, C] columns of the logits, best first.
        values: [B, K, C] logits with noise, divided by the text's scale.
        total: [B, K] logarithm of the sum of exp(value) over all columns that compete.
    """

    columns: Tensor
    values: Tensor
    total: Tensor


class BlockDrafter(StateDrafter):
    """Drafts trees with a block drafter.

    Args:
        network: The network.
        target: The model that verifies. Its embedding and head are the network's where that has
            none.
        num_nodes: Nodes of a tree.
        num_candidates: Candidates of a slot. A candidate selector has its own number.

    Raises:
        ValueError: If the network is for another target.
    """

    name = "block"

    def __init__(
        self,
        network: Block,
        target: LanguageModel,
        num_nodes: int = NUM_NODES,
        num_candidates: int = NUM_CANDIDATES,
    ) -> None:
        config, own = network.config, target.config
        given, expected = (config.target_size, config.vocab_size), own.decoder.hidden_size
        if given != (expected, own.vocab_size):
            raise ValueError(
                f"the network is for hidden size {given[0]} and {given[1]} tokens, the target has "
                f"{expected} and {own.vocab_size}"
            )
        self.network, self.target, self.num_nodes = network, target, num_nodes
        if config.selector is not None:
            num_candidates = config.selector.num_candidates
        most = most_candidates(config.num_slots)
        self.num_candidates = min(num_candidates, config.draft_vocab_size, most)
        self.hidden_layers = config.target_layers
        decoder = config.decoder
        self.kv_shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.scratch_slots = MAX_TEXTS * config.block_size
        super().__init__()
        self._anchors = LastValues((), torch.int64)

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> BlockDrafter:
        """Loads the network of one folder."""
        if len(folders) != 1:
            raise ValueError("drafter 'block' needs the folder of its network (block=DIR)")
        network = load_block(folders[0], target)
        pack_weights(network)
        return cls(network, target)

    @classmethod
    def open_questions(cls, folder: Path, target: LanguageModel) -> tuple[CheckpointAmbiguity, ...]:
        """Returns what the files leave open, such as layers and the direction of attention."""
        return block_questions(folder, target)

    def attach(self, pool: KVPool) -> None:
        """Receives the pool of the network's keys and values."""
        self.pool = pool

    @torch.inference_mode()
    def read(self, parts: Seq[StateSpan]) -> None:
        """Computes the entries of committed positions from the target's states."""
        slots, device = [], self.pool.keys.device
        positions, rows, anchors = [], [], []
        for part in parts:
            first, stop, context = part.first, part.first + part.states.shape[0], part.context
            slots.append(context.slots[first + 1 : stop + 1])
            positions.append(torch.arange(first, stop, device=device))
            rows.append(context.row)
            anchors.append(context.tokens[stop])
            self._lengths[context.id] = stop + 1
        table = parts[0].context.table
        assert table is not None
        last = on_device([rows, anchors], device)
        self._anchors.of(table).index_copy_(0, last[0], last[1])
        states = torch.cat([part.states for part in parts])
        self._store(states, torch.cat(positions), torch.cat(slots))

    def _store(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Stores the entries of states [T, F] at positions [T] in slots [T]."""
        for layer, (key, value) in enumerate(self.network.entries(states, positions)):
            self.pool.write(layer, slots, key, value)

    @torch.inference_mode()
    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns one tree per text; empty while the states of its last tokens are unknown."""
        drafts = [empty_draft(self.pool.keys.device)] * len(contexts)
        groups: dict[int | None, list[int]] = {}
        limits = []
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            most = limit_budget(context, budget, self.num_nodes)
            limits.append(most)
            if self.is_ready(context) and most.num_nodes and most.depth:
                groups.setdefault(1 if only_chains(context) else None, []).append(i)
        for width, rows in groups.items():
            for start in range(0, len(rows), MAX_TEXTS):
                some = rows[start : start + MAX_TEXTS]
                own = [limits[i] for i in some]
                lattice = self.lattice([contexts[i] for i in some], max(b.depth for b in own))
                for i, draft in zip(some, lattice_drafts(lattice, own, width), strict=True):
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
        return (
            DraftForm("tree", slots, forks=self.num_candidates > 1),
            DraftForm("chain", slots),
        )

    @property
    def most_new_states(self) -> int:
        """A step accepts at most a node of each slot, and node 0."""
        return self.network.config.num_slots + 1

    def min_bytes(self, form: DraftForm, greedy: bool) -> int:
        """Returns the memory of the logits of all slots. A Markov head ranks them one by one."""
        config = self.network.config
        slots, words = config.num_slots, config.draft_vocab_size
        if config.markov is None:
            return ranking_bytes(slots, words)
        return 4 * (slots + 1) * words + ranking_bytes(1, words)

    def plan(self, context: TextContext, budget: Budget) -> DraftPlan | None:
        """Plans a tree or a chain."""
        most = limit_budget(context, budget, self.num_nodes)
        depth, (tree, chain) = min(most.depth, self.network.config.num_slots), self.forms
        form, width = (chain, 1) if only_chains(context) else (tree, None)
        sizes = lattice_sizes(self.num_candidates, depth, most.num_nodes, width)
        count = min(most.num_nodes, sizes[depth])
        return DraftPlan(form, count, min(depth, count)) if count else DraftPlan(READ, 0, 0)

    def draft(self, inputs: DraftInputs, form: DraftForm) -> tuple[Tensor, Tensor] | None:
        """Stores the entries of the new states, then drafts from one block."""
        batch = new_rows(inputs, self.pool)
        self._store(inputs.new_states.flatten(0, 1), batch.positions(), batch.slots)
        anchors = self._anchors.update(inputs, inputs.new_tokens.flatten()[last_rows(inputs)])
        if not form.depth:
            return None
        texts = _Drafted(
            anchors,
            DraftedTexts.of_inputs(inputs),
            entries_within(inputs, inputs.lengths - 1),
            fixed_shapes=True,
        )
        most, width = inputs.most_nodes, None if form.forks else 1
        lattice = self._lattice(texts, form.depth)
        nodes = lattice_nodes(lattice, inputs.depths, inputs.num_nodes, most, width)
        return nodes.tokens, nodes.parents

    def lattice(self, contexts: Seq[TextContext], depth: int) -> Lattice:
        """Returns the candidates of the first `depth` slots of texts whose entries are complete."""
        device = self.pool.keys.device
        texts = _Drafted(
            anchors=on_device([context.tokens[-1] for context in contexts], device),
            drawn=DraftedTexts.of(contexts, device),
            known=entries_before(contexts, [len(context.tokens) - 1 for context in contexts]),
        )
        return self._lattice(texts, max(depth, 1))

    def _lattice(self, texts: _Drafted, depth: int) -> Lattice:
        outputs = self.outputs(texts.anchors, texts.known, texts.fixed_shapes)[:, :depth]
        logits = self.network.logits(outputs, self.target)
        if self.network.config.markov is not None:
            return self._markov_lattice(outputs, logits, texts)
        ranked = self._rank(logits, texts, 0)
        tokens = self.network.targets(ranked.columns)
        if self.network.config.selector is None:
            logprobs = (ranked.values - ranked.total[..., None])[:, :, None]
            return Lattice(tokens, logprobs)
        selector = self.network.selector
        contexts_of = selector.contexts(outputs, _predecessors(tokens, texts.anchors))
        pairs = self._scale_pairs(contexts_of, selector.successors, ranked, texts)
        return Lattice(tokens, pairs.log_softmax(-1))

    def outputs(self, anchors: Tensor, known: Prefixes, fixed_shapes: bool = False) -> Tensor:
        """Returns the network's outputs [B, K, E] for one block per text.

        Args:
            anchors: [B] last committed tokens.
            known: Where the entries of each text lie, one for each position before the anchor.
            fixed_shapes: As in `TreeBatch`.
        """
        config = self.network.config
        count, size = len(known), config.block_size
        blocks = chains(count, size, anchors.device)  # the rows are embedded here
        slots = blocks.tokens + self.pool.first_scratch_slot
        # One attention per kind of layer.
        windows = config.windows or (0,) * len(config.causal)
        kinds = list(zip(config.causal, windows, strict=True))
        attends = {}
        for causal, window in set(kinds):
            shared = None if causal else torch.full_like(anchors, size)
            batch = TreeBatch(
                replace(blocks, shared=shared),
                None,
                slots,
                known.last(window - 1) if window else known,
                [size] * count,
                fixed_shapes=fixed_shapes,
            )
            attends[causal, window] = PagedAttention(batch, self.pool)
        rows = self.network.embed(anchors, self.target).flatten(0, 1)
        positions = known.lengths.repeat_interleave(size) + blocks.depths
        outputs: Tensor = self.network(rows, positions, [attends[kind] for kind in kinds])
        return outputs.view(count, -1, outputs.shape[-1])

    def _rank(self, logits: Tensor, texts: _Drafted, first: int) -> _Ranked:
        """Ranks the columns of logits [B, K, V] of the slots from `first` on."""
        if texts.drawn.greedy:
            scaled = logits / LEAST_SCALE
            top = scaled.topk(self.num_candidates)
            return _Ranked(top.indices, top.values, scaled.logsumexp(-1))
        slots = torch.arange(first, first + logits.shape[1], device=logits.device)
        noisy = noisy_logits(logits, texts.drawn, slots, self.num_candidates, self.network.targets)
        best = noisy.best(self.num_candidates)
        return _Ranked(best.columns, best.values, noisy.values.logsumexp(-1))

    def _scale_pairs(
        self, contexts: Tensor, successors: Tensor, ranked: _Ranked, texts: _Drafted
    ) -> Tensor:
        """Returns pair scores [B, K, P, C] with the scale and the noise of the values."""
        pairs = pair_scores(torch.zeros_like(ranked.values), contexts, successors, ranked.columns)
        return pairs / texts.drawn.scales[:, None, None, None] + ranked.values[..., None, :]

    def _markov_lattice(self, outputs: Tensor, logits: Tensor, texts: _Drafted) -> Lattice:
        """Returns the candidates under a Markov head.

        The candidates of a slot are the best tokens after the greedy path. The state of the kind
        `rnn` follows this path too, so it is exact for chains.
        """
        head, tokens, logprobs = self.network.markov, [], []
        above = texts.anchors[:, None].expand(-1, self.num_candidates)
        state, before = head.start(outputs[:, 0]), texts.anchors
        for slot in range(outputs.shape[1]):
            hidden = outputs[:, slot]
            contexts = head.contexts(hidden, above, state)
            greedy = head.contexts(hidden, before[:, None], state)
            bias = F.linear(greedy, head.successors).float()
            ranked = self._rank(logits[:, slot, None] + bias, texts, slot)
            # The values hold the bias of the greedy path. The difference is added.
            pairs = self._scale_pairs((contexts - greedy)[:, None], head.successors, ranked, texts)
            state = head.advance(hidden, before, state)
            above = self.network.targets(ranked.columns[:, 0])
            before = above[:, 0]
            tokens.append(above)
            logprobs.append(pairs[:, 0].log_softmax(-1))
        return Lattice(torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1))


def _predecessors(tokens: Tensor, anchors: Tensor) -> Tensor:
    """Returns the predecessors [B, K, C] of candidates [B, K, C]; the anchor's are all alike."""
    first = anchors[:, None, None].expand(-1, 1, tokens.shape[-1])
    return torch.cat([first, tokens[:, :-1]], dim=1)
