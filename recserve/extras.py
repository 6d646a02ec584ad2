"""What the optional dependencies are for, and how to install them.

One table has the extras of pyproject.toml with their modules. Commands, servers and Python say by
it what a missing module belongs to. faiss comes as one of several packages, which replace each
other.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping

# Extras of pyproject.toml that a user installs: modules by the name of their import, and packages.
EXTRAS: Mapping[str, Mapping[str, str]] = {
    "train": {"sklearn": "scikit-learn", "scipy": "scipy", "matplotlib": "matplotlib"},
    "bench": {"aiohttp": "aiohttp", "scipy": "scipy"},
    "experiments": {"scipy": "scipy"},
    "client": {"httpx": "httpx"},
    "otel": {
        "opentelemetry.sdk": "opentelemetry-sdk",
        "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    },
    "ray": {"ray": "ray"},
    "grammar": {"llguidance": "llguidance"},
    "gpu": {"triton": "triton"},
}
# Commands that need another extra than the first one that has the module.
COMMANDS: Mapping[str, str] = {
    "ab": "bench",
    "bench": "bench",
    "experiments": "experiments",
    "serve": "experiments",
    "scale": "experiments",
}


def install_advice(extra: str) -> str:
    """Returns what installs an extra beside an installed wheel, and in a checkout."""
    return (
        f"pip install 'recserve[{extra}]'; "
        f"in a checkout, pip install -c constraints.txt -e '.[{extra}]'"
    )


def describe_missing(error: ModuleNotFoundError, user: str, command: str = "") -> str | None:
    """Returns what to install for a missing module; None if it is a module of recserve.

    Args:
        error: The failed import.
        user: What needs the module, such as `this command`.
        command: Name of the command, if the user is one.
    """
    name = error.name or ""
    if name.partition(".")[0] in ("", "recserve"):
        return None
    found = {
        extra: package
        for extra, modules in EXTRAS.items()
        for module, package in modules.items()
        if f"{name}.".startswith(f"{module}.")
    }
    if not found:
        return (
            f"{user} needs the module {name}, which every installation has: install recserve "
            "again with its dependencies, pip install --force-reinstall recserve"
        )
    own = COMMANDS.get(command, "")
    extra = own if own in found else next(iter(found))
    return f"{user} needs {found[extra]}: {install_advice(extra)}"


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
