"""A small language model as a drafter: it drafts a chain or a tree of its own next tokens.

Rules that compare p with q need drawn tokens. For these rules the drafter draws from the draft
model and returns the distributions. For the other rules each level takes the tokens that the target
would draw, noise included, if its distribution were the draft model's. At temperature 0 these are
the likeliest tokens.

Drafts are launched level by level, and the host reads nothing from the device. They are not
captured: the draft model's cache is the drafter's own, and the host knows its slots. A drawn draft
also returns a distribution for each node.

Sources: Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1), Chen et al. 2023 (arXiv 2302.01318,
algorithm 2); trees: SpecInfer (arXiv 2305.09781, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from recserve.drafters.shared.cached_model import CachedModel, Chains, Reading
from recserve.drafters.shared.limits import allowed, only_chains, wants_drawn
from recserve.drafters.shared.noisy import best_with_noise
from recserve.drafters.shared.rank_tree import RankTree, expansion_tree
from recserve.kernels.acceptance.noise import DRAFT, gumbel, step_keys
from recserve.kernels.host import on_device
from recserve.kernels.tree_batch import Prefixes
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.speculation import sampling
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext, TextOutcome
from recserve.speculation.sampling_table import SamplingTable, sampling_table

# How children are found. chosen: as the target would draw them, without distributions. independent:
# drawn, each sibling by itself. distinct: drawn, siblings one after another without replacement.
_Way = Literal["chosen", "independent", "distinct"]
CHAIN = 5
MAX_LOGIT_GAP = 60.0  # a drawn sibling is at most e**60 less likely than the best: q is never 0


class ModelDrafter(Drafter):
    """Drafts with one draft model.

    Args:
        model: The draft model.
        vocab_size: Vocabulary size of the target.
        expansion: Number of children per node, level by level; all 1 is a chain.
        num_slots: Capacity of the KV cache, in tokens of all sequences together. A sequence without
            slots gets no draft.
        distinct: True to draw siblings without replacement, where they are drawn.
        source: Number of this model among several that draft one tree, so that their noise differs.

    Raises:
        ValueError: If the vocabulary differs from the target's, or is smaller than an expansion.
    """

    name = "draft_model"
    needs_weights = True
    draws = True

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        expansion: Seq[int] = (1,) * CHAIN,
        num_slots: int = 2**15,
        distinct: bool = False,
        source: int = 0,
    ) -> None:
        if model.config.vocab_size != vocab_size:
            raise ValueError(
                f"the draft model has {model.config.vocab_size} tokens, the target {vocab_size}; "
                "both must number the same tokens"
            )
        if expansion and max(expansion) > vocab_size:
            raise ValueError(
                f"expansion is {tuple(expansion)}; the vocabulary has only {vocab_size} tokens"
            )
        self.tree, self.chain = expansion_tree(expansion), expansion_tree([1] * len(expansion))
        self.distinct, self.source = distinct, source
        self._cache = CachedModel(model, num_slots)

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> Drafter:
        """Loads one draft model in Hugging Face's file layout."""
        if len(folders) != 1:
            raise ValueError(
                "drafter 'draft_model' needs the folder of one draft model (draft_model=DIR), not "
                f"{len(folders)}"
            )
        return cls(load_draft_model(folders[0], target), target.config.vocab_size)

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns trees of the model's own tokens.

        A draft is empty if its budget, the free slots or the model's positions do not suffice.
        """
        drafts = [empty_draft(self._cache.device) for _ in contexts]
        groups: dict[_Way, list[int]] = {}
        shapes = []
        busy = {context.id for context in contexts}
        positions = self._cache.model.config.decoder.max_positions
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            tree = self.chain if only_chains(context) else self.tree
            shape = tree.within(allowed(context, budget, len(tree)))
            shapes.append(shape)
            length = len(context.tokens)
            inner = [level.nodes[k] for level in shape.levels() for k in level.inner]
            if (
                len(shape)
                and length + shape.depth <= positions
                and self._cache.place(context.id, length, inner, busy)
            ):
                way: _Way = "chosen"
                if wants_drawn(context):
                    way = "distinct" if self.distinct and tree is self.tree else "independent"
                groups.setdefault(way, []).append(i)
        for way, rows in groups.items():
            made = self._draft([contexts[i] for i in rows], [shapes[i] for i in rows], way)
            for i, draft in zip(rows, made, strict=True):
                drafts[i] = draft
        return drafts

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Keeps the cached keys and values of the accepted paths."""
        for outcome in outcomes:
            self._cache.commit(outcome.context.id, outcome.accepted)

    def forget(self, context_id: int) -> None:
        """Frees the sequence's slots."""
        self._cache.forget(context_id)

    @torch.inference_mode()
    def _draft(
        self, contexts: Seq[TextContext], shapes: Seq[RankTree], way: _Way
    ) -> list[TextDraft]:
        """Drafts level by level: adds children to the frontier, then computes the inner ones."""
        cache, draw = self._cache, _Draw(contexts, way, self.source, self._cache.device)
        names = [context.id for context in contexts]
        readings = [cache.readings[name] for name in names]
        frontier = _Frontier(
            cache.read_new(names, [context.tokens for context in contexts]),
            list(range(len(contexts))),
            [-1] * len(contexts),
            _Paths.of(readings, shapes),
        )
        places = [[0] * len(shape) for shape in shapes]
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        count = 0
        for depth in range(max(shape.depth for shape in shapes)):
            level = _join(shapes, depth)
            found, q = draw(cache.model.logits(frontier.hidden), frontier, level, depth)
            tokens.append(found)
            if q is not None:
                probs.append(q)
            for owner, node in zip(level.owners, level.nodes, strict=True):
                # `count` numbers the nodes in the order of their computation, level by level.
                places[owner][node] = count
                count += 1
            if level.inner:
                frontier = self._read_level(found, level, frontier, readings)
        # `order` maps each tree's preorder to that numbering.
        order = on_device(sum(places, []), cache.device)
        parents = on_device(sum((shape.parents() for shape in shapes), []), cache.device)
        sizes = [len(shape) for shape in shapes]
        rows: Seq[Tensor | None] = [None] * len(shapes)
        if probs:
            rows = torch.split(torch.cat(probs)[order], sizes)
        own, above = torch.split(torch.cat(tokens)[order], sizes), torch.split(parents, sizes)
        return [TextDraft(own[i], above[i], shape.depth, rows[i]) for i, shape in enumerate(shapes)]

    def _read_level(
        self, tokens: Tensor, level: _Joined, frontier: _Frontier, readings: Seq[Reading]
    ) -> _Frontier:
        """Computes the inner nodes among a level's tokens [C], each after its own path."""
        owners = [level.owners[k] for k in level.inner]
        nodes = [level.nodes[k] for k in level.inner]
        inner = on_device(level.inner, tokens.device)
        slots = on_device(
            [readings[owner].nodes[node] for owner, node in zip(owners, nodes, strict=True)],
            tokens.device,
        )
        parents = [level.parents[k] for k in level.inner]
        chains = Chains(tokens[inner], slots, [1] * len(owners), frontier.paths.prefixes(parents))
        hidden = self._cache.read(chains)
        return _Frontier(hidden, owners, nodes, frontier.paths.grown(parents, slots))


