"""A thousand mixed requests in one engine, one in five cancelled: nothing leaks, nobody waits on.

Text with every drafter state and recommendations on pools that are too small, submitted while the
engine steps, cancelled at any time; what is answered equals what the same request gets alone.
"""

from concurrent.futures import CancelledError

import numpy as np
import torch
from test_engine import draw_root, make
from text_plain import TableDrafter, drawn_model

from recserve.core.request import RecommendRequest
from recserve.core.text_request import SamplingParams, Speculation, TextRequest
from recserve.engine.engine import Engine, EngineConfig

REQUESTS, CANCELLED = 1000, 0.2


def variants(random: np.random.Generator, trie, model) -> tuple[list, dict]:
    """Sixty different requests, and texts for the drafter, some of them right."""
    requests, texts = [], {}
    plain = Engine(text=drawn_model(1))
    for number in range(40):
        prompt = random.integers(0, 40, random.integers(1, 20))
        params = SamplingParams(
            temperature=(0.0, 0.8, 1.3)[number % 3],
            top_k=(0, 8)[number % 2],
            presence_penalty=(0.0, 0.5)[number // 2 % 2],
            seed=number,
            max_tokens=int(random.integers(1, 14)),
        )
        texts[tuple(prompt.tolist())] = plain.run(TextRequest(prompt, params)).tokens.tolist()
        drafter = ("none", "table", "tree")[number % 3]
        requests.append(TextRequest(prompt, params, Speculation(drafter), priority=number % 3))
    for number in range(20):
        root = draw_root(model, 1 + number % 7, number)
        requests.append(RecommendRequest(root, trie, 4, 2 + number % 5))
    return requests, texts


def same(left, right) -> bool:
    if hasattr(left, "tokens"):
        return left.tokens.tolist() == right.tokens.tolist()
    close = np.allclose(left.scores, right.scores, atol=1e-4)
    return left.rows.tolist() == right.rows.tolist() and close


def test_a_thousand_mixed_requests():
    random = np.random.default_rng(7)
    codes = torch.from_numpy(np.unique(random.integers(0, 6, (60, 3)), axis=0))
    recommender, trie = make(codes, "codes", "children")
    requests, texts = variants(random, trie, recommender)
    drafters = {"table": TableDrafter("mixed", texts), "tree": TableDrafter("tree", texts)}
    slot = 2 * 2 * 2 * 8 * 4
    config = EngineConfig(4, kv_bytes=40 * 4 * slot, max_running=12, load_aware=True)
    text = drawn_model(1)
    engine = Engine(recommender, text=text, drafters=drafters, config=config)
    alone = Engine(recommender, text=text, config=EngineConfig())
    wanted = []
    for request in requests:
        if isinstance(request, TextRequest):
            request = TextRequest(request.prompt, request.params)
        wanted.append(alone.run(request))

    sent = []
    most_aside = 0
    for _ in range(REQUESTS):
        place = int(random.integers(len(requests)))
        sent.append((place, engine.submit(requests[place])))
        if random.random() < CANCELLED:
            engine.cancel(sent[int(random.integers(max(len(sent) - 30, 0), len(sent)))][1])
        while engine.stats().queue_depth > 20:
            engine.step()
            most_aside = max(most_aside, len(engine._lanes["text"].aside))
    while engine.step():
        pass

    finished = 0
    for place, future in sent:
        assert future.done()
        try:
            assert same(future.result(0), wanted[place])
        except CancelledError:
            continue
        finished += 1
    assert 700 < finished < 1000 and most_aside > 0
    stats = engine.stats()
    assert (stats.queue_depth, stats.running) == (0, 0)
    for lane in engine._lanes.values():
        lane.cache.clear()
        assert lane.allocator.num_free == lane.allocator.num_pages
    drafting = engine._lanes["text"]._drafting._budget
    assert drafting is not None and not drafting._records
