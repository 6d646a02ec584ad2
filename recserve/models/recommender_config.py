"""What a recommender is: its trunk, its semantic ids, what it reads and what it scores with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from recserve.models.config import DecoderConfig


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
