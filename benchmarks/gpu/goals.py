"""The ten goal lines: recserve's figures on this device beside those that others have published.

Lines 1 to 5 are recommendations at the shape of NVIDIA's figures: Qwen3-1.7B, beam 256, an engine
as `serve` starts it. A cold request has no cached prefix, as in NVIDIA's measurement. A warm one
has its whole history cached, beside what NVIDIA needs after the prefill. Line 6 is the server over
HTTP with four clients whose histories are new. It needs a serving installation; without one the
line is skipped, and a row names the missing package.

Lines 7 to 10 are texts of an 8B-shaped model with drafters whose networks run as trained ones do.
The target writes a walk through its vocabulary, and the weights of the networks are made to follow
this walk, but for one token in ten. So the drafts are accepted about as often as published ones,
and every kernel has its real size. Drafts are made at every step, also where the policy would not.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.drafts import LARGE, SMALL, Grid, decoded, drawn_target
from benchmarks.gpu.engine import requests_of, small_catalogue, timed
from benchmarks.gpu.searches import QWEN3_1_7B, wide_catalogue
from benchmarks.support.drawn import drawn_there
from benchmarks.support.failures import attempted, failure
from benchmarks.support.timing import Deadline
from recserve.drafters.block.drafter import BlockDrafter
from recserve.drafters.block.heads import MarkovConfig
from recserve.drafters.block.network import Block, BlockConfig
from recserve.drafters.eagle.drafter import EagleDrafter
from recserve.drafters.eagle.network import Eagle, EagleConfig
from recserve.drafters.mtp.drafter import MtpDrafter
from recserve.drafters.mtp.network import Mtp, MtpConfig
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.config import DecoderConfig
from recserve.models.decoder import FINAL_LAYER
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead
from recserve.models.language_model import LanguageModel
from recserve.search.strategy import Heads
from recserve.speculation.drafter import Drafter
from tests.support.walking_model import walk

Rows = Iterator[dict[str, Any]]
NVIDIA = "NVIDIA, H100"
DSPARK = "DSpark, Qwen3-8B, TPU v7x"
# (events of three codes, requests): what NVIDIA's SID-GR inference takes, and after the prefill.
PUBLISHED_MS = {
    (333, 1): {"cold_ms": 17.6, "warm_ms": 9.95},
    (333, 8): {"cold_ms": 93.2, "warm_ms": 43.7},
    (1666, 1): {"cold_ms": 42.3, "warm_ms": 10.7},
    (1666, 8): {"cold_ms": 308.0, "warm_ms": 51.4},
}
PUBLISHED_HTTP = {"requests_per_s": 20.1, "median_ms": 196.0, "p99_ms": 252.0}
# Tokens per second relative to plain decoding, by the number of texts.
PUBLISHED_DRAFTS = {1: 5.0, 16: 4.3, 128: 3.2}
WRONG = 0.1  # share of the tokens after which a drafter's network guesses wrong
SLOTS = 7
CLIENTS = 4
TINY = DecoderConfig(64, 2, 2, 1, 32, 128, qk_norm=True)


def goal_rows(device: str, smoke: bool, deadline: Deadline, share: slice = slice(None)) -> Rows:
    """Yields one row per goal line; a share of them if several processes split the work."""
    jobs: list[Callable[[str, bool, Deadline], Rows]] = [slate_goals, http_goal, text_goals]
    for job in jobs[share]:
        if deadline.passed():
            return
        try:
            yield from job(device, smoke, deadline)
        except Exception as error:
            yield failure(f"goals: {job.__name__}", error)


def slate_goals(device: str, smoke: bool, deadline: Deadline) -> Rows:
    """Yields the lines of recommendations."""
    catalogue = small_catalogue() if smoke else wide_catalogue(1_000_000, 8192)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = drawn_there(catalogue, TINY if smoke else QWEN3_1_7B, dtype, device)
    trie, width = catalogue.trie.to(device), 10 if smoke else 256
    config = SelfDraftConfig(
        model.config.decoder.hidden_size, model.config.codebook_sizes, placeholders=True
    )
    head = SelfDraftHead(config)
    head.start_from(model)
    models = EngineModels(model, heads=Heads(nezha=head.to(device, dtype).eval()))
    engine = build_engine(models, EngineConfig(kv_bytes=2**24 if smoke else 2**35))
    engine.capture(trie)
    cases = [("beam", events, batch) for events, batch in PUBLISHED_MS]
    for strategy, events, batch in (*cases, ("nezha", 1666, 1)):
        if deadline.passed():
            return
        name = f"{strategy}, {3 * events:,} tokens, {batch} at once"
        how = model, trie, strategy, (batch, width), events // 40 if smoke else events
        row = attempted(name, partial(timed, engine, partial(requests_of, *how)))
        yield row if "ok" in row else goal(name, row, NVIDIA, PUBLISHED_MS[events, batch])


def goal(
    name: str, ours: dict[str, Any], whose: str, published: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns a goal line: our figures, and the published ones if there are any."""
    return {"goal": name, **ours} | ({"beside": {whose: published}} if published else {})


