"""Draft heads inside the captured step give the drafts and texts of launched heads.

Steps are recorded and replayed on the CPU (recorder.py); the drafts of an engine that launches its
heads are what those of the replays must equal, text by text and step by step.
"""

import pytest
import torch

from recserve.drafters.medusa.drafter import MedusaDrafter
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.ngram import NgramDrafter
from recserve.drafters.shared.rank_tree import rank_tree
from recserve.engine.capture import EagerRecorder
from recserve.engine.text_scheduler import TextScheduler
from recserve.engine.text_step_graph import StepShape, TextStepGraphs, TextStepLimits
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.device_worlds import text_engine
from tests.support.grids import chosen
from tests.support.pretend_cuda import PretendCuda, looks_of_replays
from tests.support.recorded_steps import Counted, with_graphs
from tests.support.text_engines import PARAMETERS, assert_no_leak, engine_for, prompts
from tests.support.text_plain import drawn_model, plain

TREE = rank_tree(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (2,)))
SHAPES = (StepShape(2, 1, 0), StepShape(10, 1, 3), StepShape(72, 8, 4))


class Watched(MedusaDrafter):
    """Notes its drafts by what they continue, and for how many texts it ran its heads itself."""

    def __init__(self, model, **changes):
        torch.manual_seed(0)
        size, words = model.config.decoder.hidden_size, model.config.vocab_size
        heads = MedusaHeads(MedusaConfig(size, words, 3, **changes))
        for block in heads.parameters():
            torch.nn.init.normal_(block, std=0.4)
        if heads.token_map is not None:
            heads.token_map.copy_(torch.randperm(words)[: heads.token_map.shape[0]])
        super().__init__(heads.requires_grad_(False).eval(), size, words, TREE)
        self.drafts, self.num_contexts = {}, 0

    def propose(self, contexts, budgets):
        drafts = super().propose(contexts, budgets)
        for context, draft in zip(contexts, drafts, strict=True):
            seen = tuple(context.tokens), context.params.seed
            self.drafts[seen] = (draft.tokens.tolist(), draft.parents.tolist(), draft.depth)
        return drafts

    def _guesses(self, contexts, width):
        self.num_contexts += len(contexts)
        return super()._guesses(contexts, width)


def requests_of(name, drafter="medusa", **words):
    """Eight texts, every other one with the parameters of the name, the rest greedy."""
    return [
        TextQuery(
            prompt,
            SamplingParams(
                **{"max_tokens": 14, "seed": 100 + n} | (PARAMETERS[name] if n % 2 == 0 else {})
            ),
            Speculation(drafter, **words),
        )
        for n, prompt in enumerate(prompts(8))
    ]


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


@pytest.fixture(
    scope="module", params=chosen({"": {}, "few": {"head_vocab": 20, "shared": True}}, "few")
)
def engines(request, model):
    """One that launches its heads, one that replays them, each with its drafter and its counts."""
    launching, recorded = Watched(model, **request.param), Watched(model, **request.param)
    counted = Counted()
    replaying = with_graphs(model, counted, SHAPES, drafters={"medusa": recorded})
    return engine_for(model, drafters={"medusa": launching}), launching, replaying, recorded


