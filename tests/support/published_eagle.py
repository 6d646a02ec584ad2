"""Published layouts of EAGLE networks: fields and tensors as their files hold them."""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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


# Fields of SpecForge's configurations besides the sizes; AngelSlim's have the same ones.
SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 36,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}
IDS = "eagle_aux_hidden_state_layer_ids"
# What speculators writes by default since July 2026.
WINDOWS = {"use_sliding_window": True, "sliding_window": 2048}


def changed(make, **more):
    """Returns a layout with more fields; those of None are removed."""
    fields, weights = make()
    fields = {n: v for n, v in (fields | more).items() if v is not None}
    return fields, weights


def inner(make, **more):
    """Returns a layout of speculators with more fields of its layers."""
    fields, weights = make()
    layers = fields["transformer_layer_config"]
    more["layer_types"] = ["sliding_attention"] * layers["num_hidden_layers"]
    return fields | {"transformer_layer_config": layers | more}, weights


def modelopt() -> tuple[dict, dict]:
    """Yarn by default, `layers.0.`, no `t2d`, and nulls for what the base model has not."""
    _, weights = eagle3("layers.0.")
    del weights["t2d"]
    own = {
        IDS: [1, 2, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    null = dict.fromkeys(("mlp_bias", "pretraining_tp", "attention_bias", "hidden_act"))
    fields = SPECFORGE | SIZES | null | {"rope_scaling": rope, "eagle_config": own}
    return fields | {"draft_vocab_size": 20}, weights


def specforge(*ids: int) -> tuple[dict, dict]:
    fields, weights = eagle3()
    nested = {IDS: list(ids), "use_aux_hidden_state": True}
    return fields | SPECFORGE | {"eagle_config": nested}, weights


def qwen2_head() -> tuple[dict, dict]:
    """EAGLE-1's heads for Qwen2 have biases, SpecForge's have none; neither says so."""
    fields, weights = eagle1()
    for name, size in (("q", 32), ("k", 16), ("v", 16)):
        weights[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(size)
    return fields | {"model_type": "qwen2"}, weights


# Each public layout, and the layers of a target of six that its head reads.
PUBLIC = {
    "EAGLE-1, 2": (eagle1, (-1,)),
    "EAGLE-1, 2 of Qwen2": (qwen2_head, (-1,)),
    "HASS": (hass, (-1,)),
    "HASS with add_para_norm": (para_norm, (-1,)),
    "HASS of speculators": (hass_speculators, (-1,)),
    "EAGLE-3 of the authors": (lambda: changed(eagle3, eagle_config=None), (2, 3, 3)),
    "EAGLE-3 of 40 layers": (
        lambda: changed(eagle3, eagle_config=None, num_hidden_layers=40),
        (2, 3, 3),
    ),
    "EAGLE-3 of SpecForge, ids from 1": (lambda: specforge(1, 2, 4), (2, 3, 5)),
    "EAGLE-3 of NVIDIA, ids from 2": (lambda: specforge(2, 4, 6), (2, 4, 6)),
    "EAGLE-3 of AngelSlim": (
        lambda: changed(lambda: specforge(1, 2, 4), target_model_type="qwen3", modal_type="LLM"),
        (2, 3, 5),
    ),
    "EAGLE-3 of SpecForge for Qwen3-Next": (
        lambda: changed(lambda: specforge(1, 2, 4), decoder_sparse_step=1),
        (2, 3, 5),
    ),
    "EAGLE-3 of SpecForge for Qwen2": (
        lambda: changed(lambda: specforge(1, 2, 4), model_type="qwen2"),
        (2, 3, 5),
    ),
    "EAGLE-3 of ModelOpt": (modelopt, (2, 3, 5)),
    "EAGLE-3 of DeepSpec": (
        lambda: changed(
            deepspec,
            target_layer_ids=[1, 2, 4],
            num_target_layers=6,
            target_model_name_or_path="x/y",
            draft_num_hidden_layers=1,
        ),
        (2, 3, 5),
    ),
    "EAGLE-3 of speculators": (speculators, (0, 1, 2)),
    "EAGLE-3 of speculators, windows": (lambda: inner(speculators, **WINDOWS), (0, 1, 2)),
    "P-EAGLE of speculators": (peagle, (0, 1, 2)),
    "P-EAGLE of speculators, windows": (lambda: inner(peagle, **WINDOWS), (0, 1, 2)),
    "P-EAGLE of NeMo": (lambda: changed(peagle, parallel_drafting=True), (0, 1, 2)),
}


class Published:
    """A network as its authors wrote it, on the tensors of a file, without any cache."""

    def __init__(self, fields: dict, weights: dict[str, torch.Tensor]) -> None:
        self.fields = {**fields, **(fields.get("transformer_layer_config") or {})}
        self.fields |= {
            name: value
            for name, value in (fields.get("eagle_config") or {}).items()
            if name in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
        }
        names = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc": "fc"}
        self.weights = {}
        for name, weight in weights.items():
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            self.weights[name] = weight
        self.fused = "layers.0.hidden_norm.weight" in self.weights
        rope = self.fields.get("rope_scaling") or {"rope_type": "default"}
        theta = self.fields.get("rope_theta") or 10_000.0
        sizes = {n: self.fields[n] for n in ("hidden_size", "num_attention_heads", "head_dim")}
        sizes["max_position_embeddings"] = self.fields["max_position_embeddings"]
        turned = LlamaRotaryEmbedding(
            LlamaConfig(**sizes, rope_parameters={"rope_theta": theta} | rope)
        )
        self.frequencies, self.scale = turned.inv_freq, turned.attention_scaling

    def norm(self, x, *names):
        """The first of these norms that the file has; x without any."""
        weight = next(
            (self.weights[n] for name in names if (n := f"{name}.weight") in self.weights), None
        )
        if weight is None:
            return x
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def linear(self, x, name):
        bias = self.weights.get(f"{name}.bias", torch.zeros(1))
        return x @ self.weights[f"{name}.weight"].T + bias

    def features(self, states):
        """What goes in at rows of the target's states [n, F]."""
        if not self.fused:
            return states
        if self.fields.get("fc_norm"):
            parts = states.split(32, -1)
            states = torch.cat([self.norm(p, f"fc_norm.{n}") for n, p in enumerate(parts)], -1)
        return self.linear(states, "fc") if "fc.weight" in self.weights else states

    def outputs(self, features, embedded):
        """What rows 0..n-1 return before the last norm [n, E]."""
        if self.fused:
            normed = self.norm(features, "layers.0.hidden_norm")
            inputs = torch.cat([self.norm(embedded, "layers.0.input_layernorm"), normed], -1)
            x = normed if self.fields.get("norm_before_residual") else features
        else:
            embedded = self.norm(
                embedded, "embedding_layernorm", "embed_layernorm", "post_embedding_layernorm"
            )
            both = [embedded, self.norm(features, "hidden_states_layernorm")]
            x = self.linear(torch.cat(both, -1), "fc")
            inputs = self.norm(x, "hidden_layernorm", "layers.0.input_layernorm")
        for number in range(len({n.split(".")[1] for n in self.weights if n.startswith("layers")})):
            at = f"layers.{number}."
            inputs = self.norm(x, f"{at}input_layernorm") if number else inputs
            x = x + self.attention(inputs, f"{at}self_attn.")
            inner = self.norm(x, f"{at}post_attention_layernorm")
            gate, up = (self.linear(inner, f"{at}mlp.{n}_proj") for n in ("gate", "up"))
            x = x + self.linear(torch.nn.functional.silu(gate) * up, f"{at}mlp.down_proj")
        return x

    def attention(self, x, at):
        count = len(x)
        query, key, value = (self.linear(x, f"{at}{n}_proj").view(count, -1, 8) for n in "qkv")
        query, key = self.norm(query, f"{at}q_norm"), self.norm(key, f"{at}k_norm")
        angles = torch.arange(count)[:, None] * self.frequencies
        cos, sin = (f(angles)[:, None] * self.scale for f in (torch.cos, torch.sin))

        def turned(y):
            low, high = y.chunk(2, dim=-1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

        key, value = (y.repeat_interleave(2, 1) for y in (turned(key), value))
        scores = torch.einsum("nhd,mhd->hnm", turned(query), key) * 8**-0.5
        scores = scores.masked_fill(~torch.ones(count, count).tril().bool(), float("-inf"))
        mixed = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value).flatten(1)
        return self.linear(mixed, f"{at}o_proj")

    def last(self, x):
        """The norm that the head reads through."""
        names = ("lm_head_layernorm", "pre_lm_head_layernorm")
        return self.norm(x, "norm" if self.fused else names[0], *names)

    def logits(self, x, model):
        read = self.last(x)
        return self.linear(read, "lm_head") if self.fused else model.logits(read)
