"""The self-draft head: a small recurrent network that writes a semantic id from one hidden state.

    s_0 = hidden state of the last root token
    s_l = tanh(W_l e(c_{l-1}) + U_l s_{l-1} + b_l)        logits_l = head_l(s_0 + s_l)

Level 0 comes from the target itself, so the head draws levels 1 to L - 1 without another forward of
the target. Source: NEZHA, arXiv 2511.18793, section 4; its placeholders are left out, s_0 stands
for all of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recserve.models.recommender import Recommender


@dataclass(frozen=True)
class SelfDraftConfig:
    """hidden_size E of the target; codebook_sizes C of each level."""

    hidden_size: int
    codebook_sizes: tuple[int, ...]

    @property
    def level_offsets(self) -> tuple[int, ...]:
        """First token of each level, as the recommender numbers them."""
        return tuple(1 + sum(self.codebook_sizes[:n]) for n in range(len(self.codebook_sizes)))


class SelfDraftHead(nn.Module):
    """Code embeddings, one recurrent cell per level, and the target's head to start from."""

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__()
        self.config = config
        size, vocabulary = config.hidden_size, 1 + sum(config.codebook_sizes)
        self.tokens = nn.Embedding(vocabulary, size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.cells = nn.ModuleList(nn.RNNCell(size, size) for _ in config.codebook_sizes[1:])

    @torch.no_grad()
    def start_from(self, target: Recommender) -> None:
        """Take the target's code embeddings and head as the starting point."""
        self.tokens.weight.copy_(target.tokens.weight)
        self.head.weight.copy_(target.head.weight)

    def step(self, level: int, state: Tensor, tokens: Tensor) -> Tensor:
        """State after a code. level: of that code; state [n, E], tokens [n] its token -> [n, E]."""
        stepped: Tensor = self.cells[level](self.tokens(tokens), state)
        return stepped

    def level_logits(self, root: Tensor, state: Tensor, level: int) -> Tensor:
        """Raw logits of one level's codes. root, state [n, E] -> [n, C_level]."""
        start = self.config.level_offsets[level]
        rows = self.head.weight[start : start + self.config.codebook_sizes[level]]
        return F.linear(root + state, rows)


def save_self_draft(head: SelfDraftHead, directory: Path | str) -> None:
    """Write `config.json` and `model.safetensors`."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(asdict(head.config)) + "\n", encoding="utf-8")


def load_self_draft(directory: Path | str, target: Recommender) -> SelfDraftHead:
    """Read what `save_self_draft` wrote, in eval mode, on the target's device.

    Raises ValueError where the files are damaged or were made for another target.
    """
    folder = Path(directory)
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = SelfDraftConfig(int(values["hidden_size"]), tuple(values["codebook_sizes"]))
        weights = load_file(folder / "model.safetensors")
    except (OSError, KeyError, TypeError, json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no usable self-draft head: {error}") from error
    wanted = SelfDraftConfig(target.config.decoder.hidden_size, target.config.codebook_sizes)
    if config != wanted:
        raise ValueError(f"{folder} was made for {config}; this recommender is {wanted}")
    head = SelfDraftHead(config)
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder} does not fit its config.json: {error}") from error
    return head.to(target.tokens.weight.device).eval()
