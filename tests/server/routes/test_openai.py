"""The stock `openai` client, sync and async, against every feature of the two text routes."""

import asyncio
import json
import random
import re

import openai
import pytest

from tests.support.live_server import live
from tests.support.raw_http import connect
from tests.support.scripted_text import BEGIN, END, scripted
from tests.support.waiting import until

STORY = "Zoë paid 3 € for a 👩‍👩‍👧 cake.\n\nUser: more"
BEFORE_STOP = "Zoë paid 3 € for a 👩‍👩‍👧 cake."


def script(prompt: str, seed: int) -> str:
    return f"seed {seed}" if "seed" in prompt else "yes" if "short" in prompt else STORY


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live(scripted(tmp_path_factory.mktemp("toy"), script)) as running:
        yield running


@pytest.fixture
def engine(server):
    engine = server.app.state.lifecycle.service.engine
    engine.requests.clear()
    yield engine
    engine.hold.clear()
    engine.full, engine.failure, engine.failing_step = False, None, 2


@pytest.fixture
def client(server, engine):
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as made:
        yield made


def run_async(server, function):
    async def run():
        settings = {"base_url": f"{server.base_url}/v1", "api_key": "-", "max_retries": 0}
        async with openai.AsyncOpenAI(**settings) as client:
            return await function(client)

    return asyncio.run(run())


ASK = {"model": "toy", "prompt": "a", "max_tokens": 150}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


def client_encoding(text):
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = {c: n for n, c in enumerate(alphabet)}
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [spell[c] for piece, _ in pieces for c in piece]


def test_a_chat(client, engine):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=150)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    assert (message.role, message.content, message.refusal) == ("assistant", STORY, None)
    prompt = "system: be brief\nuser: hi\nassistant:"
    assert engine.requests[0].prompt.tolist() == [BEGIN, *client_encoding(prompt)]
    assert answer.usage.prompt_tokens == 1 + len(prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == (1 + len(prompt)) // 2


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_shape_of_streams(server, engine, path, seed):
    """A chunk is a step. The last one of a text has its last token and the finish reason."""
    draw = random.Random(f"{path} {seed}")
    chat, count = path != "completions", draw.choice([1, 2])
    logprobs = draw.random() < 0.5
    body = {
        **(CHAT if chat else ASK),
        "stream": True,
        "n": count,
        "max_tokens": draw.choice([1, 2, 9]),
    }
    body |= ({"logprobs": True} if chat else {"logprobs": 1}) if logprobs else {}
    body |= draw.choice([{}, {"stop": "paid"}, {"ignore_eos": True}])
    usage = draw.choice([None, False, True])
    steady = draw.choice([None, False, True])
    body["stream_options"] = {"include_usage": usage, "continuous_usage_stats": steady}
    *lines, done = raw_events(server, body, f"/v1/{path}")
    chunks = [json.loads(line) for line in lines]
    assert done == "[DONE]"
    counts = chunks.pop() if usage else None
    written = dict.fromkeys(range(count), 0)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index, text = choice["index"], choice["delta"]["content"] if chat else choice["text"]
        assert isinstance(text, str)
        if logprobs:
            given = choice["logprobs"]
            tokens = given["content"] if chat else given["tokens"]
            assert tokens
        else:
            assert choice["logprobs"] is None
        if usage and steady:
            assert chunk["usage"]["completion_tokens"] > written[index]
            written[index] = chunk["usage"]["completion_tokens"]
        else:
            assert chunk.get("usage") is None
    last = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in chunks}
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert len(ends) == count and {end["index"]: end for end in ends} == last
    if counts is not None and steady:
        assert counts["usage"]["completion_tokens"] == sum(written.values())


