"""The self-draft head: a small recurrent network that predicts a semantic id from one forward pass.

    s_0 = hidden state of the last root token
    s_l = tanh(W_l e(c_{l-1}) + U_l s_{l-1} + b_l)        logits_l = head_l(h_l + s_l)

h_l is the target's hidden state at the l-th placeholder, a learned vector that follows the root. A
head without placeholders has h_l = s_0. As the drafter of `speculative` it needs none: the target
itself scores level 0, and the head drafts levels 1 to L - 1. As `nezha` it decodes alone.
Source: NEZHA, arXiv 2511.18793, section 4, and its public code.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recserve.kernels import dispatch
from recserve.kernels.cpu.native import Panels
from recserve.kernels.trie.native_search import Cell, LevelCodes, NativeSearch
from recserve.models.drafters.calibration import Calibration
from recserve.models.recommender import Recommender
from recserve.models.weight_check import check_finite


@dataclass(frozen=True)
class SelfDraftConfig:
    """Sizes of a self-draft head.

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
    """Code embeddings, one recurrent cell per level, and output codes that start as the target's.

    Attributes:
        calibration: Calibration of its drafts. None means not measured.
    """

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__()
        self.config = config
        size, vocabulary = config.hidden_size, 1 + sum(config.codebook_sizes)
        self.tokens = nn.Embedding(vocabulary, size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.cells = nn.ModuleList(nn.RNNCell(size, size) for _ in config.codebook_sizes[1:])
        if config.placeholders:
            levels = len(config.codebook_sizes)
            self.placeholders = nn.Parameter(torch.randn(levels, size) * size**-0.5)
        self.calibration: Calibration | None = None
        self._inputs: dict[int, Tensor] = {}
        self.search: NativeSearch | None = None

    @torch.no_grad()
    def start_from(self, target: Recommender) -> None:
        """Initialises code embeddings and head from the target."""
        self.tokens.weight.copy_(target.tokens.weight)
        self.head.weight.copy_(target.head.weight)

    def train(self, mode: bool = True) -> SelfDraftHead:
        """Switches to training or back; drops cached tables and, in training, packed weights."""
        self._inputs = {}
        if mode:
            self.search = None
        super().train(mode)
        return self

    @torch.no_grad()
    def pack(self) -> None:
        """Packs the weights for this CPU; training drops the packed form."""
        if not dispatch.in_native(self.head.weight):
            return
        levels = range(len(self.config.codebook_sizes))
        cells = [
            Cell(Panels.of(self._cell(level).weight_hh, None), self._level_inputs(level))
            for level in levels[:-1]
        ]
        self.search = NativeSearch([LevelCodes.of(self._codes(level)) for level in levels], cells)

    def contexts(self, last_hidden: Tensor) -> Tensor:
        """Returns the root's state at each level [B, L, E], read without placeholders.

        last_hidden: [B, E].
        """
        return last_hidden[:, None].expand(-1, len(self.config.codebook_sizes), -1)

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns the state [n, E] after a code.

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
        return F.linear(context + state, self._codes(level))

    def _codes(self, level: int) -> Tensor:
        """Returns the codes [C_level, E] that a state is compared with."""
        start = self.config.level_offsets[level]
        return self.head.weight[start : start + self.config.codebook_sizes[level]]

    def _cell(self, level: int) -> nn.RNNCell:
        cell = self.cells[level]
        assert isinstance(cell, nn.RNNCell)
        return cell

    def _level_inputs(self, level: int) -> Tensor:
        """Returns what each code of a level adds to the next state, [C_level, E].

        It is cached while the weights cannot change (eval mode without gradients).
        """
        table, weights = self._inputs.get(level), self.tokens.weight
        if table is not None and table.device == weights.device:
            return table
        start, cell = self.config.level_offsets[level], self._cell(level)
        rows = weights[start : start + self.config.codebook_sizes[level]]
        table = F.linear(rows, cell.weight_ih, cell.bias_ih + cell.bias_hh)
        if not self.training and not torch.is_grad_enabled():
            self._inputs[level] = table
        return table


def save_self_draft(head: SelfDraftHead, directory: Path | str) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    values = asdict(head.config)
    if head.calibration is not None:
        values["calibration"] = head.calibration.to_dict()
    (folder / "config.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


def load_self_draft(directory: Path | str, target: Recommender) -> SelfDraftHead:
    """Reads what `save_self_draft` wrote, in eval mode, on the target's device.

    Raises:
        ValueError: If the files are damaged or were made for another target.
    """
    folder = Path(directory)
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
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
    check_finite(weights, folder / "model.safetensors")
    wanted = SelfDraftConfig(target.config.decoder.hidden_size, target.config.codebook_sizes)
    if replace(config, placeholders=False) != wanted:
        raise ValueError(f"{folder} was made for {config}; this recommender is {wanted}")
    head = SelfDraftHead(config)
    head.calibration = calibration
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder} does not fit its config.json: {error}") from error
    return head.to(target.tokens.weight).eval()
