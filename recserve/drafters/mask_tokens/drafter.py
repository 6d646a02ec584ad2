"""Mask tokens: the target's own step computes the states that the next draft is made from.

Below draft nodes hang blocks of c mask tokens. They are auxiliary nodes: scored, never accepted.
The states of the block below the last accepted node give the next draft, so a draft costs no
further forward pass of the target.

    quadratic    c -+- d -+- e --- m m      linear    c --- d --- e --- m m
                    |     `- m m
                    `- m m

Quadratic: whatever is accepted, the next step has a draft. Linear: after a rejection the masks saw
a wrong token, so the next step has masks only.

Source: Samragh et al. (arXiv 2507.11851), section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor

from recserve.drafters.mask_tokens.adapter import MASK, MaskTokensAdapter
from recserve.drafters.mask_tokens.files import load_mask_tokens
from recserve.drafters.mask_tokens.network import MaskTokens
from recserve.drafters.shared.limits import limit_budget, only_chains
from recserve.drafters.shared.noisy import best_with_noise
from recserve.kernels.host import on_device
from recserve.kernels.tree import CANDIDATE
from recserve.models.adapters import DecoderAdapter
from recserve.models.language_model import LanguageModel
from recserve.models.packing import pack_weights
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext, TextOutcome


@dataclass(frozen=True)
class MaskLayout:
    """A chain of candidates and the blocks of masks below it.

    Attributes:
        num_tokens: n, candidates.
        block: c, masks of a block.
        quadratic: Whether a block hangs below every node, or below the last one only.
    """

    num_tokens: int
    block: int
    quadratic: bool

    @staticmethod
    def within(budget: Budget, known: int, most: int, quadratic: bool) -> MaskLayout:
        """Returns the largest layout within a budget.

        With n candidates and blocks of c masks, the quadratic layout has n + c (n + 1) nodes. If
        the budget is too small for that with n = c = 1, the layout is linear.

        Args:
            budget: Limits of the draft, masks included.
            known: Masks whose states are known: most candidates.
            most: Most masks of a block.
            quadratic: Whether a block should hang below every node.
        """
        size, depth = budget.num_nodes, budget.depth
        quadratic &= size >= 3
        block = min(most, isqrt(size + 1) - 1 if quadratic else (size + 1) // 2)
        tokens = (size - block) // (block + 1) if quadratic else size - block
        # Masks that stand after the end of the text would be useless.
        tokens = max(min(tokens, known, depth - min(block, depth // 2)), 0)
        return MaskLayout(tokens, max(min(block, depth - tokens), 0), quadratic)

    @property
    def num_masks(self) -> int:
        """Masks of all blocks."""
        return self.block * (self.num_tokens + 1 if self.quadratic else 1)

    def first_mask(self, accepted: int) -> int | None:
        """Returns the draft node of the first mask below the last of `accepted` candidates.

        None if no mask hangs there.
        """
        left = self.num_tokens - accepted
        if not self.block or (left and not self.quadratic):
            return None
        return self.num_tokens + left * self.block

    def draft(self, tokens: Tensor) -> TextDraft:
        """Returns the draft with the given candidates [n]."""
        parents, kinds = _columns(self, tokens.device)
        masks = torch.zeros(self.num_masks, dtype=tokens.dtype, device=tokens.device)
        return TextDraft(
            tokens=torch.cat([tokens, masks]),
            parents=parents,
            depth=self.num_tokens + self.block,
            kinds=kinds if self.num_masks else None,
            candidate_depth=self.num_tokens,
        )


@lru_cache(maxsize=256)
def _columns(layout: MaskLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns parents and kinds of a layout's nodes. The deepest block comes first: preorder."""
    n, c = layout.num_tokens, layout.block
    parents, kinds = list(range(-1, n - 1)), [CANDIDATE] * n
    for node in reversed(range(-1 if layout.quadratic else n - 1, n)):
        if c:
            parents += [node, *range(len(parents), len(parents) + c - 1)]
            kinds += range(MASK, MASK + c)
    return torch.tensor(parents, device=device), torch.tensor(kinds, device=device)


