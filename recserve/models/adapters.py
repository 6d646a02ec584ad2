"""Networks as the engine runs them: one forward pass over the nodes of packed trees."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from recserve.kernels.attention.reference import SOFTMAX, Activation
from recserve.kernels.cache.kv_pool import KVShape
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.attention import Attend
from recserve.models.decoder import AuxHiddenStates
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.models.ranker import Ranker
from recserve.models.semantic_id_model import Network, SemanticIdModel


class ModelAdapter(Protocol):
    """What the runner needs of a network.

    Attributes:
        activation: Activation of the attention scores.
    """

    activation: Activation

    @property
    def model(self) -> Network:
        """The network."""
        ...

    def forward(
        self,
        inputs: NodeInputs | Tensor,
        batch: TreeBatch,
        attend: Attend,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """Runs the network over the computed nodes of a batch.

        Args:
            inputs: Columns of the Tq nodes, or their embeddings [Tq, E] where the caller embeds.
            batch: The trees of the nodes.
            attend: Attention over the batch.
            rows: [R] nodes whose states are read. None means all.
            aux_states: Receives the states of `rows` between the layers of a decoder.

        Returns:
            [Tq, E] final hidden states, or [R, E] of the rows that are read.
        """
        ...


class DecoderAdapter:
    """A decoder over tokens: a history's items or codes, or a text."""

    activation = SOFTMAX

    def __init__(self, model: SemanticIdModel | LanguageModel) -> None:
        self.model = model
        decoder = model.config.decoder
        self.kv_shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.group = decoder.num_heads // decoder.num_kv_heads
        self.dtype: torch.dtype = model.tokens.weight.dtype
        self.device: torch.device = model.tokens.weight.device

    def forward(
        self,
        inputs: NodeInputs | Tensor,
        batch: TreeBatch,
        attend: Attend,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """As in `ModelAdapter`."""
        x = inputs if isinstance(inputs, Tensor) else self.model.embed(inputs.tokens)
        hidden: Tensor = self.model.decoder(x, batch.positions(), attend, rows, aux_states)
        return hidden


class RankerAdapter:
    """HSTU-style layers over profile, history and candidate rows. The rows carry their
    positions.
    """

    def __init__(self, model: Ranker) -> None:
        self.model = model
        config = model.config
        self.activation = Activation(config.normalizer)
        self.kv_shape = KVShape(config.num_layers, config.num_heads, config.head_dim)
        self.group = 1
        self.dtype: torch.dtype = model.vector_projection.weight.dtype
        self.device: torch.device = model.vector_projection.weight.device

    def forward(
        self,
        inputs: NodeInputs | Tensor,
        batch: TreeBatch,
        attend: Attend,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """As in `ModelAdapter`, from columns only, and without states between layers."""
        assert isinstance(inputs, NodeInputs) and aux_states is None
        hidden: Tensor = self.model(self.model.embed(inputs), inputs.groups, attend, rows)
        return hidden
