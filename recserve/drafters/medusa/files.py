"""Files of Medusa heads: the original layouts and vLLM's, safetensors only.

medusa_names.py lists the tensors. Sizes are read from them, because published configurations name 2
heads where there are 5. Every field and every tensor is read, known to change nothing, or an error.
`python -m benchmarks.text.convert_medusa` converts a `.pt` file to safetensors offline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recserve.drafters.medusa.names import (
    TARGET,
    is_vllm,
    may_be_head,
    rename,
    repeat_blocks,
    their_names,
)
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.files import gguf_hint
from recserve.models.loading import (
    UnsupportedModel,
    opened_file,
    read_flag,
    read_json,
    read_number,
    read_tensor,
    read_whole,
    weight_map,
)
from recserve.models.weight_check import is_copy, is_finite
from recserve.models.write_tensors import write_tensors

ACCURACIES = "medusa_accuracies"
FILES = ("medusa_lm_head.safetensors", "model.safetensors")
# Fields that this loader reads.
OWN = (
    *("original_lm_head", "logit_scale", "medusa_fc_bias", "truncated_vocab_size", "num_heads"),
    *("num_hidden_layers", "medusa_num_layers", "hidden_size", "vocab_size", ACCURACIES),
)
# Fields without an effect on the heads' outputs: names, sizes that the tensors have, and the fields
# of the target in a folder of target and heads together.
WITHOUT_EFFECT = (
    *("medusa_num_heads", "base_model_name_or_path", "version", "max_paths", "topk"),
    *("num_lookahead_tokens", "architectures", "model_type", "torch_dtype", "dtype"),
    *("transformers_version", "_name_or_path", "use_cache", "bos_token_id", "eos_token_id"),
    *("pad_token_id", "tie_word_embeddings", "attention_bias", "attention_dropout", "hidden_act"),
    *("initializer_range", "intermediate_size", "max_position_embeddings", "mlp_bias"),
    *("max_sequence_length", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("pretraining_tp", "rms_norm_eps", "rope_scaling", "rope_theta", "rope_parameters"),
    *("sliding_window",),
)


def load_medusa(
    folder: Path | str,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    target_head: Tensor | None = None,
) -> MedusaHeads:
    """Loads the heads of a folder, ready to draft for a target of these sizes.

    Args:
        folder: Folder of the heads.
        hidden_size: E of the target.
        vocab_size: V of the target.
        dtype: Type of the heads.
        device: Device of the heads.
        target_head: [V, E] output matrix of the target, for heads without one of their own.

    Raises:
        UnsupportedModel: If a field or tensor is unknown or does not fit; the message names it,
            the expected and the actual value.
    """
    folder = Path(folder)
    fields, stored = _fields(folder), _tensors(folder)
    shared = read_flag(fields, "original_lm_head")  # lm_head.weight is the heads', not the target's
    weights = rename(stored, shared)
    repeat_blocks(weights, stored, read_whole(fields, "medusa_num_layers", 1))
    if target_head is not None and not any(name.startswith("outputs.") for name in weights):
        weights["outputs.0.weight"] = target_head
    own = None if shared else stored.get("lm_head.weight")
    if own is not None and target_head is not None and not is_copy(own, target_head):
        raise UnsupportedModel(
            f"{folder.name}: lm_head.weight differs from that of the target; the heads are for "
            "another target"
        )
    config = _config(weights, folder.name, hidden_size, vocab_size)
    _check_fields(fields, config, folder.name, is_vllm(stored))
    scale = read_number(fields, "logit_scale", 1.0)  # the output matrices absorb it
    words = weights.get("token_map")
    for name, tensor in weights.items():
        if not name.startswith("outputs."):
            continue
        if words is not None and tensor.shape[0] == vocab_size:
            tensor = tensor[words]  # stored for all tokens; only the mapped rows count
        weights[name] = tensor if scale == 1.0 else tensor * scale
    with torch.device("meta"):
        heads = MedusaHeads(config)
    expected = heads.state_dict()
    if missing := sorted(expected.keys() - weights.keys()):
        raise UnsupportedModel(
            f"{folder.name} lacks {their_names(missing[0])}; its other tensors are those of "
            f"{config.num_heads} heads with {config.num_layers} blocks each"
        )
    if left := sorted(weights.keys() - expected.keys()):
        raise UnsupportedModel(
            f"{folder.name} has {their_names(left[0])}, which has no place in {config.num_heads} "
            f"heads with {config.num_layers} blocks each"
        )
    cast = {}
    for name, empty in expected.items():
        if weights[name].shape != empty.shape:
            raise UnsupportedModel(
                f"{their_names(name)} is {tuple(weights[name].shape)} in {folder.name}; the "
                f"target (hidden size {hidden_size}, vocabulary {vocab_size}) needs "
                f"{tuple(empty.shape)}"
            )
        cast[name] = weights[name].to(device, None if name == "token_map" else dtype)
        if not is_finite(cast[name]):
            raise UnsupportedModel(
                f"{folder.name}: {their_names(name)} holds NaN or infinity as {dtype}, with "
                f"logit_scale {scale:g}"
            )
    heads.load_state_dict(cast, assign=True)
    return heads.requires_grad_(False).eval()


def load_accuracies(folder: Path | str) -> list[list[float]] | None:
    """Returns how often each head's prediction of each rank is right; None if not measured."""
    return _accuracies(_fields(Path(folder)))


