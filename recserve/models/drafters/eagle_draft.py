"""The EAGLE-style draft head: one decoder layer predicts the target's next hidden state.

    x_l = F_e e(c_{l-1}) + F_f f_{l-1} + p_l        f_l = layer(x_l; x_1 .. x_{l-1})        f_0 = h
    logits_l = <E_l, f_l>

h is the target's hidden state at the last root token. The layer attends to the codes of its own
prefix. Unlike EAGLE's, it does not read the states of the history, which h sums up. It learns the
target's hidden states as well as its distribution.
Source: EAGLE, arXiv 2401.15077, section 3.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.decoder import RMSNorm
from recserve.models.drafters.draft_network import DraftNetwork, SelfDraftConfig

HEAD_DIM = 32  # of the attention, or less if it does not divide E
EPS = 1e-6


class EagleDraftHead(DraftNetwork):
    """A decoder layer over pairs of a code and the feature before it.

    The state holds the feature, then the keys and values of the codes so far: [n, E + 2 l E].
    """

    kind = "eagle"

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.head_dim = math.gcd(size, HEAD_DIM)
        self.codes = nn.Linear(size, size, bias=False)
        self.features = nn.Linear(size, size, bias=False)
        self.positions = nn.Embedding(len(config.codebook_sizes), size)
        self.attention_norm, self.mlp_norm = RMSNorm(size, EPS), RMSNorm(size, EPS)
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.gate_up = nn.Linear(size, 4 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)
        nn.init.eye_(self.features.weight)  # the first feature is the root's
        nn.init.normal_(self.positions.weight, std=0.02)

    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns [B, L, 0]: a level reads its state alone. last_hidden: [B, E]."""
        return last_hidden.new_zeros(last_hidden.shape[0], len(self.config.codebook_sizes), 0)

    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Returns f_0, the root's state [B, E]."""
        return last_hidden

    def feature(self, state: Tensor) -> Tensor:
        """Returns the predicted hidden state [n, E] of the target. state: [n, any]."""
        return state[:, : self.config.hidden_size]

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Runs the layer on one more code.

        Args:
            level: Level of the code.
            state: [n, E + 2 l E] after l codes.
            codes: [n].

        Returns:
            [n, E + 2 (l + 1) E].
        """
        size, count = self.config.hidden_size, state.shape[0]
        x = F.embedding(codes, self._inputs(level)) + self.features(self.feature(state))
        query, key, value = self.qkv(self.attention_norm(x)).split(size, dim=1)
        entries = torch.cat([state[:, size:], key, value], dim=1)
        past = entries.view(count, level + 1, 2, -1, self.head_dim)  # key and value by head
        query = query.view(count, 1, -1, self.head_dim)
        weights = (query * past[:, :, 0]).sum(-1) * self.head_dim**-0.5
        read = (weights.softmax(1)[..., None] * past[:, :, 1]).sum(1)
        x = x + self.out(read.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=1)
        x = x + self.down(F.silu(gate) * up)
        return torch.cat([x, entries], dim=1)

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes. state: [n, any]."""
        return F.linear(self.feature(state), self.codes_of_level(level))

    def _inputs(self, level: int) -> Tensor:
        """Returns what each code of a level adds to x, [C_level, E]."""
        return self.cached(
            f"inputs {level}",
            lambda: self.codes(self.inputs_of_level(level)) + self.positions.weight[level],
        )
