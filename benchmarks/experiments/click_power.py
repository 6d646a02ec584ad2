"""Does the verdict on clicks keep its promises? False alarms under continuous peeking, and power.

    python -m benchmarks.experiments.click_power [--runs 1000] [--json FILE]
    python -m benchmarks.experiments.click_power --kinds planned

Each run is a simulated experiment. Users come back: how often, and how readily they click, differs
from user to user. The arms are compared after every further 1.5 % of the answers, and the run ends
at the first look that shows a difference.

A/A: the arms are equal. At most 5 % of the runs may show a difference at any look; the share must
not be above the binomial 99.5 % bound of 5 %. In the world of interleaved slates, a click belongs
to one of two teams by the taste of its user. Half: the treatment halves the clicks. Planned: the
treatment changes the clicks by the smallest effect, and the run has the size of
`recserve experiments plan`; at least 80 % of the runs must find it.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from recserve.experiments.conversions import (
    ALPHA,
    NUM_BUCKETS,
    POWER,
    RateSums,
    compare_rates,
    compare_teams,
    plan_experiment,
)
from recserve.load.session import this_machine

STEP = 1.015  # of the answers between two looks
FIRST = 100  # answers before the first look


@dataclass(frozen=True)
class World:
    """Users of a service.

    Attributes:
        name: Name in the table.
        users: Number of users.
        activity: Sigma of the log-normal activity of a user.
        rate: Mean clicks per answer of the control.
        likeness: Larger values make the users' readiness to click more alike (beta distribution).
        treated: Share of the users in the treatment.
        several: Whether an answer may lead to several clicks.
        interleaved: Whether an answer holds items of both arms; then nobody is treated.
    """

    name: str
    users: int = 2000
    activity: float = 1.0
    rate: float = 0.1
    likeness: float = 10.0
    treated: float = 0.5
    several: bool = False
    interleaved: bool = False


WORLDS = (
    World("typical"),
    World("frequent clicks", rate=0.5, likeness=3.0),
    World("rare clicks", users=20_000, rate=0.01, likeness=100.0),
    World("few heavy users", users=150, activity=1.5),
    World("one user in ten treated", users=5000, treated=0.1),
    World("several clicks", rate=1.5, several=True),
    World("interleaved", rate=1.5, several=True, treated=0.0, interleaved=True),
)


@dataclass(frozen=True)
class Result:
    """Where a run ended.

    Attributes:
        change: Relative change at the first look that showed a difference; None if none did.
        answers: Answers until then.
    """

    change: float | None
    answers: int


def simulate(
    world: World, lift: float, answers: int, smallest: float, drawn: np.random.Generator
) -> Result:
    """One experiment, with a look after every further STEP of the answers.

    Args:
        world: The users.
        lift: Clicks of the treatment over those of the control.
        answers: Answers of the whole run.
        smallest: Smallest relative change of interest, as in the settings.
        drawn: Source of randomness.
    """
    arm = (drawn.random(world.users) < world.treated).astype(np.int64)
    activity = drawn.lognormal(0.0, world.activity, world.users)
    cap = 1.0 if not world.several else world.rate * 4
    mean = world.rate / cap
    ready = cap * drawn.beta(world.likeness * mean, world.likeness * (1 - mean), world.users)
    ready = np.where(arm == 1, ready * lift, ready)
    user = drawn.choice(world.users, answers, p=activity / activity.sum())
    if world.several:
        clicks = drawn.poisson(ready[user])
    else:
        clicks = (drawn.random(answers) < ready[user]).astype(np.int64)
    parts = [(arm * NUM_BUCKETS, clicks)]  # first bucket of each user, and clicks of each answer
    compare = compare_rates
    if world.interleaved:
        taste = drawn.beta(2.0, 2.0 / lift, world.users)  # a user's share of clicks on team 1
        treated = drawn.binomial(clicks, taste[user])
        parts = [(0 * arm, clicks - treated), (0 * arm + NUM_BUCKETS, treated)]
        compare = compare_teams
    group = drawn.integers(0, NUM_BUCKETS, world.users)
    shown, clicked = (np.zeros(2 * NUM_BUCKETS, np.int64) for _ in range(2))
    begin, end = 0, FIRST
    while begin < answers:
        end = min(end, answers)
        for first, counted in parts:
            cells = (first + group)[user[begin:end]]
            np.add.at(shown, cells, 1)
            np.add.at(clicked, cells, counted[begin:end])
        control, treatment = (
            RateSums(shown[half], clicked[half])
            for half in (slice(NUM_BUCKETS), slice(NUM_BUCKETS, None))
        )
        found = compare(control, treatment, smallest)
        if found is not None and found.excludes_zero:
            return Result(found.relative[0], end)
        begin, end = end, int(np.ceil(end * STEP))
    return Result(None, answers)


def spread(world: World, answers: int, drawn: np.random.Generator) -> float:
    """The spread of a world: variance of the clicks over their number, without a treatment."""
    activity = drawn.lognormal(0.0, world.activity, world.users)
    cap = 1.0 if not world.several else world.rate * 4
    mean = world.rate / cap
    ready = cap * drawn.beta(world.likeness * mean, world.likeness * (1 - mean), world.users)
    user = drawn.choice(world.users, answers, p=activity / activity.sum())
    clicks = drawn.poisson(ready[user]) if world.several else drawn.random(answers) < ready[user]
    group = drawn.integers(0, NUM_BUCKETS, world.users)[user]
    sums = RateSums(
        np.bincount(group, minlength=NUM_BUCKETS),
        np.bincount(group, clicks, NUM_BUCKETS).astype(np.int64),
    )
    return sums.variance() / sums.num_events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--kinds", default="A/A,half,planned")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, rows, ok = time.time(), [], True
    most = int(stats.binom.ppf(0.995, options.runs, ALPHA))
    drawn = np.random.default_rng(options.seed)
    for world in WORLDS:
        for smallest in (0.1, 0.5) if "A/A" in options.kinds else ():
            runs = [
                simulate(world, 1.0, options.answers, smallest, drawn) for _ in range(options.runs)
            ]
            alarms = sum(one.change is not None for one in runs)
            ok &= alarms <= most
            rows.append({"world": world.name, "kind": "A/A", "smallest": smallest, "found": alarms})
            print(f"A/A {world.name}, smallest {smallest:g}: {alarms} of {options.runs} alarms")
        if "half" not in options.kinds:
            continue
        runs = [simulate(world, 0.5, options.answers, 0.1, drawn) for _ in range(options.runs // 5)]
        found = sum(bool(one.change is not None and one.change < 0) for one in runs)
        middle = float(np.median([one.answers for one in runs]))
        rows.append({"world": world.name, "kind": "half", "found": found, "answers": middle})
        print(f"half {world.name}: {found} of {len(runs)} found, after {middle:.0f} answers")
    world, smallest = WORLDS[0], 0.3
    answers = options.answers
    for _ in range(3):  # the spread grows with the answers per user
        measured = float(np.mean([spread(world, answers, drawn) for _ in range(20)]))
        plan = plan_experiment(world.rate, smallest, 1.0, spread=measured)
        answers = int(plan.answers)
    runs = [
        simulate(world, 1 + smallest, int(plan.answers), smallest, drawn)
        for _ in range(options.runs // 2)
    ]
    found = sum(bool(one.change is not None and one.change > 0) for one in runs)
    rows.append({"world": world.name, "kind": "planned", "found": found, "answers": plan.answers})
    ok &= stats.binomtest(found, len(runs), POWER, alternative="less").pvalue > 0.01
    print(f"planned +30 %: {found} of {len(runs)} found in {plan.answers:.0f} answers")
    print(f"{'promises kept' if ok else 'promises BROKEN'}, {time.time() - began:.0f} s")
    if options.json:
        machine = asdict(this_machine())
        found_json = {
            "machine": machine,
            "runs": options.runs,
            "most": most,
            "rows": rows,
            "ok": bool(ok),
        }
        options.json.write_text(json.dumps(found_json, indent=2))
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
