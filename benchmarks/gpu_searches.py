"""Recorded searches on a device: the same slates as launched ones and as a CPU's, and their times.

On CUDA the record is a CUDA graph; on a CPU the same function runs anew each time, padded as there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from device_worlds import Recommending, recommending
from drawn import Catalogue, drawn_there
from gpu_checks import Task
from gpu_engine import (
    CLOSE,
    cold_and_warm,
    difference,
    recommender_engine,
    recorded,
    requests_of,
    small_catalogue,
)

from recserve.engine.fixed_search import SearchShape
from recserve.kernels.trie import build_trie
from recserve.models.config import DecoderConfig

SMALL = tuple(
    SearchShape(requests, 8, excluded, weighed)
    for weighed in (False, True)
    for excluded in (24, None)
    for requests in (1, 3)
)
QWEN3_1_7B = DecoderConfig(2048, 28, 16, 8, 128, 6144, rope_theta=1e6, qk_norm=True)
# Of NVIDIA's SID-GR inference on an H100: 17.6 ms, 7.0 of prefill and 10.0 of three decode steps.
# `speculative` is to decode in 5 ms, by a draft or by what is recorded for `beam`.
GOALS_MS = {
    "beam": {"cold_ms": 17.6, "warm_ms": 10.0},
    "speculative": {"warm_ms": 5.0},
    "nezha": {"warm_ms": 1.0},
}


def search_checks(device: str, smoke: bool = False) -> Iterator[Task]:
    """Slates of recorded searches against launched ones, here and on the CPU, in float32."""
    worlds: dict[Any, Recommending] = {}

    def world(which: str, form: str, trie: str) -> Recommending:
        key = which, form, trie if which == "recorded" else ""
        if key not in worlds:
            made = worlds[key] = recommending("cpu" if which == "cpu" else device, form)
            if which == "recorded":
                recorded(made.engine, made.model, getattr(made, trie), SMALL, 64)
        return worlds[key]

    def compared(form: str, strategy: str, how: str, against: str) -> float:
        trie = "live" if how == "live" else "trie"
        one, other = world("recorded", form, trie), world(against, form, trie)
        searches = one.engine.searches
        assert searches is not None
        before, worst = searches.counts["replayed"], 0.0
        for part in (slice(None), slice(1)):
            asked = one.ask(strategy, how)[part], other.ask(strategy, how)[part]
            worst = max(worst, difference(one.engine, other.engine, *asked))
        return worst if searches.counts["replayed"] == before + 2 else float("inf")

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


def wide_catalogue(items: int, codes: int, levels: int = 3) -> Catalogue:
    """Drawn ids."""
    g = torch.Generator().manual_seed(0)
    drawn = torch.unique(torch.randint(0, codes, (items, levels), generator=g), dim=0)
    return Catalogue(f"{items:,} items", drawn, build_trie(drawn, (codes,) * levels))


def search_rows(device: str, smoke: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Milliseconds of whole requests at the shape of the goals, recorded and launched."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    catalogue = small_catalogue() if smoke else wide_catalogue(1_000_000, 8192)
    shape = DecoderConfig(64, 2, 2, 1, 32, 128, qk_norm=True) if smoke else QWEN3_1_7B
    model = drawn_there(catalogue, shape, dtype, device)
    trie = catalogue.trie.to(device)
    width, batches = (8, (1,)) if smoke else (256, (1, 8))
    events = 8 if smoke else 333  # of three codes: a context of 1,000
    shapes = tuple(SearchShape(batch, width, 64) for batch in batches)
    for graphs in (True, False):
        engine = recommender_engine(model, 2**24 if smoke else 2**33)
        if graphs:
            recorded(engine, model, trie, shapes, 64 if smoke else 4096)
        for batch in batches:
            # Where nothing is drafted, `speculative` replays what `beam` does.
            for strategy in ("beam", "nezha", *(() if graphs else ("speculative",))):
                if time.monotonic() > deadline:
                    return
                asked = partial(requests_of, model, trie, strategy, (batch, width), events)
                times, slates = cold_and_warm(engine, asked, range(1, 5), 9)
                how = "recorded" if graphs else "launched"
                goals = GOALS_MS.get(strategy, {}) if batch == 1 and not smoke else {}
                yield {
                    "engine": f"goal shape, {strategy}, {how}, batch {batch}, beam {width}",
                    "rounds": slates[0].rounds,
                    "dtype": str(dtype)[6:],
                    **times,
                    **{f"goal_{name}": goal for name, goal in goals.items()},
                }