def text_goals(device: str, smoke: bool, deadline: Deadline) -> Rows:
    """Yields one line for each number of texts: all drafters beside plain decoding."""
    shape, words = (SMALL, 1500) if smoke else (LARGE, 128_256)
    batches = (1, 2) if smoke else (1, 16, 64, 128)
    prompt, tokens, kv_bytes = (12, 24, 2**24) if smoke else (256, 96, 2**34)
    grid = Grid(shape, words, (), (), batches, prompt, tokens, kv_bytes)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = drawn_target(grid, device, dtype)
    drafters = trained_drafters(model)
    config = EngineConfig(kv_bytes=kv_bytes, load_aware=False, max_running=max(batches))
    engine = build_engine(EngineModels(text=model, drafters=drafters), config)
    lane: Any = engine.schedulers["text"]
    for batch in batches:
        if deadline.passed():
            return
        # A tree for one text, chains where the steps are full already.
        nodes = 2 * SLOTS if batch == 1 else SLOTS
        ours: dict[str, Any] = {}
        for name in ("none", *drafters):
            before = dict(lane.graphs.counts) if lane.graphs is not None else {}
            row = attempted(
                f"{batch} texts, drafter {name}",
                partial(decoded, engine, name, nodes, batch, grid),
            )
            if "ok" in row:
                yield row
                continue
            kept = {what: row[what] for what in ("step_ms", "tokens_per_step", "tokens_per_s")}
            if before:
                counts = {what: n - before[what] for what, n in lane.graphs.counts.items()}
                kept["replayed"] = counts["replayed"] / max(sum(counts.values()), 1)
            if "none" in ours:
                kept["ratio"] = row["tokens_per_s"] / ours["none"]["tokens_per_s"]
            ours[name] = kept
        ratio = PUBLISHED_DRAFTS.get(batch)
        published = None if ratio is None or smoke else {"ratio": ratio}
        yield goal(f"drafted texts, {batch} at once", ours, DSPARK, published)


