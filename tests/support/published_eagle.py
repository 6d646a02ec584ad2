"""Published layouts of EAGLE networks: fields and tensors as their files hold them."""

import torch

from tests.support.text_plain import DRAWN_SIZES, VOCABULARY

# drawn_model(0): hidden size 32, 2 layers, 4 query heads and 2 KV heads of 8, gate 48.
SIZES = DRAWN_SIZES | {"num_hidden_layers": 1, "model_type": "llama"}
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


def layer(prefix: str, inputs: int) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (32, inputs),
        "self_attn.k_proj": (16, inputs),
        "self_attn.v_proj": (16, inputs),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "post_attention_layernorm": (32,),
    }
    return {f"{prefix}{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def eagle1() -> tuple[dict, dict]:
    weights = layer("layers.0.", 32)
    weights |= {"fc.weight": torch.randn(32, 64), "fc.bias": torch.randn(32)}
    return SIZES, weights


def eagle3(prefix: str = "midlayer.") -> tuple[dict, dict]:
    weights = layer(prefix, 64)
    for name in ("hidden_norm", "input_layernorm"):
        weights[f"{prefix}{name}.weight"] = torch.randn(32)
    chosen = torch.zeros(VOCABULARY, dtype=torch.bool)
    chosen[::2] = True
    tokens = chosen.nonzero()[:, 0]
    weights |= {
        "fc.weight": torch.randn(32, 96),
        "norm.weight": torch.randn(32),
        "lm_head.weight": torch.randn(20, 32),
        "d2t": tokens - torch.arange(20),
        "t2d": chosen,
    }
    return SIZES | LAYERS | {"draft_vocab_size": 20}, weights


def speculators() -> tuple[dict, dict]:
    _, weights = eagle3("layers.0.")
    weights |= {f"fc_norm.{n}.weight": torch.randn(32) for n in range(3)}
    fields = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": SIZES,
        "draft_vocab_size": 20,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
    }
    return fields, weights


def deepspec() -> tuple[dict, dict]:
    """A full vocabulary, and norms of queries and keys."""
    _, weights = eagle3("layers.0.")
    del weights["d2t"], weights["t2d"]
    weights["lm_head.weight"] = torch.randn(VOCABULARY, 32)
    weights |= {f"layers.0.self_attn.{n}_norm.weight": torch.randn(8) for n in "qk"}
    fields = SIZES | {"target_layer_ids": [-1, 0, 1], "ttt_length": 7, "step_loss_decay": 0.8}
    return fields | {"architectures": ["Qwen3Eagle3Model"]}, weights


def peagle() -> tuple[dict, dict]:
    """Two layers, of which the first one reads twice as much, and a trained embedding."""
    fields, weights = speculators()
    for name in [n for n in weights if n.startswith("fc_norm")]:
        del weights[name]
    weights |= layer("layers.1.", 32) | {
        "layers.1.input_layernorm.weight": torch.randn(32),
        "mask_hidden": torch.randn(1, 1, 96),
        "embed_tokens.weight": torch.randn(VOCABULARY, 32),
    }
    del fields["fc_norm"]
    fields |= {
        "speculators_model_type": "peagle",
        "mask_token_id": 7,
        "transformer_layer_config": SIZES | {"num_hidden_layers": 2},
    }
    return fields, weights


def para_norm() -> tuple[dict, dict]:
    fields, weights = eagle1()
    names = ("embedding_layernorm", "hidden_states_layernorm")
    weights |= {f"{name}.weight": torch.randn(32) for name in names}
    return fields | {"add_para_norm": True}, weights


def hass() -> tuple[dict, dict]:
    fields, weights = eagle1()
    names = ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")
    weights |= {f"{name}.weight": torch.randn(32) for name in names}
    return fields, weights


def hass_speculators() -> tuple[dict, dict]:
    """speculators' names of HASS, without a bias."""
    weights = layer("transformer.", 32)
    weights |= {"fusion_fc.weight": torch.randn(32, 64)}
    names = ("post_embedding_layernorm", "pre_lm_head_layernorm", "transformer.input_layernorm")
    weights |= {f"{name}.weight": torch.randn(32) for name in names}
    fields = {"speculators_model_type": "eagle", "transformer_layer_config": SIZES}
    return fields | {"layernorms": True, "fusion_bias": False}, weights


LAYOUTS = {"eagle-1": eagle1, "eagle-3": eagle3, "speculators": speculators, "deepspec": deepspec}
