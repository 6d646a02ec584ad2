"""A trunk's weights under the names of Hugging Face's Llama and Qwen classes.

Ours keeps query, key and value, and gate and up, as one matrix each; theirs keeps them apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recserve.models.config import DecoderConfig
from recserve.models.decoder import Decoder
from recserve.models.language_model import LanguageModel
from recserve.models.recommender import BOS, Recommender

PARTS = {
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "down": "mlp.down_proj",
}


def trunk_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Weights of a trunk by their names, without the prefix `model.`."""
    c = decoder.config
    sizes = [c.num_heads * c.head_dim] + 2 * [c.num_kv_heads * c.head_dim]
    weights: dict[str, Tensor] = {}
    for name, weight in decoder.state_dict().items():
        at, _, last = name.rpartition(".")
        at, _, part = at.rpartition(".")
        if part == "qkv":
            for letter, piece in zip("qkv", weight.split(sizes), strict=True):
                weights[f"{at}.self_attn.{letter}_proj.{last}"] = piece
        elif part == "gate_up":
            gate, up = weight.chunk(2)
            weights |= {f"{at}.mlp.gate_proj.{last}": gate, f"{at}.mlp.up_proj.{last}": up}
        else:
            weights[f"{at}.{PARTS[part]}.{last}" if at else name] = weight
    return weights


def llama_weights(model: Recommender) -> dict[str, Tensor]:
    """Weights of a `codes` recommender as LlamaForCausalLM names them.

    Raises ValueError for a model that reads more than tokens.
    """
    if model.config.input != "codes":
        raise ValueError(
            f"input is {model.config.input!r}: this recommender reads item vectors or ids, which a "
            "Llama has no place for; train one with --input codes"
        )
    weights = {f"model.{name}": weight for name, weight in trunk_weights(model.decoder).items()}
    weights["model.embed_tokens.weight"] = model.tokens.weight
    if not model.config.tied:
        weights["lm_head.weight"] = model.head.weight
    return weights


def language_model_weights(model: LanguageModel) -> dict[str, Tensor]:
    """Weights of a language model as LlamaForCausalLM names them."""
    weights = {f"model.{name}": weight for name, weight in trunk_weights(model.decoder).items()}
    weights["model.embed_tokens.weight"] = model.tokens.weight
    if model.head is not None:
        weights["lm_head.weight"] = model.head.weight
    return weights


def shape_values(config: DecoderConfig) -> dict[str, Any]:
    """A trunk's shape under the keys of Hugging Face's config.json."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def language_model_values(model: LanguageModel) -> dict[str, Any]:
    """`config.json` of a language model that is a plain Llama."""
    c = model.config
    ends = list(c.eos_tokens)
    return {
        **_llama_values(c.decoder, c.vocab_size, c.tied, model.tokens.weight.dtype),
        "bos_token_id": c.bos_token,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }


def llama_config(model: Recommender) -> dict[str, Any]:
    """`config.json` of the same model as a LlamaForCausalLM, `max_history_items` added.

    Raises ValueError for a trunk that Llama does not have (QK-norm, biases of query, key, value).
    """
    c = model.config
    values = _llama_values(c.decoder, c.num_code_tokens, c.tied, model.tokens.weight.dtype)
    return values | {"max_history_items": c.max_history_items}


def _llama_values(
    config: DecoderConfig, vocab_size: int, tied: bool, dtype: torch.dtype
) -> dict[str, Any]:
    if config.qk_norm or config.attention_bias or config.output_bias or config.rope_scaling:
        raise ValueError(
            "this trunk has qk_norm, biases or scaled positions; the plain Llama written here has "
            "none of them"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        **shape_values(config),
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
