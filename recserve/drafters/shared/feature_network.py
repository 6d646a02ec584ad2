"""The interface of networks that draft from features, such as EAGLE's and MTP modules.

Row p of such a network reads a feature of the target's state at position p and the token at p + 1.
Its output is the next feature, from which the logits of the token at p + 2 follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from recserve.models.attention import Attend
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class MaskRow:
    """What a row reads in place of a state and a token.

    Attributes:
        feature: [O].
        embedded: [E].
    """

    feature: Tensor
    embedded: Tensor


@dataclass(frozen=True)
class LayerView:
    """Which rows of a text the rows of a layer see, besides their own draft.

    Attributes:
        first: Number of first rows that no later row sees.
        window: W. A committed row sees W rows, its own included; 0 means all before it.
        moves: Whether a drafted row moves the window with it. Otherwise all rows of a draft see
            what the last committed row sees.
    """

    first: int = 0
    window: int = 0
    moves: bool = False


@dataclass(frozen=True)
class RowsBefore:
    """The outputs at the row before the first one of each text.

    Attributes:
        starts: [B] first row of each text.
        outputs: [R, O] the last output of all texts, by their row of the slot table.
        rows: [B] row of each text.
        known: [B] bool, whether that is the output at the row before.
    """

    starts: Tensor
    outputs: Tensor
    rows: Tensor
    known: Tensor

    def values(self) -> Tensor:
        """Returns the outputs [B, O]; zeros where they are not known."""
        return self.outputs[self.rows].masked_fill(~self.known[:, None], 0.0)


class FeatureConfig(Protocol):
    """What the drafter needs to know of a network's configuration."""

    @property
    def decoder(self) -> DecoderConfig:
        """Sizes of the network's own keys and values."""
        ...

    @property
    def target_size(self) -> int:
        """E of the target's states."""
        ...

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Layers of the target that are read, as in `Drafter.hidden_layers`."""
        ...

    @property
    def output_size(self) -> int:
        """O, numbers of an output."""
        ...

    @property
    def views(self) -> tuple[LayerView, ...]:
        """What each layer sees. Empty if all layers see everything."""
        ...

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the target."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the network can propose."""
        ...


class FeatureNetwork(Protocol):
    """A network that reads a feature and the next token, and returns the next feature."""

    @property
    def config(self) -> FeatureConfig:
        """The configuration."""
        ...

    def mask_row(self, target: LanguageModel) -> MaskRow | None:
        """Returns what rows without a token and a state read.

        With it one forward pass drafts all positions. None if the network drafts level by level.
        """
        ...

    def embed(self, tokens: Tensor, target: LanguageModel) -> Tensor:
        """Returns the embedding [..., E] of the target's tokens [...]."""
        ...

    def committed(
        self,
        states: Tensor,
        embedded: Tensor,
        positions: Tensor,
        attend: Attend,
        before: RowsBefore | None = None,
    ) -> Tensor:
        """Returns the outputs [T, O] of committed tokens of several texts.

        Args:
            states: [T, F] states of the target.
            embedded: [T, E] embedding of the tokens after the states.
            positions: [T] positions of the states.
            attend: Attention.
            before: What is known of the rows before. None for networks that read no such row.
        """
        ...

    def __call__(
        self, features: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Returns the outputs [..., T, O] of rows that read outputs of rows before them."""
        ...

    def logits(self, outputs: Tensor, target: LanguageModel, level: int = 0) -> Tensor:
        """Returns float32 logits [..., n] of a draft's level from outputs [..., O]."""
        ...

    def targets(self, columns: Tensor) -> Tensor:
        """Returns the target's tokens of columns of the logits, of any shape."""
        ...
