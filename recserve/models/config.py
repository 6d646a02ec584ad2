"""Shapes of the networks: the decoder trunk and the recommender.

The trunk's fields have the names of Hugging Face's Llama and Qwen configurations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal


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


@dataclass(frozen=True)
class RecommenderConfig:
    """What a recommender is, as `config.json` keeps it.

    codebook_sizes: C of each level, disambiguation level included. num_items: rows of the id
    embedding (items of the catalogue it was trained on; later items have none). vector_dim: F of
    the frozen item vectors, 0 for none. normalization: what the softmax of a level runs over. tied:
    head = token embedding. dense_head: scores of all items from the root's last hidden state.
    level_heads: all levels predicted from that state. level_temperature: their logits are cosines
    over it; 0: dot products. autoregressive: false for a model that has learned nothing but its
    level heads and cannot write one code after another. max_history_items: the longest history it
    was trained on. Raises ValueError naming the field where a value does not fit.
    """

    decoder: DecoderConfig
    codebook_sizes: tuple[int, ...]
    input: Literal["codes", "items"] = "items"
    normalization: Literal["children", "vocabulary"] = "children"
    num_items: int = 0
    vector_dim: int = 0
    id_embedding: bool = False
    tied: bool = False
    dense_head: bool = False
    level_heads: bool = False
    level_temperature: float = 0.0
    autoregressive: bool = True
    max_history_items: int = 50

    def __post_init__(self) -> None:
        if self.input not in ("codes", "items"):
            raise ValueError(f"input is {self.input!r}; choose 'codes' or 'items'")
        if self.normalization not in ("children", "vocabulary"):
            raise ValueError(
                f"normalization is {self.normalization!r}; choose 'children' or 'vocabulary'"
            )
        if not self.codebook_sizes or min(self.codebook_sizes) < 1:
            raise ValueError(
                f"codebook_sizes is {self.codebook_sizes}; name one size >= 1 per level"
            )
        if self.input == "codes" and (self.vector_dim or self.id_embedding or self.dense_head):
            raise ValueError(
                "input 'codes' takes no item vectors, id embedding or dense head; use 'items'"
            )
        if not 0 <= self.level_temperature <= 10:
            raise ValueError(f"level_temperature is {self.level_temperature}; expected 0..10")
        if not self.autoregressive and not self.level_heads:
            raise ValueError("a model that is not autoregressive needs level_heads to predict with")
        if self.id_embedding and self.num_items < 1:
            raise ValueError(f"id_embedding needs num_items >= 1, got {self.num_items}")

    @property
    def num_levels(self) -> int:
        """L."""
        return len(self.codebook_sizes)

    @property
    def num_code_tokens(self) -> int:
        """V: BOS and the codes of all levels; item tokens start here."""
        return 1 + sum(self.codebook_sizes)

    @property
    def level_offsets(self) -> tuple[int, ...]:
        """First token of each level."""
        return tuple(1 + sum(self.codebook_sizes[:level]) for level in range(self.num_levels))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, read back by `from_dict`."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RecommenderConfig:
        """Raises ValueError for a missing or unknown key."""
        known = {f.name for f in fields(RecommenderConfig)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"recommender config has unknown keys {unknown}; known: {sorted(known)}"
            )
        try:
            decoder = DecoderConfig(**values["decoder"])
            sizes = tuple(int(size) for size in values["codebook_sizes"])
        except KeyError as error:
            raise ValueError(f"recommender config lacks the key {error}") from None
        return RecommenderConfig(**{**values, "decoder": decoder, "codebook_sizes": sizes})
