"""A trained model behind HTTP: its known text, the same whatever drafts it, pages given back."""

import json
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
from recserve.service.text.loader import TextSettings, load_text, open_drafters
from tests.support.grids import chosen
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


@pytest.mark.parametrize("temperature", chosen((0, 0.8), "0.8"))
def test_the_same_text_whatever_drafts_it(client, temperature):
    """Five at once, so that steps are shared; penalties and log-probabilities too."""
    settings = {"temperature": temperature, "seed": 11, "frequency_penalty": 0.2, "logprobs": 2}
    plain = client.completions.create(**ASK, **settings, **drafted_by("none"))
    names = ("none", "ngram", "suffix", "lookahead", "ngram+suffix")
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(
            pool.map(lambda n: client.completions.create(**ASK, **settings, **drafted_by(n)), names)
        )
    for name, answer in zip(names, answers, strict=True):
        assert answer.choices[0].text == plain.choices[0].text, name
        said = answer.choices[0].logprobs
        assert said.tokens == plain.choices[0].logprobs.tokens
        assert said.token_logprobs == pytest.approx(
            plain.choices[0].logprobs.token_logprobs, abs=1e-4
        )
        assert (answer.model_extra["metrics"]["speculative_decoding"] is None) == (name == "none")


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


def test_drafts_are_accepted_where_text_repeats(client):
    prompt = "Lily saw a big red ball. " * 6
    answer = client.completions.create(
        model="stories260k", prompt=prompt, max_tokens=40, temperature=0, **drafted_by("ngram")
    )
    said = answer.model_extra["metrics"]["speculative_decoding"]
    assert said["mean_acceptance_length"] > 2 and said["exact"]
    assert said["num_accepted_tokens"] == sum(said["per_position"])


def test_the_first_named_drafter_is_the_default(client):
    answer = client.completions.create(**ASK, temperature=0)
    assert answer.model_extra["metrics"]["speculative_decoding"]["drafter"] == "suffix"
    (model,) = [m for m in client.models.list() if m.id == "stories260k"]
    names = model.model_extra["recserve"]["drafters"]
    assert names == ["suffix", "ngram+suffix", "none", "ngram", "lookahead"]
    assert model.model_extra["max_model_len"] == 512


def test_the_prompt_is_cached(client):
    ask = {**ASK, "prompt": "One day a cat sat on the mat and " * 4, "max_tokens": 4}
    client.completions.create(**ask)
    again = client.completions.create(**ask)
    details = again.usage.prompt_tokens_details
    assert 0 < again.usage.prompt_tokens - details.cached_tokens <= 17


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


def test_the_context_is_not_exceeded(client):
    answer = client.completions.create(**{**ASK, "max_tokens": 507}, temperature=0)
    assert answer.usage.total_tokens <= 512
    with pytest.raises(openai.BadRequestError, match="context length is 512 tokens"):
        client.completions.create(**{**ASK, "max_tokens": 508})


def test_items_and_text_on_one_engine(server, client):
    user = server.get("/playground/samples").json()["users"][0]
    names = [model.id for model in client.models.list()]
    assert names == ["recommender", "ranker", "stories260k"]

    def either(number):
        if number % 2:
            answer = server.post("/v1/recommend", json={"user": {"id": user}, "k": 3})
            return [item["item_id"] for item in answer.json()["items"]]
        return client.completions.create(**ASK, temperature=0).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(either, range(24)))
    assert all(answer == found[0] for answer in found[::2]) and found[0].startswith(KNOWN)
    assert all(answer == found[1] for answer in found[1::2]) and len(found[1]) == 3


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
        llm=folder, llm_name="tiny", drafters="ngram,suffix", device="cpu", kv_bytes=2**24
    )
    service = ServiceLoader(config).first()
    try:
        (model,) = service.models()
        assert model["id"] == "tiny" and model["recserve"]["drafters"][:2] == ["ngram", "suffix"]
        assert service.model("tiny") == model and service.alive
    finally:
        service.close()
    assert not service.alive


def test_wrong_drafters_are_refused_when_loading(folder, tmp_path):
    network = load_text(TextSettings(folder), torch.device("cpu")).network
    for named, words in (
        ("eagle", "'eagle'"),
        ("draft_model", "draft_model"),
        (f"draft_model={tmp_path}/gone", "no such folder"),
        (f"draft_model={tmp_path}", "config.json"),
        (f"medusa={tmp_path}", "medusa_lm_head"),
    ):
        with pytest.raises(ValueError, match=words):
            open_drafters([named], network)
    models = [f"specinfer={folder}", f"specinfer={folder}", f"draft_model={folder}"]
    assert list(open_drafters(models, network))[:2] == ["specinfer", "draft_model"]
    with pytest.raises(ValueError, match="no such folder"):
        load_text(TextSettings(tmp_path / "gone"), torch.device("cpu"))


def test_token_sources_count_the_accepted_tokens(server):
    """Of a real model and drafter: sources and texts agree with the counts of the response."""
    body = {**ASK, "temperature": 0, "stream": True, "speculation": {"drafter": "suffix"}}
    body["stream_options"] = {"include_token_sources": True}
    lines = [line for line in server.post("/v1/completions", json=body).text.splitlines() if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_sources"]]
    counts = chunks[-1]["metrics"]["speculative_decoding"]
    assert "".join(token["text"] for token in tokens).startswith(KNOWN)
    drafted = sum(token["source"] == "draft" for token in tokens)
    assert drafted == counts["num_accepted_tokens"] > 0
