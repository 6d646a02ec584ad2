"""Loads language models from Hugging Face folders: config.json, and safetensors, also sharded.

Families: Llama, Qwen2, Qwen3. A configuration that needs something this code does not compute is
rejected by name. Nothing that would change the logits is ignored.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recserve.files import (
    UnreadableFile,
    gguf_hint,
    parse_json,
    read_bytes,
    read_json_object,
    regular_file,
)
from recserve.models.config import (
    MOST,
    NORM_EPS,
    ROPE_THETA,
    DecoderConfig,
    RopeFactors,
    RopeScaling,
    check_number,
)
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.weight_check import FLOATS, largest

log = logging.getLogger(__name__)

FAMILIES = ("llama", "qwen2", "qwen3")
# Largest numbers of a configuration, by its field; MAX_SIZE for all others.
MAX_SIZE = 1 << 24
LIMITS = {
    "num_hidden_layers": MOST["num_layers"],
    "num_nextn_predict_layers": MOST["num_layers"],
    "medusa_num_layers": MOST["num_layers"],
    "num_attention_heads": MOST["num_heads"],
    "num_key_value_heads": MOST["num_kv_heads"],
    "head_dim": MOST["head_dim"],
    "max_position_embeddings": MOST["max_positions"],
    "original_max_position_embeddings": MOST["max_positions"],
}
# Bounds of its numbers by field; those of FACTOR for all others, which scale something.
NUMBERS = {"rms_norm_eps": NORM_EPS, "rope_theta": ROPE_THETA}
FACTOR = (1e-6, 1e6)
# Products with larger weights leave the range of float32.
MAX_WEIGHT = 2.0**64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Tensors of drafters that map tokens.
TABLES = ("d2t", "t2d", "token_map")


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
            tensor = read_tensor(opened[files[name]], name, files[name]).to(dtype)
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

        if config.tied and HEAD in files and not torch.equal(read(HEAD), read(EMBEDDING)):
            log.warning(
                "%s: tie_word_embeddings is true, but %s differs from %s; it is the head, as in "
                "transformers",
                folder,
                HEAD,
                EMBEDDING,
            )
            config = replace(config, tied=False)
        with torch.device("meta"):
            model = LanguageModel(config)
        for name, empty in model.state_dict().items():
            weight = _assemble(name, read)
            if weight.shape != empty.shape:
                raise UnsupportedModel(
                    f"{name} is {tuple(weight.shape)} in {folder.name}; config.json requires "
                    f"{tuple(empty.shape)}"
                )
            weights[name] = weight
    heads = _head_tensors(folder, config.decoder.num_layers)
    left = {name for name in files if name not in used and not FREQUENCIES.fullmatch(name)}
    if other := sorted(name for name in left if not name.startswith(heads)):
        raise UnsupportedModel(
            f"{folder.name} has a tensor {other[0]!r} that its config.json has no place for"
        )
    if left:
        log.info(
            "%s: %d tensors of MTP modules or Medusa heads, such as %s, are no part of the model; "
            "a drafter reads them",
            folder,
            len(left),
            min(left),
        )
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def _head_tensors(folder: Path, num_layers: int) -> tuple[str, ...]:
    """Returns the prefixes of the tensors of MTP modules and Medusa heads beside a model.

    The model itself does not read them. Medusa-2 trains both together and stores them together.
    """
    fields = read_json(folder / "config.json")
    count = read_whole(fields, "num_nextn_predict_layers", 0, least=0)
    if "medusa_num_heads" in fields:
        return "medusa_head.", "medusa_heads.", "mtp."
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
        raise UnsupportedModel(
            f"config.json: dtype is {name!r:.80}; choose one of {sorted(DTYPES)}"
        )
    return config, DTYPES[name]


def read_config(fields: dict[str, Any], served: int | None = None) -> LanguageModelConfig:
    """Builds a configuration from the fields of a config.json.

    Args:
        fields: The fields.
        served: Positions of the longest text. None means `max_position_embeddings`.
    """
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"config.json: model_type is {family!r:.80}; choose one of {list(FAMILIES)}"
        )
    for name, neutral in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("pretraining_tp", 1),
        ("quantization_config", None),
    ):
        if fields.get(name) not in (None, neutral):
            raise UnsupportedModel(
                f"config.json: {name} is {fields[name]!r:.80}; only {neutral!r} is computed here"
            )
    heads, size = read_whole(fields, "num_attention_heads"), read_whole(fields, "hidden_size")
    positions = read_whole(fields, "max_position_embeddings")
    head_dim = read_whole(fields, "head_dim", size // heads)
    theta, scaling = _rope(fields, head_dim, served or positions)
    biased = read_flag(fields, "attention_bias")
    num_layers = read_whole(fields, "num_hidden_layers")
    decoder = DecoderConfig(
        hidden_size=size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=read_whole(fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=read_whole(fields, "intermediate_size"),
        max_positions=served or positions,
        rope_theta=theta,
        norm_eps=read_number(fields, "rms_norm_eps", 1e-6),
        qk_norm=family == "qwen3",
        attention_bias=family == "qwen2" or biased,
        output_bias=family != "qwen2" and biased,
        rope_scaling=scaling,
    )
    vocab_size = read_whole(fields, "vocab_size")
    begin = _tokens("config.json", "bos_token_id", fields.get("bos_token_id"), vocab_size)
    return LanguageModelConfig(
        decoder,
        vocab_size,
        read_flag(fields, "tie_word_embeddings"),
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


ROPE_TYPES = ("default", "mrope", "linear", "llama3", "yarn", "longrope")
# Fields that do not scale: those of the types `default` and `mrope`.
UNSCALED = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved"),
)
ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "attention_factor", "truncate", "short_factor", "long_factor"),
    # Without images, the parts of a position are all the same.
    *("partial_rotary_factor", "mrope_section", "mrope_interleaved"),
)


def _rope(
    fields: dict[str, Any], head_dim: int, served: int
) -> tuple[float, RopeScaling | RopeFactors | None]:
    """Returns base and scaling, from the older fields or from `rope_parameters`.

    Source: transformers (modeling_rope_utils.py). longrope has other factors for texts that are
    longer than the original positions. Here the longest served text decides for all of them,
    because cached prefixes have to fit every text that continues them.
    """
    places = {name: read_object(fields, name) for name in ("rope_parameters", "rope_scaling")}
    place = next((name for name in places if places[name]), "rope_parameters")
    rope = places[place]
    if len({_rope_key(one) for one in places.values() if one}) > 1:
        raise UnsupportedModel(
            f"config.json contradicts itself: {places!r:.200}; remove the wrong one"
        )
    if unknown := sorted(set(rope) - set(ROPE_FIELDS)):
        raise UnsupportedModel(f"config.json: {place} has an unknown field {unknown[0]!r}")
    for share in (rope.get("partial_rotary_factor"), fields.get("partial_rotary_factor")):
        if share not in (None, 1):
            raise UnsupportedModel(
                f"config.json: partial_rotary_factor is {share!r}; only 1.0 is computed here"
            )
    theta = read_number(rope, "rope_theta", read_number(fields, "rope_theta", 10_000.0))
    kind = _rope_kind(rope)
    # mrope gives each part of a head another position of an image. Texts have one position.
    if kind in ("default", "mrope"):
        for name, value in rope.items():
            if name not in UNSCALED and value is not None and (name, value) != ("factor", 1):
                raise UnsupportedModel(
                    f"config.json: {name} is {value!r:.80} beside rope_type "
                    f"{rope.get('rope_type', rope.get('type'))!r}, which does not scale; "
                    f"choose one of {list(ROPE_TYPES)} as rope_type, or remove {name}"
                )
        return theta, None
    if kind == "dynamic":
        raise UnsupportedModel(
            f"config.json: the rope type in {place} is 'dynamic', which turns all positions "
            "again when a text gets longer; cached prefixes rule that out. Choose one of "
            f"{list(ROPE_TYPES)}"
        )
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"config.json: the rope type in {place} is {kind!r}; choose one of {list(ROPE_TYPES)}"
        )
    if kind == "linear":
        return theta, RopeFactors((read_number(rope, "factor"),) * (head_dim // 2))
    positions = read_whole(fields, "max_position_embeddings")
    original = read_whole(rope, "original_max_position_embeddings", positions)
    original = read_whole(fields, "original_max_position_embeddings", original)
    if kind == "llama3":
        return theta, RopeScaling(
            read_number(rope, "factor"),
            read_number(rope, "low_freq_factor"),
            read_number(rope, "high_freq_factor"),
            original,
        )
    # Files that state the original positions may leave the factor to the ratio of the two.
    ratio = positions / original if kind == "longrope" or original < positions else None
    factor = read_number(rope, "factor", ratio)
    if kind == "yarn":
        return theta, _yarn(rope, factor, head_dim, theta, original)
    scale = 1.0
    if factor > 1:
        if original < 2:
            raise UnsupportedModel(
                f"config.json: original_max_position_embeddings is {original}; 2 or more are needed"
            )
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
    lists = {name: rope.get(name) for name in ("short_factor", "long_factor")}
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != head_dim // 2:
            raise UnsupportedModel(
                f"config.json: {name} is {values!r:.80}; a list of {head_dim // 2} numbers is "
                "needed"
            )
        for value in values:
            read_number({name: value}, name)
    factors = lists["long_factor" if served > original else "short_factor"]
    assert factors is not None
    return theta, RopeFactors(
        tuple(map(float, factors)), read_number(rope, "attention_factor", scale)
    )


def _rope_kind(rope: dict[str, Any]) -> Any:
    """Returns the type of a scaling, which has two names.

    Raises:
        UnsupportedModel: If both names are there and differ. Models for images write `mrope` and
            `default`, which are the same for texts.
    """
    kinds = [rope[name] for name in ("rope_type", "type") if name in rope]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        if any(kind not in ("default", "mrope") for kind in kinds):
            raise UnsupportedModel(
                f"config.json: rope_type is {kinds[0]!r:.60} and type is {kinds[1]!r:.60}; "
                "remove the wrong one"
            )
        return "mrope"
    return kinds[0] if kinds else "default"


def _rope_key(rope: dict[str, Any]) -> str:
    """Returns what two descriptions of the same positions have in common."""
    kind = _rope_kind(rope)
    kind = "default" if kind == "mrope" else kind
    apart = ("rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved")
    rest = {name: value for name, value in rope.items() if name not in apart and value is not None}
    return repr((kind, sorted(rest.items())))


def _yarn(
    rope: dict[str, Any], factor: float, head_dim: int, theta: float, original: int
) -> RopeFactors:
    """Returns yarn's scaling (arXiv 2309.00071).

    Pairs that turn often within the original positions stay, those that turn rarely are divided by
    the factor, and the share is linear between the two.
    """
    if theta <= 1:
        raise UnsupportedModel(f"config.json: rope_theta is {theta}; yarn needs one above 1")
    shares = [rope.get(name) for name in ("mscale", "mscale_all_dim")]

    def magnitude(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = magnitude(1.0)
    if all(shares):
        above, below = (read_number(rope, name) for name in ("mscale", "mscale_all_dim"))
        scale = magnitude(above) / magnitude(below)
    turns = [read_number(rope, "beta_fast", 32.0), read_number(rope, "beta_slow", 1.0)]
    low, high = (
        head_dim * math.log(original / (count * 2 * math.pi)) / (2 * math.log(theta))
        for count in turns
    )
    truncate = rope.get("truncate", True)
    if truncate not in (True, False, None):
        raise UnsupportedModel(f"config.json: truncate is {truncate!r}; true or false is needed")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    divided = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(head_dim // 2)]
    return RopeFactors(
        tuple(1.0 / (share / factor + 1.0 - share) for share in divided),
        read_number(rope, "attention_factor", scale),
    )


def read_number(
    fields: Mapping[str, Any], name: str, default: float | None = None, file: str = "config.json"
) -> float:
    """Returns a number of a configuration; a missing one or null gives the default.

    Raises:
        UnsupportedModel: If it is none, or outside the bounds of NUMBERS or FACTOR.
    """
    given = fields.get(name)
    value: Any = default if given is None else given
    try:
        check_number(name, value, NUMBERS.get(name, FACTOR))
    except ValueError as error:
        raise UnsupportedModel(f"{file}: {error}") from None
    return float(value)


def read_whole(
    fields: Mapping[str, Any], name: str, default: int | None = None, least: int = 1
) -> int:
    """Returns a whole number of a configuration; a missing one or null gives the default.

    Raises:
        UnsupportedModel: If it is none, or outside `least` and the bound of LIMITS.
    """
    value, most = fields.get(name), LIMITS.get(name, MAX_SIZE)
    value = default if value is None else value
    if type(value) is not int or value < least:
        needed = "a positive integer" if least == 1 else f"an integer from {least} on"
        raise UnsupportedModel(f"config.json: {name} is {value!r:.80}; {needed} is needed")
    if value > most:
        raise UnsupportedModel(f"config.json: {name} is {value!r:.40}; expected at most {most}")
    return value


def read_flag(
    fields: Mapping[str, Any], name: str, default: bool = False, file: str = "config.json"
) -> bool:
    """Returns true or false; a missing field or null gives the default.

    Raises:
        UnsupportedModel: If it is something else, such as the text "false".
    """
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{file}: {name} is {value!r:.80}; true or false is needed")
    return value


def read_names(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns a list of texts; a missing one or null gives an empty one."""
    value = fields.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UnsupportedModel(f"config.json: {name} is {value!r:.80}; a list of texts is needed")
    return tuple(value)


