"""Files of EAGLE networks: the published layouts of EAGLE-1, 2, 3 and 3.1, safetensors only.

    EAGLE-1, 2    fc, layers.0.self_attn.*, layers.0.mlp.*, layers.0.post_attention_layernorm
    HASS          also embed_layernorm, hidden_layernorm, lm_head_layernorm; or, with
                  add_para_norm, embedding_layernorm, hidden_states_layernorm
    EAGLE-3       the same with midlayer. in place of layers.0., and hidden_norm, input_layernorm,
                  norm, lm_head, d2t, t2d
    EAGLE-3.1     also fc_norm.N or input_norm
    speculators   as EAGLE-3 with layers.0.; sizes are inside transformer_layer_config. Its EAGLE-1
                  has fusion_fc, transformer.*, post_embedding_layernorm, pre_lm_head_layernorm
    vLLM          EAGLE-1 with all fields inside model, and eagle_fc_bias
    P-EAGLE       as EAGLE-3 of speculators with layers.N., mask_hidden, often embed_tokens

Every field of the configuration is read, known to change nothing, or an error. The same holds for
every tensor.

Sources: SafeAILab/EAGLE (ea_model.py, cnets.py, cnets1.py), vLLM (llama_eagle3.py), speculators
(models/eagle3, models/peagle, convert/eagle), DeepSpec (modeling/eagle3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recserve.drafters.eagle.network import Eagle, EagleConfig
from recserve.drafters.shared.feature_network import LayerView
from recserve.drafters.shared.network_files import (
    NEOX,
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
    read_token_map,
    read_windows,
    size_fields,
    target_head,
    to_halves,
    write_folder,
)
from recserve.models.config import DecoderConfig
from recserve.models.decoder import FINAL_LAYER
from recserve.models.language_model import LanguageModel
from recserve.models.loading import (
    UnsupportedModel,
    read_flag,
    read_json,
    read_names,
    read_object,
    read_part,
    read_tensors,
    read_whole,
    tensor_files,
)
from recserve.models.weight_check import is_copy

LAYERS, OUTPUTS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
EXAMPLE = DecoderConfig(2, 1, 1, 1, 2, 1)
PREFIXES = {"model.": "", "midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_": ""}
KINDS = ("eagle", "eagle3", "peagle")
# Names of the same norm of HASS.
ALIASES = {
    "embed_layernorm.weight": "embedding_layernorm.weight",
    "post_embedding_layernorm.weight": "embedding_layernorm.weight",
    "hidden_layernorm.weight": "layers.0.input_layernorm.weight",
    "pre_lm_head_layernorm.weight": "lm_head_layernorm.weight",
}
# Fields that this loader reads, in the configuration or in `eagle_config`.
OWN = (
    *("draft_vocab_size", "target_hidden_size", "eagle_config", "bias", "ptd_token_id"),
    *("eagle_aux_hidden_state_layer_ids", "target_layer_ids", "norm_before_fc", "fc_norm"),
    *("norm_output", "norm_before_residual", "transformer_layer_config", "fusion_bias"),
    *("speculators_model_type", "use_aux_hidden_state", "mask_token_id", "add_para_norm"),
    *("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm"),
    *("next_layer_regular", "parallel_draft_step", "parallel_drafting", "num_target_layers"),
    *("draft_num_hidden_layers", "model", "method", "truncated_vocab_size", "eagle_fc_bias"),
    NEOX,
)
# Fields of `eagle_config`.
NESTED = (
    *("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    *("use_mtp_layernorm", "next_layer_regular", "parallel_draft_step", "parallel_drafting"),
    *("draft_vocab_size", LAYERS, OUTPUTS, *FLAGS),
)
# Other fields without an effect on the network's outputs. `layernorms` follows from the tensors.
WITHOUT_EFFECT = (
    *("ttt_length", "step_loss_decay", "layernorms", "para_depths"),
    *("down_sample_ratio", "down_sample_ratio_min", "max_seq_len", "prediction_loss_weight"),
    *("has_lm_head", "parallel_draft_heads_num_layers"),
)


def load_eagle(folder: Path, target: LanguageModel) -> Eagle:
    """Loads the network of a folder, ready to draft for a target.

    Raises:
        UnsupportedModel: If a field or tensor is unknown or does not fit; the message names it,
            the expected and the actual value.
    """
    weights, fields = read_tensors(folder, _short), read_json(folder / "config.json")
    config = read_eagle_config(fields, set(weights), target)
    if not read_flag({**fields, **read_object(fields, "transformer_layer_config")}, NEOX, True):
        to_halves(weights, config.decoder.head_dim)
    own, head = weights.get("embed_tokens.weight"), weights.get("lm_head.weight")
    if own is not None and config.mask_token is not None and not is_copy(own, target.tokens.weight):
        config = replace(config, own_embedding=True)  # P-EAGLE trains its embedding
    elif own is not None:
        check_copy(own, target.tokens.weight, "embed_tokens.weight", folder.name)
    if head is not None and not config.fused:
        check_copy(head, target_head(target), "lm_head.weight", folder.name)
        del weights["lm_head.weight"]
    mapped = read_token_map(weights, config.draft_vocab_size, config.vocab_size, folder.name)
    if mapped is not None:
        weights["token_map"] = mapped
    with torch.device("meta"):
        network = Eagle(config)
    places = StoredTensors(folder.name, set(weights), weights.__getitem__)
    fill(network, places, partial(_assemble, config), target.tokens.weight)
    if left := sorted(places.unread() - {"embed_tokens.weight", "t2d", "d2t"}):
        raise UnsupportedModel(f"{folder.name} has a tensor {left[0]!r} that has no place in EAGLE")
    return network.requires_grad_(False).eval()


def read_eagle_config(
    fields: dict[str, Any], tensors: set[str], target: LanguageModel
) -> EagleConfig:
    """Reads a configuration. The tensors' names tell EAGLE-3 from the versions before it."""
    whole = read_object(fields, "model")
    check_fields(whole, (*OWN, *WITHOUT_EFFECT), "model")
    fields = {name: value for name, value in fields.items() if name != "model" or not whole}
    fields = lay_over(fields, whole, "model")
    inner = read_object(fields, "transformer_layer_config")
    nested = read_object(fields, "eagle_config")
    check_fields(fields, (*OWN, *WITHOUT_EFFECT))
    check_fields(inner, (NEOX,), "transformer_layer_config")
    check_names(nested, {*NESTED, *WITHOUT_EFFECT}, "eagle_config")
    every = lay_over(fields, nested, "eagle_config", (LAYERS, OUTPUTS))
    stated = fields.get("speculators_model_type")
    kind = "eagle3" if stated is None else stated
    if kind not in KINDS:
        raise UnsupportedModel(f"speculators_model_type is {kind!r}; this drafter reads {KINDS}")
    masks = {name: fields.get(name) for name in ("mask_token_id", "ptd_token_id")}
    mask = next((token for token in masks.values() if token is not None), None)
    if None not in masks.values() and len(set(map(repr, masks.values()))) > 1:
        raise UnsupportedModel(f"config.json contradicts itself: {masks}; remove the wrong one")
    parallel = kind == "peagle" or "mask_hidden" in tensors or read_flag(every, "parallel_drafting")
    for name in masks:
        read_whole(masks, name, 0, least=0)
    if mask is None and parallel:
        raise UnsupportedModel("mask_token_id is missing; a P-EAGLE network needs one")
    fused = "hidden_norm.weight" in {_leaf(name) for name in tensors}
    own, decoder = target.config, target.config.decoder
    words = read_whole(every, "draft_vocab_size", own.vocab_size)
    if not fused and words != own.vocab_size:
        raise UnsupportedModel(
            f"config.json: draft_vocab_size is {words}; the target has {own.vocab_size} tokens. "
            "There is no 'hidden_norm.weight', so the network has no head of its own: EAGLE-1, and "
            "the EAGLE of ModelOpt that reads no aux_hidden_state, need the target's vocabulary"
        )
    sizes = lay_over(fields, inner, "transformer_layer_config")
    if _stored_layers(tensors) == 1 and kind == "eagle3" and mask is None:
        # The authors build one layer, whatever the field says. Files hold 40 for the target's.
        sizes["num_hidden_layers"] = min(read_whole(sizes, "num_hidden_layers"), 1)
    sized = read_sizes(sizes, tensors, target)
    check_neutral(
        every,
        {
            "num_target_layers": decoder.num_layers,
            "draft_num_hidden_layers": sized.num_layers,
            "use_input_layernorm_in_first_layer": (
                fused or "layers.0.input_layernorm.weight" in tensors
            ),
            "use_last_layernorm": fused or "lm_head_layernorm.weight" in tensors,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_drafting": mask is not None,
            "method": "eagle3" if fused else "eagle",
            "truncated_vocab_size": own.vocab_size,
            "eagle_fc_bias": "fc.bias" in tensors,
        },
    )
    windows = read_windows(sizes, sized.num_layers, decoder.max_positions)
    # Only the masks of speculators' EAGLE-3 keep the window of a draft where it begins.
    moves = kind != "eagle3" or mask is not None or stated is None
    if not sized.qk_norm and "Qwen3Eagle3Model" in read_names(fields, "architectures"):
        raise UnsupportedModel(
            "the architecture is 'Qwen3Eagle3Model', which has norms of queries and keys; there is "
            "no tensor 'layers.0.self_attn.q_norm.weight'"
        )
    para = read_flag(fields, "add_para_norm")
    fc_bias = read_flag(fields, "fusion_bias", read_flag(fields, "bias", True))
    layers: tuple[int, ...] = (FINAL_LAYER,)
    if fused:
        layers = read_target_layers(fields, decoder.num_layers).layers
    return EagleConfig(
        decoder=sized,
        target_size=read_whole(fields, "target_hidden_size", decoder.hidden_size),
        target_layers=layers,
        vocab_size=own.vocab_size,
        draft_vocab_size=words,
        fused=fused,
        fc_bias=fc_bias and not fused,
        fc_norm=read_flag(every, "fc_norm"),
        norm_before_fc=read_flag(every, "norm_before_fc"),
        norm_output=read_flag(every, "norm_output"),
        norm_before_residual=read_flag(every, "norm_before_residual"),
        embedding_norm=not fused and (para or "embedding_layernorm.weight" in tensors),
        feature_norm=not fused and (para or "hidden_states_layernorm.weight" in tensors),
        layer_norm=not fused and "layers.0.input_layernorm.weight" in tensors,
        head_norm=not fused and "lm_head_layernorm.weight" in tensors,
        mask_token=mask,
        views=tuple(LayerView(window=window, moves=moves) for window in windows or ()),
    )


