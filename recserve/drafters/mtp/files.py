"""Files of MTP modules: DeepSeek's, Qwen3-Next's and speculators' layouts, safetensors only.

    DeepSeek      model.layers.{L + k}.{enorm, hnorm, eh_proj, shared_head.*, embed_tokens} and the
                  layer's own tensors; L is the number of the target's layers
    Qwen3-Next    mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm} for all modules, and
                  mtp.layers.{k}.*
    speculators   mtp_layers.{k}.{input_proj, token_layernorm, hidden_layernorm, final_layernorm}
                  and the layer's own tensors; sizes are inside transformer_layer_config

A folder may hold the modules alone or beside the target's own tensors. Every field of the
configuration is read, known to change nothing, or an error. The same holds for every tensor. Two
fields of this project override a layout: `norm_output`, whether the normalised output is fed back,
and `target_layer_ids`, where `[n]` for n layers is the target's stream before its final norm.

The norms of the families Qwen3-Next and Qwen3.5 are stored as differences from 1. Their query
projection holds the gate of each head behind its query. RoPE turns the first numbers of a head;
here it turns the first numbers of both halves, so the rows of queries and keys change places.

SpecForge trains modules of Qwen3.5 and writes `model_type: qwen3` with `mtp_config`. Its first
version stores the norms as they are and has no gate. Later ones store differences from 1, with or
without a gate. Beside the module lie `embed_tokens`, or `mtp.embed_tokens`, and `mtp.lm_head`:
copies of the target's, but for a head of its own with `share_lm_head: false`.

Sources: vLLM (deepseek_mtp.py, qwen3_next_mtp.py), speculators (models/mtp, convert/mtp), SpecForge
(modeling/draft/mtp.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recserve.drafters.mtp.network import Mtp, MtpConfig
from recserve.drafters.shared.network_files import (
    LAYER_TYPES,
    SLIDING,
    StoredTensors,
    check_copy,
    check_fields,
    check_names,
    check_neutral,
    fill,
    lay_over,
    layer_tensors,
    read_sizes,
    read_windows,
    size_fields,
    target_head,
    write_folder,
)
from recserve.models.config import RopeFactors
from recserve.models.decoder import FINAL_LAYER
from recserve.models.language_model import LanguageModel
from recserve.models.loading import (
    UnsupportedModel,
    opened_file,
    read_flag,
    read_json,
    read_names,
    read_object,
    read_part,
    read_tensor,
    read_whole,
    tensor_files,
)

# Fields that this loader reads.
OWN = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "attn_output_gate", "text_config"),
    *("partial_rotary_factor", "transformer_layer_config", "speculators_model_type"),
    *("mtp_use_dedicated_embeddings", "norm_output", "target_layer_ids", "mtp_config"),
)
# Other fields without an effect on the module's outputs. Those of linear attention, whose gate
# `output_gate_type` describes, concern only the target's layers.
WITHOUT_EFFECT = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_value_head_dim", "full_attention_interval"),
    *("mamba_ssm_dtype", "output_gate_type"),
)
# Families whose norms are differences from 1, and whose attention has a gate.
CENTRED = ("qwen3_next", "qwen3_5")
TYPES = (
    *(*LAYER_TYPES, "deepseek_v3"),
    *(f"{family}{kind}" for family in CENTRED for kind in ("", "_text", "_moe", "_moe_text")),
)
TARGETS_OWN = re.compile(
    r"^((model\.(language_model\.)?)?embed_tokens|model\.(language_model\.)?norm|model\.visual"
    r"|lm_head)\.|rotary_emb\.inv_freq$"
)
TARGETS_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")
NOT_COMPUTED = {
    ".mlp.experts.": "a mixture of experts",
    ".mlp.gate.": "a mixture of experts",
    ".mlp.shared_expert": "a mixture of experts",
    ".self_attn.kv_a_": "multi-head latent attention",
    ".self_attn.q_a_": "multi-head latent attention",
}


# What the names of the tensors of other layouts begin with, and why they are not read.
OTHERS = {
    "model.mtp_layers.": "MTP modules of MiMo are not read; they join state and token in the other "
    "order",
    "model.mtp_block.": "MTP modules of ERNIE 4.5 are not read",
    "model.mtp.": "MTP modules of LongCat-Flash and MiMo-V2 are not read",
}
DEEPSEEK = re.compile(r"^model\.layers\.(\d+)\.eh_proj\.weight$")
QWEN = re.compile(r"^mtp\.layers\.(\d+)\.input_layernorm\.weight$")
SPECULATORS = re.compile(r"^mtp_layers\.(\d+)\.input_proj\.weight$")
# Our names of a module's tensors outside its layer, and theirs.
NAMES = {
    DEEPSEEK: {
        "token_norm": "enorm",
        "state_norm": "hnorm",
        "fc": "eh_proj",
        "norm": "shared_head.norm",
        "head": "shared_head.head",
    },
    QWEN: {
        "token_norm": "pre_fc_norm_embedding",
        "state_norm": "pre_fc_norm_hidden",
        "fc": "fc",
        "norm": "norm",
        "head": "lm_head",
    },
    SPECULATORS: {
        "token_norm": "token_layernorm",
        "state_norm": "hidden_layernorm",
        "fc": "input_proj",
        "norm": "final_layernorm",
    },
}


@dataclass(frozen=True)
class Layout:
    """Where the tensors of the modules lie.

    Attributes:
        kind: A key of NAMES.
        first: Layer number of the first module.
        count: Number of modules.
    """

    kind: re.Pattern[str]
    first: int
    count: int

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of the modules' tensors begin with."""
        own = tuple(self.layer(number) for number in range(self.count))
        return ("mtp.",) if self.kind is QWEN else own

    @property
    def feeds_norm(self) -> bool:
        """Whether modules in this layout feed back the normalised output."""
        return self.kind is not DEEPSEEK

    def layer(self, number: int) -> str:
        """Returns the prefix of a module's layer."""
        starts = {DEEPSEEK: "model.layers.", QWEN: "mtp.layers.", SPECULATORS: "mtp_layers."}
        return f"{starts[self.kind]}{self.first + number}."

    def outside(self, number: int, ours: str) -> str:
        """Returns the name of a module's tensor outside its layer."""
        at = "mtp." if self.kind is QWEN else self.layer(number)
        return f"{at}{NAMES[self.kind][ours]}"


