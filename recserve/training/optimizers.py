"""Optimisers of a run: AdamW, and Muon for the matrices that the schedule names.

Muon moves a matrix by the orthogonalised momentum of its gradient, so that all directions of the
matrix learn at one rate. On small language models it needs about half of AdamW's tokens.

Sources: Keller Jordan et al., "Muon" (2024). The step is scaled to AdamW's as in arXiv 2502.16982,
section 2.2, so that one learning rate serves both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recserve.training.schedule import Schedule


def build_optimizers(model: nn.Module, schedule: Schedule) -> tuple[torch.optim.Optimizer, ...]:
    """Returns AdamW, followed by Muon if the schedule names matrices for it.

    Weight decay applies to matrices, and not to norms, biases and scales. Each parameter group has
    a `rate`. The loop multiplies it by the learning rate of the step.
    """
    adam: dict[tuple[float, bool], list[nn.Parameter]] = {}
    muon: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = schedule.rate(name)
        if schedule.orthogonal and name.startswith(schedule.orthogonal) and parameter.ndim == 2:
            muon.setdefault(rate, []).append(parameter)
        else:
            adam.setdefault((rate, parameter.ndim < 2), []).append(parameter)

    def group(parameters: list[nn.Parameter], rate: float, free: bool) -> dict[str, Any]:
        decay = 0.0 if free else schedule.weight_decay / rate
        return {"params": parameters, "rate": rate, "weight_decay": decay}

    optimizers: list[torch.optim.Optimizer] = []
    if adam:
        groups = [group(found, *key) for key, found in sorted(adam.items(), key=lambda g: g[0])]
        lr, betas = schedule.learning_rate, schedule.betas
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True))
    if muon:
        groups = [group(found, rate, False) for rate, found in sorted(muon.items())]
        optimizers.append(
            torch.optim.Muon(groups, lr=schedule.learning_rate, adjust_lr_fn="match_rms_adamw")
        )
    return tuple(optimizers)


def optimizer_state(optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, Tensor]:
    """Returns all state tensors of the optimisers, named `optimiser.parameter.tensor`."""
    return {
        f"{place}.{number}.{name}": value
        for place, optimizer in enumerate(optimizers)
        for number, moments in optimizer.state_dict()["state"].items()
        for name, value in moments.items()
    }


def load_optimizer_state(
    optimizers: tuple[torch.optim.Optimizer, ...], tensors: dict[str, Tensor]
) -> None:
    """Loads the tensors that `optimizer_state` returned."""
    for place, optimizer in enumerate(optimizers):
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            owner, number, kind = name.split(".")
            if int(owner) == place:
                moments.setdefault(int(number), {})[kind] = value
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
