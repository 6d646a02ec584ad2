"""Engines with all heads, and histories for their requests, random or from a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.baselines.llama import to_llama
from benchmarks.support.drawn import drawn_catalogue, drawn_prefixes, drawn_recommender
from recserve.bundle.bundle import Bundle
from recserve.core.request import Prefix, Slate, SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.evaluation.cases import leave_one_out_cases
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig
from recserve.models.inputs import NodeInputs
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead
from recserve.models.recommender import Recommender, load_recommender
from recserve.search.strategy import Heads
from recserve.service.auto_strategy import AUTO, BEAM, StrategyChooser
from recserve.service.model_loader import item_index, load_heads

HISTORY_TOKENS = 200
RETRIEVER: dict[str, Any] = {
    "width": 512,
    "outcomes": ("event",),
    "outcome_shares": (1.0,),
    "offset_unit": "events",
    "offset_bounds": (0.0, 2.0, 4.0),
    "offset_shares": (0.5, 0.25, 0.25),
}


@dataclass
class Work:
    """Work per request of one method in one cell.

    Attributes:
        nodes: Tree nodes.
        rounds: Rounds.
        shares: Time of rounds before their forward passes, relative to forward passes and
            verification.
        names: Strategies that `auto` chose.
    """

    nodes: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def words(self) -> str:
        """Returns a text for a table."""
        drafted = sum(name != BEAM for name in self.names) / max(len(self.names), 1)
        return (
            f"{np.mean(self.nodes):.0f} nodes, {np.mean(self.rounds):.2f} rounds, "
            f"proposing {np.median(self.shares):.0%} of forwards"
        ) + (f", {drafted:.0%} drafted" if drafted else "")


class Subject:
    """An engine with histories for its requests."""

    def __init__(
        self, model: Recommender, trie: Trie, heads: Heads, prefixes: list[Prefix]
    ) -> None:
        self.model, self.trie, self.prefixes = model, trie, prefixes
        decoder = model.config.decoder
        slot = 8 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
        self.llama = to_llama(model) if model.config.input == "codes" else None
        model.pack()  # the server packs its weights when it loads a bundle
        self.engine = build_engine(
            EngineModels(model, heads=heads), EngineConfig(kv_bytes=slot * 65_536)
        )
        self.engine.capture(trie)  # the server captures its searches too
        self.chooser = StrategyChooser(self.engine.selectable)
        self.index = item_index(model, heads)

    def ask(
        self, prefixes: list[Prefix], k: int, width: int, strategy: str, work: Work | None = None
    ) -> list[Slate]:
        """Returns slates for all prefixes, requested at once.

        `strategy` is a strategy of the engine, or `auto`, for which the service's rule chooses.
        """
        name = self.chooser.choose(width, None)[0] if strategy == AUTO else strategy
        slates: list[Any] = self.engine.run_many(
            [
                SlateQuery(
                    prefix=prefix,
                    trie=self.trie,
                    k=k,
                    beam_width=width,
                    strategy=name,
                    index=self.index,
                )
                for prefix in prefixes
            ]  # type: ignore[arg-type]
        )
        if work is not None:
            for slate in slates:
                work.nodes.append(slate.timing.nodes)
                work.rounds.append(slate.rounds)
                work.shares.append(slate.timing.draft_ms / max(slate.timing.verify_ms, 1e-9))
                work.names.append(name if slate.timing.drafted else BEAM)
        return slates


def grown(model: Recommender, prefix: Prefix, item: int) -> Prefix:
    """Returns the history with one more event."""
    row = item % model.num_bound_items
    if model.config.input == "codes":
        event = model.item_tokens[row]
    else:
        event = torch.tensor([model.config.num_code_tokens + row])
    tokens = torch.cat([prefix.inputs.tokens, event])
    return Prefix(NodeInputs(tokens), tokens.numpy())


def drawn_subject(model_shape: str, users: int, dtype: torch.dtype) -> Subject:
    """Returns a random model in Beauty's shape, with heads as large as trained ones."""
    hidden, layers = (int(part) for part in model_shape.split("x"))
    catalogue = drawn_catalogue(12_101)
    model = drawn_recommender(catalogue, hidden, layers, "children", dtype, level_heads=True)
    heads = []
    for placeholders in (False, True):
        config = SelfDraftConfig(hidden, model.config.codebook_sizes, placeholders)
        heads.append(SelfDraftHead(config).to(dtype).eval())
        heads[-1].start_from(model)
        heads[-1].pack()
    retriever = DenseRetriever(RetrieverConfig(hidden, **RETRIEVER)).to(dtype).eval()
    prefixes = drawn_prefixes(model, HISTORY_TOKENS // model.config.num_levels, users, 0)
    return Subject(model, catalogue.trie, Heads(*heads, retriever), prefixes)


def trained_subject(path: Path, users: int, dtype: torch.dtype, least: int = 1) -> Subject:
    """Returns test users of a bundle with at least `least` events.

    Raises:
        ValueError: If there is no such user.
    """
    bundle = Bundle.open(path)
    catalog = bundle.catalog()
    codes = torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64))
    vectors = torch.from_numpy(catalog.vectors)
    model = load_recommender(bundle.directory("recommender"), codes, vectors).to(dtype)
    config = model.config
    cases = leave_one_out_cases(bundle.events(), "test")
    long = np.flatnonzero(cases.stops - cases.starts >= least)
    if not long.size:
        raise ValueError(f"{path} has no user with {least} events; ask for fewer")
    cases = cases.take(long).sample(users)
    prefixes = []
    for case in range(len(cases)):
        history = cases.history(case)[-config.max_history_items :]
        tokens = model.template.tokens(history, catalog.semantic_ids.codes)
        prefixes.append(Prefix(NodeInputs(torch.from_numpy(tokens)), tokens))
    return Subject(
        model, build_trie(codes, config.codebook_sizes), load_heads(bundle, model), prefixes
    )
