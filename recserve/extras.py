"""What the optional dependencies are for, and how to install them.

One table maps each module that may be missing to its package and to the extra of pyproject.toml.
"""

from __future__ import annotations

EXTRAS = {
    "aiohttp": ("aiohttp", "bench"),
    "httpx": ("httpx", "client"),
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
