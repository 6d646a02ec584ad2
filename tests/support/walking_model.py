"""A random language model that writes a walk through its vocabulary."""

from typing import Any

import torch

from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig


def drawn_language_model(
    hidden: int, layers: int, vocabulary: int, dtype: torch.dtype, spread: float = 16.0
) -> LanguageModel:
    """Returns a random Llama with heads of 64 in KV groups of two, which writes a walk.

    Each token's row of the head contains part of the embedding of its predecessor on the walk. So
    the most likely token leads by far more than any rounding error, as in most steps of a trained
    model. All weights are random, and no two matrices are equal.
    """
    torch.manual_seed(0)
    heads = hidden // 64
    decoder = DecoderConfig(hidden, layers, heads, max(heads // 2, 1), 64, 11 * hidden // 4)
    model = LanguageModel(LanguageModelConfig(decoder, vocabulary)).requires_grad_(False)
    draw_walk(model, spread)
    return model.to(dtype).eval()


def draw_walk(model: LanguageModel, spread: float = 16.0) -> None:
    """Draws all matrices of a model with a head of its own, in place, so that it writes a walk."""
    size, layers = model.config.decoder.hidden_size, model.config.decoder.num_layers
    vocabulary = model.config.vocab_size
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            into_stream = "output." in name or "down." in name
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            weight.mul_((2 * layers) ** -0.5 if into_stream else 1.0)
    model.tokens.weight.mul_(size**0.5)
    assert model.head is not None
    followers = walk(torch.arange(vocabulary, device=model.tokens.weight.device), vocabulary)
    model.head.weight[followers] += spread * size**-1.0 * model.tokens.weight


def walk(token: Any, vocabulary: int) -> Any:
    """Returns the successor of a token, or of a tensor of tokens; it is a permutation."""
    return (token * (7 if vocabulary % 7 else 11) + 3) % vocabulary
