"""A small language model as a drafter: it drafts a chain or a tree of its own next tokens.

Its keys and values of a token lie in the token's slot, so a cached prefix is cached for it too. It
computes every committed token anew, because a drafted one may have been rejected.

Rules that compare p with q need drawn tokens. For texts that draw under such a rule the drafter
draws from the draft model and returns the distributions. For all others each level takes the tokens
that the target would draw, noise included, if its distribution were the draft model's. At
temperature 0 these are the likeliest tokens.

A captured draft reads the new tokens of a step and drafts all levels. Drawn drafts are launched.

Sources: Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1), Chen et al. 2023 (arXiv 2302.01318,
algorithm 2); trees: SpecInfer (arXiv 2305.09781, section 3.1).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence as Seq
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from recserve.drafters.shared.limits import limit_budget, only_chains, wants_drawn
from recserve.drafters.shared.new_states import (
    MAX_TEXTS,
    DraftStart,
    LastValues,
    StateDrafter,
    capture_depths,
    last_rows,
    new_rows,
)
from recserve.drafters.shared.noisy import DraftedTexts, noisy_logits, ranking_bytes
from recserve.drafters.shared.rank_tree import expansion_tree
from recserve.drafters.shared.score_tree import ScoreTree
from recserve.kernels.acceptance.noise import DRAFT, gumbel, step_keys
from recserve.kernels.cache.kv_pool import KVPool, KVShape
from recserve.kernels.host import on_device
from recserve.kernels.tree import chain, merge
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.attention import PagedAttention
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.speculation import sampling
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import (
    READ,
    CapturableDrafter,
    Drafter,
    DraftForm,
    DraftInputs,
    DraftPlan,
    StateSpan,
    TextContext,
)

# How children are found. chosen: as the target would draw them, without distributions. independent:
# drawn, each sibling by itself. distinct: drawn, siblings one after another without replacement.
_Way = Literal["chosen", "independent", "distinct"]
CHAIN = 5
MAX_LOGIT_GAP = 60.0  # a drawn sibling is at most e**60 less likely than the best: q is never 0


class ModelDrafter(StateDrafter):
    """Drafts with one draft model.

    Args:
        model: The draft model.
        vocab_size: Vocabulary size of the target.
        expansion: Number of children per node, level by level; all 1 is a chain.
        distinct: True to draw siblings without replacement, where they are drawn.
        source: Number of this model among several that draft one tree, so that their noise differs.

    Raises:
        ValueError: If the vocabulary differs from the target's, or is smaller than an expansion.
    """

    name = "draft_model"
    draws = True

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        expansion: Seq[int] = (1,) * CHAIN,
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
        self.model, self.expansion = model, tuple(expansion)
        self.distinct, self.salt = distinct, source << 16
        self.num_parents = expansion_tree(expansion).num_parents
        decoder = model.config.decoder
        self.kv_shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.scratch_slots = MAX_TEXTS * self.num_parents * len(expansion)
        super().__init__()

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> Drafter:
        """Loads one draft model in Hugging Face's file layout."""
        if len(folders) != 1:
            raise ValueError(
                "drafter 'draft_model' needs the folder of one draft model (draft_model=DIR), not "
                f"{len(folders)}"
            )
        return cls(load_draft_model(folders[0], target), target.config.vocab_size)

    def attach(self, pool: KVPool) -> None:
        """Receives the pool of the draft model's keys and values."""
        self.pool = pool
        size = self.model.config.decoder.hidden_size
        self._last = LastValues((size,), self.model.tokens.weight.dtype)

    def read(self, parts: Seq[StateSpan]) -> None:
        """Computes the committed tokens after the target's states. The states are not read."""
        contexts, starts, stops = [], [], []
        for part in parts:
            stop = part.first + part.states.shape[0] + 1
            self._lengths[part.context.id] = stop
            # No state precedes the first token of a text.
            start, stop = part.first + (part.first > 0), min(stop, self._positions)
            if start < stop:
                contexts.append(part.context)
                starts.append(start)
                stops.append(stop)
        if contexts:
            self._compute(contexts, starts, stops)

    @torch.inference_mode()
    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns trees of the model's own tokens; empty while the last token is not read.

        The only token of a text is read here.
        """
        drafts = [empty_draft(self.pool.keys.device)] * len(contexts)
        groups: dict[tuple[_Way, tuple[int, ...]], list[int]] = {}
        limits = [self._limit(c, b) for c, b in zip(contexts, budgets, strict=True)]
        for i, context in enumerate(contexts):
            if limits[i].num_nodes and self.is_ready(context):
                groups.setdefault((self._way(context), self._widths(context)), []).append(i)
        new = [contexts[i] for own in groups.values() for i in own if self._is_new(contexts[i])]
        if new:
            self._compute(new, [0] * len(new), [1] * len(new))
            self._lengths.update((context.id, 1) for context in new)
        for (way, widths), rows in groups.items():
            for start in range(0, len(rows), MAX_TEXTS):
                some = rows[start : start + MAX_TEXTS]
                texts, own = self._start([contexts[i] for i in some]), [limits[i] for i in some]
                depth = max(limit.depth for limit in own)
                tree, probs = self._grow(texts, widths[:depth], way)
                for i, draft in zip(some, tree.drafts(own, probs), strict=True):
                    drafts[i] = draft
        return drafts

    @property
    def capturable(self) -> CapturableDrafter | None:
        """The drafter itself."""
        return self

    @property
    def forms(self) -> Seq[DraftForm]:
        """Chains, and trees if it expands nodes, of all levels and of fewer."""
        forms = []
        for depth in capture_depths(len(self.expansion)):
            forms.append(DraftForm("chain", depth))
            if max(self.expansion) > 1:
                forms.append(DraftForm("tree", depth, forks=True))
        return forms

    def min_bytes(self, form: DraftForm, greedy: bool) -> int:
        """Returns the memory of the logits of a level. Without draws they are one table."""
        parents = math.prod(self.expansion[: form.depth - 1]) if form.forks else 1
        words = self.model.config.vocab_size
        return 4 * parents * words if greedy else ranking_bytes(parents, words)

    @property
    def most_new_states(self) -> int:
        """A step accepts at most a node of each level, and node 0."""
        return len(self.expansion) + 1

    def is_ready(self, context: TextContext) -> bool:
        """Whether all committed tokens are read. The only token of a text needs no state."""
        return len(context.tokens) == 1 or super().is_ready(context)

    def plan(self, context: TextContext, budget: Budget) -> DraftPlan | None:
        """Plans a tree or a chain. Drawn drafts and a text's first ones are launched, and so is
        what does not fit into the model's positions.
        """
        if self._way(context) != "chosen" or context.id not in self._lengths:
            return None
        if len(context.tokens) > self._positions:
            return None
        limit, forks = self._limit(context, budget), max(self._widths(context)) > 1
        if not limit.num_nodes:
            return DraftPlan(READ, 0, 0)
        form = next(form for form in self.forms if form.forks == forks)
        return DraftPlan(form, limit.num_nodes, limit.depth)

    def draft(self, inputs: DraftInputs, form: DraftForm) -> tuple[Tensor, Tensor] | None:
        """Computes the new tokens, then drafts all levels."""
        batch = new_rows(inputs, self.pool, _tokens_before(inputs, inputs.new_counts))
        hidden = self._run(inputs.new_tokens.flatten(), batch, last_rows(inputs))
        outputs = self._last.update(inputs, hidden)
        if not form.depth:
            return None
        texts = DraftStart(
            drawn=DraftedTexts.of_inputs(inputs),
            prefixes=_tokens_before(inputs, 0),
            outputs=outputs,
            fixed_shapes=True,
        )
        widths = self.expansion[: form.depth] if form.forks else (1,) * form.depth
        tree, _ = self._grow(texts, widths, "chosen")
        best = tree.best(inputs.depths, inputs.num_nodes, inputs.most_nodes)
        return best.tokens, best.parents

    @property
    def _positions(self) -> int:
        return self.model.config.decoder.max_positions

    def _is_new(self, context: TextContext) -> bool:
        """Whether no token of a text is read. Those of a cached prefix were read for another."""
        return len(context.tokens) == 1 and context.id not in self._lengths

    def _way(self, context: TextContext) -> _Way:
        if context.params.greedy or not wants_drawn(context):
            return "chosen"
        return "distinct" if self.distinct and not only_chains(context) else "independent"

    def _widths(self, context: TextContext) -> tuple[int, ...]:
        return (1,) * len(self.expansion) if only_chains(context) else self.expansion

    def _limit(self, context: TextContext, budget: Budget) -> Budget:
        """Returns the size of a text's draft, within the budget and the model's positions."""
        sizes = list(accumulate(accumulate(self._widths(context), operator.mul), initial=0))
        most, left = limit_budget(context, budget, sizes[-1]), self._positions - len(context.tokens)
        depth = max(min(most.depth, len(self.expansion), left), 0)
        count = min(most.num_nodes, sizes[depth])
        return Budget(count, min(depth, count))

    def _start(self, contexts: Seq[TextContext]) -> DraftStart:
        prefixes = _tokens_of(contexts, [len(context.tokens) for context in contexts])
        return DraftStart.of(contexts, prefixes, self._last)

    @torch.inference_mode()
    def _compute(self, contexts: Seq[TextContext], starts: Seq[int], stops: Seq[int]) -> None:
        """Computes the tokens of texts from `starts` to `stops`, and keeps the last outputs."""
        device, tokens, slots = self.pool.keys.device, list[int](), []
        sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
        for context, start, stop in zip(contexts, starts, stops, strict=True):
            tokens += context.tokens[start:stop]
            slots.append(context.slots[start:stop])
        column = on_device(tokens, device)
        tree = merge([chain(part) for part in torch.split(column, sizes)])
        batch = TreeBatch(tree, None, torch.cat(slots), _tokens_of(contexts, starts))
        ends = [end - 1 for end in accumulate(sizes)]
        places = on_device([[context.row for context in contexts], ends], device)
        hidden = self._run(column, batch, places[1])
        self._last.of(batch.prefixes.slots).index_copy_(0, places[0], hidden)

    def _run(self, tokens: Tensor, batch: TreeBatch, rows: Tensor | None = None) -> Tensor:
        """Computes tokens. Returns the final states [n, E] of all of them, or of some rows."""
        attend = PagedAttention(batch, self.pool)
        hidden: Tensor = self.model(tokens, batch.positions(), attend, rows)
        return hidden

    def _grow(
        self, texts: DraftStart, widths: Seq[int], way: _Way
    ) -> tuple[ScoreTree, Tensor | None]:
        """Expands trees level by level.

        Returns:
            The trees, and the distributions [B, n, V] that their nodes were drawn from; None if
            they were chosen.
        """
        count, device = len(texts.prefixes), self.pool.keys.device
        tree = ScoreTree(count, max(widths), len(widths), device, num_parents=self.num_parents)
        scratch = self.pool.first_scratch_slot
        hidden, probs, first = texts.outputs[:, None], list[Tensor](), 0
        for level, width in enumerate(widths):
            if level:
                batch = tree.frontier(texts.prefixes, scratch, texts.fixed_shapes)
                computed = self._run(tree.frontier_tokens.flatten(), batch)
                hidden = computed.view(count, -1, computed.shape[-1])
            logits = self.model.logits(hidden).float()
            if way == "chosen":
                tokens = _choose(logits, texts.drawn, level, width)
            else:
                tokens, q = self._draw(logits, texts.drawn, way, first, width)
                probs.append(q.flatten(1, 2))
            del logits  # before the next level makes its own
            first += tokens[0].numel()
            # A smaller budget keeps small ranks at small depths, whatever was drawn.
            scores = -1.0 - 2.0 * torch.arange(width, device=device)
            tree.grow(tokens, scores.expand_as(tokens))
        return tree, torch.cat(probs, 1) if probs else None

    def _draw(
        self, logits: Tensor, texts: DraftedTexts, way: _Way, first: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """Draws children.

        Args:
            logits: [B, W, V] of the parents.
            texts: The B texts.
            way: How to draw.
            first: Nodes of each tree in the levels above.
            width: k, children of a parent.

        Returns:
            Tokens [B, W, k], and the distributions [B, W, k, V] that they were drawn from.
        """
        (count, parents, vocabulary), device = logits.shape, logits.device
        owners = torch.arange(count, device=device).repeat_interleave(parents)
        heat = texts.temperatures[owners]
        rows = sampling.temper(logits.flatten(0, 1), heat)
        numbers = torch.arange(parents * width, device=device).view(parents, width) + first
        if way == "distinct":
            rows = torch.maximum(rows, rows.amax(1, keepdim=True) - MAX_LOGIT_GAP)
            # A parent's first child names the draw of all its children.
            noise = self._noise(texts, owners, numbers[:, 0].repeat(count), vocabulary)
            tokens = (rows + noise).topk(width).indices
            siblings, ranks = tokens.repeat_interleave(width, 0), torch.arange(width, device=device)
            elders = torch.arange(width, device=device) < ranks.repeat(len(tokens))[:, None]
            rows = rows.repeat_interleave(width, 0)
            gone = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, siblings, elders)
            rows = rows.masked_fill(gone, float("-inf"))
        else:
            if texts.truncates:
                # A device sorts the vocabulary; the host need not read from it how far to look.
                truncate = sampling.truncate if rows.is_cpu else sampling.truncate_fixed
                rows = truncate(rows, *(x[owners] for x in (texts.top_k, texts.top_p, texts.min_p)))
            rows = sampling.keep_only_best(rows, heat == 0).repeat_interleave(width, 0)
            owners = owners.repeat_interleave(width)
            noise = self._noise(texts, owners, numbers.flatten().repeat(count), vocabulary)
            tokens = (rows + noise).argmax(1)
        shape = count, parents, width
        return tokens.view(shape), rows.softmax(1).view(*shape, vocabulary)

    def _noise(
        self, texts: DraftedTexts, owners: Tensor, numbers: Tensor, vocabulary: int
    ) -> Tensor:
        """Returns [n, V] noise that differs for every step, node and model."""
        keys = step_keys(texts.lengths[owners], self.salt + 1 + numbers)
        return gumbel(texts.seeds[owners], keys, vocabulary, DRAFT)


def load_draft_model(folder: Path, target: LanguageModel) -> LanguageModel:
    """Loads a draft model with the target's type and on its device, with packed weights."""
    weight = target.tokens.weight
    model = load_language_model(folder, weight.dtype, weight.device)
    pack_weights(model)
    return model


def _choose(logits: Tensor, texts: DraftedTexts, level: int, width: int) -> Tensor:
    """Returns the tokens [B, W, width] that the target would draw from logits [B, W, V]."""
    if texts.greedy:
        return logits.topk(width).indices
    return noisy_logits(logits, texts, level, width).best(width).columns


def _tokens_of(contexts: Seq[TextContext], counts: Seq[int]) -> Prefixes:
    """Returns where the first tokens of texts lie."""
    table = contexts[0].table
    assert table is not None
    return Prefixes(table, [context.row * table.shape[1] for context in contexts], counts)


def _tokens_before(inputs: DraftInputs, counts: Tensor | int) -> Prefixes:
    """Returns where the tokens of B texts lie without the last `counts` [B] of them."""
    width = inputs.table.shape[1]
    return Prefixes.on_device(inputs.table, inputs.rows * width, inputs.lengths - counts, width)
