"""Names of the tensors of Medusa heads in the published layouts.

    original    {i}.{j}.linear.weight, .bias, {i}.{num_layers}.weight; also after `medusa_head.`
    legacy      {i}.{j}.linear.weight, .bias and nothing else: the target's head reads the blocks
    vLLM        blocks.{i}.layers.{j}.weight, .bias, lm_heads.{i}.weight, token_map

The blocks of an original head may be one module. Safetensors then stores the first block only, and
the place of the output matrix is the number of blocks.

Sources: FasterDecoding/Medusa (medusa_model_new.py, medusa_model_legacy.py), vLLM (medusa.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from recserve.models.loading import UnsupportedModel

PREFIX = re.compile(r"^(medusa_heads?\.|model\.)+")
# Numbers up to 999: a larger one would ask for so many heads or blocks.
ORIGINAL_BLOCK = re.compile(r"^(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)$")
ORIGINAL_OUTPUT = re.compile(r"^(\d{1,3})\.(\d{1,3})\.weight$")
VLLM_BLOCK = re.compile(r"^blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)$")
VLLM_OUTPUT = re.compile(r"^lm_heads?\.(?:(\d{1,3})\.)?weight$")
# The target's own tensors, which a folder of target and heads together holds too.
TARGET = re.compile(r"^(model\.(embed_tokens|layers\.\d+|norm)\..+|lm_head\.weight)$")


def rename(weights: Mapping[str, Tensor], shared: bool = False) -> dict[str, Tensor]:
    """Renames the tensors of either layout to our names. The target's own tensors are left out.

    Args:
        weights: Tensors by name.
        shared: vLLM's `original_lm_head`, one output matrix for all heads.

    Raises:
        UnsupportedModel: If a tensor belongs to neither layout, or if two differ in one place.
    """
    ours: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        short = PREFIX.sub("", name)
        if found := ORIGINAL_BLOCK.match(short) or VLLM_BLOCK.match(short):
            place = "blocks.{}.{}.{}".format(*found.groups())
        elif found := ORIGINAL_OUTPUT.match(short):
            place = f"outputs.{found[1]}.weight"
        elif (found := VLLM_OUTPUT.match(short)) and (found[1] is not None or shared):
            place = f"outputs.{0 if shared else found[1]}.weight"
        elif short == "token_map":
            place, tensor = short, tensor.long()
        elif TARGET.match(name):
            continue
        else:
            raise UnsupportedModel(f"tensor {name!r} has no place in Medusa heads")
        if place in ours and not torch.equal(ours[place], tensor):
            raise UnsupportedModel(
                f"tensor {name!r} differs from another one for the same place, {their_names(place)}"
            )
        ours[place] = tensor
    return ours


def repeat_blocks(
    weights: dict[str, Tensor], stored: Mapping[str, Tensor], num_layers: int
) -> None:
    """Adds the blocks that an original head repeats but its file stores once.

    Args:
        weights: Tensors by our names; receives the repeated blocks.
        stored: Tensors by their names in the file.
        num_layers: Blocks of a head without an output matrix, by the configuration.

    Raises:
        UnsupportedModel: If the places of output matrices or blocks contradict each other.
    """
    outputs: dict[str, str] = {}
    blocks: dict[str, set[int]] = {}
    for name in stored:
        short = PREFIX.sub("", name)
        if found := ORIGINAL_OUTPUT.match(short):
            outputs[short] = found[2]
        elif found := ORIGINAL_BLOCK.match(short):
            blocks.setdefault(found[1], set()).add(int(found[2]))
    if len(set(outputs.values())) > 1:
        raise UnsupportedModel(
            f"output matrices lie at different places: {', '.join(map(repr, sorted(outputs)))}"
        )
    count = int(next(iter(outputs.values()), num_layers))
    for head, places in blocks.items():
        if outputs and max(places) >= count:
            raise UnsupportedModel(
                f"block '{head}.{max(places)}.linear' lies after the output matrix, which is at "
                f"place {count}"
            )
        if places != {0}:
            continue
        parts = [part for part in ("weight", "bias") if f"blocks.{head}.0.{part}" in weights]
        for block in range(1, count):
            for part in parts:
                weights[f"blocks.{head}.{block}.{part}"] = weights[f"blocks.{head}.0.{part}"]


def is_vllm(names: Iterable[str]) -> bool:
    """Returns whether tensors have the names of vLLM's layout."""
    return any(VLLM_BLOCK.match(PREFIX.sub("", name)) for name in names)


def their_names(name: str) -> str:
    """Returns the name of our tensor in the two layouts."""
    if name == "token_map":
        return name
    kind, head, *rest = name.split(".")
    if kind == "outputs":
        return (
            f"the output matrix of head {head} ('{head}.<last>.weight', 'lm_heads.{head}.weight')"
        )
    layer, part = rest
    return f"'{head}.{layer}.linear.{part}' ('blocks.{head}.layers.{layer}.{part}')"


def may_be_head(name: str) -> bool:
    """Returns whether a tensor may belong to the heads: True unless it is the target's own.

    The only output matrix of vLLM's `original_lm_head` has the name of the target's.
    """
    return name == "lm_head.weight" or not TARGET.match(name)
