"""SpecInfer: one or several small models, each of which drafts a tree by a fixed expansion.

Source: SpecInfer (arXiv 2305.09781, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import ClassVar

from recserve.drafters.draft_model.drafter import ModelDrafter, load_draft_model
from recserve.drafters.merged import MergedDrafter
from recserve.models.language_model import LanguageModel
from recserve.speculation.drafter import Drafter

EXPANSION = (1, 1, 3, 1, 1)


def specinfer(
    models: Seq[LanguageModel],
    vocab_size: int,
    expansion: Seq[int] = EXPANSION,
) -> Drafter:
    """Builds the drafter of some draft models.

    One model draws siblings without replacement. Several models draw them independently, because
    the acceptance rule compares each token with its own model's distribution.

    Args:
        models: At least one draft model.
        vocab_size: Vocabulary size of the target.
        expansion: Number of children per node, level by level.

    Raises:
        ValueError: If there is no model, or one has another vocabulary than the target.
    """
    if not models:
        raise ValueError("specinfer needs at least one draft model")
    if len(models) == 1:
        return ModelDrafter(models[0], vocab_size, expansion, distinct=True)
    sources = [
        ModelDrafter(model, vocab_size, expansion, source=number)
        for number, model in enumerate(models)
    ]
    return MergedDrafter(sources)


class SpecinferDrafter(ModelDrafter):
    """The registered class of `specinfer`, which loads its draft models from folders."""

    name = "specinfer"
    num_folders: ClassVar[int | None] = None

    @classmethod
    def from_folders(cls, folders: Seq[Path], target: LanguageModel) -> Drafter:
        """Loads one or several draft models."""
        if not folders:
            raise ValueError(
                "drafter 'specinfer' needs the folder of a draft model (specinfer=DIR)"
            )
        models = [load_draft_model(folder, target) for folder in folders]
        return specinfer(models, target.config.vocab_size)
