"""R12: the schedulers against a model of what they promise."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import Site
from recserve.core.errors import DeadlineExceeded
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from tests.support.recommenders import CATALOGUES, draw_root, make
from tests.support.text_plain import VOCABULARY, drawn_model

MOST_STEPS = 400
STEPS_OF_A_RUN = 60


@dataclass(frozen=True)
class Sent:
    """A request that the model knows of.

    Attributes:
        number: Place in the order of submission.
        future: Its result.
        priority: Its priority; 0 for items.
        expired: Whether its deadline had passed when it was sent.
    """

    number: int
    future: Future[object]
    priority: int
    expired: bool


class Counts:
    """Figures over all runs."""

    steps = leaks = starved = reordered = late = wrong = 0


def machine() -> type[RuleBasedStateMachine]:
    """Returns the state machine; models are drawn once."""
    codes = torch.from_numpy(np.unique(np.random.default_rng(1).integers(0, 6, (60, 3)), axis=0))
    recommender, trie = make(codes, "codes", "children")
    assert CATALOGUES
    text = drawn_model(1)

    class Schedulers(RuleBasedStateMachine):
        """Submits, cancels and steps in any order, with a pool that is too small."""

        def __init__(self) -> None:
            super().__init__()
            config = EngineConfig(4, kv_bytes=40 * 4 * 2 * 2 * 2 * 8 * 4, max_running=3)
            self.engine = build_engine(EngineModels(recommender, text=text), config)
            self.sent: list[Sent] = []
            self.admitted: list[int] = []
            scheduler = self.engine.schedulers["text"]
            admit = scheduler.admit

            def noted(request: TextQuery, *others: object) -> bool:
                taken: bool = admit(request, *others)  # type: ignore[arg-type]
                if taken:
                    self.admitted.append(request.params.seed)
                return taken

            scheduler.admit = noted  # type: ignore[method-assign, assignment]

        def _submit(self, request: TextQuery | SlateQuery, priority: int, expired: bool) -> None:
            if expired:
                request = replace(request, deadline_s=time.monotonic() - 1)
            future = self.engine.submit(request)
            self.sent.append(Sent(len(self.sent), future, priority, expired))  # type: ignore[arg-type]

        @rule(events=st.integers(1, 7), k=st.integers(1, 5), expired=st.booleans())
        def slate(self, events: int, k: int, expired: bool) -> None:
            root = draw_root(recommender, events, events)
            self._submit(SlateQuery(prefix=root, trie=trie, k=k, beam_width=k), 0, expired)

        @rule(
            size=st.integers(1, 20),
            tokens=st.integers(1, 12),
            priority=st.integers(0, 2),
            expired=st.booleans(),
        )
        def text(self, size: int, tokens: int, priority: int, expired: bool) -> None:
            prompt = np.random.default_rng(size).integers(0, VOCABULARY, size)
            params = SamplingParams(seed=len(self.sent), max_tokens=tokens)
            self._submit(TextQuery(prompt, params, priority=priority), priority, expired)

        @precondition(lambda self: self.sent)
        @rule(data=st.data())
        def cancel(self, data: st.DataObject) -> None:
            data.draw(st.sampled_from(self.sent)).future.cancel()

        @rule(count=st.integers(1, 4))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.engine.step()

        @invariant()
        def pages_are_conserved(self) -> None:
            Counts.steps += 1
            for scheduler in self.engine.schedulers.values():
                free, total = scheduler.kv.allocator.num_free, scheduler.kv.allocator.num_pages
                Counts.leaks += not 0 <= free <= total

        def teardown(self) -> None:
            """Runs everything to its end and compares with the model."""
            for _ in range(MOST_STEPS):
                if not self.engine.step():
                    break
            texts = {one.number: one for one in self.sent}
            Counts.starved += sum(not one.future.done() for one in self.sent)
            for one in self.sent:
                if not one.future.done() or one.future.cancelled():
                    continue
                failed = one.future.exception(0)
                late = isinstance(failed, DeadlineExceeded)
                Counts.late += one.expired and not late
                Counts.wrong += failed is not None and not late
                Counts.wrong += isinstance(failed, CancelledError)
            order: dict[int, int] = {}
            for number in self.admitted:
                priority = texts[number].priority
                Counts.reordered += order.get(priority, -1) > number
                Counts.late += texts[number].expired
                order[priority] = max(order.get(priority, -1), number)
            for scheduler in self.engine.schedulers.values():
                scheduler.kv.prefixes.clear()
                Counts.leaks += scheduler.kv.allocator.num_free != scheduler.kv.allocator.num_pages
                Counts.leaks += scheduler.num_running

    return Schedulers


@check("R12", "scheduler model", "hypothesis runs of both schedulers", cases=10**5, minimum_s=6)
def scheduler_model(site: Site, budget: Budget) -> Finding:
    """Draws runs of submitting, cancelling and stepping, and compares with a model."""
    for name in ("steps", "leaks", "starved", "reordered", "late", "wrong"):
        setattr(Counts, name, 0)
    tested = machine()
    given = settings(
        max_examples=10,
        stateful_step_count=STEPS_OF_A_RUN,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for number in budget.cases(10**5, 0.95, 2):
        run_state_machine_as_test(seed(site.seed + number)(tested), settings=given)
        if Counts.steps >= 10**5:
            break
    return Finding(
        Counts.steps,
        (
            Figure("requests without a result", Counts.starved, 0),
            Figure("pages or slots not given back", Counts.leaks, 0),
            Figure("texts admitted before an older one of their priority", Counts.reordered, 0),
            Figure("expired requests that were computed", Counts.late, 0),
            Figure("results with another error", Counts.wrong, 0),
        ),
        f"at most {STEPS_OF_A_RUN} actions of a run, then at most {MOST_STEPS} engine steps",
    )
