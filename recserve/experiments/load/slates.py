"""Checks of answered slates: do their items exist, and are they the exact slate's?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import aiohttp
import numpy as np

from recserve.experiments.load.datasets import Sample
from recserve.experiments.load.exchanges import Call, Shot
from recserve.experiments.load.generator import LoadOptions, Run, drive
from recserve.experiments.load.plan import Arm
from recserve.experiments.load.targets import Json, Target
from recserve.experiments.report.measurements import SampleColumns
from recserve.experiments.statistics.quality import overlap

MAX_CHECKED_ITEMS = 2000
CHECKERS = 8


@dataclass(frozen=True)
class ExactCheck:
    """How the exact slate of a request is asked for.

    Attributes:
        target: Route.
        fields: Request fields, stronger than the arm's.
        count: Requests of each arm that are asked again; 0 for none.
        load: How requests are sent.
    """

    target: Target
    fields: Json
    count: int
    load: LoadOptions


@dataclass(frozen=True)
class Exactness:
    """Slates of one arm against the exact slate of the same request.

    Attributes:
        count: Requests compared.
        mean_overlap: Mean share of common items.
        identical_share: Share of slates with the same items in the same order.
    """

    count: int
    mean_overlap: float
    identical_share: float


@dataclass(frozen=True)
class SlateChecks:
    """What was found after a run.

    Attributes:
        known: Items that exist; None if it was not found out.
        exactness: One per arm; empty if it was not measured.
        overlaps: Per arm, overlaps of its slates with the first arm's for the same requests.
    """

    known: frozenset[str] | None = None
    exactness: tuple[Exactness | None, ...] = ()
    overlaps: tuple[tuple[float, ...], ...] = ()


async def known_items(columns: SampleColumns, url: str, load: LoadOptions) -> frozenset[str] | None:
    """Returns the items that exist among those answered, as the server knows them.

    The server is asked for each different item, 2,000 at most; further items are taken as known.
    None if it does not tell.
    """
    answered: dict[str, None] = {}
    for one in columns.exchanges:
        if one.reply is not None:
            answered.update(dict.fromkeys(one.reply.item_ids))
    if not answered:
        return None
    checked = list(answered)[:MAX_CHECKED_ITEMS]
    places = asyncio.Semaphore(CHECKERS)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, headers=dict(load.headers)) as session:

        async def status(item: str) -> int:
            async with places:
                try:
                    async with session.get(f"{url}/v1/items/{quote(item, safe='')}") as response:
                        return response.status
                except (aiohttp.ClientError, TimeoutError):
                    return 0

        statuses = await asyncio.gather(*(status(item) for item in checked))
    if not set(statuses) <= {200, 404}:
        return None
    missing = {item for item, code in zip(checked, statuses, strict=True) if code == 404}
    return frozenset(answered) - missing


async def exact_overlap(
    check: ExactCheck, columns: SampleColumns, samples: Sequence[Sample], number: int, arm: Arm
) -> Exactness | None:
    """Asks a sample of the arm's requests again for the exact slate, and compares.

    Args:
        check: How the exact slate is asked for.
        columns: Requests of the run.
        samples: What was asked.
        number: Number of the arm.
        arm: The arm.
    """
    answered: dict[int, tuple[str, ...]] = {}
    for one in columns.exchanges:
        if one.arm == number and one.reply is not None and len(answered) < check.count:
            answered.setdefault(one.sample, one.reply.item_ids)
    fields = {**arm.fields, **check.fields}
    shots = [
        Shot(
            at_s=0.0,
            calls=(
                Call(
                    url=arm.url + check.target.path,
                    body=check.target.body(samples[sample], fields),
                    sample=sample,
                ),
            ),
        )
        for sample in answered
    ]
    run = await drive(shots, check.target, replace(check.load, workers=1))
    pairs = [
        (answered[one.sample], one.reply.item_ids) for one in run.exchanges if one.reply is not None
    ]
    if not pairs:
        return None
    return Exactness(
        count=len(pairs),
        mean_overlap=float(np.mean([overlap(a, b) for a, b in pairs])),
        identical_share=float(np.mean([a == b for a, b in pairs])),
    )


def arm_overlaps(run: Run, num_arms: int) -> tuple[tuple[float, ...], ...]:
    """Returns, per arm, overlaps of its slates with arm 0's; shots are pairs of all arms."""
    slates: dict[int, dict[int, tuple[str, ...]]] = {}
    for one in run.exchanges:
        if one.reply is not None:
            slates.setdefault(one.shot, {})[one.arm] = one.reply.item_ids
    whole = [pair for pair in slates.values() if len(pair) == num_arms]
    return tuple(tuple(overlap(pair[0], pair[arm]) for pair in whole) for arm in range(num_arms))
