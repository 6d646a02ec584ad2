"""Loads language models from Hugging Face folders: config.json, and safetensors, also sharded.

Families: Llama, Qwen2, Qwen3. A configuration that needs something this code does not compute is
rejected by name. Nothing that would change the logits is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recserve.models.config import DecoderConfig, RopeScaling
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.weight_check import is_finite

FAMILIES = ("llama", "qwen2", "qwen3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UnsupportedModel(ValueError):
    """A model folder needs something that is not implemented, or lacks something."""


def load_language_model(
    folder: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LanguageModel:
    """Loads the model of a folder, ready to serve.

    Args:
        folder: Folder in the Hugging Face layout.
        dtype: Type of the weights. None means the type in the configuration.
        device: Device of the weights.

    Raises:
        UnsupportedModel: If a field or tensor does not fit; the message names it, the expected and
            the actual value.
    """
    config, stored = read_folder(folder)
    dtype = stored if dtype is None else dtype
    with torch.device("meta"):
        model = LanguageModel(config)
    files = tensor_files(folder)
    weights = {}
    used: set[str] = set()
    with ExitStack() as stack:
        opened = {
            path: stack.enter_context(opened_file(path, str(device)))
            for path in sorted(set(files.values()))
        }

        def read(name: str) -> Tensor:
            if name not in files:
                raise UnsupportedModel(f"{folder.name} has no tensor {name!r}")
            used.add(name)
            tensor: Tensor = opened[files[name]].get_tensor(name).to(dtype)
            if not is_finite(tensor):
                raise UnsupportedModel(
                    f"{files[name]}: {name} holds NaN or infinity as {dtype}; the file is damaged, "
                    "or a weight is too large for this type"
                )
            return tensor

        for name, empty in model.state_dict().items():
            weight = _assemble(name, read)
            if weight.shape != empty.shape:
                raise UnsupportedModel(
                    f"{name} is {tuple(weight.shape)} in {folder.name}; config.json requires "
                    f"{tuple(empty.shape)}"
                )
            weights[name] = weight
    modules = _mtp_tensors(folder, config.decoder.num_layers)
    left = {n for n in set(files) - used if not n.endswith(UNREAD) and not n.startswith(modules)}
    if left:
        raise UnsupportedModel(
            f"{folder.name} has a tensor {min(left)!r} that its config.json has no place for"
        )
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def _mtp_tensors(folder: Path, num_layers: int) -> tuple[str, ...]:
    """Returns the prefixes of the tensors of MTP modules, which the model itself does not read."""
    count = int(read_json(folder / "config.json").get("num_nextn_predict_layers") or 0)
    return "mtp.", *(f"model.layers.{num_layers + k}." for k in range(count))


def read_folder(folder: Path) -> tuple[LanguageModelConfig, torch.dtype]:
    """Returns the configuration of a folder, and the type that it names for its weights.

    Raises:
        UnsupportedModel: If a field does not fit; the message names it.
    """
    fields = read_json(folder / "config.json")
    config = read_config(fields)
    generation = folder / "generation_config.json"
    if generation.exists():
        # Chat models end a turn with other tokens than the end-of-text token.
        more = _tokens(read_json(generation).get("eos_token_id"))
        config = replace(config, eos_tokens=tuple(dict.fromkeys(config.eos_tokens + more)))
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype is {name!r}; choose one of {sorted(DTYPES)}")
    return config, DTYPES[name]


def read_config(fields: dict[str, Any]) -> LanguageModelConfig:
    """Builds a configuration from the fields of a config.json."""
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type is {family!r}; choose one of {list(FAMILIES)}")
    for name, neutral in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("pretraining_tp", 1),
        ("quantization_config", None),
    ):
        if fields.get(name, neutral) != neutral:
            raise UnsupportedModel(f"{name} is {fields[name]!r}; only {neutral!r} is computed here")
    heads, size = _whole(fields, "num_attention_heads"), _whole(fields, "hidden_size")
    theta, scaling = _rope(fields)
    biased = bool(fields.get("attention_bias", False))
    decoder = DecoderConfig(
        hidden_size=size,
        num_layers=_whole(fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or size // heads),
        intermediate_size=_whole(fields, "intermediate_size"),
        max_positions=_whole(fields, "max_position_embeddings"),
        rope_theta=theta,
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        qk_norm=family == "qwen3",
        attention_bias=family == "qwen2" or biased,
        output_bias=family != "qwen2" and biased,
        rope_scaling=scaling,
    )
    return LanguageModelConfig(
        decoder,
        _whole(fields, "vocab_size"),
        bool(fields.get("tie_word_embeddings", False)),
        fields.get("bos_token_id"),
        _tokens(fields.get("eos_token_id")),
    )


def _tokens(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _rope(fields: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling, from the older fields or from `rope_parameters`."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModel(f"rope type is {kind!r}; only 'default' and 'llama3' are computed")
    return theta, RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def _whole(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {name} is {value!r}; a positive integer is needed")
    return value


PARTS = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
OUTSIDE = {
    "tokens.weight": "model.embed_tokens.weight",
    "decoder.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# A tied head repeats the embedding. Old files contain the RoPE frequencies, computed here anyway.
UNREAD = ("lm_head.weight", "rotary_emb.inv_freq")


def _assemble(name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Returns our tensor `name`; projections that read the same input are one matrix here."""
    if name in OUTSIDE:
        return read(OUTSIDE[name])
    _, _, layer, part, last = name.split(".")
    return joined(f"model.layers.{layer}.", part, last, read)


def joined(prefix: str, part: str, last: str, read: Callable[[str], Tensor]) -> Tensor:
    """Returns one of our tensors of a layer.

    Args:
        prefix: What precedes the names of the layer's tensors in the file.
        part: Our name of the part, a key of PARTS.
        last: `weight` or `bias`.
        read: Returns a tensor of the file.
    """
    pieces = [read(f"{prefix}{theirs}.{last}") for theirs in PARTS[part]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in read_json(index)["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise UnsupportedModel(
            f"{folder.name} has neither {single.name} nor {index.name}; weights are read from "
            "safetensors only"
        )
    with opened_file(single) as file:
        return dict.fromkeys(file.keys(), single)


def opened_file(path: Path, device: str = "cpu") -> Any:
    """Opens a safetensors file; raises UnsupportedModel if it is none."""
    try:
        return safe_open(path, framework="pt", device=device)
    except SafetensorError as error:
        raise UnsupportedModel(f"{path} is not a safetensors file: {error}") from error


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises UnsupportedModel if there is none."""
    if not path.exists():
        raise UnsupportedModel(f"{path.parent.name} has no {path.name}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
