"""The processor of this machine, as the system describes it, and the instructions to compile for.

`RECSERVE_ISA` lowers the instruction set of the C sources, so that a machine can act as an older
one. torch has its own settings for this: `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`.

The build of a wheel imports this file where torch is not installed.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

# Levels of instruction sets that the C sources support, each with the flags that it adds to the
# level before it. Other processors compute with torch.
LEVELS_OF_MACHINES: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "x86-64-v3": ("popcnt", "movbe", "abm", "bmi1", "bmi2", "f16c", "fma", "avx2"),
        "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        "x86-64-v4-bf16": ("avx512_bf16",),
    },
    "aarch64": {"armv8-a": ("asimd",)},
}
BFLOAT16_LEVEL = "x86-64-v4-bf16"
LEVELS = LEVELS_OF_MACHINES.get(platform.machine(), {})


@dataclass(frozen=True)
class Processor:
    """A processor, as the system describes it.

    Attributes:
        name: Model name, for the log.
        flags: Instruction sets in Linux's names; empty where the system does not list them.
    """

    name: str
    flags: frozenset[str]


def instruction_set() -> str | None:
    """Returns the level that the C sources are compiled for, or None where torch computes.

    It is `RECSERVE_ISA` if that is set, else the best level of this processor. So the bits of a
    result depend on the level alone, not on the processor that compiled the sources.

    Raises:
        ValueError: If the name is unknown, or this processor lacks the instructions.
    """
    name = os.environ.get("RECSERVE_ISA")
    if not name:
        return best_level()
    if name not in LEVELS:
        raise ValueError(f"RECSERVE_ISA is {name!r}; choose one of {[*LEVELS]}, or leave it unset")
    missing = missing_flags(name)
    if missing:
        raise ValueError(f"RECSERVE_ISA is {name!r}; this processor lacks {', '.join(missing)}")
    return name


def has_bfloat16_products() -> bool:
    """Returns whether this level multiplies bfloat16 with an instruction of its own."""
    return instruction_set() == BFLOAT16_LEVEL


def has_amx() -> bool:
    """Returns whether oneDNN multiplies bfloat16 with AMX, at the best level of this processor."""
    return has_bfloat16_products() and "amx_bf16" in processor().flags


def missing_flags(level: str) -> list[str]:
    """Returns the flags of a level and of those below it that this processor lacks."""
    names = list(LEVELS)
    needed = {flag for name in names[: names.index(level) + 1] for flag in LEVELS[name]}
    return sorted(needed - processor().flags)


def best_level() -> str | None:
    """Returns the highest level whose instructions this processor has, or None without one."""
    return next((level for level in reversed(LEVELS) if not missing_flags(level)), None)


@functools.cache
def processor() -> Processor:
    """Returns the processor of this machine."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return described(text)


def instructions() -> str:
    """Describes for the log which instructions the C sources and torch use."""
    import torch

    torch_uses = torch.backends.cpu.get_cpu_capability()
    return f"C {instruction_set() or 'not used'}; torch {torch_uses}"


def described(text: str) -> Processor:
    """Returns the first processor of a /proc/cpuinfo, completed from Python's platform module."""
    first = text.partition("\n\n")[0]
    parts = (line.partition(":") for line in first.splitlines())
    about = {key.strip(): value.strip() for key, _, value in parts}
    return Processor(
        about.get("model name") or platform.processor() or platform.machine(),
        frozenset((about.get("flags") or about.get("Features", "")).split()),
    )
