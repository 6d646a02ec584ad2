"""SpecFormer's draft network: it predicts the tokens of several positions in one pass.

    states of some target layers -> norms, one projection -> causal attention over the context
      -> one vector per slot -> attention between the slots, SwiGLU -> the target's norm and head

Slot i at position t predicts the token at t + 2 + i; the target itself predicts the one at t + 1.
The context attention is one more layer of the target, with keys and values of its own.

In the paper the slots of a position see each other in both directions, and the bias of the
positional projection tells them apart. The authors' released code has a causal mask and rotary
positions there instead, which `causal` selects.

Source: SpecFormer (arXiv 2511.20340, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recserve.kernels.host import on_device
from recserve.models.attention import Attend, DenseAttention, Rope, rope_frequencies
from recserve.models.config import DecoderConfig
from recserve.models.decoder import RMSNorm, Silu


@dataclass(frozen=True)
class SpecformerConfig:
    """Configuration of a draft network. All sizes are the target's.

    Attributes:
        decoder: Sizes of one layer of the target, without biases and query and key norms.
        target_layers: Layers of the target that are read, as in `Drafter.hidden_layers`. The stream
            after the last layer is not among them, because the files cannot name it.
        num_slots: Tokens that it predicts.
        causal: Whether a slot sees only the slots before it.

    Raises:
        ValueError: If there is no layer or no slot.
    """

    decoder: DecoderConfig
    target_layers: tuple[int, ...]
    num_slots: int
    causal: bool = False

    def __post_init__(self) -> None:
        if not self.target_layers or self.num_slots < 1:
            raise ValueError(
                f"the network reads {len(self.target_layers)} layers and has {self.num_slots} "
                "slots; it needs at least one of each"
            )


class SpecformerAttention(nn.Module):
    """An RMSNorm, attention, and a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        size, dim = config.hidden_size, config.head_dim
        self.norm = RMSNorm(size, config.norm_eps)
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(size, heads * dim, bias=False)
        self.output = nn.Linear(config.num_heads * dim, size, bias=False)

    def forward(
        self, x: Tensor, rope: Rope | None, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Runs the block on x [..., T, E], and returns all rows or only `rows` [R]."""
        c = self.config
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, c.head_dim))
        query, key, value = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=-2)
        if rope is not None:
            query, key = rope(query), rope(key)
        mixed = attend(0, query, key, value).flatten(-2)
        if rows is not None:
            x, mixed = x.index_select(-2, rows), mixed.index_select(-2, rows)
        out: Tensor = x + self.output(mixed)
        return out


class Specformer(nn.Module):
    """The draft network. The last norm and the head are the target's.

    Attributes:
        config: The configuration.
    """

    def __init__(self, config: SpecformerConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        size, eps = decoder.hidden_size, decoder.norm_eps
        self.state_norms = nn.ModuleList(RMSNorm(size, eps) for _ in config.target_layers)
        self.mix = nn.Linear(len(config.target_layers) * size, size, bias=False)
        self.context_attention = SpecformerAttention(decoder)
        self.positional_norm = RMSNorm(size, eps)
        self.positional = nn.Linear(size, config.num_slots * size)
        self.slot_attention = SpecformerAttention(decoder)
        self.mlp_norm = RMSNorm(size, eps)
        self.gate_up = nn.Linear(size, 2 * decoder.intermediate_size, bias=False)
        self.down = nn.Linear(decoder.intermediate_size, size, bias=False)
        self.silu = Silu()
        # Not a buffer: positions need these in float32 whatever the weights are cast to.
        self._frequencies = rope_frequencies(decoder)

    def context(
        self, states: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Mixes the layers of each position and attends to the positions before it.

        Args:
            states: [..., T, F] states of the layers, side by side.
            positions: [..., T].
            attend: Causal attention.
            rows: [R] rows to return. None means all.

        Returns:
            [..., T, E] or [..., R, E], which `slots` reads.
        """
        parts = torch.split(states, self.config.decoder.hidden_size, dim=-1)
        normed = [norm(part) for norm, part in zip(self.state_norms, parts, strict=True)]
        mixed = self.mix(torch.cat(normed, dim=-1))
        rope = Rope(
            positions, self._turns(mixed.device), mixed.dtype, self.config.decoder.rope_scale
        )
        out: Tensor = self.context_attention(mixed, rope, attend, rows)
        return out

    def slots(self, context: Tensor, count: int | None = None) -> Tensor:
        """Returns the states of the slots.

        Args:
            context: [n, E] rows of `context`.
            count: Number of first slots to return. None means all of them. All slots attend.

        Returns:
            [n, count, E] before the target's final norm.
        """
        config = self.config
        x = self.positional(self.positional_norm(context)).unflatten(-1, (config.num_slots, -1))
        if config.causal:
            places = torch.arange(config.num_slots, device=x.device)
            rope: Rope | None = Rope(
                places, self._turns(x.device), x.dtype, self.config.decoder.rope_scale
            )
            attend = DenseAttention()
        else:
            seen = torch.ones(config.num_slots, config.num_slots, dtype=torch.bool, device=x.device)
            rope, attend = None, DenseAttention(seen)
        x = self.slot_attention(x, rope, attend)[:, :count]
        out: Tensor = x + self.down(self.silu.gate(self.gate_up(self.mlp_norm(x))))
        return out

    def _turns(self, device: torch.device) -> Tensor:
        """Returns the rotary frequencies on a device."""
        if self._frequencies.device != device:
            self._frequencies = on_device(self._frequencies, device)
        return self._frequencies
