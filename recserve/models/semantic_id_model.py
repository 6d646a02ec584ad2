"""What search, engine, service and evaluation read of a model that generates semantic ids.

`SemanticIdModel` is all that another recommender must implement to be served: its layers, the
logits of codes, and its `PrefixTemplate`. The other strategies and the live catalogue use
`ItemTables`, which a model may lack. Only what constructs, loads or trains a model knows its class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

from torch import Tensor, nn

from recserve.kernels.trie.native import NativeDescent
from recserve.models.history_bonus import HistoryBonus
from recserve.models.level_heads import LevelTables
from recserve.models.prefix_template import PrefixTemplate
from recserve.models.scoring import Rule, Scoring


class DecoderSizes(Protocol):
    """Sizes of the layers, which the cache of keys and values needs. A DecoderConfig has them."""

    @property
    def hidden_size(self) -> int:
        """E."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers that have keys and values."""
        ...

    @property
    def num_heads(self) -> int:
        """H, heads of queries: a multiple of K."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """K, heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """D."""
        ...

    @property
    def max_positions(self) -> int:
        """Most tokens of a prefix and the codes below it."""
        ...


class SemanticIdConfig(Protocol):
    """What a model is. A RecommenderConfig has all of it."""

    @property
    def decoder(self) -> DecoderSizes:
        """Sizes of the layers."""
        ...

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """[L] codes of each level, as in the catalogue."""
        ...

    @property
    def level_offsets(self) -> tuple[int, ...]:
        """[L] token of each level's code 0. The tokens of a level are consecutive."""
        ...

    @property
    def normalization(self) -> Rule:
        """Whether the softmax of a level is over its valid codes, all its codes, or all tokens."""
        ...

    @property
    def num_token_levels(self) -> int:
        """Levels whose codes are tokens.

        One more level only separates items that share all codes above it. Each of them has the
        score of these codes, or an equal share of it if levels are normalised over valid codes.
        """
        ...

    @property
    def scoring(self) -> Scoring:
        """How items are scored unless a request says otherwise. Its rule is `normalization`."""
        ...

    @property
    def num_end_levels(self) -> int:
        """How many of the last token levels hold what the original generates after each id."""
        ...

    @property
    def ended_code(self) -> int | None:
        """Code of all levels after the end of an id that is shorter than others, which is certain.

        No id is the beginning of another one. None: all ids have the same length.
        """
        ...

    @property
    def scores_vocabulary(self) -> bool:
        """Whether `full_logits` has all tokens of the model."""
        ...

    @property
    def autoregressive(self) -> bool:
        """Whether the model generates code after code. If not, it needs level heads."""
        ...

    @property
    def dense_head(self) -> bool:
        """Whether `ItemTables.dense_scores` can be used."""
        ...

    @property
    def level_heads(self) -> bool:
        """Whether `ItemTables.level_tables` can be used."""
        ...


class Network(Protocol):
    """What every nn.Module has."""

    def modules(self) -> Iterator[nn.Module]:
        """Yields all modules."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields all parameters."""
        ...

    def eval(self) -> Self:
        """Ends training."""
        ...


class SemanticIdModel(Network, Protocol):
    """A network that generates the semantic id of the next item, code after code."""

    @property
    def config(self) -> SemanticIdConfig:
        """Sizes, and how codes are numbered and normalised."""
        ...

    @property
    def template(self) -> PrefixTemplate:
        """How a history becomes the tokens of a prefix."""
        ...

    @property
    def tokens(self) -> nn.Embedding:
        """Embeddings [V, E] of the codes at least. Their device and type are those of the model."""
        ...

    @property
    def decoder(self) -> nn.Module:
        """The layers, called with the first five arguments of `Decoder.forward`.

        They pass queries, keys and values to `attend`, and return final hidden states.
        """
        ...

    @property
    def items(self) -> ItemTables | None:
        """What the model knows of each item. None: it reads codes alone."""
        ...

    @property
    def search(self) -> NativeDescent | None:
        """The search by `level_logits` in C, for products with codes. None: torch searches."""
        ...

    def pack_search(self) -> None:
        """Sets `search` for the current weights, if there is one."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the inputs [..., E] of the layers for tokens [...] of prefixes and codes."""
        ...

    def bind_placeholders(self, vectors: Tensor) -> None:
        """Embeds tokens -1, -2, ... as the vectors [P, E] of a trained `nezha` head."""

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes. hidden: [n, E]."""
        ...

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Returns raw logits [n, V] of all tokens. hidden: [n, E]."""
        ...


class ItemTables(Protocol):
    """What a model knows of each item of the catalogue.

    Attributes:
        item_tokens: [I, L] tokens of the items' codes.
        num_bound_items: Number of items.
        history_bonus: Added to dense scores. None adds nothing.
        one_by_one: Whether each query of the dense head is computed separately.
    """

    item_tokens: Tensor
    num_bound_items: int
    history_bonus: HistoryBonus | None
    one_by_one: bool

    def append_items(self, codes: Tensor, vectors: Tensor, trained_rows: Tensor) -> None:
        """Appends items of a live catalogue. See `Recommender.append_items`."""

    def embed_items(self, rows: Tensor) -> Tensor:
        """Returns the embeddings [..., E] of item rows [...]."""
        ...

    def dense_scores(
        self, hidden: Tensor, num_items: int | None = None, without: Tensor | None = None
    ) -> Tensor:
        """Returns log-probabilities [n, I] of all items. See `Recommender.dense_scores`."""
        ...

    def level_tables(self) -> LevelTables:
        """Returns the level heads, which predict all levels at once."""
        ...

    def level_codes(self, level: int) -> Tensor:
        """Returns the codes [C_level, E] that a hidden state is compared with at a level."""
        ...


def item_tables(model: SemanticIdModel) -> ItemTables:
    """Returns what a model knows of each item.

    Raises:
        ValueError: If it reads codes alone.
    """
    items = model.items
    if items is None:
        raise ValueError(f"this {type(model).__name__} has neither a dense head nor level heads")
    return items
