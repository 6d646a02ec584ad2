"""Files of mask tokens: a LoRA adapter in PEFT's layout, and the masks with their sampler head.

    adapter_config.json          PEFT's configuration of the adapter
    adapter_model.safetensors    base_model.model.model.layers.{i}.{part}.lora_{A,B}.weight
    mtp_head.safetensors         mask_embeddings [k, E], sampler.{0,1}.{linear,norm}.{weight,bias}

Every field of the configuration is read, known to change nothing, or an error. The same holds for
every tensor. The paper publishes no files, so the third one is this project's own.

Source: huggingface/peft (LoraConfig, save_pretrained).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recserve.drafters.mask_tokens.network import MaskTokens, MaskTokensConfig
from recserve.files import gguf_hint
from recserve.models.language_model import LanguageModel
from recserve.models.loading import (
    PARTS,
    UnsupportedModel,
    opened_file,
    read_flag,
    read_json,
    read_number,
    read_tensor,
)
from recserve.models.weight_check import is_finite
from recserve.models.write_tensors import write_tensors

CONFIG, ADAPTER, HEAD = "adapter_config.json", "adapter_model.safetensors", "mtp_head.safetensors"
PREFIX = "base_model.model.model.layers."
LORA_PARTS = ("qkv", "output", "gate_up", "down")
MAX_RANK = 1 << 14
# Fields that must be absent or have the value that plain LoRA has.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Other initialisations (pissa, olora, loftq, corda) change the weights of the target too.
    "init_lora_weights": (True, False, None, "gaussian", "eva"),
    **dict.fromkeys(
        ("fan_in_fan_out", "use_dora", "lora_bias", "use_qalora", "alora_invocation_tokens"),
        (False, None),
    ),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "megatron_config"), ({}, None)),
    **dict.fromkeys(
        (
            *("layers_to_transform", "layers_pattern", "modules_to_save", "layer_replication"),
            *("exclude_modules", "trainable_token_indices", "target_parameters", "arrow_config"),
        ),
        (None, [], {}),
    ),
}
OWN = ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules")
WITHOUT_EFFECT = (
    *("task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config"),
    *("megatron_core", "qalora_group_size", "runtime_config", "peft_version"),
    "ensure_weight_tying",
)


def load_mask_tokens(folder: Path, target: LanguageModel) -> MaskTokens:
    """Loads the mask tokens of a folder, ready to draft for a target.

    Projections that the adapter does not name are not updated.

    Raises:
        UnsupportedModel: If a field or tensor is unknown or does not fit; the message names it,
            the expected and the actual value.
    """
    fields = read_json(folder / CONFIG)
    rank, alpha = _read_config(fields, folder.name)
    named = _named_modules(fields, target.config.decoder.num_layers, folder.name)
    adapter, head = _tensors(folder / ADAPTER), _tensors(folder / HEAD)
    masks = head.pop("mask_embeddings", None)
    if masks is None or masks.ndim != 2 or not len(masks):
        raise UnsupportedModel(f"{HEAD} of {folder.name} has no tensor 'mask_embeddings' [k, E]")
    config = MaskTokensConfig(target.config.decoder, len(masks), rank, alpha)
    with torch.device("meta"):
        network = MaskTokens(config)
    weights = {"lora.embeddings": masks, **head}
    if other := sorted(name for name in head if not name.startswith("sampler.")):
        raise UnsupportedModel(f"{HEAD} of {folder.name} has an unknown tensor {other[0]!r}")
    used: set[str] = set()
    for layer in range(target.config.decoder.num_layers):
        for part in LORA_PARTS:
            weights |= _part(adapter, network, (layer, part), named, used)
    if other := sorted(set(adapter) - used):
        raise UnsupportedModel(
            f"{ADAPTER} of {folder.name} has a tensor {other[0]!r} that its target_modules or the "
            "target has no place for"
        )
    expected, dtype = network.state_dict(), target.tokens.weight.dtype
    if unlike := sorted(set(expected) ^ set(weights)):
        raise UnsupportedModel(f"{folder.name} lacks or has too much: {unlike[0]!r}")
    cast = {}
    for name, empty in expected.items():
        if weights[name].shape != empty.shape:
            raise UnsupportedModel(
                f"{name} is {tuple(weights[name].shape)} in {folder.name}; its configuration and "
                f"the target require {tuple(empty.shape)}"
            )
        cast[name] = weights[name].to(target.tokens.weight.device, dtype)
        if not is_finite(cast[name]):
            raise UnsupportedModel(f"{folder.name}: {name} holds NaN or infinity as {dtype}")
    network.load_state_dict(cast, assign=True)
    network.lora.folder = folder.resolve()
    return network.requires_grad_(False).eval()


def _read_config(fields: dict[str, Any], folder: str) -> tuple[int, float]:
    """Returns rank and alpha of a PEFT configuration, alpha as for a factor of alpha / r."""
    for name, value in fields.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise UnsupportedModel(
                    f"{CONFIG} of {folder}: {name} is {value!r}; only plain LoRA is computed here"
                )
        elif name not in OWN and name not in WITHOUT_EFFECT:
            raise UnsupportedModel(f"{CONFIG} of {folder} has an unknown field {name!r}")
    if fields.get("peft_type") != "LORA":
        raise UnsupportedModel(f"peft_type is {fields.get('peft_type')!r} in {folder}, not 'LORA'")
    rank, where = fields.get("r"), f"{CONFIG} of {folder}"
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise UnsupportedModel(
            f"{where}: r is {rank!r:.80}; an integer from 1 to {MAX_RANK} is needed"
        )
    alpha = read_number(fields, "lora_alpha", file=where)
    return rank, alpha * rank**0.5 if read_flag(fields, "use_rslora", file=where) else alpha


def _named_modules(fields: dict[str, Any], num_layers: int, folder: str) -> set[str]:
    """Returns the modules, as `0.self_attn.q_proj`, that `target_modules` names in PEFT's sense."""
    wanted = fields.get("target_modules")
    modules = [
        f"{layer}.{name}"
        for layer in range(num_layers)
        for part in LORA_PARTS
        for name in PARTS[part]
    ]
    if wanted == "all-linear":
        return set(modules)
    if isinstance(wanted, str):
        try:
            return {m for m in modules if re.fullmatch(wanted, f"model.layers.{m}")}
        except re.error as error:
            raise UnsupportedModel(
                f"{CONFIG} of {folder}: target_modules is {wanted!r:.80}, which is no regular "
                f"expression: {error}"
            ) from error
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise UnsupportedModel(
            f"{CONFIG} of {folder}: target_modules is {wanted!r:.80}; a list of names, a regular "
            "expression or 'all-linear' is needed"
        )
    found: set[str] = set()
    for target in wanted:
        own = {m for m in modules if f".model.layers.{m}".endswith(f".{target}")}
        if not own:
            raise UnsupportedModel(
                f"{CONFIG} of {folder}: target_modules names {target!r:.80}, which has no LoRA"
            )
        found |= own
    return found


