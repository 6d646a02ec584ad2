"""Host time of a text step or a search that is a CUDA graph, without the replay itself.

    OMP_NUM_THREADS=1 python -m benchmarks.gpu.host_step [--json host.json] [--only steps|searches]

The replay is replaced by a stored result: a path of the draft's first nodes, or the beams of the
first search. So the benchmark runs without a GPU. On a GPU the host would also launch one graph and
wait for it. Prints one row per case with microseconds of CPU time of one thread, the median of a
warm loop. A search is timed from the request to its slate, with all prefixes cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.engine import recommender_engine, recorded
from benchmarks.gpu.text import RULES, DrawnDrafter, WalkDrafter, drawn_heads
from benchmarks.support.drawn import drawn_catalogue, drawn_prefixes, drawn_recommender
from benchmarks.support.timing import machine
from recserve.core.request import SlateQuery
from recserve.drafters.ngram import NgramDrafter
from recserve.drafters.suffix.drafter import SuffixDrafter
from recserve.engine.beam_search_graph import SearchShape
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.capture import EagerRecorder
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.text_groups import TextGroup
from recserve.engine.text_scheduler import TextScheduler
from recserve.engine.text_step import StepOutputs
from recserve.engine.text_step_graph import SHAPES, TextStepGraphs, TextStepLimits
from recserve.speculation.completion import TextQuery
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.walking_model import drawn_language_model

VOCABULARY = 1500
GOAL_US = 50.0
NODES = 6  # nodes of a draft
ACCEPTED = 2  # accepted draft tokens per step
PARAMETERS = {
    "temperature": SamplingParams(temperature=0.8),
    "every parameter": SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1
    ),
}


class StoredSteps(EagerRecorder):
    """A replay returns the result of the only run, with `accept` accepted tokens."""

    accept = 0

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        outputs = step()
        forms = [found(outputs, accepted) for accepted in range(ACCEPTED + 1)]
        return lambda: forms[self.accept]

    def bound(self, graphs: TextStepGraphs) -> None:
        """Accepts no more of any draft than it has."""
        step = graphs.step

        def bounded(groups: Sequence[TextGroup], with_prompts: bool) -> StepOutputs | None:
            drafts = [draft.depth for group in groups for draft in group.drafts]
            self.accept = min([ACCEPTED, *drafts])
            return step(groups, with_prompts)

        graphs.step = bounded  # type: ignore[method-assign]


def found(outputs: StepOutputs, accepted: int) -> StepOutputs:
    """Returns the outputs with `accepted` tokens and a bonus token for every text."""
    changed = replace(outputs, results=outputs.results.clone())
    accepted, nodes = min(accepted, outputs.depth), outputs.depth + 1
    changed.results[:, :nodes] = -1
    changed.results[:, : accepted + 1] = torch.arange(accepted + 1)
    changed.results[:, nodes], changed.results[:, nodes + 1] = accepted, 1
    changed.tokens[:, : accepted + 1] = 2
    return changed


def host_rows(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """Yields one row per kind of sampling, drafter and number of texts."""
    model = drawn_language_model(64, 1, VOCABULARY, torch.float32)
    model.config = replace(model.config, decoder=replace(model.config.decoder, max_positions=4096))
    drafters: dict[str, Drafter] = {
        "walk": WalkDrafter(VOCABULARY, 3),
        "medusa": drawn_heads(model),
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
        "drawn": DrawnDrafter(VOCABULARY, NODES, torch.device("cpu")),
    }
    engine = build_engine(
        EngineModels(text=model, drafters=drafters), EngineConfig(kv_bytes=2**27, load_aware=False)
    )
    lane: Any = engine.schedulers["text"]
    stored = StoredSteps()
    shapes = tuple(shape for shape in SHAPES if shape.nodes <= (72 if smoke else 264))
    limits = TextStepLimits(shapes, seconds=float("inf"))
    graphs = TextStepGraphs(lane.runner, lane.kv, model, limits, stored, drafters)
    engine.schedulers["text"] = TextScheduler(lane.runner, model, lane.limits, graphs, kv=lane.kv)
    stored.bound(graphs)
    for name in PARAMETERS:
        for drafter in ("none", *drafters):
            for texts in (1, 2) if smoke else (1, 8, 32):
                yield measured(engine, graphs, name, drafter, texts, 12 if smoke else 100)


def search_rows(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """Yields one row per strategy and number of requests, with and without excluded items."""
    catalogue = drawn_catalogue(12_101)
    model = drawn_recommender(catalogue, 64, 1, "children", torch.float32)
    engine = recommender_engine(model, 2**27)
    batches = (1, 8)
    shapes = tuple(SearchShape(batch, 64) for batch in batches)
    graphs = recorded(engine, model, catalogue.trie, shapes, 1024, StoredSearches())
    prefixes = drawn_prefixes(model, 50, max(batches), 0)
    seen = np.arange(0, 12_101, 240)
    for strategy, batch, left_out in product(("beam", "nezha"), batches, (False, True)):
        asked = [
            SlateQuery(
                prefix=prefix,
                trie=catalogue.trie,
                k=10,
                beam_width=50,
                strategy=strategy,
                excluded=seen if left_out else None,
            )
            for prefix in prefixes[:batch]
        ]
        engine.run_many(asked)
        before, taken = graphs.counts["replayed"], []
        for _ in range(20 if smoke else 300):
            began = time.thread_time()
            engine.run_many(asked)
            taken.append((time.thread_time() - began) * 1e6)
        words = f"search {strategy}, {batch} requests{', 51 items left out' * left_out}"
        replayed = graphs.counts["replayed"] - before
        yield {"host": words, "replayed": replayed, "host_us": statistics.median(taken[5:])}


class StoredSearches(EagerRecorder):
    """A replay returns the result of the only run."""

    def __call__(self, search: Callable[[], Any]) -> Callable[[], Any]:
        found = search()
        return lambda: found


@torch.inference_mode()
def measured(
    engine: Engine, graphs: TextStepGraphs, name: str, drafter: str, texts: int, steps: int
) -> dict[str, Any]:
    """Measures texts that run concurrently for `steps` replayed steps.

    It runs under inference mode, which the engine's thread enters once and not at every step.
    """
    rng = np.random.default_rng(0)
    rule = RULES.get(drafter, ("sample",))[0]
    words = Speculation(drafter, rule, num_tokens=NODES)
    futures = []
    for n in range(texts):
        params = replace(PARAMETERS[name], seed=n, max_tokens=3 * steps + 60)
        prompt = rng.integers(0, VOCABULARY, 20)
        futures.append(engine.submit(TextQuery(prompt, params, words)))
    taken = []
    for _ in range(30 + steps):
        replayed, began = graphs.counts["replayed"], time.thread_time()
        engine.step()
        spent = time.thread_time() - began
        if graphs.counts["replayed"] > replayed:
            taken.append(spent * 1e6)
    for future in futures:
        future.cancel()
    while engine.step():
        pass
    host_us = statistics.median(taken[10:]) if len(taken) > 10 else None
    row = {"host": f"{name}, drafter {drafter}, {texts} texts", "replayed": len(taken)}
    return row | {"host_us": host_us, "in_goal": host_us is not None and host_us <= GOAL_US}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run few steps with few texts")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", choices=["steps", "searches"], help="run only this part")
    chosen = parser.parse_args(arguments)
    rows = []
    steps = host_rows(chosen.smoke) if chosen.only != "searches" else ()
    searches = search_rows(chosen.smoke) if chosen.only != "steps" else ()
    for row in chain(steps, searches):
        shown = "was not replayed" if row["host_us"] is None else f"{row['host_us']:8.0f} us"
        print(f"{row['host']:<48} {shown}", flush=True)
        rows.append(row)
    if chosen.json is not None:
        content = {"machine": machine(), "goal_us": GOAL_US, "rows": rows}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