def load_draft_model(folder: Path, target: LanguageModel) -> LanguageModel:
    """Loads a draft model onto the target's device, with packed weights."""
    device: torch.device = target.tokens.weight.device
    model = load_language_model(folder, device=device)
    pack_weights(model)
    return model


@dataclass(frozen=True)
class _Frontier:
    """Computed nodes that get children.

    Attributes:
        hidden: [F, E] final hidden states.
        owners: Index of each node's sequence.
        nodes: Number of each node in its draft; -1 for the last committed token.
        paths: Slots of all tokens up to and including each node.
    """

    hidden: Tensor
    owners: list[int]
    nodes: list[int]
    paths: _Paths


@dataclass(frozen=True)
class _Paths:
    """Slots of the tokens above and at each node of a frontier.

    The paths of chains lie side by side from the start, with the slots of all their nodes, so that
    a level only moves their ends. Those of other trees are copied level by level.

    Attributes:
        slots: [N] slots of all paths.
        starts: First place of each path.
        lengths: Tokens of each path.
        chains: Whether no node has siblings.
    """

    slots: Tensor
    starts: list[int]
    lengths: list[int]
    chains: bool

    @staticmethod
    def of(readings: Seq[Reading], shapes: Seq[RankTree]) -> _Paths:
        """Returns the paths of the last committed tokens."""
        chains = all(shape.depth == len(shape) for shape in shapes)
        device = readings[0].slots.device
        inner = [list(reading.nodes.values()) if chains else [] for reading in readings]
        parts = [reading.slots for reading in readings]
        if any(inner):
            below = torch.split(on_device(sum(inner, []), device), [len(own) for own in inner])
            parts = [part for pair in zip(parts, below, strict=True) for part in pair]
        lengths = [len(reading.host_slots) for reading in readings]
        sizes = [length + len(own) for length, own in zip(lengths, inner, strict=True)]
        starts = list(accumulate(sizes[:-1], initial=0))
        return _Paths(torch.cat(parts), starts, lengths, chains)

    def prefixes(self, parents: list[int]) -> Prefixes:
        """Returns the paths of some nodes."""
        starts = [self.starts[parent] for parent in parents]
        return Prefixes(self.slots, starts, [self.lengths[parent] for parent in parents])

    def grown(self, parents: list[int], slots: Tensor) -> _Paths:
        """Returns the paths of children of some nodes, whose slots are [C]."""
        lengths = [self.lengths[parent] + 1 for parent in parents]
        if self.chains:
            starts = [self.starts[parent] for parent in parents]
            return _Paths(self.slots, starts, lengths, chains=True)
        above = self.prefixes(parents)
        parts = [part for i, path in enumerate(above) for part in (path, slots[i : i + 1])]
        starts = list(accumulate(lengths[:-1], initial=0))
        return _Paths(torch.cat(parts), starts, lengths, chains=False)


