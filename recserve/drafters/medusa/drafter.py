"""Medusa's trees: the heads' best guesses of each position, combined by a static tree of ranks.

At a temperature above 0 each position's guesses are ranked with the target's own noise. The first
guess is then the token that the target would draw if its distribution were the head's.

Source: Medusa (arXiv 2401.10774), sections 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.drafters.medusa.files import load_accuracies, load_medusa
from recserve.drafters.medusa.network import MedusaHeads
from recserve.drafters.shared.limits import limit_budget, only_chains
from recserve.drafters.shared.noisy import best_with_noise
from recserve.drafters.shared.rank_tree import RankTree, best_tree, expansion_tree, rank_tree
from recserve.kernels.host import on_device
from recserve.models.language_model import LanguageModel
from recserve.models.packing import pack_weights
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, RankedHeads, TextContext
from recserve.speculation.sampling_params import Speculation

NUM_NODES = 24
RANKS = 10  # ranks of a head in the default tree, which needs no measured accuracies


def assumed_accuracies(num_heads: int, ranks: int = RANKS) -> list[list[float]]:
    """Returns accuracies by head and rank, to build a tree from before any are measured.

    Each head is right four fifths as often as the head before it. Each rank is right a third as
    often as the rank before it.
    """
    return [[0.6 * 0.8**k * 0.33**rank for rank in range(ranks)] for k in range(num_heads)]


@dataclass(frozen=True)
class _Form:
    """A tree within a budget, and the places of its tokens among those of all heads.

    Attributes:
        shape: The tree with n nodes.
        levels: [n] head of each node's token.
        ranks: [n] rank of each node's token in its head.
        parents: [n] int64 as in TextDraft.
    """

    shape: RankTree
    levels: NDArray[np.int64]
    ranks: NDArray[np.int64]
    parents: Tensor


@lru_cache(maxsize=1024)
def _form(tree: RankTree, num_nodes: int, depth: int) -> _Form:
    """Returns the part of a tree within `num_nodes` nodes and `depth` levels."""
    shape = tree.within(Budget(num_nodes, depth))
    levels = np.array([len(path) - 1 for path in shape.paths], np.int64)
    ranks = np.array([path[-1] for path in shape.paths], np.int64)
    return _Form(shape, levels, ranks, torch.tensor(shape.parents()))


class MedusaDrafter(Drafter):
    """Drafts a static tree with the tokens of Medusa's heads.

    Args:
        heads: The heads.
        hidden_size: Hidden size of the target.
        vocab_size: Vocabulary size of the target.
        tree: Tree of requests that name none; None builds one from `assumed_accuracies`.

    Raises:
        ValueError: If the heads are for another vocabulary or hidden size, or the tree is deeper
            than the number of heads or wider than their vocabulary.
    """

    name = "medusa"
    needs_weights = True
    num_folders = 1
    hidden_layers = (-1,)
    takes_tree = True

    def __init__(
        self, heads: MedusaHeads, hidden_size: int, vocab_size: int, tree: RankTree | None = None
    ) -> None:
        config = heads.config
        if (config.hidden_size, config.vocab_size) != (hidden_size, vocab_size):
            raise ValueError(
                f"the heads are for hidden size {config.hidden_size} and {config.vocab_size} "
                f"tokens, the target has {hidden_size} and {vocab_size}"
            )
        self.heads = heads
        self._dtype, self._device = heads.weight.dtype, heads.weight.device
        ranks = min(RANKS, config.head_vocab or config.vocab_size)
        self.num_heads = config.num_heads
        self.tree = tree or best_tree(assumed_accuracies(config.num_heads, ranks), NUM_NODES)
        self.chain = expansion_tree([1] * config.num_heads)
        self._check_tree(self.tree)
        self.num_ranks = max(ranks, self.tree.width)

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> MedusaDrafter:
        """Loads the heads of one folder, and makes the best tree of their measured accuracies."""
        if len(folders) != 1:
            raise ValueError("drafter 'medusa' needs the folder of its heads (medusa=DIR)")
        size, vocabulary = target.config.decoder.hidden_size, target.config.vocab_size
        weight = target.tokens.weight
        # A packed head has no weight to read; heads without a matrix are then refused.
        head = weight if target.head is None else getattr(target.head, "weight", None)
        heads = load_medusa(folders[0], size, vocabulary, weight.dtype, weight.device, head)
        measured = load_accuracies(folders[0])
        tree = None if measured is None else best_tree(measured, NUM_NODES)
        drafter = cls(heads, size, vocabulary, tree)
        drafter.pack()
        return drafter

    @property
    def ranked_heads(self) -> RankedHeads:
        """The drafter's own heads, which read the last hidden state and nothing else."""
        return self

    def pack(self) -> None:
        """Lay the heads' weights out for this device; they cannot be trained or moved after that,
        nor saved on a CPU.
        """
        if self._device.type == "cuda":
            self.heads.stack()
        else:
            pack_weights(self.heads)

    def check_tree(self, speculation: Speculation) -> None:
        """Raises ValueError for a request's tree that these heads cannot fill."""
        if speculation.tree is not None:
            self._check_tree(rank_tree(speculation.tree))

    def _check_tree(self, tree: RankTree) -> None:
        config = self.heads.config
        words = config.head_vocab or config.vocab_size
        if tree.depth > config.num_heads or tree.width > words:
            raise ValueError(
                f"tree has {tree.depth} levels and ranks up to {tree.width - 1}; this model has "
                f"{config.num_heads} Medusa heads with {words} tokens each"
            )

    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns filled trees; a draft is empty while its hidden state is unknown.

        A request's own tree takes precedence over the drafter's.
        """
        drafts = [empty_draft(self._device)] * len(contexts)
        forms = [self._shape(c, b) for c, b in zip(contexts, budgets, strict=True)]
        rest = []
        for i, (context, form) in enumerate(zip(contexts, forms, strict=True)):
            shape, ranked = form.shape, context.ranked
            if context.hidden is None or not shape.paths:
                continue
            if ranked is None or shape.width > ranked.shape[1]:
                rest.append(i)
                continue
            tokens = torch.from_numpy(ranked[form.levels, form.ranks])
            drafts[i] = TextDraft(tokens, form.parents, shape.depth)
        if rest:
            found = self._fill([contexts[i] for i in rest], [forms[i].shape for i in rest])
            for i, draft in zip(rest, found, strict=True):
                drafts[i] = draft
        return drafts

    def _fill(self, contexts: Seq[TextContext], shapes: Seq[RankTree]) -> list[TextDraft]:
        """Fills trees on the device with the heads' tokens."""
        guesses = self._guesses(contexts, max(shape.width for shape in shapes))
        places, parents = [], []
        for row, shape in enumerate(shapes):
            places += [(len(path) - 1, row, path[-1]) for path in shape.paths]
            parents += shape.parents()
        index = on_device(places, self._device)
        tokens = guesses[index[:, 0], index[:, 1], index[:, 2]]
        sizes = [len(shape) for shape in shapes]
        above = on_device(parents, self._device)
        return [
            TextDraft(own, parent, shape.depth)
            for own, parent, shape in zip(
                torch.split(tokens, sizes), torch.split(above, sizes), shapes, strict=True
            )
        ]

    def _shape(self, context: TextContext, budget: Budget) -> _Form:
        """Returns the request's or the drafter's tree within the budget."""
        paths = context.speculation.tree
        if only_chains(context):
            tree = self.chain
        elif paths is None:
            tree = self.tree
        else:
            tree = rank_tree(paths)
            self._check_tree(tree)
        budget = limit_budget(context, budget, len(tree.paths))
        # A budget deeper than the tree gives the same form, so that the cache holds it once.
        return _form(tree, budget.num_nodes, min(budget.depth, tree.depth))

    @torch.inference_mode()
    def _guesses(self, contexts: Seq[TextContext], width: int) -> Tensor:
        """Returns [K, B, width] tokens, best first."""
        hidden = torch.stack([c.hidden for c in contexts if c.hidden is not None])
        if all(context.params.greedy for context in contexts):
            return self.heads.tokens(self.heads.best(hidden.to(self._dtype), width))
        params, device = [context.params for context in contexts], hidden.device
        return self.ranked(
            hidden,
            on_device([len(c.tokens) for c in contexts], device),
            on_device([p.temperature for p in params], device),
            on_device([p.seed for p in params], device),
            width,
        )

    def ranked(
        self, hidden: Tensor, lengths: Tensor, temperatures: Tensor, seeds: Tensor, width: int
    ) -> Tensor:
        """Implements `RankedHeads.ranked`."""
        logits = self.heads(hidden.to(self._dtype))
        count, batch = logits.shape[:2]
        positions = lengths + torch.arange(count, device=logits.device)[:, None]
        best = best_with_noise(
            logits.float().flatten(0, 1),
            temperatures.repeat(count),
            seeds.repeat(count),
            positions.flatten(),
            width,
            self.heads.token_map,
        )
        return self.heads.tokens(best).view(count, batch, width)
