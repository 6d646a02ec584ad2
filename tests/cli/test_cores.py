"""Threads follow affinity and CPU quota, and sleep soon while they wait; in commands and pods."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from recserve import cores

# What every command does first, in control groups that a folder describes.
COMMAND = """
import json, os, sys
from pathlib import Path
from typer.testing import CliRunner
from recserve import cores
cores.PROCESS = Path(sys.argv[1])
cores.own_cores = lambda: set(range(int(sys.argv[2])))
from recserve.cli.app import app
app.command("threads")(lambda: None)
CliRunner().invoke(app, ["threads"])
import torch
spins = os.environ.get("GOMP_SPINCOUNT")
print(json.dumps([torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], spins]))
"""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *cores.POLICIES)


def start(process: Path, **environment: str) -> tuple[int, str, str | None]:
    """Returns a command's number of threads, and its environment for OpenMP, on 64 cores."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(process), "64"],
        env=clean | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    threads, variable, spins = json.loads(done.stdout)
    return threads, variable, spins


def groups(folder: Path, version: int, quotas: list[float | None], below: int) -> Path:
    """Describes nested control groups as Linux does; the process is in the innermost one.

    Args:
        folder: An empty folder.
        version: 1 or 2.
        quotas: Cores of each group, the outermost first; None for no quota.
        below: Outer groups that a container does not see: they are not mounted.

    Returns:
        The folder that stands for /proc/self.
    """
    names = [f"g{level}" for level in range(1, len(quotas))]
    mount = folder / "mount"
    for level, quota in enumerate(quotas[below:]):
        group = mount.joinpath(*names[below : below + level])
        group.mkdir(parents=True, exist_ok=True)
        if version == 2:
            most = "max" if quota is None else str(round(quota * 100_000))
            (group / "cpu.max").write_text(f"{most} 100000\n")
        else:
            most = "-1" if quota is None else str(round(quota * 50_000))
            (group / "cpu.cfs_quota_us").write_text(f"{most}\n")
            (group / "cpu.cfs_period_us").write_text("50000\n")
    inner, root = "/" + "/".join(names), "/" + "/".join(names[:below])
    kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,cpu,cpuacct")
    process = folder / "self"
    process.mkdir()
    line = f"0::{inner}" if version == 2 else f"4:memory:/other\n3:cpu,cpuacct:{inner}\n0::/"
    (process / "cgroup").write_text(line + "\n")
    other = "30 1 0:5 / /proc rw - proc proc rw\n"
    (process / "mountinfo").write_text(
        f"{other}31 1 0:28 {root} {mount} rw,relatime shared:9 - {kind} {kind} {options}\n"
    )
    return process


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_usable_cores_follow_affinity_and_every_quota(tmp_path, monkeypatch, version, seed):
    """The smallest quota of the groups that are mounted counts, rounded down to whole cores."""
    draw = random.Random(seed)
    num_cores = draw.choice([1, 2, 64])
    quotas = [None] + [draw.choice([None, 0.5, 1.0, 2.0, 3.5, 99.0]) for _ in range(3)]
    below = draw.randint(0, 3)
    monkeypatch.setattr(cores, "PROCESS", groups(tmp_path, version, quotas, below))
    monkeypatch.setattr(cores, "own_cores", lambda: set(range(num_cores)))
    expected = min([num_cores, *(int(quota) for quota in quotas[below:] if quota is not None)])
    assert cores.usable_cores() == max(1, expected)


@pytest.mark.parametrize(
    ("version", "given", "variable", "spins"),
    [
        (1, {}, "1", "3000"),
        (2, {}, "1", "3000"),
        (2, {"OMP_NUM_THREADS": "7", "GOMP_SPINCOUNT": "9"}, "7", "9"),
        (1, {"OMP_WAIT_POLICY": "active"}, "1", None),
    ],
)
def test_a_command_in_a_pod_of_one_core(tmp_path, version, given, variable, spins):
    """One thread of 64 computes, and threads sleep soon, unless the user says otherwise."""
    process = groups(tmp_path, version, [None, None, 1.0], 2)
    threads, *found = start(process, **given)
    assert found == [variable, spins]
    assert threads == 1 or variable != "1"


def test_a_system_without_control_groups_has_no_quota(tmp_path, monkeypatch):
    """Only affinity bounds the threads there."""
    monkeypatch.setattr(cores, "PROCESS", tmp_path / "none")
    assert cores.cpu_quota() is None
