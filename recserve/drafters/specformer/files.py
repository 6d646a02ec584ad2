"""Files of SpecFormer networks: the authors' tensor names, in safetensors.

    norms.N, down_samp                             a norm per layer that is read, and the projection
    decoder_input_norm, decoder_att                attention over the context
    positional_input_norm, positional              one vector per slot
    encoder_input_norm, encoder_att                attention between the slots
    encoder_ffn_input_norm, encoder_ffn            SwiGLU, with SiLU on `up_proj` in this layout

The names may begin with `mtp.`. The authors publish no configuration file, so `config.json` has the
fields of their training configuration. `max_ahead` is the number of slots. `hook_list` names layers
as Hugging Face's `hidden_states` does: 0 is the embedding, -1 the final state, -2 the stream before
the last layer. Without `is_causal` the slots are causal, as in the authors' code; the paper
describes both directions. All sizes are the target's. Fields and tensors are read, known to change
nothing, or an error.

Source: ShiLuohe/SpecFormer (SDDE/predicter.py, configs/qwen3.yaml).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recserve.drafters.specformer.network import Specformer, SpecformerConfig
from recserve.models.config import DecoderConfig
from recserve.models.decoder import FINAL_LAYER
from recserve.models.language_model import LanguageModel
from recserve.models.loading import (
    UnsupportedModel,
    join_rows,
    read_flag,
    read_json,
    read_tensors,
    read_whole,
)
from recserve.models.weight_check import is_finite
from recserve.models.write_tensors import write_tensors

PREFIX = "mtp."
# Fields that name a size of the target, by the name in DecoderConfig.
SIZES = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
OWN = ("max_ahead", "hook_list", "is_causal", "model_type", "vocab_size", "num_target_layers")
# Fields without an effect on the network's outputs.
WITHOUT_EFFECT = (
    *("architectures", "torch_dtype", "dtype", "transformers_version", "model_name"),
    *("version_name", "rnd_seed", "device_id", "bos_token_id", "do_distillation", "train_bs"),
    *("valid_bs", "test_size", "num_epochs", "lr_max", "lr_min", "adam_eps", "warm_up_ratio"),
    *("grad_acc_steps", "log_steps", "save_steps", "saved"),
)
# Modules of the file by ours. Several of them are joined into one matrix, in this order.
PARTS = {
    "mix": ("down_samp",),
    "context_attention.norm": ("decoder_input_norm",),
    "context_attention.qkv": tuple(f"decoder_att.{part}_proj" for part in "qkv"),
    "context_attention.output": ("decoder_att.o_proj",),
    "positional_norm": ("positional_input_norm",),
    "positional": ("positional",),
    "slot_attention.norm": ("encoder_input_norm",),
    "slot_attention.qkv": tuple(f"encoder_att.{part}_proj" for part in "qkv"),
    "slot_attention.output": ("encoder_att.o_proj",),
    "mlp_norm": ("encoder_ffn_input_norm",),
    # In the authors' code SiLU is applied to `up_proj`, which makes it the gate.
    "gate_up": ("encoder_ffn.up_proj", "encoder_ffn.gate_proj"),
    "down": ("encoder_ffn.down_proj",),
}


def load_specformer(folder: Path, target: LanguageModel) -> Specformer:
    """Loads the network of a folder, ready to draft for a target.

    Raises:
        UnsupportedModel: If a field or tensor is unknown or does not fit; the message names it, the
            expected and the actual value.
    """
    config = read_specformer_config(read_json(folder / "config.json"), target)
    weights = read_tensors(folder, lambda name: name.removeprefix(PREFIX))
    with torch.device("meta"):
        network = Specformer(config)
    dtype, device = target.tokens.weight.dtype, target.tokens.weight.device
    loaded, used = {}, set[str]()
    for name, empty in network.state_dict().items():
        pieces = {}
        for theirs in _theirs(name):
            if theirs not in weights:
                raise UnsupportedModel(f"{folder.name} has no tensor {theirs!r}")
            used.add(theirs)
            pieces[theirs] = weights[theirs]
        weight = join_rows(pieces)
        if weight.shape != empty.shape:
            raise UnsupportedModel(
                f"{' and '.join(_theirs(name))}: {tuple(weight.shape)} in {folder.name}; its "
                f"config.json and the target require {tuple(empty.shape)}"
            )
        loaded[name] = weight.to(device, dtype)
        if not is_finite(loaded[name]):
            raise UnsupportedModel(
                f"{folder.name}: {' or '.join(_theirs(name))} holds NaN or infinity as {dtype}"
            )
    if left := sorted(set(weights) - used - {"rotary_emb.inv_freq"}):
        raise UnsupportedModel(
            f"{folder.name} has a tensor {left[0]!r} that has no place in SpecFormer"
        )
    network.load_state_dict(loaded, assign=True)
    return network.requires_grad_(False).eval()


def read_specformer_config(fields: dict[str, Any], target: LanguageModel) -> SpecformerConfig:
    """Reads a configuration.

    Raises:
        UnsupportedModel: If a field is unknown, is missing, or does not fit the target.
    """
    own, decoder = target.config, target.config.decoder
    expected = {name: getattr(decoder, ours) for name, ours in SIZES.items()}
    expected |= {"model_type": "specformer", "vocab_size": own.vocab_size}
    expected["num_target_layers"] = decoder.num_layers
    for name, value in fields.items():
        if name not in (*SIZES, *OWN, *WITHOUT_EFFECT):
            raise UnsupportedModel(f"config.json has an unknown field {name!r}")
        if name in expected and value not in (None, expected[name]):
            raise UnsupportedModel(
                f"config.json: {name} is {value!r:.80}; the target requires {expected[name]!r}"
            )
    hooks = fields.get("hook_list")
    if not isinstance(hooks, list) or not hooks:
        raise UnsupportedModel(
            f"config.json: hook_list is {hooks!r:.80}; a list of layers is needed"
        )
    return SpecformerConfig(
        decoder=one_layer(target),
        target_layers=tuple(_layer(hook, decoder.num_layers) for hook in hooks),
        num_slots=read_whole(fields, "max_ahead"),
        causal=read_flag(fields, "is_causal", True),
    )


def one_layer(target: LanguageModel) -> DecoderConfig:
    """Returns the sizes of a network's attention blocks: the target's, without biases and norms."""
    return replace(
        target.config.decoder,
        num_layers=1,
        qk_norm=False,
        attention_bias=False,
        output_bias=False,
        dropout=0.0,
    )


def save_specformer(network: Specformer, folder: Path, num_target_layers: int) -> None:
    """Writes `config.json` and `model.safetensors` in the authors' layout.

    Args:
        network: The network.
        folder: Receives the files.
        num_target_layers: Layers of the target.

    Raises:
        ValueError: If the network reads the stream after the last layer, which a hook cannot name.
    """
    if num_target_layers in network.config.target_layers:
        raise ValueError(
            f"the network reads the stream after all {num_target_layers} layers; hook_list can "
            "name only the final state"
        )
    config, decoder = network.config, network.config.decoder
    heads = [decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads]
    sizes = {"qkv": [count * decoder.head_dim for count in heads]}
    sizes["gate_up"] = [decoder.intermediate_size] * 2
    weights: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        part = name.split(".")[-2]
        pieces = torch.split(tensor, sizes.get(part, [tensor.shape[0]]))
        weights.update(zip(_theirs(name), pieces, strict=True))
    fields = {name: getattr(decoder, ours) for name, ours in SIZES.items()}
    fields |= {
        "model_type": "specformer",
        "num_target_layers": num_target_layers,
        "max_ahead": config.num_slots,
        "hook_list": list(config.target_layers),
        "is_causal": config.causal,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _layer(hook: Any, depth: int) -> int:
    """Returns our number of a layer that a hook names.

    The last of Hugging Face's hidden states has the final norm, so it is the final state.
    """
    if type(hook) is not int or not -depth - 1 <= hook <= depth:
        raise UnsupportedModel(
            f"config.json: hook_list names layer {hook!r:.80} of its target, which has {depth} "
            f"layers; integers from {-depth - 1} to {depth} name one"
        )
    number = hook % (depth + 1)
    return FINAL_LAYER if number == depth else number


def _theirs(name: str) -> list[str]:
    """Returns the file's names of the tensors that our tensor `name` consists of."""
    part, last = name.rsplit(".", 1)
    if part.startswith("state_norms."):
        return [f"{part.replace('state_norms', 'norms')}.{last}"]
    return [f"{piece}.{last}" for piece in PARTS[part]]