def _accuracies(fields: Mapping[str, Any]) -> list[list[float]] | None:
    rows = fields.get(ACCURACIES)
    if rows is None:
        return None
    lists = isinstance(rows, list) and bool(rows) and all(isinstance(row, list) for row in rows)
    if not lists or not all(row and all(map(_is_share, row)) for row in rows):
        raise UnsupportedModel(
            f"config.json: {ACCURACIES} is {rows!r:.80}; a list for each head, with a number from "
            "0 to 1 for each rank, is needed"
        )
    return [[float(value) for value in row] for row in rows]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def save_medusa(
    heads: MedusaHeads, folder: Path | str, accuracies: Seq[Seq[float]] | None = None
) -> None:
    """Writes `config.json` and `medusa_lm_head.safetensors` in the original layout.

    Args:
        heads: The heads.
        folder: Target folder.
        accuracies: By head and rank, for `load_accuracies`.

    Raises:
        ValueError: If the layout cannot express the heads.
    """
    config = heads.config
    if config.shared or config.head_vocab is not None or not config.bias:
        raise ValueError(f"the original Medusa layout cannot express {config}")
    weights = {}
    for k in range(config.num_heads):
        for j in range(config.num_layers):
            for part in ("weight", "bias"):
                weights[f"{k}.{j}.linear.{part}"] = heads.get_parameter(f"blocks.{k}.{j}.{part}")
        weights[f"{k}.{config.num_layers}.weight"] = heads.get_parameter(f"outputs.{k}.weight")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(weights, target / FILES[0])
    fields: dict[str, Any] = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    if accuracies is not None:
        fields[ACCURACIES] = [[round(value, 6) for value in row] for row in accuracies]
    (target / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _check_fields(fields: Mapping[str, Any], config: MedusaConfig, folder: str, vllm: bool) -> None:
    """Raises UnsupportedModel for an unknown field, or one that contradicts tensors or target."""
    for name in fields:
        if name not in (*OWN, *WITHOUT_EFFECT):
            raise UnsupportedModel(f"config.json of {folder} has an unknown field {name!r}")
    expected: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.head_vocab or config.vocab_size,
        "medusa_fc_bias": config.bias,
    }
    if vllm:  # the other layouts have these fields of the target, or wrong ones
        expected |= {"num_heads": config.num_heads, "num_hidden_layers": config.num_layers}
    for name, value in expected.items():
        if fields.get(name) is not None and fields[name] != value:
            raise UnsupportedModel(
                f"{name} is {fields[name]!r:.80} in config.json of {folder}; its tensors and the "
                f"target have {value!r}"
            )
    rows, words = _accuracies(fields) or [], config.head_vocab or config.vocab_size
    if len(rows) > config.num_heads or any(len(row) > words for row in rows):
        raise UnsupportedModel(
            f"config.json of {folder}: {ACCURACIES} has {len(rows)} heads and up to "
            f"{max(map(len, rows))} ranks; its tensors have {config.num_heads} heads with {words} "
            "tokens each"
        )


