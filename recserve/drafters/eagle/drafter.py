"""EAGLE: a small network drafts a tree from the target's states.

Each level of the tree extends the `width` likeliest nodes of the level before by `width` tokens
each. Of all these nodes the draft keeps the likeliest, by the product of probabilities along the
path (noisy.py says which). A node is never likelier than its parent, so the nodes that remain form
a tree. A request may name a static tree instead (EAGLE-1).

P-EAGLE's network computes the outputs of all levels in one forward pass. Its levels are
independent of each other, and the tree grows from them in the same way.

At a temperature above 0 the tokens of each position are ranked with the target's own noise.

Sources: EAGLE-2 (arXiv 2406.16858, section 4) for the tree, EAGLE-1 (arXiv 2401.15077) for static
trees; drafters/eagle/network.py for the networks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from recserve.drafters.eagle.files import load_eagle
from recserve.drafters.eagle.questions import eagle_questions
from recserve.drafters.shared.feature_network import FeatureNetwork, MaskRow
from recserve.drafters.shared.layer_views import attend_committed, attend_drafted
from recserve.drafters.shared.limits import allowed, only_chains
from recserve.drafters.shared.noisy import DraftedTexts, likeliest
from recserve.drafters.shared.rank_tree import RankTree, rank_tree
from recserve.drafters.shared.score_tree import ScoreTree
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.tree import chain, merge
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.language_model import LanguageModel
from recserve.models.packing import pack_weights
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, StateSpan, TextContext, entries_before
from recserve.speculation.open_question import CheckpointAmbiguity
from recserve.speculation.sampling_params import Speculation

WIDTH, DEPTH, NUM_NODES = 8, 6, 40
MAX_TEXTS = 64  # texts that are drafted together
MAX_KEY = 2**62  # largest number of a node in a ScoreTree


@dataclass(frozen=True)
class _Texts:
    """Texts that are drafted together.

    Attributes:
        drawn: How they draw.
        prefixes: Where the drafter's entries of each text lie.
        outputs: [B, E] the network's outputs at the last committed tokens.
    """

    drawn: DraftedTexts
    prefixes: Prefixes
    outputs: Tensor


_requested_tree = lru_cache(maxsize=256)(rank_tree)


class EagleDrafter(Drafter):
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
    needs_weights = True
    num_folders = 1
    reads_states = True
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
        # The output at the last committed token of each text, and how many tokens it had then.
        self._outputs: dict[int, tuple[int, Tensor]] = {}

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

    def forget(self, context_id: int) -> None:
        """Drops the output of a text."""
        self._outputs.pop(context_id, None)

    @torch.inference_mode()
    def read(self, parts: Seq[StateSpan]) -> None:
        """Computes the entries of committed tokens from the target's states before them."""
        tokens, slots, trees, before, ends = [], [], [], [], []
        device, stop = self.pool.keys.device, 0
        for part in parts:
            first, size, own = part.first, part.states.shape[0], part.context.slots
            tokens.append(on_device(part.context.tokens[first + 1 : first + 1 + size], device))
            trees.append(chain(tokens[-1]))
            slots.append(own[first + 1 : first + 1 + size])
            length, last = self._outputs.get(part.context.id, (0, None))
            before.append((stop, last if length == first + 1 else None))
            stop += size
            ends.append(stop - 1)
        prefixes = entries_before([part.context for part in parts], [part.first for part in parts])
        batch = TreeBatch(merge(trees), None, torch.cat(slots), prefixes)
        outputs = self.network.committed(
            torch.cat([part.states for part in parts]),
            before,
            self.network.embed(torch.cat(tokens), self.target),
            batch.positions(),
            attend_committed(batch, parts, self.network.config.views, self.pool),
        )[on_device(ends, device)]
        for part, output in zip(parts, outputs, strict=True):
            length = part.first + part.states.shape[0] + 1
            self._outputs[part.context.id] = length, output

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
            most = allowed(context, budget, nodes)
            limits.append(Budget(most.num_nodes, min(most.depth, depth)))
            known = self._outputs.get(context.id, (0, None))[0] == len(context.tokens)
            if known and limits[i].num_nodes and limits[i].depth:
                groups.setdefault((width, shape), []).append(i)
        for (width, shape), rows in groups.items():
            count = self._num_together(shape)
            for start in range(0, len(rows), count):
                some = rows[start : start + count]
                texts = self._packed([contexts[i] for i in some])
                tree = self._grown(texts, max(limits[i].depth for i in some), width, shape)
                for i, draft in zip(some, tree.best([limits[i] for i in some]), strict=True):
                    drafts[i] = draft
        return drafts

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

    def _packed(self, contexts: Seq[TextContext]) -> _Texts:
        return _Texts(
            drawn=DraftedTexts.of(contexts, self.pool.keys.device),
            prefixes=entries_before(contexts, [len(context.tokens) - 1 for context in contexts]),
            outputs=torch.stack([self._outputs[context.id][1] for context in contexts]),
        )

    def _grown(self, texts: _Texts, depth: int, width: int, shape: RankTree | None) -> ScoreTree:
        """Expands trees level by level."""
        tree = ScoreTree(len(texts.prefixes), width, depth, self.pool.keys.device, shape)
        outputs = texts.outputs[:, None]
        parents = tree.grow(*self._children(outputs, texts, 0, width))
        mask = self.network.mask_row(self.target) if depth > 1 else None
        ahead = None if mask is None else self._all_levels(mask, texts, depth)
        for level in range(1, depth):
            places = parents[..., None].expand(-1, -1, outputs.shape[-1])
            if ahead is None:
                batch = self._frontier(tree, texts)
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

    def _all_levels(self, mask: MaskRow, texts: _Texts, depth: int) -> Tensor:
        """Returns the outputs [B, depth - 1, E] of P-EAGLE's rows below the committed tokens."""
        device, count, rows = self.pool.keys.device, len(texts.prefixes), depth - 1
        chains = merge([chain(torch.zeros(rows, dtype=torch.int64, device=device))] * count)
        first = self.pool.spare_slot + self.pool.page_size
        slots = torch.arange(first, first + count * rows, device=device)
        features, embedded = (x.expand(count * rows, -1) for x in (mask.feature, mask.embedded))
        outputs = self._run(features, embedded, TreeBatch(chains, None, slots, texts.prefixes))
        return outputs.view(count, rows, -1)

    def _run(self, features: Tensor, embedded: Tensor, batch: TreeBatch) -> Tensor:
        """Returns the outputs [n, O] of the computed nodes."""
        attend = attend_drafted(batch, self.network.config.views, self.pool)
        return self.network(features, embedded, batch.positions(), attend)

    def _frontier(self, tree: ScoreTree, texts: _Texts) -> TreeBatch:
        """Returns the batch that computes the frontier below all nodes computed before."""
        nodes, order, queries = tree.computed()
        base = self.pool.spare_slot + self.pool.page_size
        slots = base + order.numbers + order.texts * (tree.num_parents * tree.depth)
        counts = [tree.frontier_tokens.shape[1]] * tree.num_texts
        return TreeBatch(nodes, queries, slots, texts.prefixes, counts)

    def _children(
        self, outputs: Tensor, texts: _Texts, level: int, width: int
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
