"""The draft head for item search: a small recurrent network that predicts a semantic id.

    s_0 = hidden state of the last prefix token
    s_l = tanh(W_l e(c_{l-1}) + U_l s_{l-1} + b_l)        logits_l = head_l(h_l + s_l)

h_l is the target's hidden state at the l-th placeholder, a learned vector behind the prefix. A
head without placeholders has h_l = s_0. As the drafter of `speculative` it needs none: the target
itself scores level 0, and the head drafts levels 1 to L - 1. As `nezha` it decodes alone.
Source: NEZHA, arXiv 2511.18793, section 4, and its public code.

A calibration tells how often a draft of a given size contains all true beams. It is measured on
validation users when the head is trained, and stored in the head's `config.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.files import parse_record, read_json_object
from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.linear.panels import Panels
from recserve.kernels.trie.native import LevelCodes, NativeDescent, RecurrentCell
from recserve.models.recommender import Recommender
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.models.weight_check import check_weights, read_weights
from recserve.models.write_tensors import write_tensors

RECURRENT = "recurrent"  # the only kind of head; older bundles may name another


@dataclass(frozen=True)
class DraftPlan:
    """A draft width, and its average result over the validation users.

    Attributes:
        margin: Beams of the head's own search at each length, relative to the beam width. Also the
            rank of the item that sets its floor, relative to k. 0 drafts nothing.
        nodes: Nodes scored by the first forward pass, or by all of them if nothing is drafted.
        repairs: Further rounds.
        proved: Share of answers without further rounds.
    """

    margin: float
    nodes: float
    repairs: float
    proved: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; expected a number from 0 on")


@dataclass(frozen=True)
class Calibration:
    """Plans by (beam width, k), including the plan that drafts nothing."""

    plans: dict[tuple[int, int], tuple[DraftPlan, ...]]

    def scaled(self, width: int, k: int) -> list[DraftPlan]:
        """Returns the plans for a beam width and k, scaled from the nearest calibrated ones."""

        def distance(known: tuple[int, int]) -> float:
            return abs(math.log(known[0] / width)) + abs(math.log(known[1] / k))

        nearest = min(self.plans, key=distance)
        ratio = width / nearest[0]
        return [
            DraftPlan(p.margin, p.nodes * ratio, p.repairs, p.proved) for p in self.plans[nearest]
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form; `from_dict` reads it back."""
        return {
            f"{width}/{k}": [asdict(plan) for plan in plans]
            for (width, k), plans in self.plans.items()
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Calibration:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: If the values have another form.
        """
        plans = {}
        for name, listed in values.items():
            found = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", name, re.ASCII)
            if found is None or not isinstance(listed, list) or not listed:
                raise ValueError(
                    f"calibration has {name[:40]!r}: {listed!r:.80}; expected WIDTH/K and plans"
                )
            plans[int(found[1]), int(found[2])] = parse_record(
                {"plans": listed}, _Plans, f"calibration {name}: "
            ).plans
        if not plans:
            raise ValueError("calibration is empty; expected plans by WIDTH/K, or null")
        return Calibration(plans)


@dataclass(frozen=True)
class _Plans:
    plans: tuple[DraftPlan, ...]


@dataclass(frozen=True)
class SelfDraftConfig:
    """Sizes of a draft head.

    Attributes:
        hidden_size: E of the target.
        codebook_sizes: C of each level.
        placeholders: Whether it has placeholders, one per level.
    """

    hidden_size: int
    codebook_sizes: tuple[int, ...]
    placeholders: bool = False

    @property
    def level_offsets(self) -> tuple[int, ...]:
        """First token of each level, as in the recommender."""
        return tuple(1 + sum(self.codebook_sizes[:n]) for n in range(len(self.codebook_sizes)))


class SelfDraftHead(nn.Module):
    """Code embeddings, one recurrent cell per level, and output codes.

    Attributes:
        calibration: Calibration of its drafts. None means not measured.
        search: The same search in C. None means that it was not packed or that there is none.
        placeholders: [L, E] learned vectors that follow the prefix. None if the head reads none.
    """

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__()
        self.config = config
        size, vocabulary = config.hidden_size, 1 + sum(config.codebook_sizes)
        self.tokens = nn.Embedding(vocabulary, size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.placeholders: nn.Parameter | None = None
        self.calibration: Calibration | None = None
        self.search: NativeDescent | None = None
        self._tables: dict[str, Tensor] = {}
        self.cells = nn.ModuleList(nn.RNNCell(size, size) for _ in config.codebook_sizes[1:])
        if config.placeholders:
            levels = len(config.codebook_sizes)
            self.placeholders = nn.Parameter(torch.randn(levels, size) * size**-0.5)

    @torch.no_grad()
    def start_from(self, target: Recommender) -> None:
        """Initialises code embeddings and output codes from the target."""
        self.tokens.weight.copy_(target.tokens.weight)
        self.head.weight.copy_(target.head.weight)

    def train(self, mode: bool = True) -> Self:
        """Switches to training or back; drops cached tables and, in training, packed weights."""
        self._tables = {}
        if mode:
            self.search = None
        return super().train(mode)

    @torch.no_grad()
    def pack(self) -> None:
        """Packs the weights for this CPU; training drops the packed form."""
        if backend_of(self.head.weight) is not Backend.C:
            return
        levels = range(len(self.config.codebook_sizes))
        cells = [
            RecurrentCell(Panels.of(self._cell(level).weight_hh, None), self._level_inputs(level))
            for level in levels[:-1]
        ]
        codes = [LevelCodes.of(self.codes_of_level(level)) for level in levels]
        self.search = NativeDescent(codes, cells)

    @property
    def first_level(self) -> int:
        """With placeholders the head predicts all levels, without them all but the first."""
        return 0 if self.config.placeholders else 1

    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns h of each level [B, L, E].

        Args:
            last_hidden: [B, E] state of the last prefix token.
            placeholder_states: [B, L, E]. None: h is the prefix's state at each level.
        """
        if placeholder_states is not None:
            return placeholder_states
        return last_hidden[:, None].expand(-1, len(self.config.codebook_sizes), -1)

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns the state s [n, E] after a code. The state before the first code is the prefix's.

        Args:
            level: Level of the code.
            state: [n, E].
            codes: [n].
        """
        inputs = F.embedding(codes, self._level_inputs(level))
        return torch.tanh(torch.addmm(inputs, state, self._cell(level).weight_hh.T))

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes.

        Args:
            context: [n, E], h of the level, or s_0 without placeholders.
            state: [n, E].
            level: The level.
        """
        return F.linear(context + state, self.codes_of_level(level))

    def codes_of_level(self, level: int) -> Tensor:
        """Returns the output codes [C_level, E] that a state is compared with."""
        return self.head.weight[self._rows(level)]

    def _cell(self, level: int) -> nn.RNNCell:
        cell = self.cells[level]
        assert isinstance(cell, nn.RNNCell)
        return cell

    def _level_inputs(self, level: int) -> Tensor:
        """Returns what each code of a level adds to the next state, [C_level, E]."""
        cell = self._cell(level)
        codes = self.tokens.weight[self._rows(level)]
        return self._cache(
            f"inputs {level}",
            lambda: F.linear(codes, cell.weight_ih, cell.bias_ih + cell.bias_hh),
        )

    def _cache(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Returns a table that depends on the weights alone.

        It is cached while the weights cannot change (eval mode without gradients).
        """
        if self.training or torch.is_grad_enabled():
            return compute()
        table = self._tables.get(name)
        if table is None or table.device != self.head.weight.device:
            table = self._tables[name] = compute()
        return table

    def _rows(self, level: int) -> slice:
        """Returns the rows of a level's codes in a table of all tokens."""
        start = self.config.level_offsets[level]
        return slice(start, start + self.config.codebook_sizes[level])


def save_self_draft(head: SelfDraftHead, directory: Path | str) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(head.state_dict(), folder / "model.safetensors")
    values = asdict(head.config)
    if head.calibration is not None:
        values["calibration"] = head.calibration.to_dict()
    (folder / "config.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


def load_self_draft(directory: Path | str, target: SemanticIdModel) -> SelfDraftHead:
    """Reads what `save_self_draft` wrote, in eval mode, on the target's device.

    Raises:
        ValueError: If the files are damaged, hold another kind of head or were made for another
            target.
    """
    folder = Path(directory)
    try:
        values = read_json_object(folder / "config.json")
        kind = values.pop("head", RECURRENT)
        if kind != RECURRENT:
            raise ValueError(
                f"{folder / 'config.json'} names the head {kind!r}; this release has {RECURRENT} "
                "heads: run `recserve train drafter` again"
            )
        plans = values.pop("calibration", None)
        if not isinstance(plans, dict | None):
            raise ValueError(f"calibration is {plans!r:.80}; expected an object or null")
        calibration = None if plans is None else Calibration.from_dict(plans)
        config = parse_record(values, SelfDraftConfig)
        weights = read_weights(folder / "model.safetensors")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no usable self-draft head: {error}") from error
    wanted = SelfDraftConfig(target.config.decoder.hidden_size, target.config.codebook_sizes)
    if replace(config, placeholders=False) != wanted:
        raise ValueError(f"{folder} was made for {config}; this recommender is {wanted}")
    check_weights(SelfDraftHead, config, weights, folder / "model.safetensors")
    head = SelfDraftHead(config)
    head.calibration = calibration
    head.load_state_dict(weights)
    return head.to(target.tokens.weight).eval()
