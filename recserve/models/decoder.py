"""The decoder trunk of the Llama and Qwen family, for the recommender and for text models.

Projections that read the same input are stored as one matrix: one product instead of three.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.kernels import dispatch
from recserve.kernels.cpu.native_layers import NativeLayers
from recserve.kernels.reference import HeadNorms
from recserve.models.attention import Attend, PagedAttention, Rope, rope_frequencies
from recserve.models.config import DecoderConfig
from recserve.models.drafters.gated_lora import MaskRows


class Silu(nn.Module):
    """SiLU, x sigmoid(x), optionally with bits that do not depend on an element's position.

    torch computes the elements after the last whole vector of a row, or of a thread's share, with
    other instructions than the rest. So their last bit differs. torch's exp and division do not
    have this problem.

    Attributes:
        placeless: Whether to compute SiLU from exp and a division in float32, which is slower.
    """

    def __init__(self) -> None:
        super().__init__()
        self.placeless = False

    def forward(self, x: Tensor) -> Tensor:
        """Applies SiLU to any shape and float dtype."""
        if not self.placeless:
            return F.silu(x)
        wide = x.float()
        return (wide / ((-wide).exp_() + 1.0)).to(x.dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up [..., n] of a tensor [..., 2 n] that holds the gate first."""
        if not self.placeless or dispatch.in_native(gate_up):  # C does not depend on positions
            return dispatch.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        product: Tensor = self(gate) * up
        return product


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x [..., size]."""
        return dispatch.rms_norm(x, self.weight, self.eps)


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm and with a residual.

    Args:
        config: Sizes.
        num_inputs: Numbers per row that the attention of `run` reads. None means E, after the
            layer's own norm; otherwise the layer has no norm before the attention.
        gated: Whether a sigmoid of the attention's inputs scales its output (Qwen3-Next).
    """

    def __init__(
        self, config: DecoderConfig, num_inputs: int | None = None, gated: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        size, dim = config.hidden_size, config.head_dim
        if num_inputs is None:
            self.attention_norm = RMSNorm(size, config.norm_eps)
        inputs, heads = num_inputs or size, config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(inputs, heads * dim, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.norm_eps)
            self.k_norm = RMSNorm(dim, config.norm_eps)
        self.gate = nn.Linear(inputs, config.num_heads * dim, bias=False) if gated else None
        self.output = nn.Linear(config.num_heads * dim, size, bias=config.output_bias)
        self.mlp_norm = RMSNorm(size, config.norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)
        self.silu = Silu()

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        layer: int,
        attend: Attend,
        rows: Tensor | None = None,
        gate: MaskRows | None = None,
    ) -> Tensor:
        """Runs the layer.

        Args:
            x: [..., T, E].
            rope: Rotary positions.
            layer: Number of the layer.
            attend: Attention.
            rows: [R] tokens to return. None means all of them.
            gate: Rows of mask tokens, whose products differ. None means that there are none.

        Returns:
            [..., T, E], or [..., R, E].
        """
        mixed = self.mix(self.attention_norm(x), rope, layer, attend, gate)
        if rows is not None:
            x, mixed = x.index_select(-2, rows), mixed.index_select(-2, rows)
            gate = None if gate is None else gate.select(rows)
        return self.add(x, mixed, layer, gate)

    def run(
        self, inputs: Tensor, residual: Tensor, rope: Rope, layer: int, attend: Attend
    ) -> Tensor:
        """Runs the layer on inputs [..., T, num_inputs] and a residual [..., T, E]."""
        return self.add(residual, self.mix(inputs, rope, layer, attend))

    def mix(
        self,
        inputs: Tensor,
        rope: Rope,
        layer: int,
        attend: Attend,
        gate: MaskRows | None = None,
    ) -> Tensor:
        """Returns the attention's output [..., T, H D] of inputs [..., T, num_inputs]."""
        c = self.config
        product = self._product("qkv", inputs, layer, gate)
        qkv = torch.unflatten(product, -1, (-1, c.head_dim))
        turned, value = torch.split(qkv, [c.num_heads + c.num_kv_heads, c.num_kv_heads], dim=-2)
        turns = isinstance(attend, PagedAttention) and attend.turns
        # The kernel that rotates also normalises, where there is one.
        inside = c.qk_norm and turns and dispatch.fuses(qkv)
        if c.qk_norm and not inside:
            query, key = torch.split(turned, [c.num_heads, c.num_kv_heads], dim=-2)
            turned = torch.cat([self.q_norm(query), self.k_norm(key)], dim=-2)
        if isinstance(attend, PagedAttention) and turns:
            whole = torch.cat([turned, value], dim=-2) if c.qk_norm and not inside else qkv
            norms = None
            if inside:
                norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
            mixed = attend.of_projections(layer, whole, rope, norms).flatten(-2)
        else:
            query, key = torch.split(rope(turned), [c.num_heads, c.num_kv_heads], dim=-2)
            mixed = attend(layer, query, key, value).flatten(-2)
        return mixed if self.gate is None else mixed * self.gate(inputs).sigmoid()

    def add(
        self, residual: Tensor, mixed: Tensor, layer: int = 0, gate: MaskRows | None = None
    ) -> Tensor:
        """Projects and adds the attention's output [..., T, H D], then adds SwiGLU."""
        x = residual + self._dropout(self._product("output", mixed, layer, gate))
        gated = self.silu.gate(self._product("gate_up", self.mlp_norm(x), layer, gate))
        return x + self._dropout(self._product("down", gated, layer, gate))

    def _product(self, part: str, x: Tensor, layer: int, gate: MaskRows | None) -> Tensor:
        out: Tensor = getattr(self, part)(x)
        return out if gate is None else gate.add(layer, part, x, out)

    def fused(
        self,
        x: Tensor,
        normed: Tensor,
        rope: Rope,
        layer: int,
        attend: Attend,
        after: RMSNorm,
        gate: MaskRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer with sums and norms in one launch each, for inference.

        Args:
            x: [..., T, E].
            normed: [..., T, E] x after this layer's attention norm.
            rope: Rotary positions.
            layer: Number of the layer.
            attend: Attention.
            after: The norm that reads the result.
            gate: Rows of mask tokens, whose products differ. None means that there are none.

        Returns:
            The result [..., T, E], and the result after that norm.
        """
        mixed = self.mix(normed, rope, layer, attend, gate)
        added, norm = self._product("output", mixed, layer, gate), self.mlp_norm
        x, normed = dispatch.add_rms_norm(x, added, norm.weight, norm.eps)
        gated = self.silu.gate(self._product("gate_up", normed, layer, gate))
        added = self._product("down", gated, layer, gate)
        return dispatch.add_rms_norm(x, added, after.weight, after.eps)

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout) if self.training and self.config.dropout else x


FINAL_LAYER = -1  # names the final hidden state where layers are named, as in AuxHiddenStates


@dataclass
class AuxHiddenStates:
    """Records the residual stream between layers during a forward pass.

    Attributes:
        layers: Ascending numbers of layers. Number n is the stream after the first n layers, so 0
            is the embedding.
        states: [R, E] of each number, filled by the forward pass.
    """

    layers: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)


class Decoder(nn.Module):
    """Layers and the final norm; embeddings and heads belong to the model around it.

    Attributes:
        together: All layers in one call, if their weights are packed for it.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.together: NativeLayers | None = None
        # Not a buffer: positions need these in float32 whatever the weights are cast to.
        self._frequencies = rope_frequencies(config)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        taps: AuxHiddenStates | None = None,
        gate: MaskRows | None = None,
    ) -> Tensor:
        """Turns embedded tokens into final hidden states.

        Args:
            x: [..., T, E].
            positions: [..., T] int, broadcast against x.
            attend: Attention.
            rows: [R] tokens whose states to return. None means all. The others stop at the last
                layer's keys and values.
            taps: Receives the states of `rows` between layers. None records nothing.
            gate: Rows of mask tokens, whose products differ. None means that there are none.

        Returns:
            [..., T, E] or [..., R, E], final norm applied.
        """
        if self._frequencies.device != x.device:
            self._frequencies = self._frequencies.to(x.device)
        rope = Rope(positions, self._frequencies, x.dtype)
        last = len(self.layers) - 1
        # The last layer computes only `rows`, so it runs by itself.
        whole = last if rows is not None else last + 1
        taps = AuxHiddenStates(()) if taps is None else taps
        done = 0
        for stop in taps.layers:
            if stop <= whole:
                x, done = self._layers(x, rope, attend, range(done, stop), gate), stop
                taps.states.append(x if rows is None else x.index_select(-2, rows))
        x = self._layers(x, rope, attend, range(done, whole), gate, norm=rows is None)
        if rows is None:
            return x
        x = self.layers[last](x, rope, last, attend, rows, gate)
        if last + 1 in taps.layers:
            taps.states.append(x)
        hidden: Tensor = self.norm(x)
        return hidden

    def _layers(
        self,
        x: Tensor,
        rope: Rope,
        attend: Attend,
        numbers: range,
        gate: MaskRows | None,
        norm: bool = False,
    ) -> Tensor:
        """Runs some layers, and the final norm if `norm`. One call if the weights are packed."""
        # C has no gate. Its products give the same bits one by one.
        if self.together is not None and gate is None and isinstance(attend, PagedAttention):
            through = attend.through(self.together, x, rope, numbers, norm)
            if through is not None:
                return through
        if numbers and not self.training and dispatch.fuses(x):
            return self._fused(x, rope, attend, numbers, gate, norm)
        for number in numbers:
            x = self.layers[number](x, rope, number, attend, None, gate)
        return self.norm(x) if norm else x

    def _fused(
        self,
        x: Tensor,
        rope: Rope,
        attend: Attend,
        numbers: range,
        gate: MaskRows | None,
        norm: bool,
    ) -> Tensor:
        """Runs some layers, and the final norm if `norm`, with fused sums and norms."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        after = [*(layer.attention_norm for layer in layers), self.norm]
        normed: Tensor = after[numbers[0]](x)
        for number in numbers:
            norms = after[number + 1]
            x, normed = layers[number].fused(x, normed, rope, number, attend, norms, gate)
        return normed if norm else x
