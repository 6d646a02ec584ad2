"""Tiny engines on any device, and requests of every kind, to compare a CPU with a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap, PrefixGroups
from recserve.core.request import (
    LikelihoodQuery,
    Prefix,
    PrewarmQuery,
    RankQuery,
    SlateQuery,
    TextScoreQuery,
)
from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.draft_model.specinfer import specinfer
from recserve.drafters.lookahead import LookaheadDrafter
from recserve.drafters.medusa.drafter import MedusaDrafter
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.ngram import NgramDrafter
from recserve.drafters.suffix.drafter import SuffixDrafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.item_graph import ItemGraph
from recserve.kernels.trie.insertion import insert_items
from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig, item_vectors
from recserve.models.inputs import NodeInputs
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead
from recserve.models.ranker import Ranker, RankerConfig
from recserve.models.recommender import Recommender
from recserve.search.strategy import Heads
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.specformer_drafter import specformer
from tests.support.walking_model import drawn_language_model

VOCABULARY = 40
# Graphs have checks of their own. A capture would use up the time of these checks.
SMALL = EngineConfig(kv_bytes=2 * 2**20, graphs=False)
SIZES = (5, 4, 6)

ITEMS = torch.unique(
    torch.stack(
        [torch.randint(0, c, (70,), generator=torch.Generator().manual_seed(c)) for c in SIZES], 1
    ),
    dim=0,
)
NEW = 3  # number of last items that are missing in the built trie
TEXT_PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.3},
    "truncated": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "everything": {
        "temperature": 1.2, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2,
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {0: 1.5},
        "bad_words": ((3, 3), (8,)), "stop_token_ids": (30,), "min_tokens": 6, "logprobs": 2,
    },
}  # fmt: skip


class PlainIndex:
    """Exhaustive inner products: the index of strategy `dense` if faiss is not installed."""

    def __init__(self, vectors: np.ndarray) -> None:
        self._vectors = vectors

    @property
    def num_items(self) -> int:
        return len(self._vectors)

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self._vectors[rows])

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = queries @ self._vectors.T
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return rows, np.take_along_axis(scores, rows, axis=1)


def sharpened(module: Any, factor: float = 8.0) -> Any:
    """Scales weights so that results differ by more than rounding errors."""
    for weight in module.parameters():
        if weight.ndim > 1:
            weight.data.mul_(factor)
    return module.eval().requires_grad_(False)


def moved(inputs: NodeInputs, device: str) -> NodeInputs:
    """Returns the inputs on another device."""
    columns = {k: v.to(device) for k, v in vars(inputs).items() if v is not None}
    return replace(inputs, **columns)


@dataclass
class Recommending:
    """A recommender with every head and its catalogue.

    `trie` is the catalogue as built. `live` has new items, one of which replaces an old item, and
    two hidden items.
    """

    engine: Engine
    model: Recommender
    trie: Trie
    live: Trie
    index: PlainIndex
    graph: ItemGraph
    device: str
    heads: Heads

    def prefix(self, events: int) -> Prefix:
        """Returns a random history of `events` items."""
        g = torch.Generator().manual_seed(events)
        rows = torch.randint(0, len(ITEMS) - NEW, (events,), generator=g)
        if self.model.config.input == "items":
            tokens = self.model.config.num_code_tokens + rows
        else:
            tokens = (ITEMS[rows] + torch.tensor(self.model.config.level_offsets)).flatten()
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), tokens])
        return Prefix(NodeInputs(tokens.to(self.device)), tokens.numpy())

    def ask(self, strategy: Any, how: str = "plain", events: Iterable[int] = (3, 9)) -> list[Any]:
        """Returns requests of one kind: plain, filters, diversity, weighed or live."""
        prefixes = [self.prefix(n) for n in events]
        if strategy == "warm":
            return [PrewarmQuery(prefix, "recommender") for prefix in prefixes]
        trie: Trie = self.live if how == "live" else self.trie
        if strategy == "likelihood":
            rows = np.arange(7) * 5
            return [LikelihoodQuery(prefix, trie, rows[b:]) for b, prefix in enumerate(prefixes)]
        requests = [
            SlateQuery(
                prefix=prefix, trie=trie, k=5, beam_width=8, strategy=strategy,
                index=self.index if strategy == "dense" else None,
                graph=self.graph if strategy == "rpg" and how != "filters" else None,
            )
            for prefix in prefixes
        ]  # fmt: skip
        if how == "filters":
            allowed = AllowedItems.of(np.arange(len(ITEMS)) % 3 > 0)
            requests[0] = replace(requests[0], excluded=np.array([1, 4, 4, 20, 31]))
            requests[1] = replace(requests[1], allowed=allowed, excluded=np.array([2]))
        if how == "diversity":
            caps = (Cap(PrefixGroups(trie, 0), 2),)
            requests = [replace(r, caps=caps) for r in requests]
        if how == "weighed":
            requests = [replace(r, dense_weight=0.5) for r in requests]
        return requests


def recommending(device: str, form: Any = "items", autoregressive: bool = True) -> Recommending:
    """Builds the recommender and its engine on a device."""
    torch.manual_seed(0)
    normalization: Any = "children" if form == "items" else "vocabulary"
    config = RecommenderConfig(
        DecoderConfig(32, 2, 4, 2, 8, 48), SIZES, form, normalization, num_items=len(ITEMS),
        dense_head=form == "items", level_heads=True, autoregressive=autoregressive,
        vector_dim=6 if form == "items" else 0,
    )  # fmt: skip
    model = sharpened(Recommender(config))
    vectors = torch.randn(len(ITEMS), 6) if form == "items" else None
    draft = SelfDraftHead(SelfDraftConfig(32, SIZES))
    nezha = SelfDraftHead(SelfDraftConfig(32, SIZES, placeholders=True))
    for head in (draft, nezha):
        head.start_from(model)
        head.requires_grad_(False)
    retriever = DenseRetriever(
        RetrieverConfig(32, 24, ("a", "b"), (0.7, 0.3), "events", (1, 4), (0.5, 0.5))
    )
    retriever.start_from(model)
    sharpened(retriever, 1.5)
    model = model.to(device)
    model.bind_items(ITEMS, vectors)
    heads = Heads(draft.to(device).eval(), nezha.to(device).eval(), retriever.to(device).eval())
    built = len(ITEMS) - NEW
    trie = build_trie(ITEMS, SIZES).to(device)
    base = build_trie(ITEMS[:built], SIZES, None, built).to(device)
    codes = ITEMS[built:].clone()
    codes[-1] = ITEMS[11]
    rows = torch.arange(built, len(ITEMS))
    gone = torch.tensor([7, 11])
    live = insert_items(base, codes.to(device), rows.to(device), len(ITEMS), gone)
    near = torch.randint(0, len(ITEMS), (len(ITEMS), 4), dtype=torch.int32)
    graph = ItemGraph(near, torch.arange(5, dtype=torch.int32)).to(device)
    index = PlainIndex(item_vectors(retriever, model).numpy())
    engine = build_engine(EngineModels(model, heads=heads), SMALL)
    return Recommending(engine, model, trie, live, index, graph, device, heads)


@dataclass
class Ranking:
    """A ranker with profile, long history, recent events, and candidates with and without time
    limits.
    """

    engine: Engine
    ranker: Ranker
    device: str

    def inputs(self, count: int, seed: int, group: int) -> NodeInputs:
        g = torch.Generator().manual_seed(seed)
        c = self.ranker.config
        return moved(
            NodeInputs(
                torch.randint(0, c.num_items, (count,), generator=g),
                torch.full((count,), group),
                torch.randint(0, c.num_types, (count,), generator=g),
                torch.arange(count),
                torch.randn(count, c.dense_size, generator=g),
            ),
            self.device,
        )

    def ask(self) -> list[Any]:
        prefixes = []
        for n in (12, 7):
            inputs = self.inputs(n, n, 1)
            groups = torch.tensor([0] + [1] * (n - 3) + [2, 2]).to(self.device)
            keys = np.random.default_rng(n).integers(0, 2**62, n)
            prefixes.append(Prefix(replace(inputs, groups=groups), keys, shared=n - 2))
        limits = np.array([10, 11, 12, 12])
        return [
            RankQuery(prefixes[0], self.inputs(4, 1, 3), limits),
            RankQuery(prefixes[1], self.inputs(6, 2, 3)),
        ]


def ranking(device: str) -> Ranking:
    """Builds the ranker and its engine on a device."""
    torch.manual_seed(0)
    ranker = Ranker(
        RankerConfig(
            40, vector_size=6, dense_size=5, num_types=3, hidden_size=32, num_layers=2,
            num_heads=2, head_dim=16,
        )
    )  # fmt: skip
    ranker.bind_items(torch.randn(40, 6))
    ranker = sharpened(ranker, 3.0).to(device)
    ranker.freeze_items()
    return Ranking(build_engine(EngineModels(ranker=ranker), SMALL), ranker, device)


def text_engine(device: str, names: Iterable[str] = (), pages: int = 200) -> Engine:
    """Builds a language model with the named drafters; the draft model has half the layers."""
    model, small = (
        drawn_language_model(64, layers, VOCABULARY, torch.float32).to(device) for layers in (2, 1)
    )

    def medusa() -> MedusaDrafter:
        torch.manual_seed(0)
        heads = MedusaHeads(MedusaConfig(64, VOCABULARY, 3))
        heads.start_from(model)
        drafter = MedusaDrafter(heads.to(device).eval().requires_grad_(False), 64, VOCABULARY)
        drafter.pack()
        return drafter

    makers: dict[str, Callable[[], Any]] = {
        "ngram": lambda: NgramDrafter(min_match=1),
        "suffix": lambda: SuffixDrafter(),
        "lookahead": lambda: LookaheadDrafter(window=3, ngram=3),
        "draft_model": lambda: ModelDrafter(small, VOCABULARY, (1,) * 3),
        "specinfer": lambda: specinfer([model, small], VOCABULARY, (2, 1, 2)),
        "medusa": medusa,
        "specformer": lambda: specformer(model),
        "merged": lambda: MergedDrafter([SuffixDrafter(), LookaheadDrafter(window=2, ngram=3)]),
    }
    decoder = model.config.decoder
    slot = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * 4
    config = EngineConfig(page_size=4, kv_bytes=pages * 4 * slot, graphs=False, load_aware=False)
    drafters = {name: makers[name]() for name in names}
    return build_engine(EngineModels(text=model, drafters=drafters), config)


def texts(
    drafter: str, rule: str, parameters: str, count: int = 2, most: int = 8
) -> list[TextQuery]:
    """Returns text requests with random prompts."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCABULARY, 6 + 3 * n) for n in range(count)]
    return [
        TextQuery(
            np.concatenate([prompt, prompt[:4]]),
            SamplingParams(**{"max_tokens": most, "seed": n} | TEXT_PARAMETERS[parameters]),
            Speculation(drafter, rule),
        )
        for n, prompt in enumerate(prompts)
    ]


def text_scores(device: str) -> TextScoreQuery:
    """Returns a request that scores three texts."""
    keys = np.array([3, 1, 4, 1, 5], np.int64)
    prefix = Prefix(NodeInputs(torch.from_numpy(keys).to(device)), keys)
    return TextScoreQuery(prefix, np.array([1, 2, 3, 9, 8]), np.array([0, 2, 3, 5]), (4, 7))


def assert_same(got: list[Any], expected: list[Any]) -> None:
    """Asserts that two devices give the same results, with scores within 1e-4.

    The tolerance covers sums in a different order.

    Raises:
        AssertionError: If results differ.
    """
    assert len(got) == len(expected)
    for one, two in zip(got, expected, strict=True):
        for name in ("rows", "tokens", "exact", "finish_reason", "rounds"):
            a, b = getattr(one, name, None), getattr(two, name, None)
            assert np.array_equal(a, b), f"{name}: {a} and {b}"  # type: ignore[arg-type]
        for name in ("scores", "values"):
            if hasattr(two, name):
                np.testing.assert_allclose(getattr(one, name), getattr(two, name), atol=1e-4)
