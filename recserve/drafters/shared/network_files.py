"""What the files of draft networks have in common: sizes, strict fields and tensors, layers.

The rotary range of a draft network is the target's, because published heads name 2048 positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel
from recserve.models.loading import (
    FAMILIES,
    PARTS,
    UnsupportedModel,
    read_config,
    read_flag,
    read_whole,
)
from recserve.models.saving import rope_fields
from recserve.models.weight_check import is_copy, is_finite
from recserve.models.write_tensors import write_tensors

# Fields that `read_sizes` reads.
SIZES = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "rope_theta"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"),
    *("rms_norm_eps", "rope_scaling", "rope_parameters", "attention_bias", "hidden_act"),
    *("mlp_bias", "use_sliding_window", "pretraining_tp", "quantization_config", "vocab_size"),
    "qkv_bias",
    "original_max_position_embeddings",
)
# Values of `model_type` whose layers are computed here. A draft layer of a mixture of experts is
# dense. `speculator_model` describes a file whose layers are described inside it.
LAYER_TYPES = (*FAMILIES, "mistral", "phi3", "qwen3_moe", "speculator_model")
# Fields without an effect on the outputs of any network.
WITHOUT_EFFECT = (
    *("architectures", "torch_dtype", "dtype", "transformers_version", "initializer_range"),
    *("use_cache", "attention_dropout", "_name_or_path", "pad_token_id", "sliding_window"),
    *("max_window_layers", "layer_types", "speculators_version", "speculators_config"),
    *("auto_map", "target_model_type", "modal_type", "decoder_sparse_step", "mlp_only_layers"),
    *("position_embedding_type", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "norm_topk_prob", "router_aux_loss_coef"),
    *("output_router_logits", "target_model_name_or_path", "num_local_experts"),
    *("experts_per_token", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
    # Attributes of transformers' classes, which speculators and ModelOpt write too.
    *("has_no_defaults_at_init", "base_model_tp_plan", "base_model_pp_plan"),
    *("base_model_ep_plan", "_attn_implementation", "attn_implementation"),
    # Of the pictures and sounds that the target reads.
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    *("vision_end_token_id", "audio_token_id", "language_model_only"),
    "embed_requires_grad",
)
# Fields that describe the file at the top, and the layers inside an object.
APART = (
    *("model_type", "architectures", "torch_dtype", "dtype", "transformers_version"),
    *("_name_or_path", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# True, the default: a head's first half turns with its second. False: even numbers with odd ones.
NEOX = "is_neox_style"
SLIDING = "sliding_attention"


@dataclass
class StoredTensors:
    """Tensors of a folder, and which of them were read.

    Attributes:
        folder: Name of the folder, for messages.
        names: Names of all tensors.
        load: Returns a tensor by name.
    """

    folder: str
    names: set[str]
    load: Callable[[str], Tensor]
    _read: set[str] = field(default_factory=set)

    def read(self, name: str) -> Tensor:
        """Returns a tensor; raises UnsupportedModel if there is none."""
        if name not in self.names:
            raise UnsupportedModel(f"{self.folder} has no tensor {name!r}")
        self._read.add(name)
        return self.load(name)

    def unread(self) -> set[str]:
        """Returns the names of the tensors that were not read."""
        return self.names - self._read


def check_fields(names: Iterable[str], known: Iterable[str], place: str = "") -> None:
    """Raises UnsupportedModel for a field that is neither a size, nor known, nor without effect."""
    check_names(names, {*SIZES, *WITHOUT_EFFECT, *known}, place)


def check_names(names: Iterable[str], fine: Collection[str], place: str = "") -> None:
    """Raises UnsupportedModel for a field that is unknown, or is not read where it lies.

    Args:
        names: The fields.
        fine: Those that are known there.
        place: The object that holds them. Empty for the top of config.json.
    """
    for name in names:
        if name not in fine:
            where = f" inside {place}" if place else ""
            raise UnsupportedModel(f"config.json has an unknown field {name!r}{where}")


def lay_over(
    fields: Mapping[str, Any], inner: Mapping[str, Any], place: str, apart: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the fields of config.json with those of an object inside it.

    Args:
        fields: Fields at the top.
        inner: Fields of the object.
        place: Name of the object.
        apart: Fields that mean different things in both places; the inner ones stay.

    Raises:
        UnsupportedModel: If both say different things.
    """
    for name in sorted(inner.keys() & fields.keys() - {*APART, *apart}):
        if inner[name] != fields[name]:
            raise UnsupportedModel(
                f"config.json says {name} {fields[name]!r:.80}, and {place} inside it "
                f"{inner[name]!r:.80}; remove the wrong one"
            )
    return {**fields, **inner}


def check_neutral(fields: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for a field whose value asks for what is not computed.

    Args:
        fields: Fields of a configuration. A missing one and null are fine.
        expected: The value of each field that is computed.
    """
    for name, value in expected.items():
        if fields.get(name) not in (None, value):
            raise UnsupportedModel(
                f"config.json: {name} is {fields[name]!r}; only {value!r} is computed here"
            )


def read_layer_types(fields: Mapping[str, Any], num_layers: int) -> tuple[str, ...] | None:
    """Returns the kind of each layer, or None if no field names them.

    Raises:
        UnsupportedModel: If there is another number of them, or one that is not computed.
    """
    types, kinds = fields.get("layer_types"), ("full_attention", SLIDING)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise UnsupportedModel(
            f"config.json: layer_types is {types!r:.80}; a list of {num_layers} kinds is needed"
        )
    if unknown := [kind for kind in types if kind not in kinds]:
        raise UnsupportedModel(
            f"config.json: layer_types names {unknown[0]!r:.80}; {kinds} are computed here"
        )
    return tuple(types)


def read_windows(
    fields: Mapping[str, Any], num_layers: int, num_positions: int
) -> tuple[int, ...] | None:
    """Reads the attention window of each layer, 0 for a layer without one.

    `layer_types` says which layers have one; without it, those from `max_window_layers` on.
    `use_sliding_window: false` turns all of them off, as in transformers.

    Args:
        fields: Fields of the layers.
        num_layers: Number of layers.
        num_positions: Length of the longest text. A window that holds it has no effect.

    Returns:
        The windows, or None if no text is longer than one.

    Raises:
        UnsupportedModel: If the fields are incomplete or name a kind of layer that is not computed.
    """
    window, types = fields.get("sliding_window"), read_layer_types(fields, num_layers)
    enabled = read_flag(fields, "use_sliding_window", types is not None)
    if types is None:
        first = read_whole(fields, "max_window_layers", 0, least=0)
        sliding = [enabled and number >= first for number in range(num_layers)]
    else:
        sliding = [enabled and kind == SLIDING for kind in types]
    if not any(sliding):
        return None
    if type(window) is not int or window < 1:
        raise UnsupportedModel(
            f"config.json: sliding_window is {window!r}, and layer {sliding.index(True)} has a "
            "window; a positive integer is needed"
        )
    return tuple(window * own for own in sliding) if window < num_positions else None


def read_token_map(
    weights: Mapping[str, Tensor], draft_vocab_size: int, vocab_size: int, folder: str
) -> Tensor | None:
    """Returns the target's token of each draft token; None if both vocabularies are the same.

    `d2t` holds offsets, and `t2d` tells which of the target's tokens are drafted.

    Raises:
        UnsupportedModel: If a table is missing, has another length or name, or contradicts the
            other.
    """
    if "token_map" in weights:
        raise UnsupportedModel(
            f"{folder} has a tensor 'token_map' that has no place; 'd2t' holds the drafted tokens"
        )
    offsets, chosen = weights.get("d2t"), weights.get("t2d")
    for name, table, length in (
        ("d2t", offsets, draft_vocab_size),
        ("t2d", chosen, vocab_size),
    ):
        if table is not None and tuple(table.shape) != (length,):
            raise UnsupportedModel(
                f"{folder}: {name} is {tuple(table.shape)}; its config.json and the target require "
                f"({length},)"
            )
    if draft_vocab_size == vocab_size:
        if offsets is not None and bool(offsets.any()):
            raise UnsupportedModel(
                f"{folder}: d2t has offsets other than 0, and draft_vocab_size is that of the "
                f"target, {vocab_size}"
            )
        if chosen is not None and not bool(chosen.all()):
            raise UnsupportedModel(
                f"{folder}: t2d leaves out tokens, and draft_vocab_size is that of the target, "
                f"{vocab_size}"
            )
        return None
    if offsets is None:
        raise UnsupportedModel(
            f"{folder} has no tensor 'd2t'; it proposes {draft_vocab_size} of {vocab_size} tokens, "
            "so it needs one"
        )
    tokens = offsets.long() + torch.arange(len(offsets))
    outside = int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size
    # Read as token ids, offsets would repeat or exceed the vocabulary.
    if outside or len(set(tokens.tolist())) != len(tokens):
        raise UnsupportedModel(
            f"{folder}: d2t names a token twice or outside 0..{vocab_size - 1}; it must hold "
            "offsets"
        )
    if chosen is not None and not torch.equal(chosen.nonzero()[:, 0], tokens.sort().values):
        raise UnsupportedModel(f"{folder}: d2t and t2d name different tokens")
    return tokens


def read_sizes(
    fields: Mapping[str, Any],
    tensors: Collection[str],
    target: LanguageModel,
    types: Collection[str] = LAYER_TYPES,
) -> DecoderConfig:
    """Reads the sizes of a network's layers; the tensors tell whether queries have a norm.

    They also tell whether layers of Qwen2 have biases.

    Windows are read by `read_windows`.

    Args:
        fields: Fields of the layers.
        tensors: Names of the tensors.
        target: The target.
        types: Known values of `model_type`.
    """
    own = target.config
    check_neutral(fields, {"vocab_size": own.vocab_size, "position_embedding_type": "rope"})
    family = read_model_type(fields, types)
    sizes = {
        "model_type": family if family in FAMILIES else "llama",
        "vocab_size": own.vocab_size,
        "use_sliding_window": False,
    }
    served = own.decoder.max_positions
    sizes["max_position_embeddings"] = read_whole(fields, "max_position_embeddings", served)
    read = read_config({**fields, **sizes}, served).decoder
    biased = read.attention_bias
    if family == "qwen2":  # SpecForge's heads of this type have no biases, EAGLE-1's have them
        biased = any(name.endswith("q_proj.bias") for name in tensors)
    return replace(
        read,
        qk_norm=any(name.endswith("q_norm.weight") for name in tensors),
        attention_bias=read_flag(fields, "qkv_bias", biased),
    )


def read_model_type(fields: Mapping[str, Any], known: Collection[str] = LAYER_TYPES) -> str | None:
    """Returns the type of a network's layers; None if no field names one.

    Raises:
        UnsupportedModel: If it is another one, whose layers may differ with tensors of the same
            names.
    """
    family = fields.get("model_type")
    if family is not None and family not in known:
        raise UnsupportedModel(
            f"config.json: model_type is {family!r:.80}; layers of {', '.join(known)} are computed "
            "here"
        )
    return family


def fill(
    network: nn.Module,
    stored: StoredTensors,
    assemble: Callable[[str, Callable[[str], Tensor]], Tensor],
    like: Tensor,
) -> None:
    """Fills a network on the meta device with the tensors of a folder.

    Args:
        network: The network.
        stored: The folder's tensors.
        assemble: Returns the network's tensor of a name; its second argument reads a tensor.
        like: A weight of the target, whose type and device the network gets. Integers stay.

    Raises:
        UnsupportedModel: If a tensor is missing, has another shape, or is not finite.
    """
    loaded = {}
    for name, empty in network.state_dict().items():
        weight = assemble(name, stored.read)
        if weight.shape != empty.shape:
            raise UnsupportedModel(
                f"{name} is {tuple(weight.shape)} in {stored.folder}; its config.json and the "
                f"target require {tuple(empty.shape)}"
            )
        dtype = like.dtype if weight.is_floating_point() else None
        loaded[name] = weight.to(like.device, dtype)
        if not is_finite(loaded[name]):
            raise UnsupportedModel(f"{stored.folder}: {name} holds NaN or infinity as {dtype}")
    network.load_state_dict(loaded, assign=True)


def to_halves(weights: dict[str, Tensor], head_dim: int) -> None:
    """Reorders queries and keys whose RoPE turns neighbours, for a RoPE that turns halves.

    Args:
        weights: Tensors by published name; those of queries and keys are replaced.
        head_dim: D.
    """
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    for name, tensor in weights.items():
        if any(part in name for part in (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")):
            if tensor.shape[0] % head_dim:
                raise UnsupportedModel(f"{name} has {tensor.shape[0]} rows; heads have {head_dim}")
            heads = tensor.view(-1, head_dim, *tensor.shape[1:])
            weights[name] = heads[:, order].flatten(0, 1)


def target_head(target: LanguageModel) -> Tensor | None:
    """Returns the output matrix of a target; None if it is packed."""
    return target.tokens.weight if target.head is None else getattr(target.head, "weight", None)


def check_copy(own: Tensor, theirs: Tensor | None, name: str, folder: str) -> None:
    """Raises UnsupportedModel if a tensor that is not read is no copy of the target's.

    Args:
        own: The tensor.
        theirs: That of the target; None for a packed one, which is not compared.
        name: Name of the tensor.
        folder: Name of the folder.
    """
    if theirs is not None and not is_copy(own, theirs):
        raise UnsupportedModel(
            f"{folder}: {name} differs from that of the target; the head is for another target"
        )


def layer_tensors(
    prefix: str, part: str, last: str, tensor: Tensor, config: DecoderConfig
) -> dict[str, Tensor]:
    """Returns the published tensors of one tensor of a layer; `loading.joined` joins them.

    Args:
        prefix: What precedes the names in the file.
        part: Our name of the part, a key of loading.PARTS.
        last: `weight` or `bias`.
        tensor: The tensor.
        config: Sizes of the layer.
    """
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    sizes = {"qkv": [count * config.head_dim for count in heads]}
    sizes["gate_up"] = [config.intermediate_size] * 2
    names = [f"{prefix}{own}.{last}" for own in PARTS[part]]
    pieces = torch.split(tensor, sizes.get(part, [tensor.shape[0]]))
    return dict(zip(names, pieces, strict=True))


def size_fields(config: DecoderConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the fields of a config.json that `read_sizes` reads back."""
    fields: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.output_bias,
        "vocab_size": vocab_size,
    }
    if config.rope_scaling is not None:
        fields["rope_scaling"] = rope_fields(config)
    if config.attention_bias != config.output_bias:
        fields["qkv_bias"] = config.attention_bias
    return fields


def write_folder(fields: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
