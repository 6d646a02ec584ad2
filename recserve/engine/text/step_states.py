"""The states of the target that a step computed: the final ones and those between layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recserve.kernels.host import on_device
from recserve.models.decoder import FINAL_LAYER, AuxHiddenStates
from recserve.models.drafters.gated_lora import GatedLora
from recserve.speculation.drafter import Drafter


@dataclass(frozen=True)
class StepStates:
    """States of T nodes.

    Attributes:
        final: [T, E] final hidden states.
        between: [T, E] residual stream after the first n layers, by n. Only recorded layers.
    """

    final: Tensor
    between: Mapping[int, Tensor] = field(default_factory=dict)

    def read_by(self, drafter: Drafter, nodes: Seq[int] | slice) -> Tensor:
        """Returns [n, F] the layers that a drafter reads, side by side, in memory of their own."""
        layers = drafter.hidden_layers
        columns = [self.final if n == FINAL_LAYER else self.between[n] for n in layers]
        rows = nodes if isinstance(nodes, slice) else on_device(nodes, self.final.device)
        return torch.cat([column[rows] for column in columns], dim=-1)


def taps_for(drafters: Iterable[Drafter]) -> AuxHiddenStates | None:
    """Returns taps of all layers that the drafters read, or None if they read no such layer."""
    layers = {n for drafter in drafters if drafter.reads_states for n in drafter.hidden_layers}
    layers.discard(FINAL_LAYER)
    return AuxHiddenStates(tuple(sorted(layers))) if layers else None


def masks_of(drafters: Iterable[Drafter]) -> GatedLora | None:
    """Returns the mask tokens that trees of the drafters may have. None if there are none.

    Raises:
        ValueError: If two drafters have different ones.
    """
    first: tuple[str, GatedLora] | None = None
    for drafter in drafters:
        if drafter.masks is None:
            continue
        if first is None:
            first = drafter.name, drafter.masks
        elif not first[1].equals(drafter.masks):
            names = sorted([first[0], drafter.name])
            raise ValueError(
                f"the drafters {names} have different mask tokens; an engine holds one set, which "
                "both may load from one folder"
            )
    return None if first is None else first[1]


def split_states(hidden: Seq[Tensor], taps: AuxHiddenStates | None) -> list[StepStates]:
    """Returns the states of each part of a forward pass.

    Args:
        hidden: [T, E] final states of each part.
        taps: What was recorded for all parts together. None if nothing was.
    """
    if taps is None:
        return [StepStates(own) for own in hidden]
    sizes = [own.shape[0] for own in hidden]
    columns = [torch.split(states, sizes) for states in taps.states]
    between = [dict(zip(taps.layers, own, strict=True)) for own in zip(*columns, strict=True)]
    return [StepStates(own, layers) for own, layers in zip(hidden, between, strict=True)]