def read_object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns an object inside a configuration; a missing one or null gives an empty one."""
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise UnsupportedModel(f"config.json: {name} is {value!r:.80}; an object is needed")
    return value or {}


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
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUTSIDE = {
    "tokens.weight": EMBEDDING,
    "decoder.norm.weight": "model.norm.weight",
    "head.weight": HEAD,
}
# Old files contain the RoPE frequencies, which follow from config.json.
FREQUENCIES = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def _assemble(name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Returns our tensor `name`; projections that read the same input are one matrix here."""
    if name in OUTSIDE:
        return read(OUTSIDE[name])
    _, _, layer, part, last = name.split(".")
    return read_part(f"model.layers.{layer}.", part, last, read)


def read_part(prefix: str, part: str, last: str, read: Callable[[str], Tensor]) -> Tensor:
    """Returns one of our tensors of a layer.

    Args:
        prefix: What precedes the names of the layer's tensors in the file.
        part: Our name of the part, a key of PARTS.
        last: `weight` or `bias`.
        read: Returns a tensor of the file.
    """
    return join_rows({name: read(name) for name in (f"{prefix}{p}.{last}" for p in PARTS[part])})


def join_rows(pieces: Mapping[str, Tensor]) -> Tensor:
    """Returns tensors as one, the rows of each after those of the one before.

    Raises:
        UnsupportedModel: If their rows have different sizes.
    """
    if len(pieces) == 1:
        return next(iter(pieces.values()))
    shapes = {name: tuple(piece.shape) for name, piece in pieces.items()}
    if () in shapes.values() or len({shape[1:] for shape in shapes.values()}) > 1:
        listed = ", ".join(f"{name} is {shape}" for name, shape in shapes.items())
        raise UnsupportedModel(f"{listed}; only their first sizes may differ")
    return torch.cat(list(pieces.values()))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor.

    Raises:
        UnsupportedModel: If there are no weights, or a file holds a tensor that the index does not
            name there, which would be left out.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists():
        files = {name: folder / file for name, file in weight_map(index).items()}
        if single.exists() and single not in files.values():
            raise UnsupportedModel(
                f"{folder.name} has both {single.name} and {index.name}, which names "
                f"{min(files.values()).name}; remove the wrong one"
            )
        for path in sorted(set(files.values())):
            with opened_file(path) as file:
                if left := sorted(name for name in file.keys() if files.get(name) != path):  # noqa: SIM118
                    raise UnsupportedModel(
                        f"{path} holds a tensor {left[0]!r} that {index.name} does not name there; "
                        "add it to weight_map, or remove it from the file"
                    )
        return files
    if not single.exists():
        raise UnsupportedModel(
            f"{folder.name} has neither {single.name} nor {index.name}; weights are read from "
            f"safetensors only{gguf_hint(folder)}"
        )
    with opened_file(single) as file:
        return dict.fromkeys(file.keys(), single)


