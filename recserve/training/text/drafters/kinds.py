"""The kinds of drafters for texts that `recserve train drafter` trains.

A new kind is one file with its recipe, and one line in KINDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from recserve.models.language_model import LanguageModel
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.text.drafters.block import BlockTrainee
from recserve.training.text.drafters.block_recipe import BlockRecipe
from recserve.training.text.drafters.boost import train_boost
from recserve.training.text.drafters.eagle import EagleRecipe, EagleTrainee
from recserve.training.text.drafters.mask_tokens import MaskTokensRecipe, MaskTokensTrainee
from recserve.training.text.drafters.medusa import MedusaRecipe, MedusaTrainee
from recserve.training.text.drafters.medusa2 import Medusa2Recipe, train_medusa2
from recserve.training.text.drafters.mtp import MtpTrainee
from recserve.training.text.drafters.specformer import SpecformerRecipe, SpecformerTrainee


class TrainDrafter(Protocol):
    """Trains a drafter for a target model and writes its folder."""

    def __call__(
        self,
        target: LanguageModel,
        train: NDArray[np.int64],
        valid: NDArray[np.int64],
        directory: Path,
        options: TrainOptions,
        *,
        console: Console | None = None,
    ) -> TrainReport:
        """Trains the drafter.

        Args:
            target: The language model, which stays as it is.
            train: [n] int64 training tokens, preferably text that the target wrote.
            valid: [n] int64 validation tokens.
            directory: Folder that receives the drafter.
            options: Options of the run.
            console: Where progress is printed; None means standard error.

        Raises:
            ValueError: If a text is too short, or the drafter of `options.start_from` has another
                shape.
        """
        ...


KINDS: Mapping[str, TrainDrafter] = {
    "medusa": partial(MedusaTrainee.train_on, recipe=MedusaRecipe()),
    "medusa2": train_medusa2,
    "medusa2-distill": partial(train_medusa2, recipe=Medusa2Recipe(distill=True)),
    "eagle": partial(EagleTrainee.train_on, recipe=EagleRecipe(kind="eagle")),
    "eagle3": partial(EagleTrainee.train_on, recipe=EagleRecipe(kind="eagle3")),
    "mtp": partial(MtpTrainee.train_on, recipe=EagleRecipe(kind="mtp")),
    "dflash": partial(BlockTrainee.train_on, recipe=BlockRecipe(kind="dflash")),
    "jetspec": partial(BlockTrainee.train_on, recipe=BlockRecipe(kind="jetspec")),
    "dspark": partial(BlockTrainee.train_on, recipe=BlockRecipe(kind="dspark")),
    "dflash2": partial(BlockTrainee.train_on, recipe=BlockRecipe(kind="dflash2")),
    "specformer": partial(SpecformerTrainee.train_on, recipe=SpecformerRecipe()),
    "mask_tokens": partial(MaskTokensTrainee.train_on, recipe=MaskTokensRecipe()),
    "boost": train_boost,
}
