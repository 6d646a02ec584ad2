"""Measures a drafter on held-out tokens: acceptance, and time of drafts and steps.

The target continues openings greedily. The engine that serves also runs the trial, so a trial
accepts what a server would accept. Two readings of a checkpoint are compared on the same texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.language_model import LanguageModel
from recserve.speculation.completion import Completion, TextQuery
from recserve.speculation.draft import Budget, TextDraft
from recserve.speculation.drafter import Drafter, StateSpan, TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation

NUM_TEXTS, OPENING, OUTPUT = 24, 32, 64
NUM_TIMED = 3
CHAINS = "block"  # an acceptance rule that gets chains, greedy ones at temperature 0
NAME = "tried"  # the drafter's name in the engine of a trial
# A reading counts as better from this many standard errors of the paired difference. With five
# readings a smaller number names a false one too often.
MIN_ERRORS = 3.0


@dataclass(frozen=True)
class Openings:
    """What the texts of a trial begin with.

    Attributes:
        tokens: [N, n] int64 beginnings of N texts.
        num_output: Most tokens that the target writes after each.
    """

    tokens: NDArray[np.int64]
    num_output: int


@dataclass(frozen=True)
class DraftMeasure:
    """Acceptance in N texts.

    Attributes:
        drafts: [N] int64 drafts of each text.
        accepted: [N] int64 accepted tokens of each text.
        per_position: Accepted tokens by depth in their draft.
        outputs: What the target wrote.
    """

    drafts: NDArray[np.int64]
    accepted: NDArray[np.int64]
    per_position: tuple[int, ...]
    outputs: tuple[NDArray[np.int64], ...]

    @property
    def num_drafts(self) -> int:
        """Drafts of all texts."""
        return int(self.drafts.sum())

    @property
    def per_draft(self) -> float:
        """Accepted tokens per draft, without the bonus token."""
        return float(self.accepted.sum()) / max(self.num_drafts, 1)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the drafts that were accepted up to each position."""
        return tuple(count / max(self.num_drafts, 1) for count in self.per_position)


@dataclass(frozen=True)
class PairedDifference:
    """Difference of accepted tokens per draft, over the same texts.

    Attributes:
        mean: Mean of the differences of the texts.
        error: Its standard error.
    """

    mean: float
    error: float

    @property
    def is_better(self) -> bool:
        """Whether the difference is positive beyond chance."""
        return self.mean > MIN_ERRORS * self.error


@dataclass(frozen=True)
class DraftCost:
    """Times of one text at a time.

    Attributes:
        draft_ms: Time of a draft, with the states that it reads. 0 without a draft.
        step_ms: Time of a step that verifies one.
        plain_ms: Time of a plain step, which writes one token.
        speedup: Time of plain decoding over time with drafts.
    """

    draft_ms: float
    step_ms: float
    plain_ms: float
    speedup: float


def cut_openings(tokens: NDArray[np.int64], target: LanguageModel) -> Openings:
    """Returns openings from evenly spaced places of a text.

    Args:
        tokens: [m] int64 tokens of a text that the drafter was not trained on.
        target: The target.

    Raises:
        ValueError: If the text is shorter than two openings.
    """
    size, num_output = _lengths(target)
    count = min(NUM_TEXTS, len(tokens) // size)
    if count < 2:
        raise ValueError(f"the text has {len(tokens)} tokens; at least {2 * size} are needed")
    starts = np.linspace(0, len(tokens) - size, count).astype(np.int64)
    return Openings(tokens[starts[:, None] + np.arange(size)], num_output)


def write_openings(target: LanguageModel) -> Openings:
    """Returns openings that the target draws at temperature 1 from its first token."""
    size, num_output = _lengths(target)
    config = target.config
    first = config.bos_token
    if first is None:
        first = config.eos_tokens[0] if config.eos_tokens else 0
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=size - 1, min_tokens=size - 1)
        for seed in range(NUM_TEXTS)
    ]
    prompt = np.array([first], dtype=np.int64)
    written = _run_engine(_engine(target), [TextQuery(prompt, own) for own in params])
    return Openings(np.stack([np.concatenate([prompt, own.tokens]) for own in written]), num_output)


def measure_acceptance(
    target: LanguageModel, drafter: Drafter, openings: Openings, chains: bool = False
) -> DraftMeasure:
    """Continues the openings greedily with drafts, all texts side by side.

    Args:
        target: The target.
        drafter: The drafter.
        openings: What the texts begin with.
        chains: Asks for chains instead of the drafter's own trees. A chain tells two readings
            apart that differ little, since a tree also holds what is less likely.
    """
    rule = CHAINS if chains else Speculation().verifier
    found = _run(_engine(target, drafter), target, openings, Speculation(NAME, verifier=rule))
    counts = [one.counts for one in found]
    depth = max((len(own.per_position) for own in counts), default=0)
    sums = [
        sum(own.per_position[level] for own in counts if level < len(own.per_position))
        for level in range(depth)
    ]
    return DraftMeasure(
        np.array([own.num_drafts for own in counts]),
        np.array([own.num_accepted_tokens for own in counts]),
        tuple(sums),
        tuple(one.tokens for one in found),
    )


