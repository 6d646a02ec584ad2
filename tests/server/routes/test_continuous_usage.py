"""`stream_options.continuous_usage_stats`: every chunk of a stream counts the tokens so far."""

import json

import pytest

from tests.support.live_server import live
from tests.support.scripted_text import scripted

# The scripted engine writes steps of 1, 3, 2, 1, 3, ... tokens of one byte each.
TEXT = "abcdeé"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
CHAT_PROMPT_TOKENS = 1 + len("user: hi\nassistant:")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    served = scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: TEXT)
    with live(served) as running:
        yield running


def chunks_of(server, path, body):
    answer = server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def usage(prompt, completion):
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def counts_of(chunks):
    return [
        {name: chunk["usage"][name] for name in usage(0, 0)} if chunk["usage"] else None
        for chunk in chunks
    ]


def test_every_chunk_of_a_completion_counts_the_tokens_so_far(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "toy", "prompt": "xyz", "max_tokens": 16}
    chunks = chunks_of(
        server, "/v1/completions", {**body, "stream": True, "stream_options": options}
    )
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:4]]
    assert texts == ["a", "bcd", "e", "é"]
    assert counts_of(chunks) == [usage(3, n) for n in (1, 4, 6, 7, 7)]
    assert chunks[-1]["choices"] == []


def test_every_chunk_of_a_chat_counts_the_tokens_so_far(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    chunks = chunks_of(server, "/v1/chat/completions", body)
    assert counts_of(chunks) == [usage(CHAT_PROMPT_TOKENS, n) for n in (1, 4, 6, 7, 7)]


def test_a_chunk_counts_the_text_that_it_belongs_to(server):
    """As in vLLM: its own prompt and its own tokens; the last chunk counts all of them."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "toy", "prompt": ["x", "yyyy"], "n": 2, "max_tokens": 4}
    *chunks, total = chunks_of(
        server, "/v1/completions", {**body, "stream": True, "stream_options": options}
    )
    for index, prompt_tokens in enumerate((1, 1, 4, 4)):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert counts_of(own) == [usage(prompt_tokens, n) for n in (1, 4)]
    assert counts_of([total]) == [usage(5, 16)]


@pytest.mark.parametrize("options", [{}, {"continuous_usage_stats": False}])
def test_chunks_without_the_option_are_as_before(server, options):
    body = {"model": "toy", "prompt": "x", "stream": True, "stream_options": options}
    assert all("usage" not in chunk for chunk in chunks_of(server, "/v1/completions", body))
    body["stream_options"] = {**options, "include_usage": True}
    *chunks, total = chunks_of(server, "/v1/completions", body)
    assert counts_of(chunks) == [None] * len(chunks) and counts_of([total]) == [usage(1, 7)]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": "xyz", "max_tokens": 16}),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "max_completion_tokens": 16}),
    ],
)
def test_the_requests_of_guidellm_are_answered(server, path, body):
    """Bodies of guidellm 0.8.1, and its check of the server before them."""
    assert server.get("/health").status_code == 200
    sent = {
        "model": "toy",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "stop": None,
        "ignore_eos": True,
        **body,
    }
    *chunks, total = chunks_of(server, path, sent)
    assert counts_of([total])[0]["completion_tokens"] == 7
    assert [c["completion_tokens"] for c in counts_of(chunks)] == [1, 4, 6, 7]
