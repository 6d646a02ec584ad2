"""Scored prompts, vectors, tokens and aliases over HTTP, against the model's plain forward pass."""

import base64

import numpy as np
import openai
import pytest
import torch

from recserve.models.attention import DenseAttention
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.paths import reference

TEXT = "Once upon a time, there was a little girl"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    folder = reference("stories260k")
    settings = TextSettings(folder, chat_template=template, aliases=("gpt-4o", "default"))
    return load_text(settings, torch.device("cpu"))


@pytest.fixture(scope="module")
def server(text):
    with live(Service.of_text(text)) as running:
        yield running


@torch.inference_mode()
def plain(text, tokens):
    """Hidden states [n, E] and log-probabilities [n, V] by one dense causal forward pass."""
    tokens = torch.tensor(tokens)[None]
    positions = torch.arange(tokens.shape[1])[None]
    hidden = text.network(tokens, positions, DenseAttention())[0]
    return hidden, text.network.logits(hidden).float().log_softmax(-1)


def test_echo_with_logprobs_scores_the_prompt(server, text):
    """What lm-eval's local-completions asks for: token ids, `echo`, `logprobs` and one token."""
    tokens = text.model.tokenizer.encode(TEXT)
    body = {"prompt": [tokens, tokens[:5]], "echo": True, "logprobs": 3, "max_tokens": 1}
    said = server.post("/v1/completions", json={**body, "temperature": 0, "n": 2}).json()
    assert len(said["choices"]) == 4
    for choice, given in zip(
        said["choices"], [tokens, tokens, tokens[:5], tokens[:5]], strict=True
    ):
        found = choice["logprobs"]
        n = len(given)
        assert len(found["tokens"]) == n + 1 == len(found["text_offset"])
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        _, log_probs = plain(text, given)
        wanted = log_probs[range(n - 1), given[1:]].tolist()
        assert found["token_logprobs"][1:n] == pytest.approx(wanted, abs=1e-4)
        for place in range(1, n):
            top = log_probs[place - 1].topk(3).values.tolist()
            values = sorted(found["top_logprobs"][place].values(), reverse=True)
            assert values[:3] == pytest.approx(top, abs=1e-4)
            assert found["tokens"][place] in found["top_logprobs"][place]
        joined = choice["text"]
        for place in range(n):
            end = found["text_offset"][place + 1]
            assert found["text_offset"][place] <= end <= len(joined)
    assert said["usage"]["prompt_tokens"] == len(tokens) + 5


def test_prompt_logprobs_are_those_of_vllm(server, text):
    tokens = text.model.tokenizer.encode(TEXT)
    body = {"prompt": TEXT, "prompt_logprobs": 2, "max_tokens": 2}
    (choice,) = server.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"] is None
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(tokens) - 1
    _, log_probs = plain(text, tokens)
    for place, (entry, token) in enumerate(zip(rest, tokens[1:], strict=True)):
        own = entry[str(token)]
        row = log_probs[place]
        assert own["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        assert own["rank"] == int((row > row[token]).sum()) + 1
        assert sorted(one["rank"] for one in entry.values())[:2] == [1, 2]
        assert 2 <= len(entry) <= 3


def test_a_prompt_of_one_token_has_nothing_to_score(server):
    body = {"prompt": [5], "echo": True, "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 1}
    (choice,) = server.post("/v1/completions", json=body).json()["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_a_stream_does_not_score_its_prompt(server):
    for fields in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
        said = server.post("/v1/completions", json={"prompt": "a", "stream": True, **fields})
        assert (said.status_code, "not streamed" in said.text) == (422, True)


def test_an_embedding_is_the_mean_of_the_hidden_states(server, text):
    inputs = [TEXT, "A cat.", TEXT]
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as client:
        said = client.embeddings.create(model="default", input=inputs)  # asks for base64
        floats = client.embeddings.create(
            model="stories260k", input=inputs, encoding_format="float"
        )
    for one, same, given in zip(said.data, floats.data, inputs, strict=True):
        hidden, _ = plain(text, text.model.tokenizer.encode(given))
        mean = hidden.mean(0).numpy()
        np.testing.assert_allclose(one.embedding, mean / np.linalg.norm(mean), atol=1e-5)
        np.testing.assert_allclose(one.embedding, same.embedding, atol=1e-6)
    assert said.usage.prompt_tokens == sum(len(text.model.tokenizer.encode(t)) for t in inputs)
    raw = server.post("/v1/embeddings", json={"input": [1, 2], "encoding_format": "base64"}).json()
    packed = base64.b64decode(raw["data"][0]["embedding"])
    assert len(packed) == 4 * text.network.config.decoder.hidden_size


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 257}, "input"),
        ({"input": [10**6]}, "input[0]"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "word " * 4000}, "input[0]"),
        ({}, "input"),
    ],
)
def test_refused_inputs(server, body, param):
    said = server.post("/v1/embeddings", json=body)
    assert (said.status_code, said.json()["error"]["param"]) == (422, param)


def test_tokens_and_back(server, text):
    said = server.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert said["tokens"] == text.model.tokenizer.encode(TEXT)
    assert said["count"] == len(said["tokens"]) == len(said["token_strs"])
    assert said["max_model_len"] == text.model.context
    back = server.post("/detokenize", json={"tokens": said["tokens"]}).json()
    assert back["prompt"].strip() == TEXT
    plain_ = server.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()
    assert plain_["tokens"] == text.model.tokenizer.encode(TEXT, False)
    assert "token_strs" not in plain_
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    assert server.post("/tokenize", json=chat).json()["tokens"] == plain_["tokens"]
    for wrong in ({}, {"prompt": "a", **chat}):
        assert server.post("/tokenize", json=wrong).status_code == 422
    assert server.post("/detokenize", json={"tokens": [10**6]}).status_code == 422


def test_an_alias_is_the_model(server):
    listed = [one["id"] for one in server.get("/v1/models").json()["data"]]
    assert listed == ["stories260k", "gpt-4o", "default"]
    assert server.get("/v1/models/gpt-4o").json()["max_model_len"] == 512
    for name in listed:
        said = server.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
        assert said.json()["model"] == "stories260k"
    other = server.post("/v1/completions", json={"model": "x", "prompt": "a"})
    assert other.status_code == 404


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1, "skip_special_tokens": True, "include_stop_str_in_output": False},
        {"return_token_ids": False, "length_penalty": 1.0, "use_beam_search": False},
        {"truncate_prompt_tokens": None, "suffix": "", "logit_bias": {}},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(server, fields):
    said = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})
    assert said.status_code == 200, said.text
    message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    chat = {"tools": [], "reasoning_effort": "none", "verbosity": None, "tool_choice": ""}
    assert server.post("/v1/chat/completions", json={**message, **chat}).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"best_of": 2}, {"skip_special_tokens": False}, {"return_token_ids": True}]
)
def test_fields_that_ask_for_something_are_refused_by_name(server, fields):
    said = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})
    assert said.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_ping(server, method):
    assert server.request(method, "/ping").status_code == 200
