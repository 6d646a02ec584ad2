"""Published layouts of block drafters: fields and tensors as their files hold them."""

import torch

from tests.support.text_plain import DRAWN_SIZES, VOCABULARY

# drawn_model(0): hidden size 32, 2 layers, 4 query heads and 2 KV heads of 8, gate 48.
SIZES = DRAWN_SIZES | {
    "model_type": "qwen3",
    "rope_theta": 1e6,
    "layer_types": ["full_attention"] * 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "tie_word_embeddings": False,
}
SPECULATORS = {
    "algorithm": "dflash",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
    "default_proposal_method": "greedy",
    "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
}


def backbone(num_states: int = 2) -> dict[str, torch.Tensor]:
    """Returns the tensors that every variant has."""
    shapes = {"fc": (32, 32 * num_states), "hidden_norm": (32,), "norm": (32,)}
    for layer in range(2):
        own = {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "self_attn.q_norm": (8,),
            "self_attn.k_norm": (8,),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
            "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def dflash() -> tuple[dict, dict]:
    fields = SIZES | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 8,
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": 39, "target_layer_ids": [0, 1]},
    }
    return fields, backbone()


def jetspec() -> tuple[dict, dict]:
    fields, weights = dflash()
    return fields | {"dflash_config": fields["dflash_config"] | {"causal_head": True}}, weights


def nemo() -> tuple[dict, dict]:
    fields, weights = dflash()
    nested = fields["dflash_config"] | {"causal": True}
    return fields | {"architectures": ["Qwen3DFlashDraftModel"], "dflash_config": nested}, {
        f"model.{name}": weight for name, weight in weights.items()
    }


def glimmer() -> tuple[dict, dict]:
    """Other names for the projection, fused projections, and a mask of its own."""
    fields, weights = dflash()
    renamed = {"fc.weight": "encoder.fc.weight"}
    renamed["hidden_norm.weight"] = "encoder.output_norm_enc.weight"
    weights = {renamed.get(name, name): weight for name, weight in weights.items()}
    for layer in ("layers.0", "layers.1"):
        for whole, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            group = whole.split(".")[0]
            names = [f"{layer}.{group}.{part}_proj.weight" for part in parts]
            weights[f"{layer}.{whole}.weight"] = torch.cat([weights.pop(name) for name in names])
    weights["mask_embedding"] = torch.randn(1, 32)
    nested = fields["dflash_config"] | {"mask_token_id": 200}
    return fields | {"dflash_config": nested}, weights


CONV = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def dflash2() -> tuple[dict, dict]:
    fields, weights = dflash()
    for layer in ("layers.0", "layers.1"):
        for name in ("attention_conv", "mlp_conv"):
            weights[f"{layer}.{name}.base_kernel"] = torch.randn(2, 2, 32)
            weights[f"{layer}.{name}.kernel_projection.weight"] = torch.randn(16, 32)
    for name in ("predecessor_codebook", "successor_codebook"):
        weights[f"candidate_selector.{name}"] = torch.randn(VOCABULARY, 6)
    weights["candidate_selector.hidden_projection.weight"] = torch.randn(6, 32)
    nested = fields["dflash_config"] | CONV | {"block_size": 8}
    nested |= {"input_embedding_scale": 2.0, "output_multiplier": 0.5}
    nested["final_logit_softcapping"] = 30.0
    del fields["block_size"]
    return fields | {"architectures": ["DFlash2DraftModel"], "dflash_config": nested}, weights


def specforge() -> tuple[dict, dict]:
    """DSpark of SpecForge: fields inside dflash_config, no embedding and no head."""
    fields, weights = dflash()
    weights |= {f"markov_head.markov_w{n}.weight": torch.randn(VOCABULARY, 6) for n in (1, 2)}
    weights["confidence_head.proj.weight"] = torch.randn(1, 38)
    weights["confidence_head.proj.bias"] = torch.randn(1)
    nested = fields["dflash_config"] | {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return fields | {"architectures": ["DSparkDraftModel"], "dflash_config": nested}, weights


def deepspec(kind: str = "gated") -> tuple[dict, dict]:
    """DSpark of DeepSpec: fields at the top, its own embedding and head."""
    fields, weights = specforge()
    nested = fields.pop("dflash_config")
    for name in ("projector_type", "attention_mode"):
        del nested[name]
    fields |= nested | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    fields |= {"markov_head_type": kind, "block_size": 7}
    shapes = {"gated": ("gate_proj", (6, 38)), "rnn": ("joint_proj", (18, 44))}
    name, shape = shapes[kind]
    weights[f"markov_head.{name}.weight"] = torch.randn(shape)
    weights[f"markov_head.{name}.bias"] = torch.randn(shape[0])
    weights["embed_tokens.weight"] = torch.randn(VOCABULARY, 32)
    weights["lm_head.weight"] = torch.randn(VOCABULARY, 32)
    return fields, weights


def speculators(kind: str = "dflash") -> tuple[dict, dict]:
    """Sizes inside transformer_layer_config; ids of hidden states, not of layers."""
    fields, weights = {"dflash": dflash, "dflash2": dflash2, "dspark": specforge}[kind]()
    nested = fields["dflash_config"]
    fields = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.7",
        "speculators_config": SPECULATORS | {"algorithm": kind},
        "transformer_layer_config": SIZES,
        "draft_vocab_size": VOCABULARY,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [0, 2],
        "mask_token_id": 39,
        "sliding_window_non_causal": kind == "dflash2",
        "sample_from_anchor": kind == "dspark",
    }
    names = (*CONV, "markov_rank", "markov_head_type", "enable_confidence_head")
    fields |= {name: nested[name] for name in names if name in nested}
    if kind == "dflash":
        chosen = torch.zeros(VOCABULARY, dtype=torch.bool)
        chosen[::2] = True
        weights["t2d"], tokens = chosen, chosen.nonzero()[:, 0]
        weights["d2t"] = tokens - torch.arange(20)
        weights["lm_head.weight"] = torch.randn(20, 32)
        fields["draft_vocab_size"] = 20
    return fields, weights


LAYOUTS = {
    "dflash": dflash,
    "jetspec": jetspec,
    "nemo": nemo,
    "glimmer": glimmer,
    "dflash2": dflash2,
    "specforge": specforge,
    "deepspec-gated": deepspec,
    "deepspec-rnn": lambda: deepspec("rnn"),
    "speculators-dflash": speculators,
    "speculators-dflash2": lambda: speculators("dflash2"),
    "speculators-dspark": lambda: speculators("dspark"),
}
