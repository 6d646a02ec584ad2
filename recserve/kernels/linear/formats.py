"""Formats of stored weights. A format is one file and one line of `FORMATS`.

A `Codec` encodes and decodes the weights. Every backend multiplies with what it decodes, until it
has a kernel for the format. Settings, commands and estimates of memory read this table; it imports
no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from recserve.kernels.linear.panels import Panels


@dataclass(frozen=True)
class Codec:
    """How the weights of a format are made and read.

    Attributes:
        encode: Returns a weight [n, m] of any float type in the format.
        decode: Returns an encoded weight [n, m] in a float type.
        panels: Packs an encoded weight and a bias [n] for activations of a type, for C. None where
            C has no case for the format.
        c_supports: Returns whether C multiplies in place of this weight [n, m], before it is
            encoded. None with `panels` None.
        triton: Class of products (encoded, bias), as "module:class". None without a Triton kernel.
    """

    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, torch.dtype], Tensor]
    panels: Callable[[Any, Tensor | None, torch.dtype], Panels] | None = None
    c_supports: Callable[[Tensor], bool] | None = None
    triton: str | None = None


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights other than the model's own type.

    Attributes:
        bits: Bits of a weight.
        codec: Home of its `Codec`, as "module:name".
        exact: Whether it stores some weights without loss. Such a format is no setting: it is used
            for these weights, where C multiplies them.
    """

    bits: int
    codec: str
    exact: bool = False

    def open(self) -> Codec:
        """Imports the codec."""
        return cast(Codec, resolve_name(self.codec))


FORMATS = {
    "int8": WeightFormat(8, "recserve.kernels.linear.int8:INT8"),
    "float16": WeightFormat(16, "recserve.kernels.linear.float16:FLOAT16", exact=True),
}


def format_names() -> list[str]:
    """Returns the formats that a user may choose."""
    return [name for name, one in FORMATS.items() if not one.exact]


def check_format(name: str | None) -> str | None:
    """Returns the name of a format that a user may choose, or None for the model's own type.

    Raises:
        ValueError: If it is none of them.
    """
    if name is not None and name not in format_names():
        raise ValueError(f"it is {name!r}; choose {' or '.join(format_names())}, or leave it out")
    return name