def load_mtp(folder: Path, target: LanguageModel) -> Mtp:
    """Loads the modules of a folder, ready to draft for a target.

    Raises:
        UnsupportedModel: If a field or tensor is unknown or does not fit; the message names it,
            the expected and the actual value.
    """
    stored, fields = _open_tensors(folder), _fields(folder)
    layout = _layout(stored, target)
    config = _read_config(fields, stored, layout, target)
    centred = _has_centred_norms(fields)
    with torch.device("meta"):
        network = Mtp(config)
    fill(network, stored, partial(_assemble, layout, config, centred), target.tokens.weight)
    embedding, head = target.tokens.weight, target_head(target)
    copies: dict[str, Tensor | None] = {
        "mtp.embed_tokens.weight": embedding,
        "mtp.lm_head.weight": head,
        **{f"{layout.layer(n)}embed_tokens.weight": embedding for n in range(layout.count)},
    }
    for name in sorted(copies.keys() & stored.unread()):
        check_copy(stored.read(name), copies[name], name, folder.name)
    _check_targets_own(stored, target, centred)
    if left := sorted(name for name in stored.unread() if name.startswith(layout.prefixes)):
        raise UnsupportedModel(
            f"{folder.name} has a tensor {left[0]!r} that has no place in an MTP module"
        )
    return network.requires_grad_(False).eval()


