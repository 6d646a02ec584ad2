"""Shape of a decoder trunk, named as Hugging Face's Llama and Qwen configurations name it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Longer contexts than a model was first trained on, as Llama 3.1 does it.

    Wavelengths over `original_positions / low_frequency` are stretched by `factor`, those under
    `original_positions / high_frequency` stay, and between the two the share moves linearly.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_positions: int


@dataclass(frozen=True)
class DecoderConfig:
    """Llama/Qwen family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    qk_norm: RMSNorm over each head's query and key before RoPE (Qwen3).
    attention_bias: biases on the query, key and value projections (Qwen2).
    output_bias: a bias on the attention's output projection (Llama with biases).
    Raises ValueError where the sizes do not fit each other.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    attention_bias: bool = False
    dropout: float = 0.0
    output_bias: bool = False
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `DecoderConfig(**d)` reads it back."""
        return asdict(self)