class MaskTokensDrafter(Drafter):
    """Drafts chains from the states of mask tokens, with masks below every node.

    A rule that refuses auxiliary nodes gets no draft.

    Args:
        network: Mask tokens and sampler head.
        target: The model that verifies.

    Raises:
        ValueError: If the network is for another target.
    """

    name = "mask_tokens"
    needs_weights = True
    num_folders = 1
    quadratic = True

    def __init__(self, network: MaskTokens, target: LanguageModel) -> None:
        if network.config.decoder != target.config.decoder:
            raise ValueError("the mask tokens are for a target of another shape")
        self.network, self.target = network, target
        self.masks = network.lora
        self._layouts: dict[int, MaskLayout] = {}  # of the latest draft of each text
        # States of the masks for the next draft, and the number of tokens that they are for.
        self._outputs: dict[int, tuple[int, Tensor]] = {}

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> MaskTokensDrafter:
        """Loads the mask tokens of one folder."""
        if len(folders) != 1:
            raise ValueError(f"drafter {cls.name!r} needs one folder ({cls.name}=DIR)")
        network = load_mask_tokens(folders[0], target)
        pack_weights(network)
        return cls(network, target)

    def adapt_target(self, adapter: DecoderAdapter) -> DecoderAdapter:
        """Returns a target that computes the mask tokens.

        Raises:
            ValueError: If another drafter of the engine needs a different target.
        """
        if type(adapter) is DecoderAdapter:
            assert isinstance(adapter.model, LanguageModel)
            return MaskTokensAdapter(adapter.model, self.masks, self.name)
        if not isinstance(adapter, MaskTokensAdapter):
            raise ValueError(
                f"the drafter {self.name!r} cannot share an engine with one that computes the "
                f"target by {type(adapter).__name__}; serve only one of them"
            )
        if not adapter.masks.equals(self.masks):
            raise ValueError(
                f"the drafters {sorted([adapter.drafter, self.name])} have different mask tokens; "
                "an engine holds one set, which both may load from one folder"
            )
        return adapter

    def forget(self, context_id: int) -> None:
        """Drops the states of a text."""
        self._outputs.pop(context_id, None)
        self._layouts.pop(context_id, None)

    def commit(self, outcomes: Seq[TextOutcome]) -> None:
        """Copies the states of the masks below each text's last accepted node."""
        for outcome in outcomes:
            context = outcome.context
            self._outputs.pop(context.id, None)
            layout = self._layouts.pop(context.id, None)
            if layout is None or not len(outcome.draft):
                continue
            first = layout.first_mask(len(outcome.accepted))
            if first is not None:
                # Row 0 is the last committed token; row 1 + i is draft node i.
                states = outcome.hidden[1 + first : 1 + first + layout.block].clone()
                self._outputs[context.id] = len(context.tokens), states

    @torch.inference_mode()
    def propose(self, contexts: Seq[TextContext], budgets: Seq[Budget]) -> list[TextDraft]:
        """Returns a chain and its masks per text; masks only where no states are known."""
        device = self.target.tokens.weight.device
        drafts = [empty_draft(device)] * len(contexts)
        rows, layouts, states = [], [], []
        nothing = self.masks.embeddings[:0]
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            length, own = self._outputs.get(context.id, (0, nothing))
            own = own if length == len(context.tokens) else nothing
            most = limit_budget(context, budget, budget.num_nodes)
            if only_chains(context) or not most.num_nodes or not most.depth:
                continue
            layout = MaskLayout.within(most, len(own), self.masks.num_masks, self.quadratic)
            rows.append(i)
            layouts.append(layout)
            states.append(own[: layout.num_tokens])
        if not rows:
            return drafts
        tokens = self._tokens([contexts[i] for i in rows], states)
        for i, own, layout in zip(rows, tokens, layouts, strict=True):
            self._layouts[contexts[i].id] = layout
            drafts[i] = layout.draft(own[: layout.num_tokens])
        return drafts

    def _tokens(self, contexts: Seq[TextContext], states: Seq[Tensor]) -> Tensor:
        """Returns [B, n] drafted tokens, each given the one before it.

        Args:
            contexts: B texts.
            states: [m, E] states of each text's masks; the largest m is n.
        """
        device, params = self.target.tokens.weight.device, [c.params for c in contexts]
        padded = torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)
        before = on_device([context.tokens[-1] for context in contexts], device)
        lengths = on_device([len(context.tokens) for context in contexts], device)
        heat = on_device([p.temperature for p in params], device, torch.float32)
        seeds = on_device([p.seed for p in params], device)
        greedy, drafted = all(p.greedy for p in params), []
        for level in range(padded.shape[1]):
            embedded = self.target.tokens(before)
            logits = self.target.logits(self.network.sample_states(embedded, padded[:, level]))
            if greedy:
                before = logits.argmax(-1)
            else:
                noisy = best_with_noise(logits.float(), heat, seeds, lengths + level, 1)
                before = noisy[:, 0]
            drafted.append(before)
        return torch.stack(drafted, dim=1) if drafted else before.new_empty(len(contexts), 0)


class LinearMaskTokensDrafter(MaskTokensDrafter):
    """Drafts chains from the states of mask tokens, with masks below the last node only."""

    name = "mask_tokens_linear"
    quadratic = False