def _check_targets_own(stored: StoredTensors, target: LanguageModel, centred: bool) -> None:
    """Compares what a folder of target and modules holds beside the layers with the target."""
    norm = target.decoder.norm.weight
    theirs = {
        "embed_tokens.weight": target.tokens.weight,
        "norm.weight": norm - 1 if centred else norm,
        "lm_head.weight": target_head(target),
    }
    for name in sorted(stored.unread()):
        own = re.sub(r"^model\.(language_model\.)?", "", name)
        if TARGETS_OWN.match(name) and own in theirs:
            check_copy(stored.read(name), theirs[own], name, stored.folder)


def read_mtp_config(folder: Path, target: LanguageModel) -> MtpConfig:
    """Returns the configuration of a folder's modules.

    Raises:
        UnsupportedModel: If a field or the name of a tensor does not fit.
    """
    stored = _open_tensors(folder)
    return _read_config(_fields(folder), stored, _layout(stored, target), target)


def _open_tensors(folder: Path) -> StoredTensors:
    files = tensor_files(folder)

    def load(name: str) -> Tensor:
        with opened_file(files[name]) as file:
            return read_tensor(file, name, files[name])

    return StoredTensors(folder.name, set(files), load)


def _fields(folder: Path) -> dict[str, Any]:
    """Returns the fields of config.json with those of the objects that hold the layers' sizes."""
    fields = read_json(folder / "config.json")
    for place in ("text_config", "transformer_layer_config"):
        inner = read_object(fields, place)
        check_fields(inner, (*OWN, *WITHOUT_EFFECT), place)
        fields = lay_over(fields, inner, place)
    return fields


def _layout(stored: StoredTensors, target: LanguageModel) -> Layout:
    """Finds the layout by the names of the tensors; refuses names that belong to none."""
    for kind in NAMES:
        numbers = [int(match[1]) for name in stored.names if (match := kind.match(name))]
        if numbers:
            layout = Layout(kind, min(numbers), len(numbers))
            break
    else:
        for prefix, why in OTHERS.items():
            if found := sorted(name for name in stored.names if name.startswith(prefix)):
                raise UnsupportedModel(f"{stored.folder} has a tensor {found[0]!r}: {why}")
        raise UnsupportedModel(
            f"{stored.folder} holds no MTP module: it has none of the tensors "
            f"'model.layers.{target.config.decoder.num_layers}.eh_proj.weight', 'mtp.fc.weight', "
            "'mtp_layers.0.input_proj.weight'"
        )
    depth = target.config.decoder.num_layers
    for name in sorted(stored.names):
        if not name.startswith(layout.prefixes):
            layer = TARGETS_LAYER.match(name)
            if not (TARGETS_OWN.search(name) or (layer and int(layer[1]) < depth)):
                raise UnsupportedModel(
                    f"{stored.folder} has a tensor {name!r} that has no place in an MTP module"
                )
            continue
        for part, what in NOT_COMPUTED.items():
            if part in name:
                raise UnsupportedModel(
                    f"{stored.folder}: {name} belongs to {what}; MTP modules with plain attention "
                    "and a dense MLP are computed here"
                )
    return layout


