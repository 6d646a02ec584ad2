"""Results of the C kernels on fixed inputs, to compare libraries with each other.

    python -m tests.support.c_results FILE.safetensors

prints the name of the library and writes the results.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from recserve.kernels.cpu import native
from recserve.kernels.cpu.cpu_plan import Form
from recserve.kernels.cpu.half_panels import HalfPanels
from recserve.kernels.cpu.int8_panels import Int8Panels
from recserve.kernels.cpu.native_attention import NativeTreeAttention
from recserve.kernels.int8 import Int8Weight
from tests.support.attention_batches import draw_batch


def c_results() -> dict[str, Tensor]:
    """Returns products, norms, gates and attention as float32, by operation and type."""
    found: dict[str, Tensor] = {}
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 96, generator=g), torch.randn(70, 96, generator=g) / 10
    batch, query, keys, values = draw_batch([("tree", 40), ("chain", 9)], [200, 0], 8, 4, 32)
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            typed, name = x.to(dtype), str(dtype).removeprefix("torch.")
            q, k, v = query.to(dtype), keys.to(dtype), values.to(dtype)
            attend = NativeTreeAttention.of(batch, Form(4, 2, 32, dtype, True))
            assert attend is not None
            outs = {
                "product": native.Panels.of(weight.to(dtype), None)(typed),
                "int8": Int8Panels.of(Int8Weight.of(weight), None, dtype)(typed),
                "norm": native.rms_norm(typed, typed[0], 1e-5),
                "gate": native.silu_mul(typed),
                "attention": attend(q, q, q, k, v),
            }
            if dtype == torch.float32:
                outs["halves"] = HalfPanels.of(weight.half().float(), None)(typed)
            found |= {f"{kind} {name}": out.float() for kind, out in outs.items()}
    return found


def main() -> None:
    """Prints the library's name and writes the results into the file of the command line."""
    library = native.library()
    print("none" if library is None else Path(library._name).name)
    if library is not None:
        save_file(c_results(), sys.argv[1])


if __name__ == "__main__":
    main()
