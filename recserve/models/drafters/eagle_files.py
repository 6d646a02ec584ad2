"""Files of EAGLE networks: the published layouts of EAGLE-1, 2, 3 and 3.1, safetensors only.

    EAGLE-1, 2    fc, layers.0.self_attn.*, layers.0.mlp.*, layers.0.post_attention_layernorm
    EAGLE-3       the same with midlayer. in place of layers.0., and hidden_norm, input_layernorm,
                  norm, lm_head, d2t, t2d
    EAGLE-3.1     also fc_norm.N or input_norm
    speculators   as EAGLE-3 with layers.0.; sizes are inside transformer_layer_config

Every field of the configuration is read, known to change nothing, or an error. The same holds for
every tensor. The rotary range is the target's, because published heads name 2048 positions.

Sources: SafeAILab/EAGLE (ea_model.py, cnets.py, cnets1.py), vLLM (llama_eagle3.py), speculators
(models/eagle3), DeepSpec (modeling/eagle3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from recserve.models.decoder import FINAL_LAYER
from recserve.models.drafters.eagle import Eagle, EagleConfig
from recserve.models.language_model import LanguageModel
from recserve.models.loading import (
    PARTS,
    UnsupportedModel,
    joined,
    opened_file,
    read_config,
    read_json,
    tensor_files,
)
from recserve.models.weight_check import is_finite

PREFIX = re.compile(r"^(model\.|midlayer\.)")
# Fields that read_config reads.
SIZES = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "rope_theta"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"),
    *("rms_norm_eps", "rope_scaling", "rope_parameters", "attention_bias", "hidden_act"),
    *("mlp_bias", "use_sliding_window", "pretraining_tp", "quantization_config", "vocab_size"),
    *("bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
# Fields that this loader reads, in the configuration or in `eagle_config`.
OWN = (
    *("draft_vocab_size", "target_hidden_size", "eagle_config", "bias", "qkv_bias"),
    *("eagle_aux_hidden_state_layer_ids", "target_layer_ids", "norm_before_fc", "fc_norm"),
    *("norm_output", "norm_before_residual", "transformer_layer_config"),
    *("speculators_model_type", "use_aux_hidden_state"),
)
# Fields without an effect on the network's outputs.
WITHOUT_EFFECT = (
    *("architectures", "torch_dtype", "dtype", "transformers_version", "initializer_range"),
    *("use_cache", "attention_dropout", "_name_or_path", "pad_token_id", "sliding_window"),
    *("max_window_layers", "layer_types", "speculators_version", "speculators_config"),
    *(
        "ttt_length",
        "step_loss_decay",
        "embed_requires_grad",
        "auto_map",
    ),
)


def load_eagle(folder: Path, target: LanguageModel) -> Eagle:
    """Loads the network of a folder, ready to draft for a target.

    Raises:
        UnsupportedModel: If a field or tensor is unknown or does not fit; the message names it,
            the expected and the actual value.
    """
    weights = _tensors(folder)
    config = read_eagle_config(read_json(folder / "config.json"), set(weights), target)
    with torch.device("meta"):
        network = Eagle(config)
    dtype, device = target.tokens.weight.dtype, target.tokens.weight.device
    _check_vocabulary(weights, config, target, folder.name)
    used: set[str] = set()

    def read(name: str) -> Tensor:
        if name not in weights:
            raise UnsupportedModel(f"{folder.name} has no tensor {name!r}")
        used.add(name)
        return weights[name]

    loaded = {}
    for name, empty in network.state_dict().items():
        weight = _assemble(name, read)
        if weight.shape != empty.shape:
            raise UnsupportedModel(
                f"{name} is {tuple(weight.shape)} in {folder.name}; its config.json and the target "
                f"require {tuple(empty.shape)}"
            )
        loaded[name] = weight.to(device, None if name == "token_map" else dtype)
        if name != "token_map" and not is_finite(loaded[name]):
            raise UnsupportedModel(f"{folder.name}: {name} holds NaN or infinity as {dtype}")
    if left := sorted(set(weights) - used - {"embed_tokens.weight", "t2d", "d2t"}):
        raise UnsupportedModel(f"{folder.name} has a tensor {left[0]!r} that has no place in EAGLE")
    network.load_state_dict(loaded, assign=True)
    return network.requires_grad_(False).eval()


def read_eagle_config(
    fields: dict[str, Any], tensors: set[str], target: LanguageModel
) -> EagleConfig:
    """Reads a configuration. The tensors' names tell EAGLE-3 from the versions before it."""
    inner = fields.get("transformer_layer_config") or {}
    nested = fields.get("eagle_config") or {}
    for name in (*fields, *inner, *nested):
        if name not in (*SIZES, *OWN, *WITHOUT_EFFECT):
            raise UnsupportedModel(f"config.json has an unknown field {name!r}")
    kind = fields.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UnsupportedModel(f"speculators_model_type is {kind!r}; this drafter reads 'eagle3'")
    fused, every = "hidden_norm.weight" in {_leaf(name) for name in tensors}, {**fields, **nested}
    own, decoder = target.config, target.config.decoder
    sizes = {"vocab_size": own.vocab_size, "max_position_embeddings": decoder.max_positions}
    model_type = inner.get("model_type") or fields.get("model_type") or "llama"
    model_type = model_type if model_type in ("llama", "qwen2", "qwen3") else "llama"
    read = read_config({**fields, **inner, "model_type": model_type, **sizes}).decoder
    biased = bool(fields.get("qkv_bias", read.attention_bias))
    sized = replace(
        read,
        max_positions=decoder.max_positions,
        qk_norm=any(name.endswith("q_norm.weight") for name in tensors),
        attention_bias=biased,
    )
    named = every.get("eagle_aux_hidden_state_layer_ids") or every.get("target_layer_ids")
    depth = decoder.num_layers
    layers = tuple(int(n) for n in named or (2, depth // 2, depth - 3)) if fused else (FINAL_LAYER,)
    if bad := [n for n in layers if not (0 <= n <= depth or (not fused and n == FINAL_LAYER))]:
        raise UnsupportedModel(
            f"the head reads layer {bad[0]} of its target, which has {depth} layers"
        )
    return EagleConfig(
        decoder=sized,
        target_size=int(fields.get("target_hidden_size") or decoder.hidden_size),
        target_layers=layers,
        vocab_size=own.vocab_size,
        draft_vocab_size=int(every.get("draft_vocab_size") or own.vocab_size),
        fused=fused,
        fc_bias=bool(fields.get("bias", True)) and not fused,
        fc_norm=bool(every.get("fc_norm", False)),
        norm_before_fc=bool(every.get("norm_before_fc", False)),
        norm_output=bool(every.get("norm_output", False)),
        norm_before_residual=bool(every.get("norm_before_residual", False)),
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors by name, without the prefixes that differ between layouts."""
    found: dict[str, Tensor] = {}
    files = tensor_files(folder)
    for path in sorted(set(files.values())):
        with opened_file(path) as file:
            for name in file.keys():  # noqa: SIM118
                short = name
                while PREFIX.match(short):
                    into = "layers.0." if short.startswith("midlayer.") else ""
                    short = into + PREFIX.sub("", short)
                found[short] = file.get_tensor(name)
    return found


def _leaf(name: str) -> str:
    return name.removeprefix("layers.0.")


def _check_vocabulary(
    weights: dict[str, Tensor], config: EagleConfig, target: LanguageModel, folder: str
) -> None:
    """Turns the offsets of `d2t` into tokens, and checks an embedding against the target's."""
    if config.draft_vocab_size < config.vocab_size:
        if "d2t" not in weights:
            raise UnsupportedModel(
                f"{folder} has no tensor 'd2t'; it proposes {config.draft_vocab_size} of "
                f"{config.vocab_size} tokens, so it needs one"
            )
        tokens = weights["d2t"].long() + torch.arange(weights["d2t"].shape[0])
        # The table holds offsets. Read as token ids, they would repeat or exceed the vocabulary.
        if int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size:
            raise UnsupportedModel(f"{folder}: d2t names tokens outside 0..{config.vocab_size - 1}")
        if len(set(tokens.tolist())) != len(tokens):
            raise UnsupportedModel(f"{folder}: d2t names a token twice; it must hold offsets")
        chosen = weights.get("t2d")
        if chosen is not None and not torch.equal(chosen.nonzero()[:, 0], tokens.sort().values):
            raise UnsupportedModel(f"{folder}: d2t and t2d name different tokens")
        weights["token_map"] = tokens
    own = weights.get("embed_tokens.weight")
    if own is not None:
        same = target.tokens.weight.cpu()
        if own.shape != same.shape or not torch.allclose(own.to(same.dtype), same, atol=1e-2):
            raise UnsupportedModel(
                f"{folder}: embed_tokens.weight differs from the target's embedding; the head is "
                "for another target"
            )


OUTSIDE = {
    "feature_norm.weight": "layers.0.hidden_norm.weight",
    "states_norm.weight": "input_norm.weight",
    "head.weight": "lm_head.weight",
}


def _assemble(name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Returns our tensor `name`."""
    first, *rest = name.split(".")
    if first == "input_norms":
        return read(f"layers.{rest[0]}.input_layernorm.weight")
    if first != "layers":
        return read(OUTSIDE.get(name, name))
    layer, part, last = rest
    return joined(f"layers.{layer}.", part, last, read)


def save_eagle(network: Eagle, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` in the published layout.

    EAGLE-3's layout is used where the network is fused, that of EAGLE-1 and 2 elsewhere.

    Raises:
        ValueError: If the network has more than one layer.
    """
    config, decoder = network.config, network.config.decoder
    if decoder.num_layers != 1:
        raise ValueError(f"the network has {decoder.num_layers} layers; the layout holds one")
    layer = "midlayer." if config.fused else "layers.0."
    heads = [decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads]
    sizes = {"qkv": [count * decoder.head_dim for count in heads]}
    sizes["gate_up"] = [decoder.intermediate_size] * 2
    weights = {}
    for name, tensor in network.state_dict().items():
        first, *rest = name.split(".")
        if name == "token_map":
            weights["d2t"] = tensor - torch.arange(len(tensor), device=tensor.device)
            weights["t2d"] = torch.isin(
                torch.arange(config.vocab_size, device=tensor.device), tensor
            )
        elif first == "input_norms":
            weights[f"{layer}input_layernorm.weight"] = tensor
        elif first == "layers":
            _, part, last = rest
            names = [f"{layer}{own}.{last}" for own in PARTS[part]]
            pieces = torch.split(tensor, sizes.get(part, [tensor.shape[0]]))
            weights.update(zip(names, pieces, strict=True))
        else:
            weights[OUTSIDE.get(name, name).replace("layers.0.", layer)] = tensor
    fields: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": decoder.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": decoder.intermediate_size,
        "rms_norm_eps": decoder.norm_eps,
        "rope_theta": decoder.rope_theta,
        "max_position_embeddings": decoder.max_positions,
        "attention_bias": decoder.attention_bias,
        "vocab_size": config.vocab_size,
    }
    if config.fused:
        fields["draft_vocab_size"] = config.draft_vocab_size
        fields["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.target_layers),
            "use_aux_hidden_state": True,
        }
        flags = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
        fields |= {name: getattr(config, name) for name in flags if getattr(config, name)}
    else:
        fields["bias"] = config.fc_bias
    folder.mkdir(parents=True, exist_ok=True)
    stored = {n: w.detach().cpu().contiguous() for n, w in weights.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
