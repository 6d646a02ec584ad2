"""A trained model behind HTTP: its known text, the same whatever drafts it, pages given back."""

import random
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from recserve.config import ServerConfig
from recserve.engine.engine_config import EngineConfig
from recserve.server.loader import ServiceLoader
from recserve.service import Service, ServiceOptions
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.paths import reference
from tests.support.tiny_bundle import shared_bundle
from tests.support.waiting import until

KNOWN = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
    "a big, red ball."
)
ASK = {"model": "stories260k", "prompt": "Once upon a time", "max_tokens": 60}


@pytest.fixture(scope="module")
def folder():
    return reference("stories260k")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """A bundle and a language model on one engine."""
    text = load_text(TextSettings(folder, drafters=("suffix", "ngram+suffix")), torch.device("cpu"))
    store = f"lmdb:{tmp_path_factory.mktemp('store')}"
    service = Service.open(
        shared_bundle(), store, "cpu", ServiceOptions(EngineConfig(load_aware=False), text=text)
    )
    with live(service) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as made:
        yield made


def drafted_by(name, **more):
    return {"extra_body": {"speculation": {"drafter": name, **more}}}


def test_the_known_text(client):
    answer = client.completions.create(**ASK, temperature=0)
    assert answer.choices[0].text.startswith(KNOWN)
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 60
    stopped = client.completions.create(**ASK, temperature=0, stop=[" ball."])
    assert stopped.choices[0].text == KNOWN.removesuffix(" ball.")
    pieces = client.completions.create(**ASK, temperature=0, stop=" ball.", stream=True)
    assert "".join(p.choices[0].text for p in pieces) == KNOWN.removesuffix(" ball.")


def test_a_rule_that_would_be_biased_is_refused_and_harms_nobody(client):
    prompt = "One day One day One day One day"
    pairing = drafted_by("ngram", verifier="multi_step")
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(client.completions.create, **ASK, temperature=0)
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="biased") as caught:
                client.completions.create(
                    **{**ASK, "prompt": prompt}, seed=1, stream=stream, **pairing
                )
            assert caught.value.code == "unfit_draft"
            assert caught.value.param == "speculation.verifier"
        assert neighbour.result().choices[0].text.startswith(KNOWN)
    cold = {**ASK, "prompt": prompt, "temperature": 0}
    plain = client.completions.create(**cold, **drafted_by("none")).choices[0].text
    assert client.completions.create(**cold, **pairing).choices[0].text == plain
    lossy = client.completions.create(**ASK, seed=1, **drafted_by("suffix", verifier="typical"))
    assert lossy.model_extra["metrics"]["speculative_decoding"]["exact"] is False


def test_stages_are_measured(server):
    before = server.get("/metrics").text
    answer = server.post("/v1/completions", json={**ASK, "prompt": "A new beginning of a text"})
    stages = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    times = {name: float(value) for name, value in stages.items()}
    assert set(times) == {"queue", "features", "prefill", "draft", "verify", "total"}
    assert times["verify"] > 0 and times["prefill"] > 0 and times["features"] > 0
    assert sum(times.values()) - times["total"] <= times["total"] * 1.01
    stream = {**ASK, "stream": True}
    assert "server-timing" not in server.post("/v1/completions", json=stream).headers
    counted = [
        float(re.search(r'stage_seconds_count\{stage="verify"\} (\S+)', page)[1])
        for page in (before, server.get("/metrics").text)
    ]
    assert counted[1] >= counted[0] + 2


def test_clients_that_leave_leave_no_page_behind(server, client):
    """30 streams, most of them left at a drawn place."""
    engine = server.app.state.lifecycle.service.engine
    rng = random.Random(3)
    drawn = [(rng.choice(["none", "ngram", "suffix"]), rng.randrange(12), n) for n in range(30)]

    def leave(one):
        name, pieces, seed = one
        stream = client.completions.create(
            **{**ASK, "max_tokens": 200}, seed=seed, stream=True, **drafted_by(name)
        )
        for _ in range(pieces):
            next(stream, None)
        stream.close()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(leave, drawn))
    until(lambda: not engine.stats().running and not server.app.state.lifecycle.in_flight)
    lane = engine.schedulers["text"]
    with engine.held():
        lane.kv.prefixes.evict(lane.kv.allocator.num_pages)
        assert lane.kv.allocator.num_free == lane.kv.allocator.num_pages
    assert client.completions.create(**ASK, temperature=0).choices[0].text.startswith(KNOWN)


def test_what_serve_is_told_is_what_is_served(folder):
    config = ServerConfig(
        **{"llm": folder, "llm_name": "tiny", "drafters": "ngram,suffix", "device": "cpu"},
        **{"kv_bytes": 2**24, "metrics_compat": "vllm"},
    )
    service = ServiceLoader(config).first()
    try:
        assert service.gauges().step_tokens == {}
        (model,) = service.models()
        assert model["id"] == "tiny" and model["recserve"]["drafters"][:2] == ["ngram", "suffix"]
        assert service.model("tiny") == model and service.alive
    finally:
        service.close()
    assert not service.alive
