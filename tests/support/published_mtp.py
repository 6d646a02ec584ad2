"""Published MTP modules: their tensors as their files hold them, and what they compute."""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.support.text_plain import DRAWN_SIZES, VOCABULARY

# drawn_model(): hidden size 32, 2 layers, 4 query heads and 2 KV heads of 8, gate 48.
HEADS, KEYS, DIM = 4, 2, 8


def draw_weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def draw_norm(size: int = 32, centred: bool = False) -> torch.Tensor:
    return 0.3 * torch.randn(size) + (0.0 if centred else 1.0)


def draw_layer(prefix: str, gated: bool = False, centred: bool = False) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (64 if gated else 32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    weights = {f"{prefix}{name}.weight": draw_weight(*shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}{name}.weight"] = draw_norm(centred=centred)
    return weights


def deepseek(number: int = 2) -> tuple[dict, dict]:
    at = f"model.layers.{number}."
    weights = draw_layer(at) | {
        f"{at}enorm.weight": draw_norm(),
        f"{at}hnorm.weight": draw_norm(),
        f"{at}eh_proj.weight": draw_weight(32, 64),
        f"{at}shared_head.norm.weight": draw_norm(),
        f"{at}shared_head.head.weight": draw_weight(VOCABULARY, 32) * 2,
    }
    return DRAWN_SIZES | {"model_type": "llama", "num_nextn_predict_layers": 1}, weights


def qwen3_next() -> tuple[dict, dict]:
    weights = draw_layer("mtp.layers.0.", gated=True, centred=True) | {
        "mtp.pre_fc_norm_embedding.weight": draw_norm(centred=True),
        "mtp.pre_fc_norm_hidden.weight": draw_norm(centred=True),
        "mtp.fc.weight": draw_weight(32, 64),
        "mtp.norm.weight": draw_norm(centred=True),
    }
    for name in "qk":
        weights[f"mtp.layers.0.self_attn.{name}_norm.weight"] = draw_norm(8, centred=True)
    fields = {"model_type": "qwen3_next", "partial_rotary_factor": 0.5, "linear_conv_kernel_dim": 4}
    return DRAWN_SIZES | fields, weights


def speculators() -> tuple[dict, dict]:
    at = "mtp_layers.0."
    weights = draw_layer(at) | {
        f"{at}token_layernorm.weight": draw_norm(),
        f"{at}hidden_layernorm.weight": draw_norm(),
        f"{at}input_proj.weight": draw_weight(32, 64),
        f"{at}final_layernorm.weight": draw_norm(),
    }
    for name in "qk":
        weights[f"{at}self_attn.{name}_norm.weight"] = draw_norm(8)
    fields = {
        "speculators_model_type": "mtp",
        "speculators_config": {"algorithm": "mtp"},
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": DRAWN_SIZES | {"model_type": "qwen3"},
    }
    return fields, weights


LAYOUTS = {"deepseek": deepseek, "qwen3-next": qwen3_next, "speculators": speculators}


def write_folder(folder, fields, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors")
    return folder


class Published:
    """A module as its authors wrote it, on the tensors of a checkpoint."""

    def __init__(self, name: str, weights: dict[str, torch.Tensor], number: int = 0) -> None:
        self.weights, self.qwen = weights, name == "qwen3-next"
        self.module, self.layer = {
            "deepseek": (f"model.layers.{2 + number}.", f"model.layers.{2 + number}."),
            "qwen3-next": ("mtp.", "mtp.layers.0."),
            "speculators": ("mtp_layers.0.", "mtp_layers.0."),
        }[name]
        self.names = {
            "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
            "qwen3-next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
            "speculators": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        }[name]
        self.feeds_norm = name != "deepseek"

    def norm(self, x, name):
        weight = self.weights[f"{name}.weight"] + (1.0 if self.qwen else 0.0)
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def turned(self, x):
        """Rotates x [n, H, D] at 0..n-1; Qwen3-Next only the first half of a head here."""
        dim = DIM // 2 if self.qwen else DIM
        angles = torch.arange(len(x))[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x[..., : dim // 2], x[..., dim // 2 : dim]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., dim:]], dim=-1)

    def outputs(self, features, embedded, first=True):
        """Returns what n rows feed back; `first` says that row 0 is a text's."""
        token, state, fc, last = (self.module + name for name in self.names)
        if first and not self.feeds_norm:
            embedded = embedded.clone()
            embedded[0] = 0.0
        both = [self.norm(embedded, token), self.norm(features, state)]
        x = self.linear(torch.cat(both, dim=-1), fc)
        inner = self.norm(x, f"{self.layer}input_layernorm")
        x = x + self.attention(inner)
        inner = self.norm(x, f"{self.layer}post_attention_layernorm")
        gate, up = (self.linear(inner, f"{self.layer}mlp.{n}_proj") for n in ("gate", "up"))
        x = x + self.linear(F.silu(gate) * up, f"{self.layer}mlp.down_proj")
        return self.norm(x, last) if self.feeds_norm else x

    def attention(self, x):
        at, count = f"{self.layer}self_attn.", len(x)
        query = self.linear(x, f"{at}q_proj").view(count, HEADS, -1)
        gate = None
        if self.qwen:
            query, gate = query.chunk(2, dim=-1)
        key, value = (self.linear(x, f"{at}{n}_proj").view(count, KEYS, DIM) for n in "kv")
        if f"{at}q_norm.weight" in self.weights:
            query, key = self.norm(query, f"{at}q_norm"), self.norm(key, f"{at}k_norm")
        query, key = self.turned(query), self.turned(key)
        key, value = (one.repeat_interleave(HEADS // KEYS, 1) for one in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query, key) * DIM**-0.5
        scores = scores.masked_fill(~torch.ones(count, count).tril().bool(), float("-inf"))
        mixed = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value).flatten(1)
        if gate is not None:
            mixed = mixed * gate.flatten(1).sigmoid()
        return self.linear(mixed, f"{at}o_proj")

    def logits(self, output, model):
        if self.feeds_norm:
            return model.logits(output)
        read = self.norm(output, self.module + self.names[3])
        return self.linear(read, f"{self.module}shared_head.head")
