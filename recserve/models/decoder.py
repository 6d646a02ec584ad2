"""The decoder trunk of the Llama and Qwen family, for the recommender and for text models.

Projections that read the same input are stored as one matrix: one product instead of three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.kernels.backend import Backend, backend_of
from recserve.kernels.decoder.decoder import NativeLayers
from recserve.kernels.layers import operators
from recserve.kernels.layers.reference import HeadNorms
from recserve.models.attention import Attend, Rope, rope_frequencies
from recserve.models.config import DecoderConfig


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
        if not self.placeless or backend_of(gate_up) is Backend.C:  # C does not depend on positions
            return operators.silu_mul(gate_up)
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
        return operators.rms_norm(x, self.weight, self.eps)

    def after_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x + y and its norm, both [..., size]."""
        return operators.add_rms_norm(x, y, self.weight, self.eps)


class RowUpdates(Protocol):
    """What some rows of a forward pass add to the products of a decoder's layers."""

    def add(self, layer: int, part: str, x: Tensor, out: Tensor) -> Tensor:
        """Returns a product `out` [..., T, n] of x [..., T, m] with the updates added.

        Args:
            layer: Number of the layer.
            part: `qkv`, `output`, `gate_up` or `down`.
            x: Inputs of the product.
            out: The product.
        """
        ...

    def select(self, rows: Tensor) -> RowUpdates:
        """Returns the updates of some rows [R]."""
        ...


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
        inputs: Tensor,
        residual: Tensor,
        rope: Rope,
        layer: int,
        attend: Attend,
        rows: Tensor | None = None,
        updates: RowUpdates | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer, but for its last sum.

        The caller adds the two results, because the sum and the norm that follows are one kernel.

        Args:
            inputs: [..., T, num_inputs] what the attention reads.
            residual: [..., T, E].
            rope: Rotary positions.
            layer: Number of the layer.
            attend: Attention.
            rows: [R] tokens to return. None means all of them.
            updates: What some rows add to the products. None adds nothing.

        Returns:
            The residual stream and the output of SwiGLU, [..., T, E] or [..., R, E] each.
        """
        mixed = self._attention(inputs, rope, layer, attend, updates)
        if rows is not None:
            residual, mixed = residual.index_select(-2, rows), mixed.index_select(-2, rows)
            updates = None if updates is None else updates.select(rows)
        added = self._dropout(self._product("output", mixed, layer, updates))
        x, normed = self.mlp_norm.after_sum(residual, added)
        gated = self.silu.gate(self._product("gate_up", normed, layer, updates))
        return x, self._dropout(self._product("down", gated, layer, updates))

    def _attention(
        self, inputs: Tensor, rope: Rope, layer: int, attend: Attend, updates: RowUpdates | None
    ) -> Tensor:
        """Returns the attention's output [..., T, H D] of inputs [..., T, num_inputs]."""
        c = self.config
        product = self._product("qkv", inputs, layer, updates)
        qkv = torch.unflatten(product, -1, (-1, c.head_dim))
        norms = None
        if c.qk_norm:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        mixed = attend.of_projections(layer, qkv, c.num_kv_heads, rope, norms).flatten(-2)
        return mixed if self.gate is None else mixed * self.gate(inputs).sigmoid()

    def _product(self, part: str, x: Tensor, layer: int, updates: RowUpdates | None) -> Tensor:
        out: Tensor = getattr(self, part)(x)
        return out if updates is None else updates.add(layer, part, x, out)

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
        whole_decoder: All layers in one call, if their weights are packed for it.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.whole_decoder: NativeLayers | None = None
        # Not a buffer: positions need these in float32 whatever the weights are cast to.
        self._frequencies = rope_frequencies(config)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
        updates: RowUpdates | None = None,
    ) -> Tensor:
        """Turns embedded tokens into final hidden states.

        Args:
            x: [..., T, E].
            positions: [..., T] int, broadcast against x.
            attend: Attention.
            rows: [R] tokens whose states to return. None means all. The others stop at the last
                layer's keys and values.
            aux_states: Receives the states of `rows` between layers. None records nothing.
            updates: What some rows add to the products. None adds nothing.

        Returns:
            [..., T, E] or [..., R, E], final norm applied.
        """
        if self._frequencies.device != x.device:
            self._frequencies = self._frequencies.to(x.device)
        rope = Rope(positions, self._frequencies, x.dtype, self.config.rope_scale)
        last = self.config.num_layers - 1
        aux_states = AuxHiddenStates(()) if aux_states is None else aux_states
        done, wanted = 0, list(aux_states.layers)
        run = self._in_c(x, rope, attend, updates)
        if run is not None:
            # The last layer computes only `rows`, so it runs by itself.
            whole = last + (rows is None)
            while wanted and wanted[0] <= whole:
                stop = wanted.pop(0)
                x, done = run(x, range(done, stop), False), stop
                aux_states.states.append(x if rows is None else x.index_select(-2, rows))
            x = run(x, range(done, whole), rows is None)
            if rows is None:
                return x
            done = whole
        normed: Tensor = self._norm_before(done)(x)
        for number in range(done, last + 1):
            if number in wanted:
                aux_states.states.append(x if rows is None else x.index_select(-2, rows))
            chosen = rows if number == last else None
            x, added = self.layers[number](normed, x, rope, number, attend, chosen, updates)
            x, normed = self._norm_before(number + 1).after_sum(x, added)
        if last + 1 in wanted:
            aux_states.states.append(x)
        return normed

    def _norm_before(self, number: int) -> RMSNorm:
        """Returns the norm of a layer's inputs, or the final norm."""
        final = number == self.config.num_layers
        norm = self.norm if final else self.layers[number].attention_norm
        assert isinstance(norm, RMSNorm)
        return norm

    def _in_c(
        self, x: Tensor, rope: Rope, attend: Attend, updates: RowUpdates | None
    ) -> Callable[[Tensor, range, bool], Tensor] | None:
        """Returns a function that runs some layers in one call, if the weights are packed for it.

        Its arguments are x, the numbers of the layers, and whether the final norm follows.
        """
        # C knows no updates. Its products give the same bits one by one.
        if self.whole_decoder is None or updates is not None:
            return None
        return attend.in_one_call(self.whole_decoder, x, rope)