def _stored_layers(tensors: set[str]) -> int:
    """Returns the number of layers that a file holds."""
    return len({name.split(".")[1] for name in tensors if name.startswith("layers.")})


@dataclass(frozen=True)
class TargetLayers:
    """The layers of the target that a head reads.

    Attributes:
        layers: Number n is the stream after n layers, as in `Drafter.hidden_layers`.
        reason: Which field says so, and how its numbers are read.
    """

    layers: tuple[int, ...]
    reason: str


def read_target_layers(fields: dict[str, Any], depth: int) -> TargetLayers:
    """Reads which layers of a target with `depth` layers an EAGLE-3 head reads.

    Several fields name them, and their numbers count differently. Input i of the target's layers is
    the stream after i layers, and output i is the stream after i + 1 layers.

    Raises:
        UnsupportedModel: If a field holds no layers of the target, or two fields contradict.
    """
    nested = read_object(fields, "eagle_config")
    several = read_flag(fields, "use_aux_hidden_state", True)
    if not read_flag(nested, "use_aux_hidden_state", several):
        return TargetLayers((FINAL_LAYER,), "use_aux_hidden_state is false")
    found: dict[str, TargetLayers] = {}
    for place, content in (("", fields), ("eagle_config.", nested)):
        for field, always in ((LAYERS, False), (OUTPUTS, True)):
            ids = content.get(field)
            if ids is None or ids == []:
                continue
            name = f"{place}{field}"
            if not isinstance(ids, list) or not all(type(n) is int for n in ids):
                raise UnsupportedModel(
                    f"config.json: {name} is {ids!r}; a list of layers is needed"
                )
            first = bool(place) and ids[0] == 1 and not _saved_before_top_level(fields)
            # A copy of the ids at the top means what those at the top mean.
            outputs = always or (first and fields.get(field) != ids)
            reason = f"{name} names outputs of layers" if outputs else f"{name} names inputs"
            reason += ", because it begins with 1" if first and outputs and not always else ""
            found[name] = TargetLayers(tuple(n + outputs for n in ids), reason)
            if bad := [n for n in ids if not 0 <= n + outputs <= depth]:
                raise UnsupportedModel(
                    f"config.json: {name} is {ids}: the head reads layer {bad[0]} of its target, "
                    f"which has {depth} layers ({reason})"
                )
    if len({one.layers for one in found.values()}) > 1:
        told = "; ".join(f"{one.reason}: after layers {one.layers}" for one in found.values())
        raise UnsupportedModel(f"config.json contradicts itself: {told}. Remove the wrong one")
    for one in found.values():
        return one
    default = (2, depth // 2, depth - 3)
    if min(default) < 0:
        raise UnsupportedModel(
            f"config.json names no layers of the target, which has only {depth}; add "
            "eagle_aux_hidden_state_layer_ids"
        )
    return TargetLayers(default, "no field names them; this is the default of the authors")


def _saved_before_top_level(fields: dict[str, Any]) -> bool:
    """Returns whether an older `save_eagle` wrote a file, whose nested numbers are inputs.

    It wrote no number at the top, and no field that the files of other programs always have.
    """
    always = {*size_fields(EXAMPLE, 1), "draft_vocab_size", "eagle_config"}
    maybe = {"rope_scaling", "qkv_bias", *FLAGS, "speculators_model_type", "mask_token_id"}
    return always <= set(fields) <= always | maybe


def eagle_tensor_names(folder: Path) -> set[str]:
    """Returns the names of all tensors, without the prefixes that differ between layouts."""
    return {_short(name) for name in tensor_files(folder)}


def _short(name: str) -> str:
    while before := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = PREFIXES[before] + name.removeprefix(before)
    return ALIASES.get(name, name)


def _leaf(name: str) -> str:
    return name.removeprefix("layers.0.")


OUTSIDE = {
    "feature_norm.weight": "layers.0.hidden_norm.weight",
    "states_norm.weight": "input_norm.weight",
    "head.weight": "lm_head.weight",
    "tokens.weight": "embed_tokens.weight",
    "embedding_norm.weight": "embedding_layernorm.weight",
}
# EAGLE-1 with the norms of HASS.
OUTSIDE_HASS = OUTSIDE | {
    "feature_norm.weight": "hidden_states_layernorm.weight",
    "norm.weight": "lm_head_layernorm.weight",
}


def _assemble(config: EagleConfig, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Returns our tensor `name`."""
    first, *rest = name.split(".")
    if name == "mask_states":
        return read("mask_hidden").flatten()  # [1, 1, F]
    if first == "input_norms":
        return read(f"layers.{rest[0]}.input_layernorm.weight")
    if first != "layers":
        return read((OUTSIDE if config.fused else OUTSIDE_HASS).get(name, name))
    layer, part, last = rest
    return read_part(f"layers.{layer}.", part, last, read)


def save_eagle(network: Eagle, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` in the published layout.

    EAGLE-3's layout is used where the network is fused, that of EAGLE-1 and 2 elsewhere.

    A network with several layers, such as P-EAGLE's, gets the layout of speculators.

    Raises:
        ValueError: If the layout has no place for the windows of the layers.
    """
    config, decoder = network.config, network.config.decoder
    windows = _window_fields(config)
    middle = config.fused and decoder.num_layers == 1 and config.mask_token is None
    middle = middle and "speculators_model_type" not in windows
    outside = OUTSIDE if config.fused else OUTSIDE_HASS
    weights = {}
    for name, tensor in network.state_dict().items():
        first, *rest = name.split(".")
        if name == "token_map":
            weights["d2t"] = tensor - torch.arange(len(tensor), device=tensor.device)
            weights["t2d"] = torch.isin(
                torch.arange(config.vocab_size, device=tensor.device), tensor
            )
        elif name == "mask_states":
            weights["mask_hidden"] = tensor[None, None]
        elif first == "input_norms":
            weights[f"layers.{rest[0]}.input_layernorm.weight"] = tensor
        elif first == "layers":
            layer, part, last = rest
            weights |= layer_tensors(f"layers.{layer}.", part, last, tensor, decoder)
        else:
            weights[outside.get(name, name)] = tensor
    if middle:
        weights = {n.replace("layers.0.", "midlayer."): w for n, w in weights.items()}
    fields = size_fields(decoder, config.vocab_size) | windows
    if config.fused:
        fields["draft_vocab_size"] = config.draft_vocab_size
        fields |= _layer_fields(config)
        fields |= {name: getattr(config, name) for name in FLAGS if getattr(config, name)}
        if config.mask_token is not None:
            fields |= {"speculators_model_type": "peagle", "mask_token_id": config.mask_token}
    else:
        fields["bias"] = config.fc_bias
        if config.feature_norm:
            fields["add_para_norm"] = True
    write_folder(fields, weights, folder)


def _window_fields(config: EagleConfig) -> dict[str, Any]:
    """Returns the fields of the layers' windows: a kind per layer.

    The name of the layout says whether a drafted row moves its window.
    """
    if not config.views:
        return {}
    own = {(view.window, view.moves) for view in config.views if view.window}
    if len(own) != 1 or any(view.first for view in config.views):
        raise ValueError(f"config.json has one window for all layers; these have {config.views}")
    ((window, moves),) = own
    fields: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": [SLIDING if view.window else "full_attention" for view in config.views],
    }
    if not moves:
        if config.mask_token is not None:
            raise ValueError("a P-EAGLE network whose windows do not move has no layout")
        fields["speculators_model_type"] = "eagle3"
    return fields


def _layer_fields(config: EagleConfig) -> dict[str, Any]:
    """Returns the fields that name the target's layers, which vLLM reads at the top.

    SGLang reads those in `eagle_config`, and takes numbers that begin with 1 for outputs of layers.
    It has no way to name the input of layer 1 first, so such numbers are at the top only.
    """
    layers = list(config.target_layers)
    nested: dict[str, Any] = {"use_aux_hidden_state": not config.reads_final}
    if config.reads_final:
        return {"eagle_config": nested}
    if layers[0] != 1:
        nested[LAYERS] = layers
    return {LAYERS: layers, "eagle_config": nested}