def _read_config(
    fields: dict[str, Any], stored: StoredTensors, layout: Layout, target: LanguageModel
) -> MtpConfig:
    check_fields(fields, (*OWN, *WITHOUT_EFFECT))
    check_neutral(fields, {"speculators_model_type": "mtp"})
    if read_flag(fields, "mtp_use_dedicated_embeddings"):
        raise UnsupportedModel("mtp_use_dedicated_embeddings is True; only False is computed here")
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if read_whole(fields, name, layout.count) != layout.count:
            raise UnsupportedModel(
                f"{stored.folder}: {name} is {fields[name]}; it holds {layout.count} modules"
            )
    centred = str(fields.get("model_type")).startswith(CENTRED)
    shares_head = _shares_head(fields, layout)
    names = {name for name in stored.names if name.startswith(layout.prefixes)}
    share, whole = _rotary_share(fields, centred)
    decoder = replace(read_sizes(whole, names, target, TYPES), num_layers=layout.count)
    if share != 1.0 and isinstance(decoder.rope_scaling, RopeFactors):
        raise UnsupportedModel(
            f"partial_rotary_factor is {share}; with scaled positions only 1.0 is computed"
        )
    _refuse_windows(fields, decoder.max_positions)
    gated = read_flag(fields, "attn_output_gate", centred)
    if gated and decoder.attention_bias:
        raise UnsupportedModel("attention_bias is True; with an output gate only False is computed")
    heads = [name for name in names if name.endswith(".shared_head.head.weight")]
    own_head = bool(heads) if shares_head is None else not shares_head
    layers, depth = fields.get("target_layer_ids"), target.config.decoder.num_layers
    layers = [FINAL_LAYER] if layers is None else layers
    if layers not in ([FINAL_LAYER], [depth]) or type(layers[0]) is not int:
        raise UnsupportedModel(
            f"target_layer_ids is {layers}; an MTP module reads the final state, or [{depth}]"
        )
    return MtpConfig(
        decoder=decoder,
        vocab_size=target.config.vocab_size,
        feeds_norm=read_flag(fields, "norm_output", layout.feeds_norm),
        first_token=layout.feeds_norm,
        gated=gated,
        rotary_dim=None if share == 1.0 else int(decoder.head_dim * share),
        own_head=own_head,
        target_layer=layers[0],
    )


def _shares_head(fields: dict[str, Any], layout: Layout) -> bool | None:
    """Returns whether `mtp_config` says that the target's head is read; None without the field."""
    if fields.get("mtp_config") is None:
        return None
    inner = read_object(fields, "mtp_config")
    check_names(inner, ("share_lm_head",), "mtp_config")
    if layout.kind is not QWEN:
        raise UnsupportedModel("config.json: mtp_config is read beside tensors 'mtp.*' only")
    _has_centred_norms(fields)
    return read_flag(inner, "share_lm_head", True, file="mtp_config of config.json")


def _has_centred_norms(fields: dict[str, Any]) -> bool:
    """Returns whether the norms are stored as differences from 1.

    Raises:
        UnsupportedModel: If the file is SpecForge's and does not tell.
    """
    if str(fields.get("model_type")).startswith(CENTRED):
        return True
    if fields.get("mtp_config") is None:
        return False
    if read_flag(fields, "attn_output_gate", False):
        return True
    raise UnsupportedModel(
        f"config.json has mtp_config, model_type {fields.get('model_type')!r:.80} and no "
        "attn_output_gate: SpecForge has written the norms of such modules as they are and as "
        "differences from 1. Remove mtp_config if they are stored as they are; if as differences, "
        "set model_type 'qwen3_5', attn_output_gate false and partial_rotary_factor (1.0 if the "
        "file has none)"
    )


def _refuse_windows(fields: dict[str, Any], num_positions: int) -> None:
    """Raises UnsupportedModel for windows; `layer_types` may list the target's layers."""
    kinds = set(read_names(fields, "layer_types"))
    if unknown := kinds - {"full_attention", "linear_attention", SLIDING}:
        raise UnsupportedModel(
            f"config.json: layer_types names {min(unknown)!r}, which is not computed here"
        )
    if SLIDING not in kinds and (kinds or not read_flag(fields, "use_sliding_window")):
        return
    windows = read_windows({**fields, "layer_types": [SLIDING]}, 1, num_positions)
    if windows is not None:
        raise UnsupportedModel(
            f"config.json: its layers have windows of {windows[0]} positions; MTP modules without "
            "windows are computed here"
        )


def _rotary_share(fields: dict[str, Any], centred: bool) -> tuple[float, dict[str, Any]]:
    """Returns which part of a head RoPE turns, and the fields without it."""
    whole = {name: value for name, value in fields.items() if name != "partial_rotary_factor"}
    shares = [fields.get("partial_rotary_factor")]
    for place in ("rope_scaling", "rope_parameters"):
        rope = fields.get(place)
        if isinstance(rope, dict):
            shares.append(rope.get("partial_rotary_factor"))
            whole[place] = {n: v for n, v in rope.items() if n != "partial_rotary_factor"}
    shares = [share for share in shares if share is not None]
    if len(set(map(repr, shares))) > 1:
        raise UnsupportedModel(
            f"config.json names partial_rotary_factor {shares}; remove the wrong ones"
        )
    if not shares:
        return (0.25 if centred else 1.0), whole
    (share,) = shares[:1]
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor is {share!r}; a number above 0 and up to 1 is "
            "needed"
        )
    return float(share), whole


