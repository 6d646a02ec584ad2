"""Which request goes to which arm, and when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recserve.experiments.assignment import ArmSplit
from recserve.experiments.load.arrivals import Times
from recserve.experiments.load.datasets import Sample
from recserve.experiments.load.exchanges import Call, Shot
from recserve.experiments.load.targets import Json, Target

Mode = Literal["blocks", "split", "paired"]
# Requests of each arm in one randomised block.
PER_BLOCK = 2
URL_FIELD = "url"


@dataclass(frozen=True)
class Arm:
    """One configuration under test.

    Attributes:
        name: Name in the report.
        url: Address of the server, without the route.
        fields: Request fields of this arm; dots in names nest.
    """

    name: str
    url: str
    fields: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Design:
    """How requests are divided among arms.

    Attributes:
        mode: `blocks` draws the order of arms within small blocks of requests. `split` gives each
            unit one arm permanently, by hash. `paired` sends every request to all arms, one after
            the other in drawn order.
        seed: Seed of the draws, and of the hash.
        weights: Share of units per arm in `split`; None for equal shares.
    """

    mode: Mode = "blocks"
    seed: str = "0"
    weights: tuple[float, ...] | None = None


def parse_arm(text: str, url: str) -> Arm:
    """Returns the arm of `NAME=JSON` or `NAME=URL`.

    Args:
        text: A JSON object of request fields; its field `url` is the server's address.
        url: Address where the arm names none.

    Raises:
        ValueError: If the text is neither.
    """
    name, found, value = text.partition("=")
    if not found or not name:
        raise ValueError(f"arm {text!r}: expected NAME=JSON or NAME=URL")
    if value.startswith(("http://", "https://")):
        return Arm(name=name, url=value.rstrip("/"))
    try:
        fields = json.loads(value or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"arm {name}: {value!r} is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"arm {name}: expected a JSON object, got {value!r}")
    own = fields.pop(URL_FIELD, url)
    return Arm(name=name, url=str(own).rstrip("/"), fields=fields)


def check_samples(samples: Sequence[Sample], target: Target) -> None:
    """Raises ValueError if the data set does not fit the route."""
    one = samples[0]
    if target.kind == "text" and not one.turns:
        raise ValueError(f"{target.name} needs prompts, and this data set holds users")
    if target.kind == "items" and one.turns:
        raise ValueError(f"{target.name} needs users, and this data set holds prompts")
    if target.name == "rank" and not one.candidates:
        raise ValueError("rank needs candidates: ask for some per user")


def sample_order(num_samples: int, num_requests: int, seed: str) -> NDArray[np.int64]:
    """Returns the sample of each request: drawn orders of all samples, one after the other."""
    drawn = np.random.default_rng(_number(seed, "order"))
    rounds = -(-num_requests // num_samples)
    orders = [drawn.permutation(num_samples) for _ in range(max(rounds, 1))]
    return np.concatenate(orders)[:num_requests].astype(np.int64)


def make_plan(
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    target: Target,
    times: Times,
    design: Design,
    fields: Json,
) -> list[Shot]:
    """Returns the shots of a run, in order of time.

    Args:
        samples: Requests to send; their order is drawn.
        arms: At least one.
        target: Makes the requests.
        times: Scheduled seconds, one per shot; a closed loop reads only their number.
        design: How arms are drawn.
        fields: Request fields of all arms.
    """
    order = sample_order(len(samples), len(times), design.seed)
    drawn = np.random.default_rng(_number(design.seed, "arms"))
    bodies = _Bodies(samples=samples, arms=arms, target=target, fields=fields)
    if design.mode == "paired":
        choices = [tuple(drawn.permutation(len(arms))) for _ in order]
    elif design.mode == "blocks":
        block = np.repeat(np.arange(len(arms)), PER_BLOCK)
        blocks = -(-len(order) // len(block))
        drawn_arms = np.concatenate([drawn.permutation(block) for _ in range(max(blocks, 1))])
        choices = [(arm,) for arm in drawn_arms[: len(order)]]
    else:
        split = ArmSplit.even(design.seed, [arm.name for arm in arms], design.weights)
        numbers = {arm.name: number for number, arm in enumerate(arms)}
        chosen = [split.assign(sample.unit).arm for sample in samples]
        choices = [() if chosen[i] is None else (numbers[str(chosen[i])],) for i in order]
    return [
        Shot(at_s=float(time), calls=tuple(bodies.call(int(i), int(arm)) for arm in picked))
        for time, i, picked in zip(times, order, choices, strict=True)
        if picked
    ]


@dataclass(frozen=True)
class _Bodies:
    """Makes each request once: a sample comes again with the same bytes."""

    samples: Sequence[Sample]
    arms: Sequence[Arm]
    target: Target
    fields: Json
    made: dict[tuple[int, int], Call] = field(default_factory=dict)

    def call(self, sample: int, arm: int) -> Call:
        """The request of a sample to an arm."""
        found = self.made.get((sample, arm))
        if found is None:
            one = self.arms[arm]
            body = self.target.body(self.samples[sample], {**self.fields, **one.fields})
            found = Call(url=one.url + self.target.path, body=body, arm=arm, sample=sample)
            self.made[sample, arm] = found
        return found


def _number(seed: str, purpose: str) -> int:
    """A seed for numpy from a text, different per purpose."""
    return int.from_bytes(f"{purpose}:{seed}".encode(), "little")
