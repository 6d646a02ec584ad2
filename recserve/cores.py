"""How many cores this process may use, and how its threads wait for each other.

OpenMP reads its environment when torch is imported, so `set_threads` comes before that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROCESS = Path("/proc/self")
# OpenMP's threads wait for each other at the end of each loop. A thread that waits longer than this
# sleeps. Without a bound it spins for milliseconds, and on a core that is shared it spins against
# the very thread that it waits for. The figures are in docs/guides/tuning.md.
SPINS = "3000"  # iterations of gcc's runtime, tens of microseconds
BLOCK_MS = "0"  # milliseconds of clang's and Intel's
POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def set_threads() -> None:
    """Sets the number of OpenMP threads, and that they sleep soon while they wait.

    What the environment says already stays. The number is set only if a control group allows fewer
    cores than the process may run on: OpenMP sees the latter, but no quota.
    """
    os.environ.update(short_waits())
    if "OMP_NUM_THREADS" not in os.environ and usable_cores() < len(own_cores()):
        os.environ["OMP_NUM_THREADS"] = str(usable_cores())


def short_waits() -> dict[str, str]:
    """Returns the variables of a process whose threads do not spin for long.

    There are none if the environment says already how threads wait.
    """
    if any(name in os.environ for name in POLICIES):
        return {}
    return {"GOMP_SPINCOUNT": SPINS, "KMP_BLOCKTIME": BLOCK_MS}


def own_cores() -> set[int]:
    """Returns the cores that the scheduler may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Returns how many threads can compute at once: by affinity and by CPU quota, at least 1.

    A quota of 2.5 cores counts as 2, since a third thread would be stopped half of the time.
    """
    quota = cpu_quota()
    cores = len(own_cores())
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cpu_quota() -> float | None:
    """Returns the cores' worth of time that the control groups of this process leave it.

    Returns:
        The smallest quota of its groups and their parents, of version 1 or 2; None without one.
    """
    quotas = [quota for folder in _groups() if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _groups() -> Iterator[Path]:
    """Yields the folders of the process's groups that may limit CPU time, and their parents.

    Raises no error: a system without control groups has none.
    """
    try:
        memberships = (PROCESS / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (PROCESS / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    paths = {}  # by controller; the name of version 2 is empty
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in mounts:
        place, _, system = line.partition(" - ")
        root, mount = place.split()[3:5]
        kind, _, options = system.split(maxsplit=2)
        controller = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        if controller not in paths or (controller and controller not in options.split(",")):
            continue
        # In a container the mount may begin at the group itself, which the path names from outside.
        group = Path(paths[controller])
        below = group.relative_to(root) if group.is_relative_to(root) else Path()
        for part in (below, *below.parents):
            yield Path(mount) / part


def _quota(folder: Path) -> float | None:
    """Returns the quota of one group in cores; None if it has none."""
    try:
        if (folder / "cpu.max").exists():
            most, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            most = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        return int(most) / int(period) if int(most) > 0 else None
    except (OSError, ValueError):  # no such file, or `max`
        return None
