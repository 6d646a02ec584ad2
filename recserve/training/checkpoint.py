"""Checkpoints of training runs, each in one safetensors file.

A checkpoint holds everything that a resumed run needs to continue exactly like an uninterrupted
run. Every epoch seeds its own generator from (seed, epoch). So only a checkpoint within an epoch
holds the states of random generators.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recserve.files import (
    FORMAT_KEY,
    UnreadableFile,
    check_metadata,
    parse_record,
    regular_file,
)
from recserve.models.write_tensors import write_tensors
from recserve.training.optimizers import load_optimizer_state, optimizer_state
from recserve.training.options import EpochRecord

FORMAT = "recserve-checkpoint/1"


@dataclass
class RunState:
    """State of a training run.

    Attributes:
        model: The model in training.
        optimizers: Its optimisers, as `build_optimizers` returns them.
        averaged: Running average of the weights, by parameter name.
        best: The averaged weights with the best validation so far, by parameter name.
        epoch: Number of finished epochs.
        step: Number of finished optimiser steps.
        best_epoch: Epoch of `best`, from 1; 0 before the first validation.
        best_value: Value of the selection metric in that epoch; higher is better.
        seconds: Training and validation time, including the runs that this one resumes.
        validation_s: Duration of the latest validation.
        history: One record per finished epoch.
        batches: Number of finished batches of an epoch that is not finished.
        targets: Number of their targets.
        sums: Their summed losses, by name.
        random: States of random generators after them, by kind of device.
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
    batches: int = 0
    targets: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    random: dict[str, Tensor] = field(default_factory=dict)

    def begin_epoch(self) -> None:
        """Forgets the batches of the last epoch."""
        self.batches, self.targets, self.sums, self.random = 0, 0, {}, {}

    def note_batches(self, batches: int, targets: int, sums: dict[str, float]) -> None:
        """Notes what is finished of the present epoch, and the states of random generators."""
        self.batches, self.targets, self.sums = batches, targets, dict(sums)
        self.random = {"cpu": torch.get_rng_state()}
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            self.random["cuda"] = torch.cuda.get_rng_state(device)

    def restore_random(self) -> None:
        """Sets the random generators to the states that `note_batches` saw."""
        if "cpu" in self.random:
            torch.set_rng_state(self.random["cpu"].cpu())
        device = next(self.model.parameters()).device
        if "cuda" in self.random and device.type == "cuda":
            torch.cuda.set_rng_state(self.random["cuda"].cpu(), device)

    def counters(self) -> dict[str, Any]:
        """Returns the JSON-ready part of the state, which is everything but tensors."""
        names = ("epoch", "step", "best_epoch", "best_value", "seconds", "validation_s")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.batches:
            values |= {"batches": self.batches, "targets": self.targets, "sums": self.sums}
        return values | {"history": [asdict(record) for record in self.history]}


@dataclass(frozen=True)
class _Counters:
    """The counters of a run in a file, see `RunState`."""

    epoch: int
    step: int
    best_epoch: int
    seconds: float
    validation_s: float
    batches: int = 0
    targets: int = 0
    sums: dict[str, float] = field(default_factory=dict)


def save_checkpoint(state: RunState, path: Path, recipe: dict[str, Any]) -> None:
    """Writes a checkpoint atomically.

    A concurrent reader finds either the old file or the new one, never a partial one.

    Args:
        state: The state to save.
        path: The file to write; its folder is created if needed.
        recipe: Settings that a resumed run must share. They are stored as JSON in the file's
            header.
    """
    tensors = {f"model.{n}": t.detach() for n, t in state.model.named_parameters()}
    tensors |= {f"averaged.{n}": t for n, t in state.averaged.items()}
    tensors |= {f"best.{n}": t for n, t in state.best.items()}
    tensors |= {f"optimizer.{n}": t for n, t in optimizer_state(state.optimizers).items()}
    tensors |= {f"random.{n}": t for n, t in state.random.items()}
    header = {
        FORMAT_KEY: FORMAT,
        "run": json.dumps(state.counters()),
        "recipe": json.dumps(recipe, sort_keys=True),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, path, header)


def load_checkpoint(state: RunState, path: Path, recipe: dict[str, Any]) -> None:
    """Loads a checkpoint into `state`.

    Args:
        state: Receives weights, optimiser moments and counters.
        path: The file to read.
        recipe: Settings of this run, which must equal those of the run that wrote the file.

    Raises:
        ValueError: If the file is damaged, or if its run had another recipe.
    """
    try:
        with safe_open(regular_file(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        check_metadata(header, FORMAT, path)
        run: dict[str, Any] = json.loads(header["run"])
        written: dict[str, Any] = json.loads(header["recipe"])
        if not isinstance(run, dict) or not isinstance(written, dict):
            raise ValueError("its counters and settings are no JSON objects")
    except (SafetensorError, UnreadableFile, KeyError, ValueError, RecursionError) as error:
        raise _damage_error(path, error) from error
    recipe = json.loads(json.dumps(recipe))  # JSON turns tuples into lists
    if written != recipe:
        differs = sorted(k for k in {*written, *recipe} if written.get(k) != recipe.get(k))
        raise ValueError(
            f"checkpoint {path.name} has other values of {differs}; train without resume"
        )
    try:
        _set(state, tensors, run, f"checkpoint {path.name}: ")
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # of another model
        raise _damage_error(path, error) from error


def _damage_error(path: Path, error: Exception) -> ValueError:
    text = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"checkpoint {path.name} is damaged ({text}); train without resume")


def _set(state: RunState, tensors: dict[str, Tensor], run: dict[str, Any], place: str) -> None:
    """Sets a state to tensors and counters of a file. Raises ValueError if a counter is wrong."""
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
    state.random = groups.get("random", {})
    state.history = [parse_record(record, EpochRecord, place) for record in run.pop("history", ())]
    state.best_value = float(run.pop("best_value", "-inf"))  # infinite before a validation
    counters = parse_record(run, _Counters, place)
    for name, value in vars(counters).items():
        setattr(state, name, value)
