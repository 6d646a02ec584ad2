"""Methods that beam.py compares: this engine and the baselines, on the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.support.baselines.beams import BeamSearch, Slates
from benchmarks.support.baselines.generate import Generate, tiger_t5
from benchmarks.support.baselines.llama import to_llama
from benchmarks.support.baselines.loops import bare_tree, kv_copy
from benchmarks.support.drawn import Catalogue, drawn_prefixes, drawn_recommender
from recserve.core.request import Prefix, PrefixKeys, Request, Slate, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig

HISTORY_TOKENS = 200
METHODS = ("generate", "generate-function", "t5", "kv-copy", "bare-tree", "cold", "warm")


@dataclass(frozen=True)
class Cell:
    """One cell of the benchmark: catalogue, model, dtype, batch and beam width."""

    items: str
    model: str
    dtype: str
    batch: int
    beams: int

    def title(self) -> str:
        return f"{self.items} · {self.model} · {self.dtype} · batch {self.batch}"


@dataclass(frozen=True)
class Work:
    """Operations and bytes of a cell, counted from its shapes.

    Attributes:
        trunk: Number of weights that every token passes.
        prefill_gflop: Operations of the batch's prefixes.
        weight_mbytes: Weights that each forward pass reads.
        kv_mbytes: Keys and values of one user's prefix.
    """

    trunk: int
    prefill_gflop: float
    weight_mbytes: float
    kv_mbytes: float

    def node_gflop(self, nodes: int) -> float:
        """Returns the operations of `nodes` tree nodes, including attention over the prefix."""
        return nodes * self.prefill_gflop / (HISTORY_TOKENS + 1)


class Model:
    """One set of weights on one catalogue, with every method that uses it."""

    def __init__(self, catalogue: Catalogue, shape: str, dtype: str, invariant: bool) -> None:
        hidden, layers = (int(part) for part in shape.split("x"))
        self.catalogue = catalogue
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.ours = drawn_recommender(catalogue, hidden, layers, "children", self.dtype)
        self.theirs = to_llama(self.ours)
        self.bare = copy.deepcopy(self.ours)
        self.ours.pack()  # the server packs its weights when it loads a bundle
        self.t5 = tiger_t5(self.ours.config.num_code_tokens).to(self.dtype)
        slot = 2 * layers * hidden * self.dtype.itemsize
        sizes = EngineConfig(kv_bytes=slot * 16_384, invariant=invariant)
        self.engine = build_engine(EngineModels(self.ours), sizes)

    def prefixes(self, count: int, seed: int) -> list[Prefix]:
        """Returns histories of 200 tokens, with as many items as fit."""
        items = HISTORY_TOKENS // self.ours.config.num_levels
        return drawn_prefixes(self.ours, items, count, seed)

    def work(self, batch: int) -> Work:
        c = self.ours.config.decoder
        trunk = sum(w.numel() for w in self.bare.decoder.parameters())
        tokens = batch * (HISTORY_TOKENS + 1)
        attention = 4 * c.num_layers * c.num_heads * c.head_dim * HISTORY_TOKENS / 2
        size = self.dtype.itemsize
        kv = 2 * c.num_layers * c.num_kv_heads * c.head_dim * (HISTORY_TOKENS + 1) * size
        return Work(trunk, 1e-9 * tokens * (2 * trunk + attention), 1e-6 * trunk * size, 1e-6 * kv)


def answers(
    model: Model, cell: Cell, repeats: int
) -> Iterator[tuple[str, Callable[[int], list[Slate] | Slates]]]:
    """Yields each method as a function of the run's number."""
    trie, width = model.catalogue.trie, cell.beams
    search = BeamSearch(trie, model.ours.config.level_offsets, width, normalise=True)
    same = model.prefixes(cell.batch, 0)
    prompts = torch.stack([prefix.inputs.tokens for prefix in same])
    length = prompts.shape[1]

    def engine(prefixes: list[Prefix]) -> list[Slate]:
        requests: list[Request] = [
            SlateQuery(prefix=prefix, trie=trie, k=width, beam_width=width) for prefix in prefixes
        ]
        return model.engine.run_many(requests)  # type: ignore[return-value]

    def forgetting(prefixes: list[Prefix]) -> list[Slate]:
        for prefix in prefixes:
            model.engine.forget(PrefixKeys(prefix.keys))
        return engine(prefixes)

    generate = Generate(model.theirs, search, length)
    yield "generate", lambda _: generate(prompts)
    if cell.items != "1000000":
        function = Generate(model.theirs, search, length, "function")
        yield "generate-function", lambda _: function(prompts)
    t5 = Generate(model.t5, search, length)
    yield "t5", lambda _: t5(prompts)
    yield "kv-copy", lambda _: kv_copy(model.theirs, prompts, search)
    yield "bare-tree", lambda _: bare_tree(model.bare, prompts, search)
    fresh = [model.prefixes(cell.batch, seed) for seed in range(1, repeats + 2)]
    yield "cold", lambda i: forgetting(fresh[i])
    yield "warm", lambda _: engine(same)


def forecast(name: str, model: Model, cell: Cell, gflops: float) -> tuple[float, float]:
    """Estimates seconds and GB of a method that treats each beam as a sequence.

    The seconds follow from the operations, the GB from caches and activations.
    """
    work = model.work(cell.batch)
    c = model.ours.config.decoder
    copies = cell.batch * cell.beams
    kv_gb = 1e-3 * work.kv_mbytes * copies
    activations = 1e-9 * copies * HISTORY_TOKENS * model.dtype.itemsize * 4 * c.intermediate_size
    if name.startswith("generate"):
        return work.prefill_gflop * cell.beams / gflops, 2 * kv_gb + activations
    if name == "kv-copy":
        return (work.prefill_gflop + 3 * work.node_gflop(copies)) / gflops, 2 * kv_gb
    return 0.0, 0.0
