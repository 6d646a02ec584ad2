"""Cross-entropy of draft slots, in memory that does not grow with the number of slots.

A position has one state per slot, and each state has logits over the vocabulary. Two loops keep
their number in memory constant. Positions are computed in pieces of `rows` slot states. The slots
of a piece pass through the target's head one by one. The states are detached, and the gradient of
each slot's loss is written to its states. One backward pass carries it through the drafter.

Source: SpecFormer (arXiv 2511.20340), in-batch gradient accumulation, which has the second loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class SlotLabels:
    """What slots should predict: slot i at position t the target's token at t + 2 + i.

    Attributes:
        logits: [n, V] target logits at n positions; windows of `window` positions one after
            another.
        window: T.
    """

    logits: Tensor
    window: int

    def of(self, rows: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Returns logits [m, V] of a slot's tokens at positions [m], and whether they are known.

        They are not known where the window ends before.
        """
        places = rows + 1 + slot
        known = rows % self.window + 1 + slot < self.window
        return self.logits[places.clamp(max=self.logits.shape[0] - 1)], known

    def count(self, slot: int) -> int:
        """Returns the number of positions at which a slot's token is known."""
        windows = self.logits.shape[0] // self.window
        return max(windows * (self.window - 1 - slot), 1)


class SlotLoss:
    """The loss of a network's slots and its gradient.

    Args:
        target: The frozen target, whose final norm and head read the states.
        slots: Returns the states [m, slots, E] of contexts [m, E].
        num_slots: Number of slots.
        rows: Most slot states in memory.
    """

    def __init__(
        self,
        target: LanguageModel,
        slots: Callable[[Tensor], Tensor],
        num_slots: int,
        rows: int,
    ) -> None:
        self.target, self.slots, self.num_slots = target, slots, num_slots
        self.step = max(rows // num_slots, 1)

    def __call__(
        self, context: Tensor, labels: SlotLabels, weights: Sequence[nn.Parameter]
    ) -> tuple[Tensor, Tensor]:
        """Returns the mean loss over the slots, and the loss of each slot without gradient.

        Args:
            context: [n, E].
            labels: Labels of the same n positions.
            weights: Parameters that `slots` uses.
        """
        total, parts = _Accumulated.apply(self, labels, context, *weights)  # type: ignore[no-untyped-call]
        return total, parts

    def logits(self, states: Tensor) -> Tensor:
        """Returns float32 logits [..., V] of slot states [..., E]."""
        states = states.to(self.target.tokens.weight.dtype)
        return self.target.logits(self.target.decoder.norm(states)).float()

    def pieces(self, count: int, device: torch.device) -> list[Tensor]:
        """Returns the positions of each piece of `count` positions."""
        return list(torch.split(torch.arange(count, device=device), self.step))

    def of_slot(self, states: Tensor, labels: SlotLabels, rows: Tensor, slot: int) -> Tensor:
        """Returns one slot's cross-entropy with the target's distribution, a share of its mean."""
        wanted, known = labels.of(rows, slot)
        said = self.logits(states).log_softmax(-1)
        own = -(wanted.float().softmax(-1) * said).sum(-1)
        return (own * known).sum() / labels.count(slot)

    def accumulate(
        self, context: Tensor, labels: SlotLabels, weights: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the loss of each slot, and the gradients of their mean.

        Returns:
            [slots] losses, then the gradients of the context and of each weight.
        """
        losses = torch.zeros(self.num_slots, device=context.device)
        sums = [torch.zeros_like(x) for x in (context, *weights)]
        for rows in self.pieces(context.shape[0], context.device):
            own = context[rows].requires_grad_()
            states = self.slots(own)
            gradient = torch.empty_like(states)
            for slot in range(self.num_slots):
                leaf = states[:, slot].detach().requires_grad_()
                loss = self.of_slot(leaf, labels, rows, slot)
                losses[slot] += loss.detach()
                (gradient[:, slot],) = _gradients(loss / self.num_slots, [leaf])
            into_context, *into_weights = _gradients(states, [own, *weights], gradient)
            sums[0][rows] = into_context
            for whole, piece in zip(sums[1:], into_weights, strict=True):
                whole += piece
        return losses, sums


def _gradients(
    outputs: Tensor, inputs: Sequence[Tensor], given: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs. A backward pass runs outside of autocast."""
    with torch.autocast(outputs.device.type, enabled=False):
        return torch.autograd.grad(outputs, inputs, given)


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: SlotLoss, labels: SlotLabels, context: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            losses, gradients = loss.accumulate(context.detach(), labels, weights)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses)
        return losses.mean(), losses

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * scales[0] for gradient in ctx.saved_tensors)