def _assemble(
    layout: Layout, config: MtpConfig, centred: bool, name: str, read: Callable[[str], Tensor]
) -> Tensor:
    """Returns our tensor `name`."""
    _, block, first, *rest = name.split(".")
    number = int(block)
    at = layout.layer(number)
    if first != "layer":
        tensor = read(f"{layout.outside(number, first)}.{rest[0]}")
    elif rest[0] == "gate":
        both = read(f"{at}self_attn.q_proj.weight")
        return _by_heads(both, config, 2)[:, 1].flatten(0, 1)
    else:
        tensor = read_part(at, rest[0], rest[1], partial(_piece, config, read))
    if "norm" in name and centred:
        tensor = tensor + 1.0
    return tensor


def _piece(config: MtpConfig, read: Callable[[str], Tensor], name: str) -> Tensor:
    """Reads a tensor of the layer: queries without their gate, rows in the order of our RoPE."""
    tensor = read(name)
    part = name.split(".")[-2]
    if part == "q_proj" and config.gated:
        tensor = _by_heads(tensor, config, 2)[:, 0].flatten(0, 1)
    if part not in ("q_proj", "k_proj", "q_norm", "k_norm") or config.rotary_dim is None:
        return tensor
    dim, turned = config.decoder.head_dim, config.rotary_dim
    if tensor.shape[0] % dim:
        raise UnsupportedModel(f"{name} has {tensor.shape[0]} rows; heads have {dim} each")
    half, rest = turned // 2, (dim - turned) // 2
    places = torch.arange(dim)
    parts = torch.split(places, [half, half, rest, rest])
    order = torch.cat([parts[0], parts[2], parts[1], parts[3]])
    return tensor.view(-1, dim, *tensor.shape[1:])[:, order].flatten(0, 1)


def _by_heads(tensor: Tensor, config: MtpConfig, count: int) -> Tensor:
    """Splits rows by head, and within a head into `count` parts: [H, count, D, ...]."""
    heads, dim = config.decoder.num_heads, config.decoder.head_dim
    if tensor.shape[0] != heads * count * dim:
        raise UnsupportedModel(
            f"q_proj has {tensor.shape[0]} rows; attn_output_gate needs {heads * count * dim}"
        )
    return tensor.view(heads, count, dim, *tensor.shape[1:])


def save_mtp(network: Mtp, folder: Path, target_layers: int) -> None:
    """Writes `config.json` and `model.safetensors` in DeepSeek's layout.

    Without heads of their own, the modules' readers use the target's.

    Args:
        network: The module.
        folder: Where to.
        target_layers: Layers of the target. The modules' layers get the numbers after them.

    Raises:
        ValueError: If the layout cannot express the module.
    """
    config = network.config
    layout = Layout(DEEPSEEK, target_layers, config.decoder.num_layers)
    unlike = config.feeds_norm or config.first_token or config.gated or config.rotary_dim
    if unlike or config.target_layer != FINAL_LAYER:
        raise ValueError(
            "DeepSeek's layout holds modules that feed back their output, without gate"
        )
    weights: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        _, block, first, *rest = name.split(".")
        number = int(block)
        if first == "layer":
            at = layout.layer(number)
            weights |= layer_tensors(at, rest[0], rest[1], tensor, config.decoder)
        else:
            weights[f"{layout.outside(number, first)}.{rest[0]}"] = tensor
    fields = size_fields(config.decoder, config.vocab_size)
    fields |= {"num_hidden_layers": target_layers, "num_nextn_predict_layers": layout.count}
    write_folder(fields, weights, folder)
