"""What the optional dependencies are for, and how to install them.

One table maps each module that may be missing to its package and to the extra of pyproject.toml.
faiss comes as one of several packages, which replace each other.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

EXTRAS = {
    "aiohttp": ("aiohttp", "bench"),
    "httpx": ("httpx", "client"),
    "llguidance": ("llguidance", "grammar"),
    "matplotlib": ("matplotlib", "train"),
    "opentelemetry": ("OpenTelemetry", "otel"),
    "ray": ("ray", "ray"),
    "scipy": ("scipy", "train"),
    "sklearn": ("scikit-learn", "train"),
    "triton": ("Triton", "gpu"),
}


def install_advice(extra: str) -> str:
    """Returns the command that installs an extra in a checkout."""
    return f"in a checkout, pip install -c constraints.txt -e '.[{extra}]'"


def describe_missing(error: ModuleNotFoundError, user: str) -> str | None:
    """Returns what to install for a missing module; None if it is of no extra.

    Args:
        error: The failed import.
        user: What needs the module, such as `this command`.
    """
    known = EXTRAS.get((error.name or "").split(".")[0])
    return None if known is None else f"{user} needs {known[0]}: {install_advice(known[1])}"


FAISS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu12", "faiss-gpu-cu11", "faiss")
FAISS_FOR_CPU = "pip install faiss-cpu"
FAISS_FOR_CUDA = "pip uninstall -y faiss-cpu && pip install faiss-gpu"


def find_faiss() -> str:
    """Returns name and version of the installed package of faiss, without importing it.

    Raises:
        RuntimeError: If there is none, or more than one: they write the same files.
    """
    found = []
    for name in FAISS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        names = [one.split()[0] for one in found]
        raise RuntimeError(
            f"{' and '.join(found)} are installed, and overwrite each other's files: "
            f"pip uninstall -y {' '.join(names)}, then install one of them"
        )
    if not found and importlib.util.find_spec("faiss") is None:
        raise RuntimeError(
            f"faiss is not installed: {FAISS_FOR_CPU}, or faiss-gpu for searches on an NVIDIA GPU"
        )
    return found[0] if found else "faiss of an unknown package"
