"""R16 to R19: batch jobs, assignment of units, and the latency comparison."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import stats

from benchmarks.batch.kills import files, finished, start
from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import Site
from benchmarks.campaign.traffic import history
from benchmarks.experiments.ab_power import (
    ALPHA,
    EFFECT,
    POWER,
    drawn_trace,
    paired_p,
    replay,
)
from recserve.batch.generate import Defaults
from recserve.batch.job import Job, run
from recserve.batch.processes import LocalWorkers
from recserve.batch.recipe import SlateRecipe
from recserve.experiments.assignment import ArmSplit, hash_v2
from recserve.experiments.statistics import SRM_ALARM, STATISTICS, sample_ratio_p
from tests.support.paths import ROOT

# GrowthBook's SDK specification 0.7.1, cases.json, hash version 2.
VECTORS = (
    ("seed", "a", 0.0505),
    ("seed", "b", 0.2696),
    ("foo", "ab", 0.2575),
    ("foo", "def", 0.2019),
    ("89123klj", "8952klfjas09ujkasdf", 0.124),
    ("90850943850283058242805", "123", 0.7516),
    ("()**(%$##$%#$#", '___)((*":&', 0.0128),
)
KILL_S = 4.0
# `ab_power` finds 45,000 pairs for a power of 0.9 at +3 % on this trace. A share of replays falls
# below the true power half of the time, so the check takes as many pairs as a power of 0.97 needs.
POWER_PAIRS = 64_000


@check("R16", "reproducible jobs", "reruns and 1, 2 workers", cases=4, minimum_s=15, weight=0)
def reproducible(site: Site, budget: Budget) -> Finding:
    """Runs the same job twice in this process and on one and two workers."""
    folder, random = site.scratch(), np.random.default_rng(site.seed)
    source = folder / "users.parquet"
    users = {"user_id": [f"user{n}" for n in range(64)]}
    rows = [history(random) for _ in range(64)]
    pq.write_table(pa.table({**users, "history": rows}), source, row_group_size=16)
    store = f"lmdb:{folder / 'store'}"
    recipe = SlateRecipe(str(site.bundle), Defaults(k=3, beam_width=4), store, "cpu")
    jobs = [Job(source, folder / f"out{n}", 16) for n in range(4)]
    failed = sum(not finished(start(job, recipe)) for job in jobs[:2])
    for job, workers in zip(jobs[2:], (1, 2), strict=True):
        run(job, LocalWorkers(recipe, workers))
    digests = {digest(job.output) for job in jobs}
    return Finding(
        len(jobs),
        (
            Figure("different outputs", len(digests) - 1, 0),
            Figure("jobs that failed", failed, 0),
        ),
        "sha256 of all Parquet files; Ray is tested in tests/batch",
    )


def digest(output: Path) -> str:
    """Returns a hash of the names and bytes of a job's Parquet files."""
    found = hashlib.sha256()
    for name, content in files(output).items():
        if name.endswith(".parquet"):
            found.update(name.encode() + b"\0" + content)
    return found.hexdigest()


@check("R17", "exactly-once jobs", "SIGKILL at drawn points", cases=200, minimum_s=25)
def exactly_once(site: Site, budget: Budget) -> Finding:
    """Runs benchmarks.batch.kills with as many kills as fit."""
    points = max(3, min(200, int((budget.left_s - 10) / KILL_S)))
    command = [sys.executable, "-m", "benchmarks.batch.kills", "--points", str(points)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = re.search(r"(\d+) kills;.*?(\d+) differ", done.stdout)
    kills, differ = (int(found[1]), int(found[2])) if found else (0, 1)
    return Finding(
        kills,
        (
            Figure("files that differ from an undisturbed job", differ, 0),
            Figure("runs that failed", bool(done.returncode), 0),
        ),
        (done.stdout + done.stderr)[-300:].replace("\n", " ") if done.returncode else "",
    )


@check("R18", "assignment", "drawn ids to arms of two experiments", cases=10**7, minimum_s=3)
def assignment(site: Site, budget: Budget) -> Finding:
    """Tests uniformity, independence, GrowthBook's vectors and the sample-ratio alarm."""
    splits = [ArmSplit.even(seed, ("a", "b", "c")) for seed in ("first", "second")]
    counts = np.zeros((3, 3))
    names = {"a": 0, "b": 1, "c": 2}
    for number in budget.cases(10**4, 0.7):
        for unit in range(number * 1000, (number + 1) * 1000):
            one, other = (split.assign(f"user-{site.seed}-{unit}").arm for split in splits)
            counts[names[one or ""], names[other or ""]] += 1
    uniform = min(stats.chisquare(counts.sum(axis)).pvalue for axis in (0, 1))
    independent = stats.chi2_contingency(counts).pvalue
    wrong = sum(hash_v2(seed, value) != expected for seed, value, expected in VECTORS)
    random = np.random.default_rng(site.seed)
    alarms = [
        sample_ratio_p((int(n), 100_000 - int(n))) < SRM_ALARM
        for n in random.binomial(100_000, 0.5, 10_000)
    ]
    most = float(stats.binom.ppf(0.999, len(alarms), SRM_ALARM)) / len(alarms)
    return Finding(
        int(counts.sum()),
        (
            Figure("p of equal arms", float(uniform), 0.001, at_least=True),
            Figure("p of independent experiments", float(independent), 0.001, at_least=True),
            Figure("GrowthBook vectors that differ", wrong, 0),
            Figure("p of 51 : 49 of 100,000", sample_ratio_p((51_000, 49_000)), SRM_ALARM),
            Figure("false alarms of 10,000 equal splits", float(np.mean(alarms)), most),
        ),
        f"an alarm at p < {SRM_ALARM} is false in that share; the bound is its 99.9 % quantile",
    )


@check("R19", "A/A of the latency tool", "replays of a drawn trace", cases=1000, minimum_s=20)
def equal_arms(site: Site, budget: Budget) -> Finding:
    """Counts false positives of equal arms, and how often +3 % at p99 is found."""
    trace = drawn_trace(20_000, site.seed)
    found: dict[str, list[bool]] = {name: [] for name in STATISTICS}
    power: list[bool] = []
    for number in budget.cases(1000, 0.95, 60):
        said = replay(trace, ("blocks", "paired")[number % 2], 4000, 0.0, 2 * number)
        for name in STATISTICS:
            found[name].append(said["p"][name] < ALPHA)
        if number % 2 == 0:
            moved = paired_p(trace, POWER_PAIRS, EFFECT, 2 * number + 1, "p99")
            power.append(moved < ALPHA)
    count = len(found["p99"])
    # The band of one statistic is 99 %; a campaign that looks at all of them takes 99.9 %.
    most = float(stats.binom.ppf(0.999, count, ALPHA)) / count
    worst = max(found, key=lambda name: np.mean(found[name]))
    return Finding(
        count,
        (
            Figure("false positives, worst statistic", float(np.mean(found[worst])), most),
            Figure(f"power for {EFFECT:+.0%} at p99", float(np.mean(power)), POWER, at_least=True),
        ),
        f"equal arms: 4,000 requests or pairs, worst statistic {worst}; {len(power)} replays with "
        f"{EFFECT:+.0%} of {POWER_PAIRS:,} pairs, paired mode",
    )