def _part(
    adapter: dict[str, Tensor],
    network: MaskTokens,
    place: tuple[int, str],
    named: set[str],
    used: set[str],
) -> dict[str, Tensor]:
    """Returns our tensors of a layer's part, and adds the names of those read to `used`.

    Args:
        adapter: Tensors of the file.
        network: Network with the expected shapes.
        place: Layer and part.
        named: Modules that have an update. All others get zeros.
        used: Names that were read.
    """
    layer, part = place
    own = f"lora.layers.{layer}.{part}"
    expected = network.state_dict()
    downs, weights = [], {}
    inner, rank = expected[f"{own}.down"].shape[1], network.config.rank
    for number, module in enumerate(f"{layer}.{name}" for name in PARTS[part]):
        up = expected[f"{own}.ups.{number}"]
        shapes = {"A": (rank, inner), "B": tuple(up.shape)}
        pair = {}
        for side, shape in shapes.items():
            name = f"{PREFIX}{module}.lora_{side}.weight"
            pair[side] = adapter.get(name, torch.zeros(shape))
            if module not in named:
                continue
            used.add(name)
            if name not in adapter:
                raise UnsupportedModel(f"{ADAPTER} has no tensor {name!r}")
            if pair[side].shape != shape:
                raise UnsupportedModel(
                    f"{name} is {tuple(pair[side].shape)}; r and the target require {shape}"
                )
        downs.append(pair["A"])
        weights[f"{own}.ups.{number}"] = pair["B"]
    return weights | {f"{own}.down": torch.cat(downs)}


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise UnsupportedModel(f"{path.parent.name} has no {path.name}{gguf_hint(path.parent)}")
    with opened_file(path) as file:
        return {name: read_tensor(file, name, path) for name in file.keys()}  # noqa: SIM118


def save_mask_tokens(network: MaskTokens, folder: Path) -> None:
    """Writes the three files of a network."""
    adapter: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        first, *rest = name.split(".")
        if first == "sampler":
            head[name] = tensor
        elif name == "lora.embeddings":
            head["mask_embeddings"] = tensor
        else:
            _, layer, part, kind = rest[:4]
            names = [f"{PREFIX}{layer}.{module}.lora_" for module in PARTS[part]]
            if kind == "down":
                pieces = tensor.chunk(len(names))
                adapter |= {f"{n}A.weight": a for n, a in zip(names, pieces, strict=True)}
            else:
                adapter[f"{names[int(rest[-1])]}B.weight"] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    for file, weights in ((ADAPTER, adapter), (HEAD, head)):
        write_tensors(weights, folder / file)
    modules = sorted({m.split(".")[-1] for part in LORA_PARTS for m in PARTS[part]})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": network.config.rank,
        "lora_alpha": network.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": modules,
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
