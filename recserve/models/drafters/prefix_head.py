"""The interface of draft heads for `speculative`, their kinds, and their files in a bundle.

`config.json` names the kind under `head`; without it the head is recurrent (draft_network.py).
Level heads are weights of the recommender; their `config.json` contains their calibration alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from torch import Tensor

from recserve.kernels.trie.native_search import NativeSearch
from recserve.models.drafters.calibration import Calibration
from recserve.models.drafters.draft_network import (
    RECURRENT,
    DraftNetwork,
    load_network,
    save_network,
)
from recserve.models.drafters.eagle_draft import EagleDraftHead
from recserve.models.drafters.lattice_draft import LatticeDraftHead
from recserve.models.drafters.level_draft import LevelDraftHead
from recserve.models.drafters.mask_draft import MaskDraftHead
from recserve.models.drafters.mlp_draft import MlpDraftHead
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.recommender import Recommender

LEVELS = "levels"
# The kinds of heads that are trained, by name. The first is the default.
NETWORKS: dict[str, type[DraftNetwork]] = {
    kind.kind: kind
    for kind in (SelfDraftHead, MlpDraftHead, LatticeDraftHead, EagleDraftHead, MaskDraftHead)
}
HEAD_KINDS = (*NETWORKS, LEVELS)


class PrefixHead(Protocol):
    """Predicts an item code by code from the root's last hidden state.

    Attributes:
        calibration: Calibration of its drafts. None means not measured.
        search: The same search in C. None means that it was not packed or that there is none.
    """

    calibration: Calibration | None
    search: NativeSearch | None

    @property
    def placeholders(self) -> Tensor | None:
        """Learned vectors [P, E] that follow the root. None if the head reads none."""
        ...

    def pack(self) -> None:
        """Packs the weights for this CPU."""
        ...

    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns what each level reads besides its state, [B, L, any].

        Args:
            last_hidden: [B, E].
            placeholder_states: [B, P, E]. None for a head without placeholders.
        """
        ...

    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Returns the state [B, S] before the first code. last_hidden: [B, E]."""
        ...

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns the state [n, S] after codes [n] of a level."""
        ...

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes.

        Args:
            context: [n, any], of this level.
            state: [n, S].
            level: The level.
        """
        ...


def save_prefix_head(head: PrefixHead, directory: Path) -> None:
    """Writes the files that `load_prefix_head` reads next to the recommender."""
    if isinstance(head, DraftNetwork):
        save_network(head, directory)
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").unlink(missing_ok=True)  # weights of an earlier head
    plans = None if head.calibration is None else head.calibration.to_dict()
    config = {"head": LEVELS, "calibration": plans}
    (directory / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


def load_prefix_head(directory: Path, target: Recommender) -> DraftNetwork | LevelDraftHead:
    """Reads a draft head on the target's device.

    Raises:
        ValueError: If the files are damaged, were made for another target, or name a kind of head
            that this release does not know.
    """
    config = directory / "config.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        kind = values.get("head", RECURRENT) if isinstance(values, dict) else RECURRENT
        if kind == LEVELS:
            plans = values.get("calibration")
            return LevelDraftHead(target, None if plans is None else Calibration.from_dict(plans))
    except (OSError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{config} is not the config of a draft head: {error}") from error
    if kind not in NETWORKS:
        raise ValueError(f"{config} names the head {kind!r}; known heads: {', '.join(HEAD_KINDS)}")
    return load_network(NETWORKS[kind], directory, target)


def reads_placeholders(directory: Path) -> bool:
    """Returns whether the saved head in a folder reads placeholders."""
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return bool(values.get("placeholders", False))
