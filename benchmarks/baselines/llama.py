"""Our weights inside Hugging Face's classes: the same function, somebody else's code."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from recserve.models.config import DecoderConfig
from recserve.models.llama_layout import llama_weights, shape_values
from recserve.models.recommender import Recommender

# Hugging Face's classes are Any from here on: their annotations do not cover what they do.
Network = Any


def empty_model(config: DecoderConfig, vocabulary: int) -> Network:
    """The Hugging Face model of the same shape: Qwen3 with qk_norm, Qwen2 with biases, else Llama.

    Raises ValueError for a shape that none of the three has.
    """
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        **shape_values(config),
        "tie_word_embeddings": False,
    }
    if config.qk_norm and config.attention_bias:
        raise ValueError("no model of the family has both qk_norm and attention_bias")
    if config.attention_bias and config.head_dim * config.num_heads != config.hidden_size:
        raise ValueError("Qwen2 has no head_dim of its own; make num_heads * head_dim the size")
    model: Network
    if config.qk_norm:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    elif config.attention_bias:
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    return model.eval()


@torch.no_grad()
def to_llama(model: Recommender) -> Network:
    """A recommender of `codes` form as a causal language model over BOS and code tokens.

    Raises ValueError for a model that reads more than tokens.
    """
    weights = llama_weights(model) | {"lm_head.weight": model.head.weight}
    theirs = empty_model(model.config.decoder, model.config.num_code_tokens)
    theirs.load_state_dict({name: w.clone() for name, w in weights.items()})
    return theirs.to(model.tokens.weight.dtype).eval()