@dataclass(frozen=True)
class _Joined:
    """One level of several trees. The fields are those of Level.

    Attributes:
        nodes: Number of each node in its tree.
        owners: Index of each node's tree.
        parents: Index of each parent in the frontier.
        ranks: Rank of each node among its siblings.
        inner: Indices, in this level, of the nodes that have children.
    """

    nodes: list[int]
    owners: list[int]
    parents: list[int]
    ranks: list[int]
    inner: list[int]


def _join(shapes: Seq[RankTree], depth: int) -> _Joined:
    """Joins the nodes of one depth of all trees."""
    joined = _Joined([], [], [], [], [])
    base = 0
    for owner, shape in enumerate(shapes):
        levels = shape.levels()
        if depth < len(levels):
            level = levels[depth]
            joined.inner.extend(len(joined.nodes) + k for k in level.inner)
            joined.nodes.extend(level.nodes)
            joined.owners.extend([owner] * len(level.nodes))
            joined.parents.extend(base + parent for parent in level.parents)
            joined.ranks.extend(level.ranks)
        # Nodes of this tree in the frontier: its inner nodes one level up, or the root.
        if depth <= len(levels):
            base += len(levels[depth - 1].inner) if depth else 1
    return joined


class _Draw:
    """Finds children from the draft model's logits."""

    def __init__(
        self, contexts: Seq[TextContext], way: _Way, source: int, device: torch.device
    ) -> None:
        self.table: SamplingTable = sampling_table([c.params for c in contexts], device)
        self.lengths = on_device([len(c.tokens) for c in contexts], device)
        self.way, self.salt = way, source << 16

    def __call__(
        self, logits: Tensor, frontier: _Frontier, level: _Joined, depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Finds the tokens of a level.

        Args:
            logits: [F, V] logits of the frontier.
            frontier: The parents.
            level: The C children.
            depth: Depth of the frontier; 0 for the last committed tokens.

        Returns:
            Tokens [C], and the distributions [C, V] that they were drawn from; None if they were
            chosen.
        """
        device, table = logits.device, self.table
        of = on_device([frontier.owners, frontier.nodes], device)
        owners, nodes = of[0], of[1]
        columns = on_device([level.parents, level.ranks, level.nodes], device)
        parents, ranks, children = columns[0], columns[1], columns[2]
        temperature = table.temperature[owners]
        rows = sampling.temper(logits.float(), temperature)
        if table.truncates and self.way != "distinct":
            # A device sorts the vocabulary; the host need not read from it how far to look.
            truncate = sampling.truncate if rows.is_cpu else sampling.truncate_fixed
            rows = truncate(rows, table.top_k[owners], table.top_p[owners], table.min_p[owners])
        vocabulary, width = rows.shape[1], max(level.ranks) + 1
        if self.way == "chosen":
            if table.greedy:
                return rows.topk(width).indices[parents, ranks], None
            scale = (temperature > 0).to(rows.dtype)
            positions = self.lengths[owners] + depth
            best = best_with_noise(rows, scale, table.seeds[owners], positions, width)
            return best[parents, ranks], None
        if self.way == "distinct":
            rows = torch.maximum(rows, rows.amax(1, keepdim=True) - MAX_LOGIT_GAP)
            best = (rows + self._noise(owners, nodes, vocabulary)).topk(width).indices
            return best[parents, ranks], _without_elders(rows[parents], best[parents], ranks)
        rows = sampling.keep_only_best(rows, temperature == 0)[parents]
        drawn = (rows + self._noise(owners[parents], children, vocabulary)).argmax(1)
        return drawn, rows.softmax(1)

    def _noise(self, owners: Tensor, nodes: Tensor, vocabulary: int) -> Tensor:
        """[n, V] noise that differs for every step, node and model."""
        keys = step_keys(self.lengths[owners], self.salt + 1 + nodes)
        return gumbel(self.table.seeds[owners], keys, vocabulary, DRAFT)


def _without_elders(logits: Tensor, best: Tensor, ranks: Tensor) -> Tensor:
    """Returns the distribution of each child after its earlier siblings are removed.

    Args:
        logits: [C, V] logits of each child's parent.
        best: [C, W] tokens of each child and its siblings, in order.
        ranks: [C] position of each child in its row of `best`.

    Returns:
        [C, V] probabilities.
    """
    before = torch.arange(best.shape[1], device=best.device) < ranks[:, None]
    gone = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best, before)
    return logits.masked_fill(gone, float("-inf")).softmax(1)
