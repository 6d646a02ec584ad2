"""The Triton version of fp8.py: device functions with bit-identical codes and numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NATIVE_SINCE = (8, 9)  # compute capability; older machines have no e4m3 instructions


def has_native(device: torch.device) -> bool:
    """Returns whether the machine converts e4m3; otherwise integer operations do the same."""
    if not (device.type == "cuda" and torch.cuda.is_available()):
        return False
    return torch.cuda.get_device_capability(device) >= NATIVE_SINCE


@triton.jit
def decoded(codes, NATIVE: tl.constexpr):
    """Decodes uint8 codes of any shape to float16, which represents all e4m3 numbers."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def powers(exponents):
    """Returns 2 ** (exponents - 127) in float32, and 0 for exponent 0."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sizes(x):
    """Returns the absolute values of float32 numbers as int32 in the same order; NaN is largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponents_of(largest):
    """Returns the int32 exponents of vectors whose largest numbers have these sizes."""
    found = largest >> 23
    return tl.where(found == 255, 255, tl.maximum(found, 8) - 7)


@triton.jit
def encoded(x, exponents):
    """Encodes float32 numbers as uint8 codes; the vectors' exponents are broadcast against them."""
    y = x * powers(tl.maximum(254 - exponents, 1))
    size, sign = sizes(y), (y.to(tl.int32, bitcast=True) >> 24) & 128
    # Round to nearest even at the third mantissa bit. float32's exponents are 120 above e4m3's.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2**-6, codes are multiples of 2**-9, the last bit of a float32 near 2**14.
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 127))
    return (code | sign).to(tl.uint8)
