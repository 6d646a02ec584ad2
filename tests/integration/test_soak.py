"""Mixed requests in one engine, one in five cancelled: nothing leaks, nobody waits on.

Text with every drafter and rule, and recommendations, on pools that are too small, submitted while
the engine steps, cancelled at any time; what is answered equals what the same request gets alone.
"""

from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.speculation.completion import Completion, TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.recommenders import draw_prefix, make
from tests.support.text_engines import MAKERS, assert_forgotten
from tests.support.text_plain import VOCABULARY, TableDrafter, drawn_model

CANCELLED = 0.2


# Of each drafter and none, with the rules that its drafts are fit for beside the default one.
PAIRS = [(drafter, "sample") for drafter in ("none", "table", "tree", *MAKERS)]
PAIRS += [("draft_model", rule) for rule in ("rejection", "block", "multi_step")]
PAIRS += [("specinfer", "multi_step"), ("medusa", "typical"), ("tree", "greedy")]


def variants(random: np.random.Generator, trie, recommender, text) -> tuple[list, dict]:
    """Requests of every pair, twenty recommendations, and texts for the table, some of them
    right.
    """
    requests, texts = [], {}
    plain = build_engine(EngineModels(text=text))
    for number, (drafter, rule) in enumerate(PAIRS * 3):
        prompt = random.integers(0, VOCABULARY, random.integers(1, 20))
        params = SamplingParams(
            temperature=0.0 if rule == "greedy" else (0.0, 0.8, 1.3)[number % 3],
            top_k=(0, 8)[number % 2],
            presence_penalty=(0.0, 0.5)[number // 2 % 2],
            seed=number,
            max_tokens=int(random.integers(1, 14)),
        )
        texts[tuple(prompt.tolist())] = plain.run(TextQuery(prompt, params)).tokens.tolist()
        how = Speculation(drafter, rule)
        requests.append(TextQuery(prompt, params, how, priority=number % 3))
    for number in range(20):
        root = draw_prefix(recommender, 1 + number % 7, number)
        requests.append(SlateQuery(prefix=root, trie=trie, k=4, beam_width=2 + number % 5))
    return requests, texts


def assert_fits(request, answer, wanted) -> None:
    """The answer that the request gets alone, without drafts; rules that draw otherwise at a
    temperature write another text of the same length.
    """
    if isinstance(request, SlateQuery):
        assert answer.rows.tolist() == wanted.rows.tolist()
        np.testing.assert_allclose(answer.scores, wanted.scores, atol=1e-4)
    elif request.params.greedy or request.speculation.verifier == "sample":
        assert answer.tokens.tolist() == wanted.tokens.tolist()
    else:
        assert len(answer.tokens) == len(wanted.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, load_aware", [(1000, False), (150, True)], ids=["always", "load-aware"]
)
def test_mixed_requests(count, load_aware):
    random = np.random.default_rng(7)
    codes = torch.from_numpy(np.unique(random.integers(0, 6, (60, 3)), axis=0))
    recommender, trie = make(codes, "codes", "children")
    text = drawn_model(1)
    requests, texts = variants(random, trie, recommender, text)
    drafters = {"table": TableDrafter("mixed", texts), "tree": TableDrafter("tree", texts)}
    drafters |= {name: make_drafter(text) for name, make_drafter in MAKERS.items()}
    own = [drafter.kv_shape for drafter in drafters.values()]
    slot = 2 * 2 * 2 * 8 * 4 + sum(one.slot_bytes(torch.float32) for one in own if one is not None)
    config = EngineConfig(4, kv_bytes=40 * 4 * slot, max_running=12, load_aware=load_aware)
    engine = build_engine(EngineModels(recommender, text=text, drafters=drafters), config)
    alone = build_engine(EngineModels(recommender, text=text), EngineConfig())
    wanted = []
    for request in requests:
        if isinstance(request, TextQuery):
            request = TextQuery(request.prompt, request.params)
        wanted.append(alone.run(request))

    sent = []
    most_preempted = 0
    for number in range(count):
        place = number % len(requests)  # requests of one kind come far apart
        sent.append((place, engine.submit(requests[place])))
        if random.random() < CANCELLED:
            sent[int(random.integers(max(len(sent) - 30, 0), len(sent)))][1].cancel()
        while engine.stats().queue_depth > 20:
            engine.step()
            most_preempted = max(most_preempted, len(engine.schedulers["text"].preempted))
    while engine.step():
        pass

    finished, drafted = 0, set()
    for place, future in sent:
        assert future.done()
        try:
            answer = future.result(0)
        except CancelledError:
            continue
        finished += 1
        assert_fits(requests[place], answer, wanted[place])
        if isinstance(answer, Completion) and answer.counts.num_drafts:
            speculation = requests[place].speculation
            drafted.add((speculation.drafter, speculation.verifier))
    assert 0.7 * count < finished < count and most_preempted > 0
    stats = engine.stats()
    assert (stats.queue_depth, stats.running) == (0, 0)
    for lane in engine.schedulers.values():
        lane.kv.prefixes.clear()
        assert lane.kv.allocator.num_free == lane.kv.allocator.num_pages
    for name in MAKERS:
        assert_forgotten(drafters[name])
    if load_aware:
        # Who drafts follows from measured costs, and the first draft of a drafter may be empty.
        assert drafted
    else:
        assert drafted == {*PAIRS} - {("none", "sample")}
