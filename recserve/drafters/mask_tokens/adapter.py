"""The target of mask-token drafters, whose forward pass computes the rows of mask tokens too."""

from __future__ import annotations

from torch import Tensor

from recserve.drafters.mask_tokens.gated_lora import GatedLora, MaskRows
from recserve.kernels.tree import AUXILIARY
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.adapters import DecoderAdapter
from recserve.models.attention import Attend
from recserve.models.decoder import AuxHiddenStates
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel

MASK = AUXILIARY + 1  # a node of the kind MASK + i has mask token i as its input, not its token


class MaskTokensAdapter(DecoderAdapter):
    """A language model whose trees may have nodes of the kinds MASK + i.

    Attributes:
        masks: The mask tokens.
        drafter: Name of the drafter that they belong to.
    """

    model: LanguageModel

    def __init__(self, model: LanguageModel, masks: GatedLora, drafter: str) -> None:
        super().__init__(model)
        self.masks, self.drafter = masks, drafter

    def forward(
        self,
        inputs: NodeInputs | Tensor,
        batch: TreeBatch,
        attend: Attend,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """As in `ModelAdapter`. A pass without mask tokens is the one of every other service."""
        kinds = batch.tree.kinds
        if kinds is not None and isinstance(inputs, NodeInputs):
            own = kinds if batch.queries is None else kinds[batch.queries]
            fixed = batch.fixed_shapes or own.is_cuda
            masks = MaskRows(self.masks, own - MASK, fixed)
            if fixed or masks.rows.shape[0]:
                places = batch.positions()
                return masks.forward(self.model, inputs.tokens, places, attend, rows, aux_states)
        return super().forward(inputs, batch, attend, rows, aux_states)
