"""Coverage-guided fuzzing of one parser by atheris, in a process of its own: libFuzzer ends it.

    python -m benchmarks.campaign.guided_fuzzing PARSER BUNDLE CORPUS SECONDS SEED

CORPUS is a folder of inputs. An input that fails stays in it, and the exit status is not 0.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["recserve"]):
    from benchmarks.campaign.checks.fuzzing import targets

SLOW_S = 10  # an input that takes longer counts as a failure


def main() -> None:
    name, bundle, corpus, seconds, seed = sys.argv[1:]
    (target,) = (one for one in targets(Path(bundle)) if one.name == name)

    def parse(data: bytes) -> None:
        with contextlib.suppress(target.expected):
            target.parse(data)

    options = {
        "max_total_time": seconds,
        "seed": seed,
        "timeout": SLOW_S,
        "artifact_prefix": f"{corpus}/",
    }
    flags = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, corpus], parse)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
