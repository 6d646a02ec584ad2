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
from recserve.training.text.drafters.block import train_block
from recserve.training.text.drafters.block_recipe import BlockRecipe
from recserve.training.text.drafters.boost import train_boost
from recserve.training.text.drafters.eagle import EagleRecipe, train_eagle
from recserve.training.text.drafters.mask_tokens import train_mask_tokens
from recserve.training.text.drafters.medusa import train_medusa
from recserve.training.text.drafters.medusa2 import Medusa2Recipe, train_medusa2
from recserve.training.text.drafters.mtp import train_mtp
from recserve.training.text.drafters.specformer import train_specformer


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
    "medusa": train_medusa,
    "medusa2": train_medusa2,
    "medusa2-distill": partial(train_medusa2, recipe=Medusa2Recipe(distill=True)),
    "eagle": partial(train_eagle, recipe=EagleRecipe(kind="eagle")),
    "eagle3": partial(train_eagle, recipe=EagleRecipe(kind="eagle3")),
    "mtp": train_mtp,
    "dflash": partial(train_block, recipe=BlockRecipe(kind="dflash")),
    "jetspec": partial(train_block, recipe=BlockRecipe(kind="jetspec")),
    "dspark": partial(train_block, recipe=BlockRecipe(kind="dspark")),
    "dflash2": partial(train_block, recipe=BlockRecipe(kind="dflash2")),
    "specformer": train_specformer,
    "mask_tokens": train_mask_tokens,
    "boost": train_boost,
}
