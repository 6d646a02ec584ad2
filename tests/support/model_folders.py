"""Random language models in the folder layout of transformers."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

COMMON = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "head_dim": 16}),
    "llama-3.1": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "head_dim": 32}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3-biases": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "attention_bias": True}),
}


def drawn(folder, family: str, seed: int = 0, shard: str = "5GB", **more):
    """Saves a random model with transformers; biases and norms are far from neutral.

    `more` are fields of its configuration.
    """
    model_class, config_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    theirs = model_class(config_class(**COMMON | extra | more)).eval()
    for weight in theirs.parameters():
        spread = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3
        weight.data.add_(torch.randn(weight.shape) * spread)
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs
