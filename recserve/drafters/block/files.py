"""Files of block drafters: the published layouts of DFlash, JetSpec, DFlash2 and DSpark.

    DFlash, JetSpec   fc, hidden_norm, norm, layers.N.self_attn.*, layers.N.mlp.*, two norms a layer
    DFlash2           also layers.N.attention_conv.*, layers.N.mlp_conv.*, candidate_selector.*
    DSpark            also markov_head.*, confidence_head.*
    all               optionally embed_tokens, lm_head, d2t, t2d, mask_embedding

Safetensors only. Every tensor has a place, is known to change nothing, or is an error. See
block_layouts.py for the configurations and their sources.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recserve.drafters.block.layouts import read_block_config
from recserve.drafters.block.network import Block, BlockConfig
from recserve.drafters.shared.network_files import read_token_map, to_halves
from recserve.models.language_model import LanguageModel
from recserve.models.loading import (
    PARTS,
    UnsupportedModel,
    join_rows,
    read_json,
    read_tensors,
)
from recserve.models.saving import rope_fields
from recserve.models.weight_check import is_finite
from recserve.models.write_tensors import write_tensors

PREFIX = re.compile(r"^(model\.|midlayer\.)")
# ModelOpt stores the parts of DSpark's heads without the heads' names.
HEAD_PARTS = re.compile(r"^(markov_w1|markov_w2|gate_proj|joint_proj)\.")
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# Names of our tensors in a file, outside the layers.
OUTSIDE = {
    "tokens.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "token_map": "token_map",
    "mask_embedding": "mask_embedding",
    "selector.predecessor_codebook": "candidate_selector.predecessor_codebook",
    "selector.successor_codebook": "candidate_selector.successor_codebook",
    "selector.hidden_projection.weight": "candidate_selector.hidden_projection.weight",
    "markov.markov_w2": "markov_head.markov_w2.weight",
}
LAYER = PARTS | {
    "query": ("self_attn.q_proj",),
    "key_value": ("self_attn.k_proj", "self_attn.v_proj"),
}
# A draft's size follows the budget, so the confidence head is not asked.
UNREAD = ("confidence_head.proj.weight", "confidence_head.proj.bias", "t2d", "d2t")


def load_block(folder: Path, target: LanguageModel) -> Block:
    """Loads the network of a folder, ready to draft for a target.

    Raises:
        UnsupportedModel: If a field or tensor is unknown or does not fit; the message names it,
            the expected and the actual value.
        ValueError: If the configuration contradicts itself.
    """
    weights = _tensors(folder)
    if "mask_embedding" not in weights and (folder / "mask_embedding.pt").exists():
        raise UnsupportedModel(
            f"{folder.name} has a mask_embedding.pt, which is a pickle; store it as the tensor "
            "'mask_embedding' in model.safetensors"
        )
    _share_with(target, weights)
    config, pairs = read_block_config(read_json(folder / "config.json"), set(weights), target)
    _split_fused(weights, config)
    if pairs:
        to_halves(weights, config.decoder.head_dim)
    mapped = read_token_map(weights, config.draft_vocab_size, config.vocab_size, folder.name)
    if mapped is not None:
        weights["token_map"] = mapped
    with torch.device("meta"):
        network = Block(config)
    dtype, device = target.tokens.weight.dtype, target.tokens.weight.device
    used: set[str] = set()

    def read(name: str) -> Tensor:
        if name not in weights:
            raise UnsupportedModel(f"{folder.name} has no tensor {name!r}")
        used.add(name)
        return weights[name]

    loaded = {}
    for name, empty in network.state_dict().items():
        weight = join_rows({own: read(own) for own in _names(name)})
        if weight.shape != empty.shape:
            raise UnsupportedModel(
                f"{name} is {tuple(weight.shape)} in {folder.name}; its config.json and the target "
                f"require {tuple(empty.shape)}"
            )
        loaded[name] = weight.to(device, None if name == "token_map" else dtype)
        if name != "token_map" and not is_finite(loaded[name]):
            raise UnsupportedModel(f"{folder.name}: {name} holds NaN or infinity as {dtype}")
    if left := sorted(set(weights) - used - set(UNREAD)):
        raise UnsupportedModel(
            f"{folder.name} has a tensor {left[0]!r} that its config.json has no place for"
        )
    network.load_state_dict(loaded, assign=True)
    return network.requires_grad_(False).eval()


def block_tensor_names(folder: Path, target: LanguageModel) -> set[str]:
    """Returns the names of the tensors that are not copies of the target's, without prefixes."""
    weights = _tensors(folder)
    _share_with(target, weights)
    return set(weights)


