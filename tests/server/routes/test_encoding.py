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
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}:{{ c.function.arguments.a }}:{% endfor %}{{ m.tool_call_id }}"
        "{% endfor %}"
    )
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


def test_what_lm_eval_asks_before_it_tokenises_over_http(server, text):
    """It takes the remote tokeniser only if `eos_token` is there, and encodes it alone."""
    info = server.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert info["model_max_length"] == text.model.context
    assert info["chat_template"].startswith("{% for m in messages %}")
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    tokens = server.post("/tokenize", json=body).json()["tokens"]
    assert tokens == list(text.model.end_tokens)


def test_no_tokens_may_be_asked_for(server, text):
    """With `max_tokens: 0`, the prompt is scored and nothing is written."""
    tokens = text.model.tokenizer.encode(TEXT)
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    said = server.post("/v1/completions", json=body).json()
    assert said["usage"]["completion_tokens"] == 0
    for choice in said["choices"]:
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        assert len(choice["logprobs"]["tokens"]) == len(tokens)
        _, log_probs = plain(text, tokens)
        wanted = log_probs[range(len(tokens) - 1), tokens[1:]].tolist()
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
    full = [5] * text.model.context
    said = server.post("/v1/completions", json={"prompt": full, "max_tokens": 0})
    assert said.status_code == 200 and said.json()["choices"][0]["text"] == ""
    over = server.post("/v1/completions", json={"prompt": [*full, 5], "max_tokens": 0})
    assert over.json()["error"]["code"] == "context_length_exceeded"
    with server.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 0, "stream": True}
    ) as said:
        events = said.read().decode().strip().split("\n\n")
    assert '"finish_reason":"length"' in events[0] and events[-1] == "data: [DONE]"
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}
    assert server.post("/v1/chat/completions", json=chat).json()["error"]["param"] == "max_tokens"


def test_completions_take_the_limit_under_the_name_of_chats(server):
    body = {"prompt": "a", "max_tokens": 9, "max_completion_tokens": 2, "ignore_eos": True}
    said = server.post("/v1/completions", json=body).json()
    assert said["usage"]["completion_tokens"] == 2


def test_the_turns_of_an_agent_reach_the_template(server):
    """As LangChain and OpenAI's client send a conversation with a tool back."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seven"}]},
    ]
    said = server.post("/tokenize", json={"messages": messages, "return_token_strs": True})
    assert said.status_code == 200, said.text
    back = server.post("/detokenize", json={"tokens": said.json()["tokens"]}).json()["prompt"]
    assert back.replace(" ", "") == "Hif:1:sevenc1"
    answer = server.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_an_answer_can_be_sent_back_as_it_is(server):
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as client:
        first = {"role": "user", "content": "Once"}
        said = client.chat.completions.create(model="default", messages=[first], max_tokens=2)
        turn = said.choices[0].message
        for sent in (turn, turn.model_dump()):
            messages = [first, sent, {"role": "user", "content": "upon"}]
            client.chat.completions.create(model="default", messages=messages, max_tokens=1)


def test_a_whole_float_is_an_integer(server):
    """JSON Schema says so, and clients in languages without integers send them."""
    body = {"prompt": "a", "max_tokens": 2.0, "n": 1.0, "seed": 7.0, "temperature": 1}
    said = server.post("/v1/completions", json=body)
    assert said.status_code == 200 and said.json()["usage"]["completion_tokens"] <= 2
    for field, value in (("max_tokens", 2.5), ("n", 17.0), ("seed", 1e300)):
        error = server.post("/v1/completions", json={**body, field: value}).json()["error"]
        assert error["param"] == field, error
