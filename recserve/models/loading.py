"""Loads language models from Hugging Face folders: config.json, and safetensors, also sharded.

Families: Llama, Qwen2, Qwen3. A configuration that needs something this code does not compute is
rejected by name. Nothing that would change the logits is ignored.
"""

from __future__ import annotations

import json
import math
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
from recserve.models.weight_check import largest

FAMILIES = ("llama", "qwen2", "qwen3")
MAX_LAYERS = 1000
# Products with larger weights leave the range of float32.
MAX_WEIGHT = 2.0**64
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
            size = largest(tensor)
            if not math.isfinite(size):
                raise UnsupportedModel(
                    f"{files[name]}: {name} holds NaN or infinity as {dtype}; the file is damaged, "
                    "or a weight is too large for this type"
                )
            if size > MAX_WEIGHT:
                raise UnsupportedModel(
                    f"{files[name]}: {name} holds a number of size {size:.3g}; weights up to "
                    f"{MAX_WEIGHT:.3g} are computed here"
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
        named = read_json(generation).get("eos_token_id")
        more = _tokens(generation.name, "eos_token_id", named, config.vocab_size)
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
    num_layers = _whole(fields, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise UnsupportedModel(
            f"config.json: num_hidden_layers is {num_layers}; expected at most {MAX_LAYERS}"
        )
    decoder = DecoderConfig(
        hidden_size=size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_whole(fields, "num_key_value_heads", heads),
        head_dim=_whole(fields, "head_dim", size // heads),
        intermediate_size=_whole(fields, "intermediate_size"),
        max_positions=_whole(fields, "max_position_embeddings"),
        rope_theta=theta,
        norm_eps=_positive(fields, "rms_norm_eps", 1e-6),
        qk_norm=family == "qwen3",
        attention_bias=family == "qwen2" or biased,
        output_bias=family != "qwen2" and biased,
        rope_scaling=scaling,
    )
    vocab_size = _whole(fields, "vocab_size")
    begin = _tokens("config.json", "bos_token_id", fields.get("bos_token_id"), vocab_size)
    return LanguageModelConfig(
        decoder,
        vocab_size,
        bool(fields.get("tie_word_embeddings", False)),
        begin[0] if begin else None,
        _tokens("config.json", "eos_token_id", fields.get("eos_token_id"), vocab_size),
    )


def _tokens(file: str, name: str, value: object, vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens of a field: none, one, or a list. Raises UnsupportedModel."""
    if value is None:
        return ()
    tokens = value if isinstance(value, list) else [value]
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UnsupportedModel(
                f"{file}: {name} has {token!r}; a token number from 0 to {vocab_size - 1} is needed"
            )
    return tuple(tokens)


def _rope(fields: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling, from the older fields or from `rope_parameters`."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = _positive(rope, "rope_theta", _positive(fields, "rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModel(f"rope type is {kind!r}; only 'default' and 'llama3' are computed")
    return theta, RopeScaling(
        _positive(rope, "factor"),
        _positive(rope, "low_freq_factor"),
        _positive(rope, "high_freq_factor"),
        _whole(rope, "original_max_position_embeddings"),
    )


def _positive(fields: dict[str, Any], name: str, default: float | None = None) -> float:
    """Returns a number of a configuration; a missing one or null gives the default."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"config.json: {name} is {value!r}; a number above 0 is needed")
    return float(value)


def _whole(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
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
        return {name: folder / file for name, file in weight_map(index).items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise UnsupportedModel(
            f"{folder.name} has neither {single.name} nor {index.name}; weights are read from "
            "safetensors only"
        )
    with opened_file(single) as file:
        return dict.fromkeys(file.keys(), single)


def weight_map(index: Path) -> dict[str, str]:
    """Returns the file name of each tensor from an index of shards.

    Raises:
        UnsupportedModel: If the field `weight_map` is missing, or names a file of another folder.
    """
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise UnsupportedModel(f"{index}: weight_map is missing; it must name each tensor's file")
    for tensor, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UnsupportedModel(
                f"{index}: weight_map gives {file!r} for {tensor}; a file of this folder is needed"
            )
    return names


def opened_file(path: Path, device: str = "cpu") -> Any:
    """Opens a safetensors file; raises UnsupportedModel if it is none."""
    try:
        return safe_open(path, framework="pt", device=device)
    except SafetensorError as error:
        raise UnsupportedModel(f"{path} is not a safetensors file: {error}") from error
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises UnsupportedModel if there is none."""
    if not path.exists():
        raise UnsupportedModel(f"{path.parent.name} has no {path.name}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
