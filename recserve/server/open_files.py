"""The number of connections that the limit on open files allows."""

from __future__ import annotations

import contextlib
import sys

RESERVED_FILES = 256  # not for connections: models, history store, journal


def possible_connections(wanted: int) -> int:
    """Returns the number of connections that may be open at once, at most `wanted`.

    Raises the soft limit on open files towards what they need, up to the hard limit.
    """
    if sys.platform == "win32":
        return wanted
    import resource

    def soft_limit() -> float:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return float("inf") if soft == resource.RLIM_INFINITY else soft

    needed = wanted + RESERVED_FILES
    if soft_limit() < needed:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return int(max(1, min(wanted, soft_limit() - RESERVED_FILES)))
