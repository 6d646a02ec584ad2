"""The processor of this machine, as the system describes it, and the instructions to compile for.

`RECSERVE_ISA` lowers the instruction set of the C sources, so that a machine can act as an older
one. torch has its own settings for this.

    python processor.py LEVEL        prints all settings for a level, as for a shell

The build of a wheel imports this file where torch is not installed.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Level:
    """A level of instruction sets that the C sources support: this row, and one `simd_*.h`.

    Attributes:
        flags: Instruction sets that it adds to the level before it, in Linux's names.
        compiler: Flags of the C compiler.
        torch: Environment variables with which torch and oneDNN compute as on such a processor.
        bfloat16: Whether it multiplies bfloat16 with an instruction of its own.
    """

    flags: tuple[str, ...]
    compiler: tuple[str, ...]
    torch: Mapping[str, str] = field(default_factory=dict)
    bfloat16: bool = False


def _cap_libraries(torch: str, onednn: str) -> dict[str, str]:
    return {"ATEN_CPU_CAPABILITY": torch, "ONEDNN_MAX_CPU_ISA": onednn}


# Other processors compute with torch.
LEVELS_OF_MACHINES: dict[str, dict[str, Level]] = {
    "x86_64": {
        "x86-64-v3": Level(
            ("popcnt", "movbe", "abm", "bmi1", "bmi2", "f16c", "fma", "avx2"),
            ("-march=x86-64-v3",),
            _cap_libraries("avx2", "AVX2"),
        ),
        "x86-64-v4": Level(
            ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
            ("-march=x86-64-v4",),
            _cap_libraries("avx512", "AVX512_CORE"),
        ),
        "x86-64-v4-bf16": Level(
            ("avx512_bf16",), ("-march=x86-64-v4", "-mavx512bf16"), bfloat16=True
        ),
    },
    "aarch64": {"armv8-a": Level(("asimd",), ("-march=armv8-a",))},
}
LEVELS = LEVELS_OF_MACHINES.get(platform.machine(), {})
EVERY_LEVEL = {name: one for levels in LEVELS_OF_MACHINES.values() for name, one in levels.items()}


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
    level = instruction_set()
    return level is not None and EVERY_LEVEL[level].bfloat16


def missing_flags(level: str) -> list[str]:
    """Returns the flags of a level and of those below it that this processor lacks."""
    names = list(LEVELS)
    needed = {flag for name in names[: names.index(level) + 1] for flag in LEVELS[name].flags}
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
    return parse_cpuinfo(text)


def instructions() -> str:
    """Describes for the log which instructions the C sources and torch use."""
    import torch

    torch_uses = torch.backends.cpu.get_cpu_capability()
    return f"C {instruction_set() or 'not used'}; torch {torch_uses}"


def parse_cpuinfo(text: str) -> Processor:
    """Returns the first processor of a /proc/cpuinfo, completed from Python's platform module."""
    first = text.partition("\n\n")[0]
    parts = (line.partition(":") for line in first.splitlines())
    about = {key.strip(): value.strip() for key, _, value in parts}
    return Processor(
        about.get("model name") or platform.processor() or platform.machine(),
        frozenset((about.get("flags") or about.get("Features", "")).split()),
    )


def settings(level: str) -> dict[str, str]:
    """Returns environment variables with which this machine acts as one of a level."""
    return {"RECSERVE_ISA": level, **EVERY_LEVEL[level].torch}


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in settings(sys.argv[1]).items()))
