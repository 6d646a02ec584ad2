"""Training of MTP modules for a frozen target model.

DeepSeek trains its modules with the target. Here the target stays as it is, so that a module can be
added to any model. It starts as a copy of the target's last layer on the token's embedding, and
learns the target's distributions over unrolled steps, as EAGLE-3 does. Step i has the weight
0.6 ** i.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2) for the module, FastMTP (arXiv 2509.18362,
equation 2) for the weights of the steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from recserve.drafters.eagle.network import Eagle
from recserve.drafters.mtp.files import load_mtp, save_mtp
from recserve.drafters.mtp.network import Mtp, MtpConfig, MtpModule
from recserve.training.text.drafters.eagle import EagleTrainee


class MtpTrainee(EagleTrainee):
    """An MTP module of DeepSeek's kind on a frozen target, for the training loop."""

    discount: ClassVar[float] = 0.6

    @torch.no_grad()
    def new_network(self, train: NDArray[np.int64]) -> Eagle | Mtp:
        """Returns a module that begins with the weights of the target's last layer."""
        own = self.target.config
        decoder = replace(own.decoder, num_layers=1, dropout=0.0)
        network = Mtp(MtpConfig(decoder, own.vocab_size))
        (block,) = network.blocks
        assert isinstance(block, MtpModule)
        block.layer.load_state_dict(self.target.decoder.layers[-1].state_dict())
        block.norm.weight.copy_(self.target.decoder.norm.weight)
        size = decoder.hidden_size
        block.fc.weight[:, :size] += torch.eye(size)
        return network.to(self.device)

    def save(self, folder: Path) -> None:
        """Writes the module in DeepSeek's layout."""
        assert isinstance(self.model, Mtp)
        save_mtp(self.model, folder, self.target.config.decoder.num_layers)

    def load(self, folder: Path) -> Eagle | Mtp:
        """Returns the module of a folder."""
        return load_mtp(folder, self.target)
