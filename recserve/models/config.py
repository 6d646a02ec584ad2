"""Configurations of the networks: the decoder trunk and the recommender.

The trunk's fields have the names of Hugging Face's Llama and Qwen configurations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from recserve.models.scoring import Scoring

# Largest sizes of a decoder. Larger ones would fail in an allocation, if not before.
MOST = {
    "hidden_size": 1 << 24,
    "num_layers": 1000,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 24,
    "max_positions": 1 << 30,
}
MAX_ROWS = 1 << 31  # of a table of items
MAX_HISTORY = 1 << 20  # items
MAX_CODES = 1 << 16
# Bounds of its numbers. Far outside of those of known models, a model computes nonsense.
NORM_EPS = (1e-30, 1.0)
ROPE_THETA = (1e-3, 1e15)


def check_number(name: str, value: float, bounds: tuple[float, float]) -> None:
    """Raises ValueError for a number outside of its bounds, and for NaN."""
    least, most = bounds
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.80}; expected a number from {least:g} to {most:g}")


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary positions to longer contexts, as in Llama 3.1.

    Wavelengths over `original_positions / low_frequency` are stretched by `factor`. Wavelengths
    under `original_positions / high_frequency` do not change. Between the two, the share is linear.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_positions: int


@dataclass(frozen=True)
class RopeFactors:
    """Scaling of rotary positions by one number for each pair: linear, yarn and longrope.

    Attributes:
        divisors: [D/2] the frequency of each pair is divided by it.
        scale: Factor on all cosines and sines.
    """

    divisors: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class DecoderConfig:
    """Decoder of the Llama and Qwen family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Attributes:
        qk_norm: RMSNorm over each head's query and key before RoPE (Qwen3).
        attention_bias: Biases on the query, key and value projections (Qwen2).
        output_bias: A bias on the attention's output projection (Llama with biases).

    Raises:
        ValueError: If the sizes do not fit each other, or a number is out of range.
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
    rope_scaling: RopeScaling | RopeFactors | None = None

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r:.80}; expected an integer from 1 to {most}")
        check_number("norm_eps", self.norm_eps, NORM_EPS)
        check_number("rope_theta", self.rope_theta, ROPE_THETA)
        check_number("dropout", self.dropout, (0.0, 1.0))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")

    @property
    def rope_scale(self) -> float:
        """Factor on the cosines and sines of rotary positions."""
        return self.rope_scaling.scale if isinstance(self.rope_scaling, RopeFactors) else 1.0


@dataclass(frozen=True)
class RecommenderConfig:
    """Configuration of a recommender, stored in `config.json`.

    Attributes:
        decoder: The trunk.
        codebook_sizes: C of each level, including the disambiguation level.
        input: Whether a history item is its codes or one position.
        normalization: What the softmax of a level runs over.
        num_items: Rows of the id embedding: items of the catalogue at training. Later items have
            none.
        vector_dim: F of the frozen item vectors, 0 for none.
        id_embedding: Whether items have a learned id embedding.
        tied: Whether the head is the token embedding.
        dense_head: Whether all items are scored from the prefix's last hidden state.
        level_heads: Whether all levels are predicted from that state.
        level_temperature: Level logits are cosines divided by it. 0 means dot products.
        autoregressive: False for a model that has learned only its level heads and cannot generate
            one code after another.
        max_history_items: The longest history in training.

    Raises:
        ValueError: If a value does not fit; the message names the field.
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
        if not self.codebook_sizes or not all(1 <= n <= MAX_CODES for n in self.codebook_sizes):
            raise ValueError(
                f"codebook_sizes is {self.codebook_sizes}; name one size in 1..{MAX_CODES} per "
                "level"
            )
        for name, least, most in (
            ("num_items", 0, MAX_ROWS),
            ("vector_dim", 0, MOST["hidden_size"]),
            ("max_history_items", 1, MAX_HISTORY),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least}..{most}")
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
        """L, the number of levels."""
        return len(self.codebook_sizes)

    @property
    def num_token_levels(self) -> int:
        """Levels whose codes are tokens: all."""
        return len(self.codebook_sizes)

    @property
    def scoring(self) -> Scoring:
        """How items are scored unless a request says otherwise."""
        return Scoring(self.normalization)

    @property
    def num_end_levels(self) -> int:
        """0: nothing follows an id."""
        return 0

    @property
    def ended_code(self) -> None:
        """None: all ids have the same length."""
        return None

    @property
    def scores_vocabulary(self) -> bool:
        """True: the head has all tokens."""
        return True

    @property
    def num_code_tokens(self) -> int:
        """V, BOS and the codes of all levels; the first item token."""
        return 1 + sum(self.codebook_sizes)

    @property
    def level_offsets(self) -> tuple[int, ...]:
        """First token of each level."""
        return tuple(1 + sum(self.codebook_sizes[:level]) for level in range(self.num_levels))

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form; `files.read_record` reads it back."""
        return asdict(self)
