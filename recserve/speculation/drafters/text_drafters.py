"""Drafters of text by name, with what each is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from recserve.models.drafters.medusa_files import load_accuracies, load_medusa
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.models.packing import pack_weights
from recserve.speculation.drafters.draft_model import ModelDrafter
from recserve.speculation.drafters.lookahead import LookaheadDrafter
from recserve.speculation.drafters.medusa import NUM_NODES, MedusaDrafter
from recserve.speculation.drafters.merged import MergedDrafter
from recserve.speculation.drafters.ngram import NgramDrafter
from recserve.speculation.drafters.none import NoDrafter
from recserve.speculation.drafters.rank_tree import best_tree
from recserve.speculation.drafters.specinfer import specinfer
from recserve.speculation.drafters.suffix import SuffixDrafter
from recserve.speculation.text import Drafter
from recserve.speculation.text_request import Speculation

JOIN = "+"


@dataclass(frozen=True)
class DrafterWeights:
    """Folders. models: draft models, as Hugging Face lays them out. medusa: heads."""

    models: tuple[Path, ...] = ()
    medusa: Path | None = None


def _none(target: LanguageModel, weights: DrafterWeights) -> Drafter:
    return NoDrafter()


def _ngram(target: LanguageModel, weights: DrafterWeights) -> Drafter:
    return NgramDrafter()


def _suffix(target: LanguageModel, weights: DrafterWeights) -> Drafter:
    return SuffixDrafter()


def _lookahead(target: LanguageModel, weights: DrafterWeights) -> Drafter:
    return LookaheadDrafter()


def _draft_model(target: LanguageModel, weights: DrafterWeights) -> Drafter:
    if len(weights.models) != 1:
        raise ValueError(
            "drafter 'draft_model' needs the folder of one draft model (draft_model=DIR), not "
            f"{len(weights.models)}"
        )
    return ModelDrafter(_load(weights.models[0], target), target.config.vocab_size)


def _specinfer(target: LanguageModel, weights: DrafterWeights) -> Drafter:
    if not weights.models:
        raise ValueError("drafter 'specinfer' needs the folder of a draft model (specinfer=DIR)")
    return specinfer([_load(f, target) for f in weights.models], target.config.vocab_size)


def _medusa(target: LanguageModel, weights: DrafterWeights) -> Drafter:
    if weights.medusa is None:
        raise ValueError("drafter 'medusa' needs the folder of its heads (medusa=DIR)")
    size, vocabulary = target.config.decoder.hidden_size, target.config.vocab_size
    dtype = target.tokens.weight.dtype
    heads = load_medusa(weights.medusa, size, vocabulary, dtype, _device(target))
    measured = load_accuracies(weights.medusa)
    tree = None if measured is None else best_tree(measured, NUM_NODES)
    drafter = MedusaDrafter(heads, size, vocabulary, tree)
    drafter.pack()
    return drafter


DRAFTERS: dict[str, Callable[[LanguageModel, DrafterWeights], Drafter]] = {
    "draft_model": _draft_model,
    "lookahead": _lookahead,
    "medusa": _medusa,
    "ngram": _ngram,
    "none": _none,
    "specinfer": _specinfer,
    "suffix": _suffix,
}


def build_drafter(
    name: str, target: LanguageModel, weights: DrafterWeights | None = None
) -> Drafter:
    """A drafter for a target; names joined by `+` draft one tree together.

    Raises ValueError (UnsupportedModel for files) for an unknown name, or for weights that are
    missing or do not fit the target, with what was expected and what came.
    """
    names = name.split(JOIN)
    if unknown := [part for part in names if part not in DRAFTERS]:
        raise ValueError(
            f"drafter is {unknown[0]!r}; choose one of {sorted(DRAFTERS)}, or several joined by "
            f"{JOIN!r}"
        )
    if len(names) > 1 and ("none" in names or len(set(names)) < len(names)):
        raise ValueError(f"drafter is {name!r}; join different ones, and not 'none'")
    built = [DRAFTERS[part](target, weights or DrafterWeights()) for part in names]
    return built[0] if len(built) == 1 else MergedDrafter(built)


def check_speculation(speculation: Speculation, drafter: Drafter) -> None:
    """Raises ValueError for a request's words that its drafter cannot follow."""
    if speculation.tree is None:
        return
    members = drafter.sources if isinstance(drafter, MergedDrafter) else (drafter,)
    takers = [member for member in members if isinstance(member, MedusaDrafter)]
    if not takers:
        raise ValueError(
            f"a tree of choices is for the drafter 'medusa', not for {speculation.drafter!r}"
        )
    for member in takers:
        member.check(speculation)


def _load(folder: Path, target: LanguageModel) -> LanguageModel:
    model = load_language_model(folder, device=_device(target))
    pack_weights(model)
    return model


def _device(target: LanguageModel) -> torch.device:
    device: torch.device = target.tokens.weight.device
    return device
