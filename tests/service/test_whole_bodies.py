"""A body of many queries enters the engine whole or not at all, and leaves nothing behind."""

import asyncio
import random
from concurrent.futures import Future

import msgspec
import pytest
import torch

from recserve.core.errors import QueueFull
from recserve.engine.engine_config import EngineConfig
from recserve.schemas.encoding import EmbeddingsRequest
from recserve.schemas.items import Candidate, RankBatchRequest, RankRequest, RecommendRequest
from recserve.schemas.scoring import GenerativeScoringRequest, RerankRequest
from recserve.schemas.text import CompletionRequest
from recserve.server.context import RequestContext
from recserve.service import Service, ServiceOptions
from recserve.service.errors import UnknownModel
from recserve.service.text import text_scores
from recserve.service.text.loader import TextSettings, load_text
from tests.support.tiny_bundle import shared_bundle
from tests.support.tiny_llm import tiny_llm

PLACES = 8
HISTORY = [f"item{number:06d}" for number in (3, 7, 31)]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service whose engine takes no step."""
    folder = tmp_path_factory.mktemp("service")
    text = load_text(TextSettings(tiny_llm(folder / "toy")), torch.device("cpu"))
    options = ServiceOptions(EngineConfig(max_queue=PLACES, load_aware=False), text=text)
    store = f"lmdb:{folder}/store"
    with Service.open(shared_bundle(), store, "cpu", options) as opened, opened.engine.held():
        yield opened
        clear(opened.engine.queue)


def depth(service) -> int:
    waiting = service.engine.queue.waiting
    return sum(not one.future.cancelled() for one in list(waiting))


BAD_FIELDS = {
    "stop_token_ids": [2**31],
    "logit_bias": {"999999": 1.0},
    "temperature": -1.0,
    "top_p": 7.0,
    "bad_words": [""],
    "min_tokens": 10**6,
    "model": "another",
    "speculation": {"drafter": "unknown"},
    "max_tokens": 10**6,
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_refused_completion_leaves_no_prompt_to_score(service, field):
    rng = random.Random(field)
    prompts = [[rng.randrange(200) for _ in range(9)] for _ in range(3)]
    good = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 1}
    before = depth(service)
    with pytest.raises((ValueError, UnknownModel)):
        body = msgspec.convert({**good, field: BAD_FIELDS[field]}, CompletionRequest)
        service.text.begin_completion(body)
    assert depth(service) == before


NAMES = ("texts", "copies", "scored", "embeddings", "rerank", "scoring", "rank:batch", "infer")


def begin_many(service, count: int, name: str):
    """Begins a body that needs `count` places."""
    prompts = [[1, 2, number] for number in range(count)]
    rank = RankRequest(history=HISTORY, candidates=[Candidate(item_id=HISTORY[0])])
    scored = CompletionRequest(prompt=prompts[: count // 2], max_tokens=1, prompt_logprobs=1)
    texts = service.text
    labels = {"label_token_ids": [1, 2], "query": "q"}
    calls = {
        "texts": lambda: texts.begin_completion(CompletionRequest(prompt=prompts, max_tokens=1)),
        "copies": lambda: texts.begin_completion(CompletionRequest(prompt=[1], n=count)),
        "scored": lambda: texts.begin_completion(scored),
        "embeddings": lambda: texts.embeddings.begin(EmbeddingsRequest(input=prompts)),
        "rerank": lambda: texts.scores.begin_rerank(
            RerankRequest(query="q", documents=[f"text {n}" for n in range(count)]), "1"
        ),
        "scoring": lambda: texts.scores.begin_scoring(
            GenerativeScoringRequest(items=prompts, **labels)
        ),
        "rank:batch": lambda: service.ranker.begin_each(RankBatchRequest(requests=[rank] * count)),
        "infer": lambda: service.recommender.begin_all(
            [RecommendRequest(history=HISTORY, k=3)] * count, "id"
        ),
    }
    return calls[name]()


def cancel(pending) -> None:
    for one in pending if isinstance(pending, list) else [pending]:
        one.cancel()


@pytest.mark.parametrize("name", NAMES)
def test_a_body_that_does_not_fit_leaves_the_queue_as_it_was(service, name, monkeypatch):
    monkeypatch.setattr(text_scores, "GROUP_TOKENS", 1)
    queue = service.engine.queue
    clear(queue)
    first = begin_many(service, 4, name)
    assert depth(service) == 4
    with pytest.raises(QueueFull, match="needs 6 places"):
        begin_many(service, 6, name)
    with pytest.raises(ValueError, match="needs 10 places.*at most 8"):
        begin_many(service, 10, name)
    assert depth(service) == len(queue) == 4
    begin_many(service, 4, name)
    assert depth(service) == 8
    cancel(first)
    assert depth(service) == 4


def clear(queue) -> None:
    for one in list(queue.waiting):
        one.future.cancel()
        queue._remove(one)


@pytest.mark.parametrize("together", [True, False])
def test_the_first_failure_ends_a_body_that_needs_all_results(together):
    async def receive():
        await asyncio.sleep(60)

    async def wait(futures):
        context = RequestContext(None, {"type": "http", "method": "POST"}, receive)
        loop = asyncio.get_running_loop()
        loop.call_soon(futures[1].set_exception, OSError("broken"))
        if not together:
            loop.call_later(0.01, futures[0].set_result, 1)
        try:
            await context.wait(futures, 1e12, together)
        finally:
            context.close()

    futures = [Future[int](), Future[int]()]
    if together:
        with pytest.raises(OSError, match="broken"):
            asyncio.run(wait(futures))
    else:
        asyncio.run(wait(futures))
    assert futures[0].cancelled() == together
