"""Scorers of the levels of a fixed-shape search: the target model or the self-draft head."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.core.request import SlateQuery
from recserve.core.sequence import SearchSequence
from recserve.engine.runtime.runner import Runner
from recserve.kernels.attention.reference import SOFTMAX
from recserve.kernels.tree import TokenTree
from recserve.kernels.tree_batch import PrefixTable, TreeBatch
from recserve.kernels.trie.fixed_trie import FixedTrie
from recserve.models.attention import PagedAttention
from recserve.models.item_heads import SelfDraftHead
from recserve.models.recommender import Recommender
from recserve.search.strategies.beam import request_of
from recserve.search.trie_prefixes import level_scores

Words = NDArray[np.int64]
DEAD_LEAF = 2**40  # larger than every leaf rank: nodes of dead beams have no relatives


@dataclass(frozen=True)
class ExtendedBeams:
    """Beams that a search has extended by one level.

    Attributes:
        level: The level of the parents.
        nodes: [B, n] trie nodes of the new beams.
        alive: [B, n] bool, whether a beam is alive.
        parents: [B, n] columns of the parents among the beams of `level`.
        codes: [B, n] codes of the new beams at `level`.
    """

    level: int
    nodes: Tensor
    alive: Tensor
    parents: Tensor
    codes: Tensor


class LevelScorer(Protocol):
    """Computes the states and logits of a search's beams, level by level.

    Attributes:
        num_words: Number of int64 values of a request that the scorer reads on the device.
        rounds: Rounds that a result reports.
        forwards: Forward passes of the target model.
    """

    num_words: int
    rounds: int
    forwards: int

    def num_nodes(self, request: SlateQuery) -> int:
        """Returns how many nodes of the target a search computes for a request, in its own
        slots.
        """
        ...

    def write(self, words: Words, sequence: SearchSequence) -> None:
        """Writes the values of a request to words [num_words], on the host."""
        ...

    def write_padding(self, words: Words) -> None:
        """Writes the values of missing requests to words [n, num_words]."""
        ...

    def load(self, sequences: Seq[SearchSequence], last_hidden: Tensor) -> None:
        """Copies states that are on the device into the scorer's buffers. last_hidden is [n, E]."""
        ...

    def begin(self, words: Tensor) -> Tensor:
        """Returns the states [B, *] of the empty prefixes. words is [B, num_words]."""
        ...

    def logits(self, states: Tensor, level: int) -> tuple[Tensor, Tensor | None]:
        """Returns logits [B * n, C] of a level's codes, and their normalizers as `level_scores`
        does.
        """
        ...

    def deeper(self, states: Tensor, step: ExtendedBeams) -> Tensor:
        """Returns the states [B * n, *] of the new beams."""
        ...

    def along(self, codes: Tensor) -> list[Tensor]:
        """Returns L tensors for the codes [B, n, L] of given ids: the states before each code.

        The first is [B, *], the others are [B * n, *].
        """
        ...


