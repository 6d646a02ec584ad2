"""The interface of draft heads for `speculative`, and their files in a bundle.

A self-draft head has its own `config.json` (nezha.py). Level heads are weights of the recommender;
their `config.json` names them and contains their calibration.
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
    """Predicts an item code by code from the root's last hidden state.

    Attributes:
        calibration: Calibration of its drafts. None means not measured.
        search: The same search in C. None means that it was not packed.
    """

    calibration: Calibration | None
    search: NativeSearch | None

    def pack(self) -> None:
        """Packs the weights for this CPU."""
        ...

    def contexts(self, last_hidden: Tensor) -> Tensor:
        """Returns what each level reads besides its state, [B, L, E]. last_hidden: [B, E]."""
        ...

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns the state [n, E] after codes [n] of a level; the first state is last_hidden."""
        ...

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes. context, state: [n, E]."""
        ...


def save_prefix_head(head: PrefixHead, directory: Path) -> None:
    """Writes the files that `load_prefix_head` reads next to the recommender."""
    if isinstance(head, SelfDraftHead):
        save_self_draft(head, directory)
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").unlink(missing_ok=True)  # weights of an earlier head
    plans = None if head.calibration is None else head.calibration.to_dict()
    config = {"head": LEVELS, "calibration": plans}
    (directory / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


def load_prefix_head(directory: Path, target: Recommender) -> SelfDraftHead | LevelDraftHead:
    """Reads a draft head on the target's device.

    Raises:
        ValueError: If the files are damaged or were made for another target.
    """
    config = directory / "config.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("head") != LEVELS:
            return load_self_draft(directory, target)
        plans = values.get("calibration")
        return LevelDraftHead(target, None if plans is None else Calibration.from_dict(plans))
    except (OSError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{config} is not the config of a draft head: {error}") from error