def test_the_async_client(server, engine):
    async def both(client):
        answer = await client.chat.completions.create(**CHAT)
        stream = await client.completions.create(**ASK, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
        many = await asyncio.gather(*[client.completions.create(**ASK) for _ in range(20)])
        return answer.choices[0].message.content, "".join(texts), {m.choices[0].text for m in many}

    assert run_async(server, both) == (STORY, STORY, {STORY})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "stop, text",
    [
        ("\n\nUser:", BEFORE_STOP),
        (["more", "\n\nUser:"], BEFORE_STOP),
        ("€", "Zoë paid 3 "),
        ("👩‍👩‍👧", "Zoë paid 3 € for a "),
        ("never", STORY),
        ("Z", ""),
    ],
)
def test_stop_strings_over_token_borders(client, stop, text, stream):
    answer = client.completions.create(**ASK, stop=stop, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text
    assert choices[-1].finish_reason == "stop"
    if not stream and stop != "never":
        # Up to the token that completed the stop string, whatever was written in the same step.
        first = stop if isinstance(stop, str) else "\n\nUser:"
        assert answer.usage.completion_tokens == len((text + first).encode())


def test_max_tokens_ends_in_the_middle_of_a_character(client):
    answer = client.completions.create(**{**ASK, "max_tokens": 3})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Zo�", "length")
    assert client.completions.create(model="toy", prompt="a").usage.completion_tokens == 16
    chat = client.chat.completions.create(**CHAT, max_completion_tokens=5)
    assert chat.usage.completion_tokens == 5 and chat.choices[0].finish_reason == "length"


def test_several_texts_and_prompts(client, engine):
    answer = client.completions.create(
        model="toy", prompt=["seed", "short"], n=3, seed=7, max_tokens=60
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    first = [choice.text for choice in answer.choices[:3]]
    assert first[0] == "seed 7" and len(set(first)) == 3
    assert [choice.text for choice in answer.choices[3:]] == ["yes"] * 3
    seeds = sorted(request.params.seed for request in engine.requests)
    again = client.completions.create(model="toy", prompt=["seed"], n=3, seed=7, max_tokens=60)
    assert [choice.text for choice in again.choices] == first and len(set(seeds)) == 3
    assert answer.usage.prompt_tokens == len("seedshort")
    free = client.completions.create(model="toy", prompt="seed", n=2, max_tokens=60)
    assert len({choice.text for choice in free.choices}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client, stream):
    settings = {"logprobs": True, "top_logprobs": 2, "max_tokens": 4, "stream": stream}
    answer = client.chat.completions.create(**CHAT, **settings)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    tokens = [t for choice in choices if choice.logprobs for t in choice.logprobs.content]
    assert [token.token for token in tokens] == ["Z", "o", "\\xc3", "\\xab"]
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == "Zoë"
    assert [(top.token, top.logprob) for top in tokens[0].top_logprobs] == [
        ("#", -0.5),
        ("Z", -1.5),
    ]


def test_every_parameter_reaches_the_engine(client, engine):
    client.completions.create(
        **ASK,
        temperature=0.3,
        top_p=0.9,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        logit_bias={"65": -100, "66": 2.5},
        seed=-5,
        user="u1",
        extra_body={
            **{"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2},
            **{"stop_token_ids": [9, END], "bad_words": ["no"], "priority": 3},
            "speculation": {"drafter": "medusa", "num_tokens": 5, "tree": [[0], [0, 0], [1]]},
        },
    )
    (request,) = engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.9, 40, 0.05)
    assert (params.presence_penalty, params.frequency_penalty) == (-1.5, 0.5)
    assert (params.repetition_penalty, params.seed, params.min_tokens) == (1.1, -5, 2)
    assert params.logit_bias == {65: -100.0, 66: 2.5} and params.max_tokens == 150
    assert params.stop_token_ids == (END, 9)
    bad = tuple(tuple(client_encoding(word)) for word in ("no", " no"))
    assert params.bad_words == bad
    said = request.speculation
    assert (said.drafter, said.num_tokens, said.tree) == ("medusa", 5, ((0,), (0, 0), (1,)))
    assert request.priority == 3
    client.completions.create(
        **ASK, extra_body={"ignore_eos": True, "top_k": -1, "temperature": None}
    )
    assert engine.requests[1].params.stop_token_ids == ()
    assert (engine.requests[1].params.temperature, engine.requests[1].params.top_k) == (1.0, 0)
    assert engine.requests[1].speculation.drafter == "none"


def test_a_seed_of_minus_one_is_random(client, engine):
    for _ in range(2):
        client.completions.create(**ASK, seed=-1)
    first, second = (request.params.seed for request in engine.requests)
    assert first != second and -1 not in (first, second)


def test_unknown_fields_inside_a_turn_are_ignored(server, engine):
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "and"}]},
    ]
    plain = server.post("/v1/chat/completions", json={"messages": turns}).json()
    marked = [{**turn, "cache_control": {"type": "ephemeral"}, "id": None} for turn in turns]
    marked[2]["content"] = [{"type": "text", "text": "and", "cache_control": {"ttl": "1h"}}]
    answer = server.post("/v1/chat/completions", json={"messages": marked})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]
    assert engine.requests[0].prompt.tolist() == engine.requests[1].prompt.tolist()
    refused = server.post("/v1/chat/completions", json={"messages": turns, "cache_control": {}})
    assert refused.json()["error"]["code"] == "unknown_field"


