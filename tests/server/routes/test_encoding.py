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
        assert (said.status_code, "not streamed" in said.text) == (400, True)


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
        ({"input": "word " * 4000}, "input"),
        ({}, "input"),
    ],
)
def test_refused_inputs(server, body, param):
    said = server.post("/v1/embeddings", json=body)
    assert (said.status_code, said.json()["error"]["param"]) == (400, param)


def test_tokens_and_back(server, text):
    said = server.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert said["tokens"] == text.model.tokenizer.encode(TEXT)
    assert said["count"] == len(said["tokens"]) == len(said["token_strs"])
    assert said["max_model_len"] == text.model.context
    names = text.model.tokenizer.tokenizer.id_to_token
    assert said["token_strs"] == [names(token) for token in said["tokens"]]
    back = server.post("/detokenize", json={"tokens": said["tokens"]}).json()
    assert back["prompt"].strip() == TEXT
    plain_ = server.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()
    assert plain_["tokens"] == text.model.tokenizer.encode(TEXT, False)
    assert plain_["token_strs"] is None
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    assert server.post("/tokenize", json=chat).json()["tokens"] == plain_["tokens"]
    for wrong in ({}, {"prompt": "a", **chat}):
        assert server.post("/tokenize", json=wrong).status_code == 422
    assert server.post("/detokenize", json={"tokens": [10**6]}).status_code == 422


def test_what_lm_eval_asks_before_it_tokenises_over_http(server, text):
    """It takes the remote tokeniser only if `eos_token` is there, and encodes it alone."""
    info = server.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert info["model_max_length"] == text.model.context
    assert info["chat_template"].startswith("{% for m in messages %}")
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    tokens = server.post("/tokenize", json=body).json()["tokens"]
    assert tokens == list(text.model.end_tokens)


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
        {"n": 2, "best_of": 2},
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


def test_what_litellm_sends_back_is_taken(server):
    """Its message of an answer has a field of its own."""
    turn = {"role": "assistant", "content": "Once", "tool_calls": None, "function_call": None}
    turn["provider_specific_fields"] = {"refusal": None}
    messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "and"}]
    said = server.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert said.status_code == 200, said.text


def test_rerank_has_the_third_name_of_vllm(server):
    """litellm's provider `hosted_vllm` posts there."""
    body = {"model": "default", "query": "a", "documents": ["b", "c"], "top_n": 2}
    answers = [server.post(path, json=body).json()["results"] for path in ("/rerank", "/v1/rerank")]
    assert len(answers[0]) == 2 and answers[0] == answers[1]


@pytest.mark.parametrize(
    ("turn", "code", "param"),
    [
        ({"role": "user"}, "missing_field", "messages[0].content"),
        ({"role": "user", "content": None}, "missing_field", "messages[0].content"),
        (
            {"role": "assistant", "content": None, "tool_calls": []},
            "missing_field",
            "messages[0].content",
        ),
        (
            {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]},
            "out_of_range",
            "messages[0].tool_calls",
        ),
        (
            {"role": "assistant", "content": "a", "refusal": "no"},
            "unsupported",
            "messages[0].refusal",
        ),
        ({"role": "", "content": "a"}, "out_of_range", "messages[0].role"),
    ],
)
def test_a_turn_that_no_template_can_write_is_refused(server, turn, code, param):
    said = server.post("/v1/chat/completions", json={"messages": [turn]}).json()["error"]
    assert (said["code"], said["param"]) == (code, param)


def test_a_whole_float_is_an_integer(server):
    """JSON Schema says so, and clients in languages without integers send them."""
    body = {"prompt": "a", "max_tokens": 2.0, "n": 1.0, "seed": 7.0, "temperature": 1}
    said = server.post("/v1/completions", json=body)
    assert said.status_code == 200 and said.json()["usage"]["completion_tokens"] <= 2
    for field, value in (("max_tokens", 2.5), ("n", 17.0), ("seed", 1e300)):
        error = server.post("/v1/completions", json={**body, field: value}).json()["error"]
        assert error["param"] == field, error


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/responses"), ("GET", "/docs"), ("GET", "/redoc")]
)
def test_what_is_not_served_is_said_so(server, method, path):
    """The reasons are in docs/reference/http.md."""
    said = server.request(method, path, json={"input": "a"})
    assert said.status_code == 404 and "GET /openapi.json" in said.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_ping(server, method):
    assert server.request(method, "/ping").status_code == 200