def trained_drafters(target: LanguageModel) -> dict[str, Drafter]:
    """Returns EAGLE, MTP and DSpark drafters whose networks guess the target's walk."""
    decoder, words = target.config.decoder, target.config.vocab_size
    one, size = replace(decoder, num_layers=1), decoder.hidden_size
    wrong = torch.rand(words, generator=torch.Generator().manual_seed(1)) < WRONG
    wrong = wrong.to(target.tokens.weight.device)
    other = target.tokens.weight.roll(1, dims=0)

    eagle: Any = _placed(target, lambda: Eagle(EagleConfig(
        one, size, (FINAL_LAYER,), words, words, fused=False, own_embedding=True,
    )))  # fmt: skip
    # The output is the token's embedding, from which the target's head reads the walk.
    eagle.tokens.weight.copy_(torch.where(wrong[:, None], other, target.tokens.weight))
    mtp: Any = _placed(target, lambda: Mtp(MtpConfig(one, words, own_head=True)))
    head = mtp.blocks[0].head
    assert target.head is not None
    after = walk(torch.arange(words, device=wrong.device), words)
    head.weight.copy_(target.head.weight)
    head.weight[after] = torch.where(
        wrong[:, None], target.head.weight.roll(1, dims=0)[after], head.weight[after]
    )
    for fc in (eagle.fc, mtp.blocks[0].fc):
        fc.weight.zero_()[:, :size].fill_diagonal_(1.0)

    layers = tuple(dict.fromkeys((0, decoder.num_layers // 2, decoder.num_layers)))
    rank = min(256, size)
    dspark: Any = _placed(target, lambda: Block(BlockConfig(
        replace(decoder, num_layers=min(5, decoder.num_layers), qk_norm=True), size, layers,
        words, words, SLOTS, (False,) * min(5, decoder.num_layers), mask_token=words - 1,
        from_anchor=True, markov=MarkovConfig(rank),
    )))  # fmt: skip
    vectors = dspark.markov.markov_w1.weight
    nn.init.normal_(vectors, std=rank**-0.5)
    dspark.markov.markov_w2[after] = torch.where(wrong[:, None], 0.0, 40.0 * vectors)
    return {
        "eagle": EagleDrafter(eagle, target),
        "mtp": MtpDrafter(mtp, target),
        "dspark": BlockDrafter(dspark, target),
    }


def _placed(target: LanguageModel, make: Callable[[], nn.Module]) -> Any:
    """Returns a network on the target's device, whose layers change their input little."""
    like, before = target.tokens.weight, torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(like.dtype)
    try:
        with torch.device(like.device):
            network = make().requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(before)
    for name, weight in network.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            weight.mul_(0.01)
    return network


def http_goal(device: str, smoke: bool, deadline: Deadline) -> Rows:
    """Yields the line of HTTP: a server in this process, and clients on threads of their own."""
    try:
        from benchmarks.server.overhead import serve
        from recserve.service import Service
    except ImportError as error:
        yield {"cut": "goal: HTTP, 4 clients", "note": f"package {error.name} is missing"}
        return
    with tempfile.TemporaryDirectory() as folder:
        bundle, items = _http_bundle(Path(folder), smoke, device)
        if deadline.passed():
            return
        service = Service.open(bundle, device="cuda" if device == "cuda" else "cpu")
        try:
            server, thread, port = serve(service)
            try:
                events = 20 if smoke else 1666
                _clients(port, items, events, smoke, requests=1, seed=0)  # compiles the kernels
                began = time.perf_counter()
                taken = _clients(port, items, events, smoke, requests=3 if smoke else 16, seed=1)
                seconds = time.perf_counter() - began
            finally:
                server.should_exit = True
                thread.join()
        finally:
            service.close()
    ours = {
        "requests_per_s": len(taken) / seconds,
        "median_ms": float(np.median(taken)),
        "p99_ms": float(np.percentile(taken, 99)),
    }
    yield goal(f"HTTP, {CLIENTS} clients, 5,000 tokens", ours, NVIDIA, PUBLISHED_HTTP)


def _http_bundle(folder: Path, smoke: bool, device: str) -> tuple[Path, int]:
    """Writes a bundle of three levels with a random recommender; returns it and its items."""
    from recserve.bundle.building import BuildOptions, build_bundle
    from recserve.bundle.bundle import Bundle
    from recserve.features.synthetic import SyntheticOptions, write_synthetic
    from recserve.models.config import RecommenderConfig
    from recserve.models.recommender import Recommender, save_recommender

    items = 500 if smoke else 5000
    data = write_synthetic(folder / "data", SyntheticOptions(items, 100, 10))
    out = folder / "bundle"
    options = BuildOptions(
        data.items, data.events, out,
        levels=2, codes=16 if smoke else 256, text_dim=16, collaborative_dim=0,
    )  # fmt: skip
    build_bundle(options, log=lambda _: None)
    bundle = Bundle.open(out)
    shape = replace(TINY, qk_norm=False) if smoke else QWEN3_1_7B
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = Recommender(RecommenderConfig(
                shape, bundle.catalog().semantic_ids.codebook_sizes, "codes",
                num_items=items, max_history_items=4096,
            ))  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    save_recommender(model.cpu(), bundle.directory("recommender"))
    bundle.commit("recommender", {})
    return out, items


def _clients(
    port: int, items: int, events: int, smoke: bool, requests: int, seed: int
) -> Sequence[float]:
    """Returns the milliseconds of all requests of CLIENTS clients that send one after another."""
    from http.client import HTTPConnection

    taken, failures = list[float](), list[Exception]()

    def send(number: int) -> None:
        connection = HTTPConnection("127.0.0.1", port)
        rng = np.random.default_rng((seed, number))
        width = 10 if smoke else 256
        try:
            for _ in range(requests):
                history = [f"item{item:06d}" for item in rng.integers(0, items, events)]
                body = {"history": history, "strategy": "beam", "beam_width": width, "k": 10}
                began = time.perf_counter()
                connection.request("POST", "/v1/recommend", json.dumps(body))
                answer = connection.getresponse()
                text = answer.read()
                taken.append((time.perf_counter() - began) * 1e3)
                if answer.status != 200:
                    raise RuntimeError(f"HTTP {answer.status}: {text[:300]!r}")
        except Exception as error:
            failures.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return taken
