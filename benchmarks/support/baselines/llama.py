"""Weights of this project in Hugging Face's model classes, which compute the same function."""

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

from recserve.bundle.exporting import as_language_model
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel
from recserve.models.recommender import Recommender
from recserve.models.saving import named_tensors

# Hugging Face's classes are Any from here on, because their annotations are incomplete.
Network = Any


def empty_model(config: DecoderConfig, vocabulary: int) -> Network:
    """Returns the Hugging Face model of this shape.

    It is Qwen3 with qk_norm, Qwen2 with biases, and otherwise Llama.

    Raises:
        ValueError: If none of the three has this shape.
    """
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
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
    """Returns a recommender of `codes` form as a causal language model over BOS and code tokens.

    Raises:
        ValueError: If the model has other inputs than tokens.
    """
    weights = named_tensors(as_language_model(model)) | {"lm_head.weight": model.head.weight}
    theirs = empty_model(model.config.decoder, model.config.num_code_tokens)
    theirs.load_state_dict({name: w.clone() for name, w in weights.items()})
    return theirs.to(model.tokens.weight.dtype).eval()


@torch.no_grad()
def language_llama(model: LanguageModel) -> Network:
    """Returns a language model as a Hugging Face model; both share their weights' memory."""
    theirs = empty_model(model.config.decoder, model.config.vocab_size)
    theirs.load_state_dict(named_tensors(model), assign=True)
    return theirs.eval()
