"""Assembles an engine from models: runners, schedulers, strategies, drafters, CUDA graphs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from recserve.core.draft_policy import DepthPolicy
from recserve.drafters.none import NoDrafter
from recserve.engine.beam_search_graph import cuda_searches
from recserve.engine.capture import TEXT_PREFILL_BUCKETS, cuda_prefills
from recserve.engine.draft_graph import cuda_drafts, make_captured_drafts
from recserve.engine.draft_proposer import text_step_cost
from recserve.engine.engine import Engine
from recserve.engine.engine_config import EngineConfig
from recserve.engine.invariance import invariant_runner
from recserve.engine.kv_cache import KVCache, cache_bytes
from recserve.engine.round_scheduler import RoundScheduler
from recserve.engine.runner import Runner
from recserve.engine.text_scheduler import TextLimits, TextScheduler
from recserve.engine.text_step_graph import cuda_steps
from recserve.kernels.cache.fp8 import pool_dtype
from recserve.kernels.cache.kv_pool import KVPool
from recserve.models.adapters import DecoderAdapter, RankerAdapter
from recserve.models.language_model import LanguageModel
from recserve.models.ranker import Ranker
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.search.strategies.likelihood import likelihood_strategy
from recserve.search.strategies.prewarm import PrewarmStrategy
from recserve.search.strategies.prompt_scores import PromptStrategy
from recserve.search.strategies.rank import RankStrategy
from recserve.search.strategies.text_scores import TextScoreStrategy
from recserve.search.strategy import Heads, recommend_strategies
from recserve.speculation.drafter import Drafter

log = logging.getLogger(__name__)

# Requests of the greatest length that a cache holds at least, for batches to form.
FEW_REQUESTS = 16
# Most tokens in a step of items, and of reranking, scoring and embeddings, by device. Other
# requests wait for it.
ITEM_TOKENS = {"cpu": 4096, "cuda": 32_768}
SCORE_TOKENS = {"cpu": 256, "cuda": 2048}
ADMITTED_STEPS = 8  # of scores: longer work waits in the queue, without pages


@dataclass(frozen=True)
class EngineModels:
    """The models of one engine. Each of them is optional.

    Attributes:
        recommender: Generates items.
        ranker: Scores given items.
        heads: Networks that strategies other than `beam` need.
        text: Writes and scores text.
        drafters: Drafters of the language model, by name. `build_engine` adds `none`.
    """

    recommender: SemanticIdModel | None = None
    ranker: Ranker | None = None
    heads: Heads = Heads()
    text: LanguageModel | None = None
    drafters: Mapping[str, Drafter] | None = None


def build_engine(models: EngineModels, config: EngineConfig | None = None) -> Engine:
    """Returns an engine that serves the models. Its `start` runs the steps on a thread.

    Args:
        models: The models to serve.
        config: Sizes and modes. None selects the defaults.

    Raises:
        NotInvariant: If `invariant` is set and this machine cannot compute a model that way.
        ValueError: If `graphs` is set and the language model is not on a CUDA device.
    """
    config = _set_kv_bytes(config or EngineConfig(), models)
    engine = Engine(config)
    engine.add_strategy("warm", PrewarmStrategy())
    if models.recommender is not None:
        _add_recommender(engine, models.recommender, models.heads)
    if models.ranker is not None:
        runner = _runner(RankerAdapter(models.ranker.eval()), config)
        engine.schedulers["ranker"] = _round_scheduler(runner, config)
        engine.add_strategy("ranker", RankStrategy(models.ranker))
    engine.drafters.update({"none": NoDrafter(), **(models.drafters or {})})
    if models.text is not None:
        _add_text(engine, models.text)
    return engine


def _set_kv_bytes(config: EngineConfig, models: EngineModels) -> EngineConfig:
    """Returns the configuration with the size of the key-value caches as a number."""
    if config.kv_bytes != "auto":
        return config
    generative = [one for one in (models.recommender, models.text) if one is not None]
    adapters: list[DecoderAdapter | RankerAdapter] = [DecoderAdapter(one) for one in generative]
    if models.ranker is not None:
        adapters.append(RankerAdapter(models.ranker))
    graph_bytes = 0
    if models.recommender is not None:
        graph_bytes += config.item_graph_bytes
    if models.text is not None and config.graphs is not False:
        graph_bytes += config.graph_limits.bytes + config.prefill_limits.bytes
        if any(drafter.capturable is not None for drafter in (models.drafters or {}).values()):
            graph_bytes += config.draft_limits.bytes
    device = adapters[0].device if adapters else torch.device("cpu")
    return replace(config, kv_bytes=cache_bytes(device, len(adapters), graph_bytes))


def warn_if_slow(name: str, dtype: torch.dtype, num_slots: int, longest: int) -> None:
    """Logs what makes a model slow on CUDA.

    Args:
        name: Name of the model.
        dtype: Type of its weights.
        num_slots: Tokens that its key-value cache holds.
        longest: Tokens of its longest request.
    """
    if dtype == torch.float32:
        log.warning(
            "the %s computes in float32, which is several times slower than bfloat16 on CUDA", name
        )
    if num_slots < FEW_REQUESTS * longest:
        log.warning(
            "the cache of the %s holds %d tokens, fewer than %d requests of %d; raise kv_bytes",
            name, num_slots, FEW_REQUESTS, longest,
        )  # fmt: skip


def _warn(name: str, runner: Runner, model: SemanticIdModel | LanguageModel) -> None:
    """Logs what makes a model slow on CUDA."""
    if runner.pool.keys.is_cuda:
        slots = runner.pool.num_pages * runner.pool.page_size
        warn_if_slow(name, model.tokens.weight.dtype, slots, model.config.decoder.max_positions)


def _add_recommender(engine: Engine, model: SemanticIdModel, heads: Heads) -> None:
    config = engine.config
    runner = _runner(DecoderAdapter(model.eval()), config)
    _warn("recommender", runner, model)
    engine.schedulers["recommender"] = scheduler = _round_scheduler(runner, config)
    strategies = recommend_strategies(model, heads)
    if config.invariant:
        strategies = {name: one for name, one in strategies.items() if one.invariant}
    engine.selectable = tuple(sorted(strategies))
    for name, strategy in {**strategies, "likelihood": likelihood_strategy(model)}.items():
        engine.add_strategy(name, strategy)
    if not config.invariant:
        kv, graphs = scheduler.kv, config.graphs
        scheduler.searches = cuda_searches(
            runner, kv, model, heads.nezha, graphs, config.search_limits
        )
        scheduler.prefills = cuda_prefills(runner, kv, model, graphs, config.prefill_limits)


def _add_text(engine: Engine, model: LanguageModel) -> None:
    config, drafters = engine.config, engine.drafters
    adapter = DecoderAdapter(model.eval())
    for drafter in drafters.values():
        adapter = drafter.adapt_target(adapter)
    runner = _runner(adapter, config, drafters.values())
    _warn("language model", runner, model)
    limits, shapes = TextLimits(), config.graph_limits.shapes
    nodes = max([limits.draft_nodes, *[shape.nodes for shape in shapes]])
    longest = model.config.decoder.max_positions + nodes
    kv = KVCache(runner.pool, 2 * _num_rows(config), longest)  # for texts and for their scores
    captured = make_captured_drafts(kv, config.graphs, drafters, limits.draft_nodes)
    graphs = cuda_steps(runner, kv, model, config.graphs, config.graph_limits, drafters, captured)
    measured = config.load_aware and len(drafters) > 1  # `none` drafts nothing
    policy = DepthPolicy(text_step_cost(model) if measured else None)
    drafts = cuda_drafts(kv, model, drafters, captured, config.draft_limits)
    text = TextScheduler(runner, model, limits, graphs, policy, kv, drafts)
    engine.schedulers["text"] = text
    text.prefills = cuda_prefills(
        runner, kv, model, config.graphs, config.prefill_limits, TEXT_PREFILL_BUCKETS
    )
    text.step_sizes = Counter() if config.count_steps else None
    step_tokens = SCORE_TOKENS[runner.pool.keys.device.type]
    engine.schedulers["text_scores"] = RoundScheduler(
        runner, kv, step_tokens, ADMITTED_STEPS * step_tokens
    )
    engine.add_strategy("text_scores", TextScoreStrategy(model))
    engine.add_strategy("prompt_scores", PromptStrategy(model))


def _round_scheduler(runner: Runner, config: EngineConfig) -> RoundScheduler:
    kv = KVCache(runner.pool, _num_rows(config))
    return RoundScheduler(runner, kv, ITEM_TOKENS[runner.pool.keys.device.type])


def _num_rows(config: EngineConfig) -> int:
    """Returns the most requests of a scheduler that have pages: one may run in the background."""
    return config.max_running + 1


def _runner(
    adapter: DecoderAdapter | RankerAdapter, config: EngineConfig, drafters: Iterable[Drafter] = ()
) -> Runner:
    """Returns a runner, and gives drafters with keys and values of their own a pool beside its."""
    size, dtype = config.page_size, pool_dtype(config.kv_dtype, adapter.dtype)
    own = [(part, part.kv_shape) for drafter in drafters for part in drafter.parts]
    slot_bytes = adapter.kv_shape.slot_bytes(dtype)
    slot_bytes += sum(shape.slot_bytes(adapter.dtype) for _, shape in own if shape is not None)
    assert config.kv_bytes != "auto"
    num_pages = max(config.kv_bytes // (slot_bytes * size), 1)
    if config.invariant:
        runner = invariant_runner(adapter, num_pages, size, dtype)
    else:
        runner = Runner(adapter, KVPool(adapter.kv_shape, num_pages, size, dtype, adapter.device))
    for drafter, shape in own:
        if shape is not None:
            pool = KVPool(
                shape, num_pages, size, adapter.dtype, adapter.device, drafter.scratch_slots
            )
            runner.pool.attached.append(pool)
            drafter.attach(pool)
    return runner
