"""Formats of stored weights. A format is one file and one line of `FORMATS`.

A `Codec` encodes and decodes the weights. Every backend multiplies with what it decodes, until it
has a kernel for the format. Settings, commands and estimates of memory read this table; it imports
no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PanelsOfFormat(Protocol):
    """Weights of a format in the layout that C reads."""

    def supports(self, weight: Tensor) -> bool:
        """Returns whether C multiplies in place of this weight [n, m], before it is encoded."""
        ...

    def of(self, encoded: Any, bias: Tensor | None, dtype: torch.dtype) -> Any:
        """Packs an encoded weight and a bias [n] for activations of a type."""
        ...


@dataclass(frozen=True)
class Codec:
    """How the weights of a format are made and read.

    Attributes:
        encode: Returns a weight [n, m] of any float type in the format.
        decode: Returns an encoded weight [n, m] in a float type.
        c: Class with the methods of `PanelsOfFormat`, as "module:class". None without C kernels.
        triton: Class of products (encoded, bias), as "module:class". None without a Triton kernel.
    """

    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, torch.dtype], Tensor]
    c: str | None = None
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


def settings() -> list[str]:
    """Returns the formats that a user may choose."""
    return [name for name, one in FORMATS.items() if not one.exact]


def checked(name: str | None) -> str | None:
    """Returns the name of a format that a user may choose, or None for the model's own type.

    Raises:
        ValueError: If it is none of them.
    """
    if name is not None and name not in settings():
        raise ValueError(f"it is {name!r}; choose {' or '.join(settings())}, or leave it out")
    return name