def test_a_full_queue_and_a_passed_deadline(client, engine):
    engine.full = True
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**ASK, stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"
    engine.full = False
    engine.hold.set()
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**ASK, extra_body={"timeout_ms": 2000})
    assert caught.value.status_code == 504
    until(lambda: engine.cancelled or engine.requests)


def test_a_failure_before_the_first_piece_has_a_status(client, engine):
    engine.failure, engine.failing_step = ValueError("a secret of the inside"), 0
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**ASK, stream=True)
    assert caught.value.status_code == 500 and "secret" not in str(caught.value)


def test_a_failure_in_a_stream_is_an_event(client, server, engine):
    engine.failure = ValueError("a secret of the inside")
    texts = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in client.completions.create(**ASK, stream=True):
            texts.append(chunk.choices[0].text)
    assert texts == ["Z", "oë"] and "secret" not in str(caught.value)
    lines = raw_events(server, {**ASK, "stream": True})
    assert json.loads(lines[-2])["error"]["code"] == "internal" and lines[-1] == "[DONE]"


def test_a_deadline_that_passes_in_a_stream_is_an_event(client, engine):
    engine.hold.set()
    stream = client.completions.create(**ASK, stream=True, extra_body={"timeout_ms": 1000})
    assert next(iter(stream)).choices[0].text == "Z"
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.body["code"] == "deadline_exceeded"


def test_a_stream_goes_on_while_the_server_drains(client, server, engine):
    lifecycle = server.app.state.lifecycle
    engine.hold.set()
    stream = iter(client.completions.create(**ASK, stream=True))
    first = next(stream).choices[0].text
    lifecycle.draining = True
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**ASK)
        assert caught.value.status_code == 503
        engine.hold.clear()
        assert first + "".join(chunk.choices[0].text for chunk in stream) == STORY
    finally:
        lifecycle.draining = False


def raw_events(server, body, path="/v1/completions"):
    answer = server.post(path, json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] and answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events.pop() == "" and all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def test_the_events_byte_by_byte(server, engine):
    """The golden form: what clients that read lines themselves rely on."""
    body = {"model": "toy", "prompt": "short", "stream": True, "request_id": "g"}
    body |= {"stream_options": {"include_usage": True}}
    lines = raw_events(server, body)
    head = r'\{"id":"cmpl-g","object":"text_completion","created":\d+,"model":"toy",'
    head += r'"system_fingerprint":"recserve-[^"]+","usage":'
    piece = (
        head + r'null,"choices":\[\{"index":0,"text":"%s","logprobs":null,"finish_reason":%s\}\]\}'
    )
    counts = head + (
        r'\{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,'
        r'"prompt_tokens_details":\{"cached_tokens":2\}\},'
        r'"metrics":\{"speculative_decoding":null\},"choices":\[\]\}'
    )
    expected = [piece % ("y", "null"), piece % ("es", '"stop"'), counts]
    assert len(lines) == 4 and lines[-1] == "[DONE]"
    for line, pattern in zip(lines, expected, strict=False):
        assert re.fullmatch(pattern, line), line


def test_a_client_that_leaves_ends_its_texts(server, client, engine):
    engine.hold.set()
    before = engine.cancelled
    stream = client.completions.create(**ASK, n=2, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: engine.cancelled == before + 2)
    body = json.dumps(ASK).encode()
    with connect(server) as wire:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        wire.sendall(head.encode() + body)
        until(lambda: len(engine.requests) == 3)
    until(lambda: engine.cancelled == before + 3)
    until(lambda: server.app.state.lifecycle.in_flight == 0)


def test_a_model_without_a_template_says_so(tmp_path):
    with live(scripted(tmp_path, script, template=False)) as server:
        answer = server.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 400 and "/v1/completions" in answer.json()["error"]["message"]
        assert server.post("/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize("drafter, source", [("none", set()), ("ngram", {"draft"})])
@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_names_the_source_of_each_token(server, chat, drafter, source):
    """The scripted model commits 1, 3, 2, 1, 3, … tokens, of which a draft proposed all but one."""
    ask = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    body = {**ask, "stream": True, "speculation": {"drafter": drafter}}
    body["stream_options"] = {"include_token_sources": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    lines = [line for line in server.post(path, json=body).text.splitlines() if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in choices:
        text = choice["delta"].get("content", "") if chat else choice["text"]
        assert "".join(token["text"] for token in choice["token_sources"]) == text
    tokens = [token for choice in choices for token in choice["token_sources"]]
    drafted = [token for token in tokens if token["source"] == "draft"]
    counts = chunks[-1]["metrics"]["speculative_decoding"]
    assert {token["source"] for token in tokens} == {"target"} | source
    assert len(drafted) == (counts["num_accepted_tokens"] if counts else 0)