class HeadScorer:
    """Scores with the recurrent self-draft head, from the placeholder states of the root."""

    num_words = 0
    rounds = 1
    forwards = 0

    def __init__(self, head: SelfDraftHead, requests: int) -> None:
        self.head = head
        weight, levels = head.head.weight, len(head.config.codebook_sizes)
        self._last_hidden = weight.new_zeros(requests, weight.shape[1])
        self._contexts = weight.new_zeros(requests, levels, weight.shape[1])

    def num_nodes(self, request: SlateQuery) -> int:
        """As LevelScorer."""
        return 0

    def write(self, words: Words, sequence: SearchSequence) -> None:
        """As LevelScorer."""

    def write_padding(self, words: Words) -> None:
        """As LevelScorer."""

    def load(self, sequences: Seq[SearchSequence], last_hidden: Tensor) -> None:
        """As LevelScorer."""
        count = len(sequences)
        self._last_hidden[:count].copy_(last_hidden)
        if self.head.config.placeholders:
            placeholder_states = [
                s.placeholder_states for s in sequences if s.placeholder_states is not None
            ]
            torch.stack(placeholder_states, out=self._contexts[:count])
        else:
            self._contexts.copy_(self._last_hidden[:, None])

    def begin(self, words: Tensor) -> Tensor:
        """As LevelScorer."""
        return self._last_hidden

    def logits(self, states: Tensor, level: int) -> tuple[Tensor, Tensor | None]:
        """As LevelScorer."""
        beams = states.shape[0] // self._last_hidden.shape[0]
        context = self._contexts[:, level].repeat_interleave(beams, 0)
        return self.head.level_logits(context, states, level), None

    def deeper(self, states: Tensor, step: ExtendedBeams) -> Tensor:
        """As LevelScorer."""
        requests = step.nodes.shape[0]
        first = torch.arange(requests, device=states.device) * (states.shape[0] // requests)
        parents = (first[:, None] + step.parents).flatten()
        return self.head.step(step.level, states[parents], step.codes.flatten())

    def along(self, codes: Tensor) -> list[Tensor]:
        """As LevelScorer."""
        states = [self._last_hidden, self._last_hidden.repeat_interleave(codes.shape[1], 0)]
        for level in range(codes.shape[2] - 1):
            states.append(self.head.step(level, states[-1], codes[..., level].flatten()))
        return [states[0], *states[2:]]


@dataclass(frozen=True)
class _Nodes:
    """All nodes of B trees so far, each field [B, n].

    `first` is the first leaf under a node, `last` is one past the last leaf.
    """

    first: Tensor
    last: Tensor
    depths: Tensor
    tokens: Tensor

    def and_also(self, other: _Nodes) -> _Nodes:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Nodes(*(torch.cat(pair, dim=1) for pair in pairs))


class TargetScorer:
    """Scores with the target model, which reads the trees of all levels under the cached roots.

    The values of a request are the length of its root and the root's slots. Then follow one slot
    for each column of each level except the last, and one for each code except the last of each
    dense candidate. Columns past the request's own slots use the pool's spare slot.
    """

    def __init__(
        self,
        model: Recommender,
        runner: Runner,
        trie: FixedTrie,
        columns: Seq[int],
        requests: int,
        dense_candidates: int = 0,
    ) -> None:
        """Args: columns: beams at each level 0 : L + 1; dense_candidates: given ids per request."""
        size = runner.pool.page_size
        self.model, self.runner, self.trie = model, runner, trie
        self.columns = tuple(columns[1:-1])
        self.root_width = -(-model.config.decoder.max_positions // size) * size
        self.dense_candidates = dense_candidates
        self.rounds = self.forwards = len(self.columns)
        self.num_words = (
            1 + self.root_width + sum(self.columns) + dense_candidates * len(self.columns)
        )
        weight = model.tokens.weight
        self._last_hidden = weight.new_zeros(requests, weight.shape[1])
        self._rows = torch.arange(requests, device=weight.device)
        self._offsets = torch.tensor(model.config.level_offsets, device=weight.device)
        self._words = torch.empty(0)
        self._nodes: _Nodes | None = None

    def num_nodes(self, request: SlateQuery) -> int:
        """As LevelScorer."""
        return sum(count for _, count in self._slot_counts(request))

    def _slot_counts(self, request: SlateQuery) -> list[tuple[int, int]]:
        """Returns the columns of each level and how many of them, from the first, can be alive.

        The last pair is that of the dense candidates.
        """
        sizes = request.trie.level_sizes[1:]
        counts = [
            (columns, min(columns, nodes, request.width))
            for columns, nodes in zip(self.columns, sizes, strict=False)
        ]
        dense_candidates = min(self.dense_candidates, request.width) if request.dense_weight else 0
        return [
            *counts,
            (self.dense_candidates * len(self.columns), dense_candidates * len(self.columns)),
        ]

    def write(self, words: Words, sequence: SearchSequence) -> None:
        """As LevelScorer."""
        size, rows = self.runner.pool.page_size, sequence.root_length
        slots = (np.array(sequence.pages)[:, None] * size + np.arange(size)).ravel()
        words[0] = rows
        words[1 : 1 + rows] = slots[:rows]
        own = slots[-(-rows // size) * size + sequence.tree_used :]
        place, taken = 1 + self.root_width, 0
        words[place:] = self.runner.pool.spare_slot
        for columns, count in self._slot_counts(request_of(sequence)):
            words[place : place + count] = own[taken : taken + count]
            place, taken = place + columns, taken + count

    def write_padding(self, words: Words) -> None:
        """As LevelScorer."""
        words[:, 0] = 0
        words[:, 1:] = self.runner.pool.spare_slot

    def load(self, sequences: Seq[SearchSequence], last_hidden: Tensor) -> None:
        """As LevelScorer."""
        self._last_hidden[: len(sequences)].copy_(last_hidden)

    def begin(self, words: Tensor) -> Tensor:
        """As LevelScorer."""
        self._words, self._nodes = words, None
        return self._last_hidden

    def logits(self, states: Tensor, level: int) -> tuple[Tensor, Tensor | None]:
        """As LevelScorer."""
        return level_scores(self.model, states, level)

    def deeper(self, states: Tensor, step: ExtendedBeams) -> Tensor:
        """As LevelScorer: one forward pass over the new nodes."""
        new = self._placed(step)
        nodes = new if self._nodes is None else self._nodes.and_also(new)
        self._nodes = nodes if step.level + 1 < len(self.columns) else None
        batch, order = self._laid_out(nodes, step.nodes.shape[1])
        tokens = new.tokens.gather(1, order).flatten()
        hidden = self._forward(batch, tokens)
        # The states are in preorder; the caller needs the order of the beams.
        place = torch.empty_like(order).scatter_(1, order, _count(order))
        return hidden[(self._rows[:, None] * order.shape[1] + place).flatten()]

    def along(self, codes: Tensor) -> list[Tensor]:
        """As LevelScorer: one forward pass over chains."""
        requests, count, size = codes.shape[0], codes.shape[1], codes.shape[2] - 1
        if not size:
            return [self._last_hidden]
        tokens = (codes[..., :-1] + self._offsets[:-1]).flatten()
        index = torch.arange(tokens.shape[0], device=codes.device)
        depths = index % size
        tree = TokenTree(
            tokens=tokens,
            parents=torch.where(depths > 0, index - 1, -1),
            depths=depths,
            ends=index - depths + size,
            offsets=torch.arange(requests + 1, device=codes.device) * (count * size),
        )
        slots = self._words[:, 1 + self.root_width + sum(self.columns) :].flatten()
        hidden = self._forward(TreeBatch(tree, None, slots, self._roots()), tokens)
        return [self._last_hidden, *hidden.view(requests * count, size, -1).unbind(1)]

    def _forward(self, batch: TreeBatch, tokens: Tensor) -> Tensor:
        """Returns hidden states [Tq, E]. The tokens [Tq] are codes, so item tables may move."""
        attend = PagedAttention(batch, self.runner.pool, SOFTMAX, self.runner.attention)
        hidden: Tensor = self.model.decoder(self.model.tokens(tokens), batch.positions(), attend)
        return hidden

    def _roots(self) -> PrefixTable:
        words = self._words
        return PrefixTable(words[:, 1 : 1 + self.root_width], self._rows, words[:, 0])

    def _placed(self, step: ExtendedBeams) -> _Nodes:
        """Returns the new nodes. Those of dead beams get leaf ranks after all others."""
        leaves = self.trie.trie.leaves(step.nodes)
        above = sum(self.columns[: step.level])
        alone = DEAD_LEAF + above + _count(step.nodes)
        return _Nodes(
            torch.where(step.alive, leaves.first, alone),
            torch.where(step.alive, leaves.last, alone + 1),
            torch.full_like(step.parents, step.level),
            step.codes.long() + self.model.config.level_offsets[step.level],
        )

    def _laid_out(self, nodes: _Nodes, new: int) -> tuple[TreeBatch, Tensor]:
        """Lays out the trees in preorder. The last `new` columns are computed.

        Returns those columns [B, new] too, counted from 0, in preorder.
        """
        count, levels = nodes.first.shape[1], self.trie.trie.num_levels
        # Preorder: by first leaf, then by depth, so that ancestors come before descendants.
        order = (nodes.first * levels + nodes.depths).argsort(1)
        place = torch.empty_like(order).scatter_(1, order, _count(order))
        start = (self._rows * count)[:, None]

        def packed(column: Tensor) -> Tensor:
            return column.gather(1, order).flatten()

        # A subtree ends at the first node whose first leaf is past the subtree's last leaf.
        first, last = nodes.first.gather(1, order), nodes.last.gather(1, order)
        tree = TokenTree(
            tokens=packed(nodes.tokens),
            parents=torch.full((order.numel(),), -1, device=order.device),  # attention reads `ends`
            depths=packed(nodes.depths),
            ends=(torch.searchsorted(first, last) + start).flatten(),
            offsets=torch.arange(start.shape[0] + 1, device=start.device) * count,
        )
        queries, column = place[:, -new:].sort(1)
        slots = self._words[:, 1 + self.root_width :][:, :count]
        batch = TreeBatch(tree, (queries + start).flatten(), packed(slots), self._roots())
        return batch, column


def _count(like: Tensor) -> Tensor:
    """Returns [B, n] with 0, 1, 2, ... in every row."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1)
