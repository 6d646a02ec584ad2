"""Reads weights and checks them: names and sizes as the configuration says, no NaN, no infinity."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from recserve.files import regular_file

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file. Raises ValueError if it is none."""
    try:
        return load_file(regular_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def largest(weight: Tensor) -> float:
    """Returns the largest magnitude in a weight; NaN if it contains NaN.

    One pass without copies runs at memory speed, in any float type: 1 s for 20 GB on one core.
    It is 0 for integer weights, which are not checked.
    """
    if not weight.is_floating_point() or not weight.numel():
        return 0.0
    # min and max propagate NaN. `isfinite` would write a bool per number, 30 times slower.
    return float(torch.stack(torch.aminmax(weight)).abs().max())


def is_finite(weight: Tensor) -> bool:
    """Returns whether a weight contains no NaN and no infinity."""
    return math.isfinite(largest(weight))


def is_copy(own: Tensor, other: Tensor) -> bool:
    """Returns whether two weights are the same numbers, each rounded to 16 bits or more."""
    if own.shape != other.shape:
        return False
    # Two roundings to bfloat16 are 2^-8 apart; float16 has steps of 6e-8 near 0.
    return torch.allclose(own.cpu().float(), other.cpu().float(), rtol=2**-7, atol=1e-7)


def check_finite(weights: Mapping[str, Tensor], file: Path) -> None:
    """Raises ValueError naming the file and the first weight that is not finite."""
    for name, weight in weights.items():
        if not is_finite(weight):
            raise ValueError(f"{file}: {name} holds NaN or infinity; the model is damaged")


def check_weights(
    kind: Callable[[Any], nn.Module], config: Hashable, weights: Mapping[str, Tensor], file: Path
) -> None:
    """Compares weights with a model that has no memory yet, before one with memory is built.

    A file has all of the model's weights and no other tensor, which would be left out.

    Args:
        kind: Builds a model from its configuration.
        config: The configuration.
        weights: Weights of a file.
        file: The file, for messages.

    Raises:
        ValueError: If a weight is missing, has another size or is no float, if a tensor has no
            place, or if a weight is not finite.
    """
    try:
        expected = _shapes(kind, config)
    except RuntimeError as error:
        raise ValueError(f"{file.parent}/config.json asks for too much memory: {error}") from error
    for name, shape in expected.items():
        if name not in weights:
            continue
        if weights[name].dtype not in FLOATS:
            raise ValueError(
                f"{file}: {name} is {weights[name].dtype}; expected a float of 16 bits or more"
            )
        if weights[name].shape != shape:
            raise ValueError(
                f"{file} does not fit its config.json: {name} is {tuple(weights[name].shape)}; the "
                f"sizes there require {tuple(shape)}"
            )
    if missing := sorted(expected.keys() - weights.keys()):
        raise ValueError(f"{file} has no tensor {missing[0]!r}, which its config.json requires")
    if left := sorted(weights.keys() - expected.keys()):
        raise ValueError(f"{file} has a tensor {left[0]!r} that its config.json has no place for")
    check_finite(weights, file)


@lru_cache(maxsize=32)
def _shapes(kind: Callable[[Any], nn.Module], config: Hashable) -> dict[str, torch.Size]:
    """Returns the sizes of a model's weights; they are known when its bundle is loaded again."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in kind(config).state_dict().items()}
