"""Small random Medusa heads, and texts to draft for."""

import torch

from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.speculation.drafter import TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.text_loop import VOCABULARY

E, V, K = 16, VOCABULARY, 3


def drawn_heads(**changes) -> MedusaHeads:
    """Returns random heads; `changes` replace fields of their configuration."""
    torch.manual_seed(0)
    heads = MedusaHeads(
        MedusaConfig(**{"hidden_size": E, "vocab_size": V, "num_heads": K, **changes})
    )
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return heads.requires_grad_(False).eval()


def context(hidden, temperature=0.0, seed=0, id=0, **words) -> TextContext:
    """Returns a text of three tokens with this last hidden state."""
    params = SamplingParams(temperature, seed=seed)
    return TextContext(id, [1, 2, 3], 3, params, Speculation("medusa", **words), hidden)
