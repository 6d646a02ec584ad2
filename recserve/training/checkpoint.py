"""Everything a run needs to go on as if it had never stopped, in one safetensors file.

There is no state of a random generator in it: every epoch seeds its own from (seed, epoch).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recserve.training.optimizers import load_optimizer_state, optimizer_state
from recserve.training.options import EpochRecord


@dataclass
class RunState:
    """The moving part of a training run, as of the end of an epoch.

    averaged, best: weights by parameter name, the running average and the best of it so far.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    averaged: dict[str, Tensor]
    best: dict[str, Tensor]
    epoch: int = 0
    step: int = 0
    best_epoch: int = 0
    best_value: float = float("-inf")
    seconds: float = 0.0
    validation_s: float = 0.0
    history: list[EpochRecord] = field(default_factory=list)

    def counters(self) -> dict[str, Any]:
        """The part that is not tensors, JSON-ready."""
        names = ("epoch", "step", "best_epoch", "best_value", "seconds", "validation_s")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return values | {"history": [asdict(record) for record in self.history]}


def save_checkpoint(state: RunState, path: Path, recipe: dict[str, Any]) -> None:
    """Write atomically: whoever reads finds the old checkpoint or the new one, never half of it.

    recipe: what must be the same in the run that goes on; kept as JSON in the header.
    """
    tensors = {f"model.{n}": t.detach() for n, t in state.model.named_parameters()}
    tensors |= {f"averaged.{n}": t for n, t in state.averaged.items()}
    tensors |= {f"best.{n}": t for n, t in state.best.items()}
    tensors |= {f"optimizer.{n}": t for n, t in optimizer_state(state.optimizers).items()}
    tensors = {name: value.contiguous().cpu().clone() for name, value in tensors.items()}
    header = {"run": json.dumps(state.counters()), "recipe": json.dumps(recipe, sort_keys=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, header)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(state: RunState, path: Path, recipe: dict[str, Any]) -> None:
    """Put a checkpoint into `state`.

    Raises ValueError if the file is damaged, or was written by a run with another recipe.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        run = json.loads(header["run"])
        written = json.loads(header["recipe"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"checkpoint {path.name} is damaged ({error}); train anew") from error
    recipe = json.loads(json.dumps(recipe))  # tuples are lists in JSON
    if written != recipe:
        differs = sorted(k for k in {*written, *recipe} if written.get(k) != recipe.get(k))
        raise ValueError(f"checkpoint {path.name} is of a run with other {differs}; train anew")
    groups: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        groups.setdefault(kind, {})[rest] = value
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            parameter.copy_(groups["model"][name])
    device = next(state.model.parameters()).device
    state.averaged = {n: t.to(device) for n, t in groups["averaged"].items()}
    state.best = {n: t.to(device) for n, t in groups.get("best", {}).items()}
    load_optimizer_state(state.optimizers, groups.get("optimizer", {}))
    state.history = [EpochRecord(**record) for record in run.pop("history")]
    for name, value in run.items():
        setattr(state, name, value)
