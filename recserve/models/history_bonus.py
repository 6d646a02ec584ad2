"""The history bonus: what a history says about the next item without a network.

bonus(i) = sum over n = 0, 1, .. of DECAY^n * link(h_n, i)  +  repeat * [i is in the history]

h_0 is the latest item, h_1 the one before it, and so on, up to RECENT items. `link(a, i)` grows
with how often training users had i soon after a. The dense head's scores get the bonus before its
best items are chosen. training/recommender/fit_history_bonus.py fits it on validation users.

Source: Han et al. 2026, arXiv 2605.07125, whose untrained transitions beat trained recommenders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from recserve.files import read_arrays, whole_file
from recserve.kernels.host import on_device

FILE = "history_bonus.safetensors"
RECENT, DECAY = 3, 0.5

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HistoryBonus:
    """Links between items, and what an item of the history gets.

    Attributes:
        offsets: [I + 1] int64. The links of item a are at `offsets[a] : offsets[a + 1]`.
        rows: [E] int32 item rows that the links lead to, each at most once per item.
        links: [E] float32 value of each link.
        repeat: What each item of the history gets.

    Raises:
        ValueError: If an array has another shape or type, is not finite or leads to no item.
    """

    offsets: NDArray[np.int64]
    rows: NDArray[np.int32]
    links: NDArray[np.float32]
    repeat: float

    def __post_init__(self) -> None:
        expected = {"offsets": "int64", "rows": "int32", "links": "float32"}
        for name, dtype in expected.items():
            if (found := getattr(self, name).dtype) != dtype:
                raise ValueError(f"{name} are {found}; expected {dtype}")
        if self.offsets.ndim != 1 or not self.offsets.size or self.rows.ndim != 1:
            raise ValueError(
                f"offsets are {self.offsets.shape} and rows {self.rows.shape}; expected [I + 1], "
                "[E]"
            )
        ends = int(self.offsets[0]), int(self.offsets[-1])
        if ends != (0, len(self.rows)) or (np.diff(self.offsets) < 0).any():
            raise ValueError(
                f"offsets run from {ends[0]} to {ends[1]}; expected to rise from 0 to "
                f"{len(self.rows)}, the number of rows"
            )
        if self.links.shape != self.rows.shape:
            raise ValueError(f"links are {self.links.shape}; expected {self.rows.shape}, as rows")
        low, high = int(self.rows.min(initial=0)), int(self.rows.max(initial=0))
        if len(self.rows) and not 0 <= low <= high < self.num_items:
            raise ValueError(f"rows span {low}..{high}; there are {self.num_items} items")
        if not (np.isfinite(self.links).all() and np.isfinite(self.repeat)):
            raise ValueError("links or repeat hold NaN or infinity")

    @property
    def num_items(self) -> int:
        """I, the number of items that have links. Later items have none."""
        return len(self.offsets) - 1

    def entries(self, histories: Sequence[Ints], num_items: int) -> tuple[Ints, Floats]:
        """Returns where the bonus is not 0, and its values, ordered by place.

        Args:
            histories: Item rows of B histories, oldest first.
            num_items: Number of columns of the scores.

        Returns:
            [n] places in the scores [B, num_items], row by row, each once, and [n] values.
        """
        places, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for back in range(RECENT):
            owners = [b for b, history in enumerate(histories) if len(history) > back]
            latest = np.array([histories[b][-1 - back] for b in owners], dtype=np.int64)
            linked = latest < self.num_items
            owner, item = np.array(owners, dtype=np.int64)[linked], latest[linked]
            counts = self.offsets[item + 1] - self.offsets[item]
            shift = np.repeat(self.offsets[item] - (np.cumsum(counts) - counts), counts)
            found = shift + np.arange(len(shift))
            places.append(np.repeat(owner, counts) * num_items + self.rows[found])
            values.append(DECAY**back * self.links[found].astype(np.float64))
        if self.repeat:
            sizes = [len(history) for history in histories]
            seen = np.concatenate([*histories, np.zeros(0, dtype=np.int64)])
            again = np.unique(np.repeat(np.arange(len(sizes)), sizes) * num_items + seen)
            places.append(again)
            values.append(np.full(len(again), self.repeat))
        # One sum per place, in a fixed order, on every device.
        where, which = np.unique(np.concatenate(places), return_inverse=True)
        sums = np.bincount(which.reshape(-1), np.concatenate(values), len(where))
        return where, sums.astype(np.float64, copy=False)

    def add_to(self, scores: Tensor, histories: Sequence[Ints]) -> None:
        """Adds the bonus to scores.

        Args:
            scores: [B, I] contiguous float32 scores, changed in place.
            histories: Item rows of B histories, oldest first.
        """
        where, values = self.entries(histories, scores.shape[1])
        flat = scores.view(-1)
        flat[on_device(where, scores.device)] += on_device(values, scores.device, scores.dtype)

    def save(self, folder: Path) -> None:
        """Writes `history_bonus.safetensors`."""
        arrays: dict[str, NDArray[Any]] = {
            "offsets": self.offsets,
            "rows": self.rows,
            "links": self.links,
            "repeat": np.array([self.repeat]),
        }
        with whole_file(folder / FILE) as new:
            save_file(arrays, new)


def load_history_bonus(folder: Path, num_items: int) -> HistoryBonus | None:
    """Reads what `save` wrote; None if the folder has no bonus.

    Args:
        folder: The recommender's folder.
        num_items: Number of items that the recommender was trained with.

    Raises:
        ValueError: If the file is damaged or has another number of items.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        arrays = read_arrays(path, ("offsets", "rows", "links", "repeat"))
        repeat = float(arrays.pop("repeat").reshape(()))
        bonus = HistoryBonus(**arrays, repeat=repeat)
        if bonus.num_items != num_items:
            raise ValueError(f"it has {bonus.num_items} items; the recommender has {num_items}")
        return bonus
    except ValueError as error:
        raise ValueError(f"{path}: not a history bonus ({error})") from error
