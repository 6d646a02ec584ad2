"""Files of Hydra's heads: the published layout, safetensors only.

    mlp           hydra_mlp.{i}.{j}.linear.{weight,bias}, hydra_lm_head.{i}.{weight,bias}
    prefix-mlp    hydra_mlp.{i}.{2j+1}..., hydra_lm_head.{i}.1.{weight,bias}, because Dropout takes
                  the even places; prefix_embeding_layer.* (sic), one Llama layer and its norm
    grounded      also hydra_mlp.{i}.{first block}.res_connection.{weight,bias}

Blocks after the first are one module, which the layout stores several times. `input_embed_fn` is
a copy of the target's embedding. Every field and every tensor is read, known to change nothing, or
an error. `python -m benchmarks.text.convert_medusa` converts a `.pt` file offline.

Source: zankner/Hydra (hydra_model.py, mlp_head.py, prefix_mlp_head.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from recserve.models.decoder import FINAL_LAYER
from recserve.models.drafters.hydra import Hydra, HydraConfig
from recserve.models.language_model import LanguageModel
from recserve.models.loading import PARTS, UnsupportedModel, joined, opened_file, read_json
from recserve.models.weight_check import is_finite

FILE = "hydra_lm_head.safetensors"
ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
PREFIX = "prefix_embeding_layer."
OWN = (
    *("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads"),
    "hidden_state_offset",
)
# Fields without an effect on the heads' outputs.
WITHOUT_EFFECT = (
    *("base_model_name_or_path", "architectures", "model_type", "torch_dtype", "dtype"),
    *("transformers_version", "_name_or_path", "dropout_rate"),
)
# Embedding and rotary table of the prefix layer: it reads states, and computes its table.
UNREAD = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
EMBEDDING = "input_embed_fn.weight"
EVEN = re.compile(r"^hydra_mlp\.\d+\.\d*[02468]\.")


def load_hydra(folder: Path, target: LanguageModel) -> Hydra:
    """Loads the heads of a folder, ready to draft for a target.

    Raises:
        UnsupportedModel: If a field or tensor is unknown or does not fit; the message names it,
            the expected and the actual value.
    """
    weights = _tensors(folder)
    config = read_hydra_config(read_json(folder / "config.json"), target)
    with torch.device("meta"):
        network = Hydra(config)
    dtype, device = target.tokens.weight.dtype, target.tokens.weight.device
    used: set[str] = set()
    if config.prefix and any(EVEN.match(name) for name in weights):
        raise UnsupportedModel(
            f"{folder.name} has blocks at even places, such as 'hydra_mlp.0.0'; hydra_head_arch "
            "'prefix-mlp' has Dropout there, and its blocks at odd places"
        )

    def read(name: str) -> Tensor:
        if name not in weights:
            arch = "prefix-mlp" if config.prefix else "mlp"
            raise UnsupportedModel(
                f"{folder.name} has no tensor {name!r}, which hydra_head_arch {arch!r} with "
                f"{config.num_heads} heads of {config.num_layers} blocks needs"
            )
        used.add(name)
        return weights[name]

    loaded = {}
    for name, empty in network.state_dict().items():
        weight = _assemble(name, config, read)
        if weight.shape != empty.shape:
            raise UnsupportedModel(
                f"{_theirs(name, config)[0]} is {tuple(weight.shape)} in {folder.name}; its "
                f"config.json and the target require {tuple(empty.shape)}"
            )
        loaded[name] = weight.to(device, dtype)
        if not is_finite(loaded[name]):
            raise UnsupportedModel(f"{folder.name}: {name} holds NaN or infinity as {dtype}")
    if left := sorted(set(weights) - used - {*UNREAD, EMBEDDING}):
        raise UnsupportedModel(
            f"{folder.name} has a tensor {left[0]!r} that its config.json has no place for"
        )
    own = weights.get(EMBEDDING)
    if own is not None:
        same = target.tokens.weight.cpu()
        if own.shape != same.shape or not torch.allclose(own.to(same.dtype), same, atol=1e-2):
            raise UnsupportedModel(
                f"{folder.name}: {EMBEDDING} differs from the target's embedding; the heads are "
                "for another target"
            )
    network.load_state_dict(loaded, assign=True)
    return network.requires_grad_(False).eval()


def read_hydra_config(fields: dict[str, Any], target: LanguageModel) -> HydraConfig:
    """Reads a configuration; absent fields have the defaults of the published code.

    Raises:
        UnsupportedModel: If a field is unknown, or its value is not computed here.
    """
    for name in fields:
        if name not in (*OWN, *WITHOUT_EFFECT):
            raise UnsupportedModel(f"config.json has an unknown field {name!r}")
    arch = fields.get("hydra_head_arch", "mlp")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"hydra_head_arch is {arch!r}; only {' and '.join(map(repr, ARCHITECTURES))} are "
            "computed here"
        )
    offset, depth = int(fields.get("hidden_state_offset", 0)), target.config.decoder.num_layers
    if not 0 <= offset <= depth:
        raise UnsupportedModel(
            f"hidden_state_offset is {offset}; the target has {depth} layers, so it must be "
            f"0..{depth}"
        )
    return HydraConfig(
        decoder=target.config.decoder,
        vocab_size=target.config.vocab_size,
        num_heads=int(fields.get("hydra_num_heads", 4)),
        num_layers=int(fields.get("hydra_num_layers", 1)),
        grounded=bool(fields.get("grounded_heads", False)),
        prefix=ARCHITECTURES[arch],
        layer=depth - offset if offset else FINAL_LAYER,
    )


def save_hydra(network: Hydra, folder: Path) -> None:
    """Writes `config.json` and `hydra_lm_head.safetensors` in the published layout."""
    config = network.config
    decoder = config.decoder
    heads = [decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads]
    sizes = {"qkv": [count * decoder.head_dim for count in heads]}
    sizes["gate_up"] = [decoder.intermediate_size] * 2
    weights: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        theirs = _theirs(name, config)
        if name.startswith("prefix."):
            part = name.split(".")[-2]
            pieces = torch.split(tensor, sizes.get(part, [tensor.shape[0]]))
        else:
            pieces = (tensor,) * len(theirs)
        weights.update(zip(theirs, pieces, strict=True))
    fields = {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": "prefix-mlp" if config.prefix else "mlp",
        "grounded_heads": config.grounded,
        "hidden_state_offset": 0
        if config.layer == FINAL_LAYER
        else decoder.num_layers - config.layer,
    }
    folder.mkdir(parents=True, exist_ok=True)
    # The copies of a block share memory, which safetensors rejects.
    save_file({n: w.detach().cpu().clone() for n, w in weights.items()}, folder / FILE)
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _theirs(name: str, config: HydraConfig) -> list[str]:
    """Returns the published names of our tensor; several if it is stored in parts or copies."""
    kind, *rest = name.split(".")
    if kind == "prefix":
        if rest[0] == "norm":
            return [f"{PREFIX}norm.weight"]
        _, layer, part, last = rest
        return [f"{PREFIX}layers.{layer}.{own}.{last}" for own in PARTS[part]]
    head, part, last = rest
    # With Dropout, block j lies at place 2 j + 1, and the output matrix at place 1.
    if part == "output":
        place = ".1" if config.prefix else ""
        return [f"hydra_lm_head.{head}{place}.{last}"]
    first = 1 if config.grounded else 0
    blocks = range(first, config.num_layers) if part == "shared" else range(1)
    module = "res_connection" if part == "residual" else "linear"
    places = [2 * block + 1 if config.prefix else block for block in blocks]
    return [f"hydra_mlp.{head}.{place}.{module}.{last}" for place in places]


def _assemble(name: str, config: HydraConfig, read: Callable[[str], Tensor]) -> Tensor:
    """Returns our tensor `name`. Raises UnsupportedModel if the copies of a block differ."""
    theirs = _theirs(name, config)
    if name.startswith("prefix.layers."):
        _, _, layer, part, last = name.split(".")
        return joined(f"{PREFIX}layers.{layer}.", part, last, read)
    copies = [read(each) for each in theirs]
    for each, copy in zip(theirs[1:], copies[1:], strict=True):
        if not torch.equal(copy, copies[0]):
            raise UnsupportedModel(
                f"{theirs[0]} and {each} differ; the blocks of a head after the first are one "
                "module in Hydra"
            )
    return copies[0]


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / FILE
    if not path.exists():
        hint = ""
        if pickled := sorted(each.name for each in folder.glob("*.pt")):
            command = "python -m benchmarks.text.convert_medusa"
            hint = f"; convert {pickled[0]} offline with `{command}`"
        raise UnsupportedModel(f"{folder.name} has no {FILE}{hint}")
    with opened_file(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
