"""Checks and times of item searches as CUDA graphs on a device.

The checks compare slates of captured searches (`recorded`) with eager ones (`launched`) and with
the CPU's. On a CPU the same function runs again each time instead of a graph, with the same
padding. `python benchmarks/gpu.py` runs this module and prints one line for each check and
measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.checks import Task, spoil
from benchmarks.gpu.engine import (
    CLOSE,
    difference,
    lost,
    recommender_engine,
    recorded,
    recorder_for,
    requests_of,
    small_catalogue,
    timed,
)
from benchmarks.support.drawn import Catalogue, drawn_there
from benchmarks.support.failures import attempted, complaints, once
from benchmarks.support.timing import Deadline
from recserve.engine.beam_search_graph import SearchShape
from recserve.engine.capture import PrefillBucket, PrefillGraphs
from recserve.kernels.trie.trie import build_trie
from recserve.models.config import DecoderConfig
from tests.support.device_worlds import Recommending, recommending

SMALL = tuple(
    SearchShape(requests, 8, excluded, weighed)
    for weighed in (False, True)
    for excluded in (24, None)
    for requests in (1, 3)
)
QWEN3_1_7B = DecoderConfig(2048, 28, 16, 8, 128, 6144, rope_theta=1e6, qk_norm=True)
# NVIDIA's SID-GR inference on an H100 takes 17.6 ms: 7.0 for prefill, 10.0 for three decode steps.
# `speculative` is to decode in 5 ms, by a draft or by what is recorded for `beam`.
GOALS_MS = {
    "beam": {"cold_ms": 17.6, "warm_ms": 10.0},
    "speculative": {"warm_ms": 5.0},
    "nezha": {"warm_ms": 1.0},
}


def search_checks(device: str, smoke: bool = False) -> Iterator[Task]:
    """Yields comparisons of captured searches with eager ones and with the CPU's, in float32."""
    reasons: list[str] = []

    @once
    def world(which: str, form: str, trie: str = "") -> Recommending:
        made = recommending("cpu" if which == "cpu" else device, form)
        if which == "recorded":
            with complaints() as heard:
                graphs = recorded(made.engine, made.model, getattr(made, trie), SMALL, 64)
            spoil(graphs.runner)
            reasons.extend([*heard, *graphs.missing])
        return made

    def compared(form: str, strategy: str, how: str, against: str) -> float:
        one = world("recorded", form, "live" if how == "live" else "trie")
        other = world(against, form)
        searches = one.engine.searches
        assert searches is not None
        before, worst = searches.counts["replayed"], 0.0
        for part in (slice(None), slice(1)):
            asked = one.ask(strategy, how)[part], other.ask(strategy, how)[part]
            worst = max(worst, difference(one.engine, other.engine, *asked))
        if searches.counts["replayed"] != before + 2:
            raise RuntimeError(f"{searches.counts}, not replayed; {'; '.join(reasons)}")
        return worst

    for form in ("items", "codes"):
        ways = ("plain", "filters", "live", *(("weighed",) if form == "items" else ()))
        for strategy in ("beam", "nezha"):
            for how in ways:
                for against in ("cpu",) if smoke else ("launched", "cpu"):
                    yield Task(
                        f"recorded search {strategy} of {form}, {how}: as {against}",
                        lambda f=form, s=strategy, h=how, a=against: compared(f, s, h, a),
                        CLOSE,
                    )


def prefill_checks(device: str, smoke: bool = False) -> Iterator[Task]:
    """Yields comparisons of captured prefills with launched ones, in float32.

    A history grows from request to request, so that all but the first prefills are short ones
    behind a cached prefix. With `nezha`, placeholders follow the last token.
    """

    def compared(strategy: str, form: str) -> float:
        launching, world = recommending(device, form), recommending(device, form)
        scheduler: Any = world.engine.schedulers["recommender"]
        runner = scheduler.runner
        with complaints() as heard:
            recorder = recorder_for(torch.device(device))
            buckets = PrefillBucket(17), PrefillBucket(65)
            graphs = PrefillGraphs(runner, scheduler.kv, world.model, recorder, buckets=buckets)
        scheduler.prefills = graphs
        spoil(runner)
        worst = 0.0
        for events in (2, 3, 4, 9, 2, 12):
            asked = launching.ask(strategy, events=(events,))
            worst = max(worst, difference(world.engine, launching.engine, asked, asked))
        if graphs.counts["replayed"] < 4:
            raise RuntimeError(f"{graphs.counts} prefills; {'; '.join(heard)}")
        return worst

    for strategy in ("beam", "nezha"):
        for form in ("items",) if smoke else ("items", "codes"):
            name = f"recorded prefills, {strategy} of {form}: as launched"
            yield Task(name, lambda s=strategy, f=form: compared(s, f), CLOSE)


def wide_catalogue(items: int, codes: int, levels: int = 3) -> Catalogue:
    """Returns a catalogue of random semantic ids."""
    g = torch.Generator().manual_seed(0)
    drawn = torch.unique(torch.randint(0, codes, (items, levels), generator=g), dim=0)
    return Catalogue(f"{items:,} items", drawn, build_trie(drawn, (codes,) * levels))


def search_rows(device: str, smoke: bool, deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yields milliseconds of whole requests at the shape of the goals, captured and eager."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    catalogue = small_catalogue() if smoke else wide_catalogue(1_000_000, 8192)
    shape = DecoderConfig(64, 2, 2, 1, 32, 128, qk_norm=True) if smoke else QWEN3_1_7B
    model = drawn_there(catalogue, shape, dtype, device)
    trie = catalogue.trie.to(device)
    width, batches = (10, (1,)) if smoke else (256, (1, 8))
    events = 8 if smoke else 333  # three codes each: a context of 1,000 tokens
    shapes = tuple(SearchShape(batch, width, 64) for batch in batches)
    for how in ("recorded", "launched"):
        if deadline.passed():
            return
        engine = recommender_engine(model, 2**24 if smoke else 2**33)
        if how == "recorded":
            yield from lost("the goal shape", engine, model, trie, shapes, 64 if smoke else 4096)
        # Without a draft, `speculative` replays the search of `beam`.
        strategies = ("beam", "nezha") + (("speculative",) if how == "launched" else ())
        for batch, strategy in product(batches, strategies):
            if deadline.passed():
                return
            name = f"goal shape, {strategy}, {how}, batch {batch}, beam {width}"
            asked = partial(requests_of, model, trie, strategy, (batch, width), events)
            row = attempted(name, partial(timed, engine, asked))
            goals = GOALS_MS.get(strategy, {}) if batch == 1 and not smoke else {}
            if "ok" not in row:
                row = {"engine": name, "dtype": str(dtype)[6:], **row}
                row |= {f"goal_{state}": goal for state, goal in goals.items()}
            yield row