def measure_cost(target: LanguageModel, drafter: Drafter, openings: Openings) -> DraftCost:
    """Continues some openings one after another, plainly and with drafts."""
    engine = _engine(target, drafter, graphs=None)
    few = Openings(openings.tokens[:NUM_TIMED], openings.num_output)
    timed: dict[str, list[Completion]] = {}
    for _ in range(2):  # the first round compiles and fills caches
        with _timed_drafts(drafter) as drafts_ms:
            for name in ("none", NAME):
                timed[name] = [
                    _run(engine, target, Openings(row[None], few.num_output), Speculation(name))[0]
                    for row in few.tokens
                ]
    plain, drafted = ([one.timing for one in timed[name]] for name in ("none", NAME))
    totals = [sum(one.verify_ms + one.draft_ms for one in own) for own in (plain, drafted)]
    return DraftCost(
        draft_ms=sum(drafts_ms) / max(len(drafts_ms), 1),
        step_ms=sum(one.verify_ms for one in drafted) / max(sum(t.forwards for t in drafted), 1),
        plain_ms=sum(one.verify_ms for one in plain) / max(sum(t.forwards for t in plain), 1),
        speedup=totals[0] / max(totals[1], 1e-9),
    )


@contextmanager
def _timed_drafts(drafter: Drafter) -> Iterator[list[float]]:
    """Collects the milliseconds of each draft, of one text at a time.

    The engine counts the proposals of all steps together, also of those in which a paused drafter
    only reads states.
    """
    propose, read = drafter.propose, drafter.read
    found, reading_ms = list[float](), 0.0

    def timed_read(parts: Seq[StateSpan]) -> None:
        nonlocal reading_ms
        began = time.perf_counter()
        read(parts)
        reading_ms = (time.perf_counter() - began) * 1e3

    def timed_propose(texts: Seq[TextContext], budgets: Seq[Budget]) -> Seq[TextDraft]:
        nonlocal reading_ms
        began = time.perf_counter()
        drafts = propose(texts, budgets)
        if any(draft.num_nodes for draft in drafts):
            found.append((time.perf_counter() - began) * 1e3 + reading_ms)
        reading_ms = 0.0
        return drafts

    own = dict(vars(drafter))
    vars(drafter).update(propose=timed_propose, read=timed_read)
    try:
        yield found
    finally:
        for name in ("propose", "read"):
            if name in own:
                vars(drafter)[name] = own[name]
            else:
                del vars(drafter)[name]


def compare(one: DraftMeasure, other: DraftMeasure) -> PairedDifference:
    """Returns how much more `other` accepts, over the texts that have drafts in both."""
    both = (one.drafts > 0) & (other.drafts > 0)
    if both.sum() < 2:
        return PairedDifference(0.0, 0.0)
    rates = [own.accepted[both] / own.drafts[both] for own in (one, other)]
    gains = rates[1] - rates[0]
    return PairedDifference(float(gains.mean()), float(gains.std(ddof=1) / len(gains) ** 0.5))


def _lengths(target: LanguageModel) -> tuple[int, int]:
    """Returns the tokens of an opening and of an output, which must fit the target's positions."""
    positions = target.config.decoder.max_positions
    size = max(1, min(OPENING, positions // 4))
    return size, min(OUTPUT, positions - size)


def _engine(
    target: LanguageModel, drafter: Drafter | None = None, graphs: bool | None = False
) -> Engine:
    drafters = {} if drafter is None else {NAME: drafter}
    return build_engine(
        EngineModels(text=target, drafters=drafters), EngineConfig(graphs=graphs, load_aware=False)
    )


def _run(
    engine: Engine, target: LanguageModel, openings: Openings, speculation: Speculation
) -> list[Completion]:
    params = SamplingParams(
        temperature=0.0, max_tokens=openings.num_output, stop_token_ids=target.config.eos_tokens
    )
    return _run_engine(engine, [TextQuery(row, params, speculation) for row in openings.tokens])


def _run_engine(engine: Engine, queries: list[TextQuery]) -> list[Completion]:
    """Runs an engine that was not started until it has answered."""
    futures = engine.submit_all(queries)
    while engine.step():
        pass
    return [future.result() for future in futures]