def _names(name: str) -> list[str]:
    """Returns the names in a file whose tensors make up our tensor `name`."""
    first, *rest = name.split(".")
    if first == "layers" and rest[1] in LAYER:
        layer, part, last = rest
        return [f"layers.{layer}.{own}.{last}" for own in LAYER[part]]
    if first == "markov" and name not in OUTSIDE:
        return [name.replace("markov.", "markov_head.", 1)]
    return [OUTSIDE.get(name, name)]


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors by name, without the prefixes and names that differ between layouts."""
    found = read_tensors(folder, _short)
    if "mask_embedding" in found:
        found["mask_embedding"] = found["mask_embedding"].flatten()
    return found


def _short(name: str) -> str:
    """Returns the name of a tensor without what differs between layouts."""
    while PREFIX.match(name):
        into = "layers.0." if name.startswith("midlayer.") else ""
        name = into + PREFIX.sub("", name)
    name = HEAD_PARTS.sub(r"markov_head.\1.", name)
    name = re.sub(r"^confidence_proj\.", "confidence_head.proj.", name)
    return ALIASES.get(name, name)


def _share_with(target: LanguageModel, weights: dict[str, Tensor]) -> None:
    """Drops copies of the target's embedding and head, as DeepSpec saves them."""
    head = target.tokens if target.head is None else target.head
    for name, theirs in (("embed_tokens.weight", target.tokens), ("lm_head.weight", head)):
        own, same = weights.get(name), getattr(theirs, "weight", None)
        if own is not None and same is not None and torch.equal(own.to(same.dtype), same.cpu()):
            del weights[name]


def _split_fused(weights: dict[str, Tensor], config: BlockConfig) -> None:
    """Splits projections that are stored as one matrix (qkv_proj, gate_up_proj)."""
    d = config.decoder
    heads = [d.num_heads * d.head_dim] + [d.num_kv_heads * d.head_dim] * 2
    fused = {
        "self_attn.qkv_proj": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), heads),
        "mlp.gate_up_proj": (("mlp.gate_proj", "mlp.up_proj"), [d.intermediate_size] * 2),
    }
    for name in list(weights):
        for whole, (parts, sizes) in fused.items():
            if f".{whole}." in name:
                tensor = weights.pop(name)
                if tensor.shape[0] != sum(sizes):
                    raise UnsupportedModel(f"{name} has {tensor.shape[0]} rows, not {sum(sizes)}")
                for part, piece in zip(parts, torch.split(tensor, sizes), strict=True):
                    if (own := name.replace(whole, part)) in weights:
                        raise UnsupportedModel(f"{name} repeats the tensor {own!r}")
                    weights[own] = piece


def save_block(network: Block, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` in the published layout.

    This is z-lab's layout for DFlash, JetSpec and DFlash2, and SpecForge's for DSpark.

    Raises:
        ValueError: If the network's configuration has no place in the layout.
    """
    config, decoder = network.config, network.config.decoder
    mixed = len(set(config.causal)) > 1 or config.windows
    if mixed or config.from_anchor != (config.markov is not None):
        raise ValueError("the layout holds no such mixture of variants")
    sizes = {
        "key_value": [decoder.num_kv_heads * decoder.head_dim] * 2,
        "gate_up": [decoder.intermediate_size] * 2,
    }
    weights = {}
    for name, tensor in network.state_dict().items():
        if name == "token_map":
            index = torch.arange(len(tensor), device=tensor.device)
            weights["d2t"] = tensor - index
            every = torch.arange(config.vocab_size, device=tensor.device)
            weights["t2d"] = torch.isin(every, tensor)
            continue
        names = _names(name)
        part = name.split(".")[2] if len(names) > 1 else ""
        pieces = torch.split(tensor, sizes[part]) if part else [tensor]
        weights.update(zip(names, pieces, strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(weights, folder / "model.safetensors")
    text = json.dumps(_fields(config), indent=1) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _fields(config: BlockConfig) -> dict[str, Any]:
    """Returns the fields of config.json."""
    decoder = config.decoder
    nested: dict[str, Any] = {
        "target_layer_ids": [n - 1 for n in config.target_layers],
        "mask_token_id": config.mask_token,
    }
    name = "DFlashDraftModel"
    if config.causal[0]:
        nested["causal_head"] = True
    if config.conv is not None and config.selector is not None:
        name = "DFlash2DraftModel"
        nested |= {
            "conv_kernel_size": config.conv.taps,
            "conv_group_size": config.conv.group_size,
            "selector_rank": config.selector.rank,
            "selector_top_k": config.selector.num_candidates,
        }
    if config.markov is not None:
        name = "DSparkDraftModel"
        nested |= {
            "projector_type": "dspark",
            "markov_rank": config.markov.rank,
            "markov_head_type": config.markov.kind,
            "enable_confidence_head": False,
        }
    factors = {
        "input_embedding_scale": (config.input_scale, 1.0),
        "output_multiplier": (config.output_scale, 1.0),
        "final_logit_softcapping": (config.softcap, 0.0),
    }
    nested |= {key: value for key, (value, neutral) in factors.items() if value != neutral}
    return {
        "architectures": [name],
        "model_type": "qwen3",
        "hidden_size": decoder.hidden_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": decoder.intermediate_size,
        "rms_norm_eps": decoder.norm_eps,
        "rope_theta": decoder.rope_theta,
        "rope_scaling": None if decoder.rope_scaling is None else rope_fields(decoder),
        "max_position_embeddings": decoder.max_positions,
        "attention_bias": decoder.attention_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "dflash_config": nested,
    }
