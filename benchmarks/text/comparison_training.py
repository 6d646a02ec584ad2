"""Trains the kinds of drafters that drafter_comparison.py measures, each for the same time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from safetensors import safe_open

from benchmarks.support.runs import write_json
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.models.saving import save_language_model
from recserve.tokenizer.tokenizer import copy_tokenizer
from recserve.training.loop import fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.text.distilled_text import read_drafter_text, target_sha256
from recserve.training.text.drafters import boost, medusa2
from recserve.training.text.drafters.kinds import KINDS, TrainDrafter
from recserve.training.text.language_model import DRAFT, LanguageTrainee

TRAINED = "trained.json"
EPOCHS = 10_000  # so that the time ends a training, not the number of epochs
DRAFT_MODEL = "draft_model"


def train_draft_model(
    target: LanguageModel,
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
    directory: Path,
    options: TrainOptions,
    *,
    console: Console | None = None,
) -> TrainReport:
    """Trains a small language model as a draft model."""
    own = target.config
    positions = own.decoder.max_positions
    recipe = replace(DRAFT, vocab_size=own.vocab_size, max_positions=positions)
    trainee = LanguageTrainee(recipe, train, valid, options.seed, options.torch_device())
    report = fit(trainee, recipe.schedule.with_options(options), options, directory, console)
    save_language_model(trainee.model, directory)
    if options.llm is not None:
        copy_tokenizer(options.llm, directory)
    return report


TRAINERS: Mapping[str, TrainDrafter] = {**KINDS, DRAFT_MODEL: train_draft_model}


def trained_s(folder: Path) -> float:
    """Returns how long a training that was interrupted has run, up to its checkpoints."""
    seconds = 0.0
    for path in folder.rglob("checkpoint.safetensors"):
        with safe_open(path, "pt") as file:
            seconds += float(json.loads(file.metadata()["run"])["seconds"])
    return seconds


def train_all(kinds: list[str], options: argparse.Namespace, console: Console) -> list[str]:
    """Trains the kinds that are not trained yet, and returns those that failed."""
    text, failed, sha256 = None, [], target_sha256(options.target)
    for kind in kinds:
        folder = options.work / "trained" / kind
        facts = {"kind": kind, "minutes": options.minutes, "clock": options.clock}
        facts |= {"target_sha256": sha256}
        if (folder / TRAINED).is_file():
            written = json.loads((folder / TRAINED).read_text(encoding="utf-8"))
            check_facts(str(folder / TRAINED), written, facts)
            continue
        if text is None:
            found = read_drafter_text(options.text, options.target)
            if found.foreign:
                raise SystemExit(f"{found.foreign[0]} was written by another model than --target")
            text = found.split()
        left = max(options.minutes - trained_s(folder) / 60, 0.001)
        console.print(f"{kind}: {left:.2f} minutes")
        training = TrainOptions(
            epochs=EPOCHS,
            max_minutes=left,
            clock="processor" if options.clock == "cpu" else "wall",
            seed=options.seed,
            resume=True,
            llm=options.target,
        )
        try:
            target = load_language_model(options.target, device=training.torch_device())
            report = TRAINERS[kind](target, *text, folder, training, console=console)
        except ValueError as error:  # a kind that this target or this text does not allow
            console.print(f"[red]{kind}: {error}[/red]", soft_wrap=True)
            failed.append(kind)
            continue
        facts |= {"seconds": report.seconds, "epochs": report.epochs, "metrics": report.metrics}
        write_atomically(folder / TRAINED, facts)
    return failed


def weights_of(folder: Path) -> tuple[tuple[Path, ...], Path | None]:
    """Returns the folders of a trained drafter, and of its target if that was trained too."""
    own = folder / medusa2.TARGET
    if own.is_dir():
        return (folder / medusa2.HEADS,), own
    models = sorted(folder.glob(boost.FOLDER.format("*")))
    return tuple(models) or (folder,), None


def check_facts(what: str, written: dict[str, Any], facts: dict[str, Any]) -> None:
    """Ends the run if finished work was made with other values."""
    for name, value in facts.items():
        if written.get(name) != value:
            raise SystemExit(
                f"{what} was made with {name} = {written.get(name)!r}, not {value!r}; use another "
                "--work, or delete it"
            )


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_suffix(".tmp")
    write_json(aside, content)
    aside.replace(path)
