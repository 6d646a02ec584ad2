"""The models as the runner sees them: packed rows in, hidden states out."""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.paged_kv import KVShape
from recserve.kernels.reference import SOFTMAX, Activation
from recserve.models.attention import Attend
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.models.ranker import Ranker
from recserve.models.recommender import Recommender


class DecoderTrunk:
    """Decoder over tokens: of a history and its codes, or of a text."""

    activation = SOFTMAX

    def __init__(self, model: Recommender | LanguageModel) -> None:
        self.model = model
        decoder = model.config.decoder
        self.kv_shape = KVShape(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self.dtype: torch.dtype = model.tokens.weight.dtype
        self.device: torch.device = model.tokens.weight.device

    def hidden(
        self, inputs: NodeInputs, positions: Tensor, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """[Tq, E], or [R, E] of the given rows."""
        return self.model(inputs.tokens, positions, attend, rows)  # type: ignore[no-any-return]


class RankerTrunk:
    """HSTU-style layers over profile, history and candidate rows; positions are the rows' own."""

    def __init__(self, model: Ranker) -> None:
        self.model = model
        config = model.config
        self.activation = Activation(config.normalizer)
        self.kv_shape = KVShape(config.num_layers, config.num_heads, config.head_dim)
        self.dtype: torch.dtype = model.vector_projection.weight.dtype
        self.device: torch.device = model.vector_projection.weight.device

    def hidden(
        self, inputs: NodeInputs, positions: Tensor, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """[Tq, E], or [R, E] of the given rows."""
        assert inputs.groups is not None
        return self.model(self.model.embed(inputs), inputs.groups, attend, rows)  # type: ignore[no-any-return]