def weight_map(index: Path) -> dict[str, str]:
    """Returns the file name of each tensor from an index of shards.

    Raises:
        UnsupportedModel: If the field `weight_map` is missing, or names a file of another folder.
    """
    try:
        content = parse_json(read_bytes(index), index)
    except UnreadableFile as error:
        raise UnsupportedModel(str(error)) from error
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
        return safe_open(regular_file(path), framework="pt", device=device)
    except SafetensorError as error:
        raise UnsupportedModel(
            f"{path} is not a safetensors file; it is damaged: {error}"
        ) from error
    except (UnreadableFile, OSError) as error:
        raise UnsupportedModel(str(error)) from error


def read_tensor(file: Any, name: str, path: Path) -> Tensor:
    """Returns a tensor of an opened safetensors file.

    Numbers of 8 bits need scales, which no loader reads. So weights are floats of 16 bits or more,
    and tables of tokens (TABLES) are integers or truth values.

    Raises:
        UnsupportedModel: If the file has no such tensor, or one of another type.
    """
    try:
        tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    table = name.rsplit(".", 1)[-1] in TABLES
    if tensor.dtype not in (WHOLE if table else FLOATS):
        needed = "integers or truth values" if table else "float16, bfloat16, float32 or float64"
        raise UnsupportedModel(f"{path}: {name} is {tensor.dtype}; expected {needed}")
    if not (table or tensor.ndim):
        raise UnsupportedModel(f"{path}: {name} is one number; expected a vector or a matrix")
    return tensor


def read_tensors(folder: Path, rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Returns all tensors of a folder by the names that `rename` gives them.

    Raises:
        UnsupportedModel: If two tensors get one name; see also `read_tensor`.
    """
    found: dict[str, Tensor] = {}
    for path in sorted(set(tensor_files(folder).values())):
        with opened_file(path) as file:
            for name in file.keys():  # noqa: SIM118
                if (own := rename(name)) in found:
                    raise UnsupportedModel(f"{folder.name} has the tensor {own!r} twice")
                found[own] = read_tensor(file, name, path)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises UnsupportedModel if there is none."""
    if not path.exists():
        raise UnsupportedModel(f"{path.parent.name} has no {path.name}{gguf_hint(path.parent)}")
    try:
        return read_json_object(path)
    except UnreadableFile as error:
        raise UnsupportedModel(str(error)) from error
