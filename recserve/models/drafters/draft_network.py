"""The base class of trained draft heads for item search, and their files in a bundle.

A head predicts an item code by code from one hidden state of the target. A subclass is one kind of
head; `prefix_head.py` lists the kinds. `config.json` names the kind under `head`. A file without
that key belongs to the recurrent head (nezha.py), the only kind of older bundles.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recserve.kernels.trie.native_search import NativeSearch
from recserve.models.drafters.calibration import Calibration
from recserve.models.recommender import Recommender
from recserve.models.weight_check import check_finite

RECURRENT = "recurrent"


@dataclass(frozen=True)
class SelfDraftConfig:
    """Sizes of a draft head.

    Attributes:
        hidden_size: E of the target.
        codebook_sizes: C of each level.
        placeholders: Whether it has placeholders, one per level that it predicts.
    """

    hidden_size: int
    codebook_sizes: tuple[int, ...]
    placeholders: bool = False

    @property
    def level_offsets(self) -> tuple[int, ...]:
        """First token of each level, as in the recommender."""
        return tuple(1 + sum(self.codebook_sizes[:n]) for n in range(len(self.codebook_sizes)))


class DraftNetwork(nn.Module, ABC):
    """Code embeddings, and output codes that start as the target's.

    Attributes:
        kind: Name of the kind in `config.json` and in `recserve train drafter --head`.
        calibration: Calibration of its drafts. None means not measured.
        search: The same search in C. None means that it was not packed or that there is none.
        placeholders: [P, E] learned vectors that follow the root. None if the head reads none.
    """

    kind: ClassVar[str]

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__()
        self.config = config
        size, vocabulary = config.hidden_size, 1 + sum(config.codebook_sizes)
        self.tokens = nn.Embedding(vocabulary, size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.placeholders: nn.Parameter | None = None
        self.calibration: Calibration | None = None
        self.search: NativeSearch | None = None
        self._tables: dict[str, Tensor] = {}

    @torch.no_grad()
    def start_from(self, target: Recommender) -> None:
        """Initialises code embeddings and head from the target."""
        self.tokens.weight.copy_(target.tokens.weight)
        self.head.weight.copy_(target.head.weight)

    def train(self, mode: bool = True) -> Self:
        """Switches to training or back; drops cached tables and, in training, packed weights."""
        self._tables = {}
        if mode:
            self.search = None
        return super().train(mode)

    def pack(self) -> None:  # noqa: B027 - most kinds have no search in C
        """Packs the weights for this CPU; training drops the packed form."""

    @property
    def first_level(self) -> int:
        """The first level that the head predicts; the target scores the levels above it."""
        return 1

    @abstractmethod
    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns what each level reads besides its state, [B, L, any].

        Args:
            last_hidden: [B, E] state of the last root token.
            placeholder_states: [B, P, E]. None for a head without placeholders.
        """

    @abstractmethod
    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Returns the state [B, S] before the first code. last_hidden: [B, E]."""

    @abstractmethod
    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns the state [n, S] after codes [n] of a level. state: [n, S]."""

    @abstractmethod
    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes.

        Args:
            context: [n, any], of this level.
            state: [n, S].
            level: The level.
        """

    def feature(self, state: Tensor) -> Tensor | None:
        """Returns the hidden state of the target [n, E] that the head predicts, if it does.

        state: [n, S].
        """
        return None

    def codes_of_level(self, level: int) -> Tensor:
        """Returns the output codes [C_level, E] that a state is compared with."""
        return self.head.weight[self.rows(level)]

    def inputs_of_level(self, level: int) -> Tensor:
        """Returns the embeddings [C_level, E] of a level's codes."""
        return self.tokens.weight[self.rows(level)]

    def root_logits(self, states: Tensor) -> Tensor:
        """Returns logits [B, L - 1, C] of the levels below the first, padded to the largest C.

        Args:
            states: [B, L - 1, E] to compare with each level's codes.
        """
        widest = max(self.config.codebook_sizes)
        rows = [
            F.linear(states[:, level - 1], self.codes_of_level(level))
            for level in range(1, len(self.config.codebook_sizes))
        ]
        padded = [F.pad(each, (0, widest - each.shape[1])) for each in rows]
        return torch.stack(padded, 1) if padded else states.new_zeros(*states.shape[:2], widest)

    def cached(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Returns a table that depends on the weights alone.

        It is cached while the weights cannot change (eval mode without gradients).

        Args:
            name: Key of the table.
            compute: Computes it.
        """
        if self.training or torch.is_grad_enabled():
            return compute()
        table = self._tables.get(name)
        if table is None or table.device != self.head.weight.device:
            table = self._tables[name] = compute()
        return table

    def rows(self, level: int) -> slice:
        """Returns the rows of a level's codes in a table of all tokens."""
        start = self.config.level_offsets[level]
        return slice(start, start + self.config.codebook_sizes[level])


Network = TypeVar("Network", bound=DraftNetwork)


def save_network(head: DraftNetwork, directory: Path | str) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    values = asdict(head.config)
    if head.kind != RECURRENT:
        values["head"] = head.kind
    if head.calibration is not None:
        values["calibration"] = head.calibration.to_dict()
    (folder / "config.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


def load_network(kind: type[Network], directory: Path | str, target: Recommender) -> Network:
    """Reads a head of one kind that `save_network` wrote, in eval mode, on the target's device.

    Raises:
        ValueError: If the files are damaged, hold another kind or were made for another target.
    """
    folder = Path(directory)
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = values.get("head", RECURRENT)
        config = SelfDraftConfig(
            int(values["hidden_size"]),
            tuple(values["codebook_sizes"]),
            bool(values.get("placeholders", False)),
        )
        plans = values.get("calibration")
        calibration = None if plans is None else Calibration.from_dict(plans)
        weights = load_file(folder / "model.safetensors")
    except (
        OSError,
        KeyError,
        TypeError,
        AttributeError,
        json.JSONDecodeError,
        SafetensorError,
    ) as error:
        raise ValueError(f"{folder} holds no usable self-draft head: {error}") from error
    if found != kind.kind:
        raise ValueError(f"{folder} holds a head of kind {found!r}, not {kind.kind!r}")
    check_finite(weights, folder / "model.safetensors")
    wanted = SelfDraftConfig(target.config.decoder.hidden_size, target.config.codebook_sizes)
    if replace(config, placeholders=False) != wanted:
        raise ValueError(f"{folder} was made for {config}; this recommender is {wanted}")
    head = kind(config)
    head.calibration = calibration
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder} does not fit its config.json: {error}") from error
    return head.to(target.tokens.weight).eval()