@pytest.mark.parametrize("name", chosen(("greedy", "warm", "everything", "stops"), "everything"))
def test_drafts_are_those_of_launched_heads(name, engines, model):
    """Alone and eight together."""
    launched, launching, replaying, recorded = engines
    for queries in (requests_of(name)[:1], requests_of(name)):
        launching.drafts, recorded.drafts = {}, {}
        launching.num_contexts = recorded.num_contexts = 0
        launched.forget_all()
        replaying.forget_all()
        wanted = [answer.tokens.tolist() for answer in launched.run_many(queries)]
        assert wanted == [plain(model, r.prompt.tolist(), r.params)[0] for r in queries]
        assert [answer.tokens.tolist() for answer in replaying.run_many(queries)] == wanted
        assert launching.drafts == recorded.drafts
        # What follows a step that was launched, with a prompt in it, finds nothing ranked.
        assert recorded.num_contexts <= (1 if len(queries) == 1 else launching.num_contexts // 2)
    assert_no_leak(replaying)


def test_the_buckets_say_whose_heads_they_hold(engines):
    graphs = engines[2].schedulers["text"].graphs
    names = [made.bucket.name for made in graphs.captured]
    sizes = ["2x1", "10x1", "72x8"]
    assert names == [
        *sizes,
        *(size + "+" for size in sizes),
        *(size + " medusa" for size in sizes[1:]),
        *(size + "+ medusa" for size in sizes[1:]),
        *(size + "+ mixed" for size in sizes[1:]),
    ]
    assert all(made.seconds > 0 for made in graphs.captured)


def test_a_request_s_own_tree_may_need_more_ranks(engines, model):
    """Ranks that were not recorded are looked up as without records."""
    _, _, replaying, recorded = engines
    wide = recorded.num_ranks + 2
    recorded.num_contexts = 0
    request = requests_of("warm", tree=((0,), (wide,)))[0]
    answer = replaying.run(request)
    assert answer.tokens.tolist() == plain(model, request.prompt.tolist(), request.params)[0]
    assert recorded.num_contexts == answer.timing.forwards - 2
    recorded.num_contexts = 0
    request = requests_of("warm", tree=((0,), (0, 1), (1,)))[0]
    assert replaying.run(request).tokens.tolist() == answer.tokens.tolist()
    assert recorded.num_contexts <= 1


@pytest.mark.slow
def test_a_merged_drafter_takes_its_one_source_with_heads(model):
    queries = requests_of("hot", "both")
    found, num_contexts = [], []
    for recorded in (False, True):
        watched = Watched(model)
        both = {"both": MergedDrafter([NgramDrafter(min_match=1), watched])}
        engine = (
            with_graphs(model, Counted(), (StepShape(300, 8, 16),), drafters=both)
            if recorded
            else engine_for(model, drafters=both)
        )
        tokens = [answer.tokens.tolist() for answer in engine.run_many(queries)]
        found.append((tokens, watched.drafts))
        num_contexts.append(watched.num_contexts)
    assert found[0] == found[1] and num_contexts[1] <= num_contexts[0] // 2
    assert MergedDrafter([Watched(model), Watched(model)]).ranked_heads is None
    assert NgramDrafter().ranked_heads is None


@pytest.mark.slow
def test_texts_of_two_drafters_with_heads_step_without_them(model):
    drafters = {"medusa": Watched(model), "other": Watched(model)}
    engine = with_graphs(model, Counted(), SHAPES, drafters=drafters)
    queries = requests_of("warm")[:2] + requests_of("warm", "other")[2:4]
    wanted = [plain(model, r.prompt.tolist(), r.params)[0] for r in queries]
    assert [answer.tokens.tolist() for answer in engine.run_many(queries)] == wanted
    assert min(drafter.num_contexts for drafter in drafters.values()) > 2


@pytest.mark.slow
def test_the_host_waits_once_a_step(monkeypatch, force_kernels):
    """On a pretended device: one look, no upload that is waited for, whatever is drafted."""
    from tests.support import triton_interpreter

    force_kernels("triton")
    launches = triton_interpreter.interpret_pretended(monkeypatch)
    with PretendCuda() as device:
        engine = text_engine("cuda", ["medusa"])
        scheduler = engine.schedulers["text"]
        limits = TextStepLimits((StepShape(6, 1, 3),), seconds=float("inf"))
        graphs = TextStepGraphs(
            scheduler.runner,
            scheduler.kv,
            scheduler.model,
            limits,
            EagerRecorder(),
            engine.drafters,
        )
        engine.schedulers["text"] = TextScheduler(
            scheduler.runner, scheduler.model, scheduler.limits, graphs, kv=scheduler.kv
        )
        params = SamplingParams(1.3, max_tokens=8)
        engine.submit(TextQuery(prompts(1)[0], params, Speculation("medusa", num_tokens=3)))
        waits = looks_of_replays(device, engine, graphs)
        # Behind the first replay, whose drafts the drafter made itself.
        assert len(waits) > 2 and launches["walk_kernel"] >= len(waits)
        for counts, table in waits[1:]:
            assert counts["read"] <= 1 and not counts["shape"] and not counts["upload"], table