def _config(
    weights: Mapping[str, Tensor], folder: str, hidden_size: int, vocab_size: int
) -> MedusaConfig:
    """Derives the configuration from the tensors' names and shapes."""
    blocks = [name.split(".") for name in weights if name.startswith("blocks.")]
    outputs = [name for name in weights if name.startswith("outputs.")]
    if not outputs or not blocks:
        raise UnsupportedModel(
            f"{folder} holds no Medusa heads: no tensor like '0.0.linear.weight' or "
            "'blocks.0.layers.0.weight' with its output matrix"
        )
    config = MedusaConfig(
        hidden_size,
        vocab_size,
        1 + max(int(part[1]) for part in blocks),
        1 + max(int(part[2]) for part in blocks),
        bias=any(part[3] == "bias" for part in blocks),
        shared=len(outputs) == 1 and len({part[1] for part in blocks}) > 1,
    )
    words = weights.get("token_map")
    if words is None:
        return config
    if words.ndim != 1 or not len(words):
        raise UnsupportedModel(
            f"token_map of {folder} is {tuple(words.shape)}; a list of tokens is needed"
        )
    if not 0 <= int(words.min()) <= int(words.max()) < vocab_size:
        raise UnsupportedModel(
            f"token_map of {folder} names tokens {int(words.min())}..{int(words.max())}; the "
            f"target's vocabulary is 0..{vocab_size - 1}"
        )
    if len(set(words.tolist())) < len(words):
        raise UnsupportedModel(f"token_map of {folder} names a token twice")
    return replace(config, head_vocab=words.shape[0])


def _fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    return read_json(path)


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Reads every tensor that may belong to a head; the target's other tensors are not read.

    Raises:
        UnsupportedModel: If two places hold heads, or a file is damaged.
    """
    index = folder / "model.safetensors.index.json"
    sources = {name: [folder / name] for name in FILES if (folder / name).exists()}
    if index.exists():
        files = weight_map(index)
        # The target's shards need not be there. Those that are there are looked into.
        needed = {file for name, file in files.items() if may_be_head(name)}
        here = {file for file in files.values() if file in needed or (folder / file).exists()}
        sources = {name: paths for name, paths in sources.items() if name not in here}
        sources[index.name] = [folder / file for file in sorted(here)]
    names = {path: _names(path) for paths in sources.values() for path in paths}
    heads = [
        source
        for source, paths in sources.items()
        if any(not TARGET.match(name) for path in paths for name in names[path])
    ]
    if len(heads) > 1:
        raise UnsupportedModel(f"{folder.name} has heads in {' and in '.join(heads)}; remove one")
    if not sources:
        hint = ""
        if pickled := sorted(path.name for path in folder.glob("*.pt")):
            command = "python -m benchmarks.text.convert_medusa"
            hint = f"; convert {pickled[0]} offline with `{command}`"
        hint += gguf_hint(folder)
        raise UnsupportedModel(f"{folder.name} has none of {list(FILES)}{hint}")
    weights: dict[str, Tensor] = {}
    for path in names:
        with opened_file(path) as file:
            for name in filter(may_be_head, names[path]):
                if name in weights:
                    raise UnsupportedModel(f"{folder.name} has the tensor {name!r} twice")
                weights[name] = read_tensor(file, name, path)
                if not is_finite(weights[name]):
                    raise UnsupportedModel(
                        f"{path}: {name} holds NaN or infinity; the heads are damaged"
                    )
    return weights


def _names(path: Path) -> list[str]:
    with opened_file(path) as file:
        return list(file.keys())
