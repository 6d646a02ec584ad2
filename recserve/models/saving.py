"""Saves language models as Hugging Face folders, which models/loading.py and others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recserve.models.config import DecoderConfig, RopeScaling
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.loading import OUTSIDE, PARTS
from recserve.models.write_tensors import write_tensors


def save_language_model(model: LanguageModel, folder: Path) -> None:
    """Writes config.json and model.safetensors.

    Raises:
        ValueError: If no public family has this trunk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = config_fields(model.config)
    fields["dtype"] = str(model.tokens.weight.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    write_tensors(named_tensors(model), folder / "model.safetensors", {"format": "pt"})


def named_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """Returns the model's weights under the names of Hugging Face's classes."""
    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        weights |= _apart(name, weight, model.config.decoder)
    return weights


def config_fields(config: LanguageModelConfig) -> dict[str, Any]:
    """Returns the fields of a config.json; `loading.read_config` reads them back."""
    c = config.decoder
    family = "qwen3" if c.qk_norm else "qwen2" if c.attention_bias != c.output_bias else "llama"
    if family == "qwen2" and c.head_dim * c.num_heads != c.hidden_size:
        raise ValueError(
            f"head_dim is {c.head_dim}; with biases on query, key and value alone (Qwen2) it must "
            f"be hidden_size / num_heads = {c.hidden_size // c.num_heads}"
        )
    if family == "qwen3" and c.attention_bias != c.output_bias:
        raise ValueError("qk_norm with biases needs them on the output projection too (Qwen3)")
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": [names[family]],
        "model_type": family,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": rope_fields(c),
        "hidden_act": "silu",
        "attention_bias": c.output_bias,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_token,
        "eos_token_id": list(config.eos_tokens) or None,
    }


def rope_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the rotary positions as fields of a config.json."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if isinstance(scaling, RopeScaling):
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency,
            "high_freq_factor": scaling.high_frequency,
            "original_max_position_embeddings": scaling.original_positions,
        }
    elif scaling is not None:
        # longrope with the same factors for short and long texts is any scaling by factors.
        rope |= {
            "rope_type": "longrope",
            "short_factor": list(scaling.divisors),
            "long_factor": list(scaling.divisors),
            "attention_factor": scaling.scale,
            "original_max_position_embeddings": config.max_positions,
        }
    return rope


def _apart(name: str, weight: Tensor, config: DecoderConfig) -> dict[str, Tensor]:
    """Splits our tensor `name` into Hugging Face's tensors."""
    if name in OUTSIDE:
        return {OUTSIDE[name]: weight}
    _, _, layer, part, last = name.split(".")
    theirs = [f"model.layers.{layer}.{their}.{last}" for their in PARTS[part]]
    if part == "qkv":
        key = config.num_kv_heads * config.head_dim
        pieces = torch.split(weight, [config.num_heads * config.head_dim, key, key])
    else:
        pieces = torch.chunk(weight, len(theirs))
    return dict(zip(theirs, pieces, strict=True))
