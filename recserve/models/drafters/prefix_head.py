"""What drafts prefixes of items for `speculative`, and how it is kept in a bundle.

`config.json` of a self-draft head is its own (nezha.py); that of level heads, whose weights are the
recommender's, names them and holds their calibration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from torch import Tensor

from recserve.kernels.trie.native_search import NativeSearch
from recserve.models.drafters.calibration import Calibration
from recserve.models.drafters.level_draft import LevelDraftHead
from recserve.models.drafters.nezha import SelfDraftHead, load_self_draft, save_self_draft
from recserve.models.recommender import Recommender

LEVELS = "levels"


class PrefixHead(Protocol):
    """Guesses an item code by code from the root's last hidden state.

    calibration: what its drafts are worth, None where it was not measured. search: the same in C,
    None where it was not laid out for it.
    """

    calibration: Calibration | None
    search: NativeSearch | None

    def pack(self) -> None:
        """Lay the weights out for this CPU."""
        ...

    def contexts(self, last_hidden: Tensor) -> Tensor:
        """[B, L, E] what each level reads in addition to its state. last_hidden [B, E]: roots."""
        ...

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """State after a code of a level; the first is the tail. [n, E], [n] -> [n, E]."""
        ...

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Raw logits of one level's codes. context, state [n, E] -> [n, C_level]."""
        ...


def save_prefix_head(head: PrefixHead, directory: Path) -> None:
    """Write what `load_prefix_head` reads beside the recommender."""
    if isinstance(head, SelfDraftHead):
        save_self_draft(head, directory)
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").unlink(missing_ok=True)  # of a head that was there before
    plans = None if head.calibration is None else head.calibration.to_dict()
    config = {"head": LEVELS, "calibration": plans}
    (directory / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


def load_prefix_head(directory: Path, target: Recommender) -> SelfDraftHead | LevelDraftHead:
    """On the target's device. Raises ValueError where the files are damaged or were made for
    another target.
    """
    config = directory / "config.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("head") != LEVELS:
            return load_self_draft(directory, target)
        plans = values.get("calibration")
        return LevelDraftHead(target, None if plans is None else Calibration.from_dict(plans))
    except (OSError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{config} is no draft head's: {error}") from error
