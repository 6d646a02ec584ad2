"""Training of SpecFormer networks, which draft for a frozen target model.

Every slot learns the target's own distribution of its token, and all slots count alike. The loss
is computed position by position through the vocabulary (slot_loss.py), so that memory does not grow
with the draft length.

Source: SpecFormer (arXiv 2511.20340), whose labels are the tokens of text that the target wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recserve.drafters.specformer.files import (
    load_specformer,
    one_layer,
    save_specformer,
)
from recserve.drafters.specformer.network import Specformer, SpecformerConfig
from recserve.models.attention import DenseAttention
from recserve.models.decoder import FINAL_LAYER, AuxHiddenStates
from recserve.models.language_model import LanguageModel
from recserve.training.loop import StepLoss
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.slot_loss import SlotLabels, SlotLoss
from recserve.training.text.drafters.trainee import DrafterTrainee, accept_metrics


@dataclass(frozen=True)
class SpecformerRecipe:
    """Sizes of a SpecFormer network and settings of its training.

    Attributes:
        num_slots: Tokens that it drafts.
        slot_rows: Slot states of a batch that are in memory at the same time.
        window: Tokens of a training row.
        batch: Rows per step.
        validation_rows: Most validation rows that are measured.
        schedule: Learning rate, averaging and stopping.
    """

    num_slots: int = 8
    slot_rows: int = 4096
    window: int = 256
    batch: int = 8
    validation_rows: int = 64
    schedule: Schedule = field(default_factory=lambda: Schedule(4, 1e-3, weight_decay=0.0))


class SpecformerTrainee(DrafterTrainee[SpecformerRecipe, Specformer]):
    """A SpecFormer network on a frozen target, for the training loop."""

    def new_network(self, train: NDArray[np.int64]) -> Specformer:
        """Returns a new network. Raises ValueError if a window is too short for the slots."""
        recipe = self.recipe
        if recipe.window < recipe.num_slots + 2:
            raise ValueError(
                f"window is {recipe.window}; {recipe.num_slots} slots need at least "
                f"{recipe.num_slots + 2} tokens"
            )
        network = Specformer(specformer_config(recipe, self.target)).to(self.device)
        self.slot_loss = SlotLoss(self.target, network.slots, recipe.num_slots, recipe.slot_rows)
        return network

    def load(self, folder: Path) -> Specformer:
        """Returns the network of a folder."""
        return load_specformer(folder, self.target)

    def save(self, folder: Path) -> None:
        """Writes the network in the authors' layout."""
        save_specformer(self.model, folder, self.target.config.decoder.num_layers)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the loss of a batch, as the mean over slots and positions."""
        context, logits = self.context(self.train[batch])
        labels = SlotLabels(logits, self.recipe.window)
        total, losses = self.slot_loss(context, labels, slot_parameters(self.model))
        parts = {f"slot_{number}": part for number, part in enumerate(losses)}
        return StepLoss(total, parts, len(context))

    @torch.inference_mode()
    def validate(self) -> dict[str, float]:
        """Returns the mean accept length of the slots' best chain, and each slot's accuracy.

        The labels are the target's likeliest tokens in the given text. So this is the accept length
        on text that the target wrote without draws.
        """
        hits = []
        last = self.recipe.window - 1 - self.recipe.num_slots
        for part in self.validation_batches():
            context, logits = self.context(part)
            said = logits.argmax(-1)
            for places in self.slot_loss.pieces(len(context), self.device):
                # Only positions at which the tokens of all slots are known.
                own = places[places % self.recipe.window < last]
                states = self.model.slots(context[own])
                guesses = [self.slot_loss.logits(slot).argmax(-1) for slot in states.unbind(1)]
                hits.append(torch.stack([g == said[own + 1 + n] for n, g in enumerate(guesses)]))
        return accept_metrics(torch.cat(hits, dim=1), "slot")

    def context(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns the network's contexts [b T, E] and the target's logits [b T, V] of some rows."""
        tokens = torch.from_numpy(rows).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)
        layers = self.model.config.target_layers
        aux_states = AuxHiddenStates(tuple(sorted({n for n in layers if n != FINAL_LAYER})))
        with torch.no_grad():
            final = self.target(tokens, positions, DenseAttention(), None, aux_states)
            logits = self.target.logits(final)
        between = dict(zip(aux_states.layers, aux_states.states, strict=True)) | {
            FINAL_LAYER: final
        }
        states = torch.cat([between[n] for n in layers], dim=-1).float()
        context = self.model.context(states, positions, DenseAttention())
        return context.flatten(0, 1), logits.flatten(0, 1)


def slot_parameters(network: Specformer) -> list[nn.Parameter]:
    """Returns the parameters that `Specformer.slots` uses."""
    context = (network.state_norms, network.mix, network.context_attention)
    others = {id(p) for module in context for p in module.parameters()}
    return [p for p in network.parameters() if id(p) not in others]


def specformer_config(recipe: SpecformerRecipe, target: LanguageModel) -> SpecformerConfig:
    """Returns the configuration of a new network for a target.

    It reads the embedding, the middle layer, the last but one and the final state.
    """
    depth = target.config.decoder.num_layers
    layers = dict.fromkeys((0, depth // 2, depth - 1, FINAL_LAYER))
    return SpecformerConfig(one_layer(target), tuple(layers), recipe.num_slots)
