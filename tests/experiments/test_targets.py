"""Bodies, and answers of recserve, vLLM and SGLang as documented, of llama.cpp as recorded.

llama.cpp's are from llama-server 0.5.0-dev of llama-cpp-python 0.3.36, without `id` and
`system_fingerprint`. stories260k drafts for itself: `llama-server --model stories.gguf --spec-type
draft-simple --spec-draft-model stories.gguf --spec-draft-n-max 4`. The log of the server says 7 of
7 drafted tokens and a mean length of 4.50 for the completion, which is two steps.
"""

from pathlib import Path

import msgspec
import pytest

from recserve.load.datasets import Sample
from recserve.load.targets import (
    MalformedReply,
    StreamJoiner,
    find_target,
    merge_fields,
)

FIXTURES = Path(__file__).parent / "fixtures"
LILY = ", there was a little girl named Lily"
# (fixture, target, text, output tokens, steps, drafted, accepted, pieces of text)
STREAMS = [
    ("vllm_chat_stream.txt", "chat", "Hello, world. Über!", 8, 3, 9, 5, 3),
    ("sglang_chat_stream.txt", "chat", "Let me thinkFour", 6, 2, 8, 4, 2),
    ("llamacpp_completion_stream.txt", "completions", LILY, 10, 2, 7, 7, 10),
    ("llamacpp_chat_stream.txt", "chat", '"Here," Ann', 10, 2, 7, 7, 10),
]


def joined(name, step=10_000):
    """The stream fed in steps of so many bytes, the clock counting steps."""
    data = (FIXTURES / name).read_bytes()
    joiner = StreamJoiner()
    for number, start in enumerate(range(0, len(data), step)):
        joiner.feed(data[start : start + step], float(number))
    return joiner


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("name", "target", "text", "tokens", "steps", "drafted", "accepted", "pieces"), STREAMS
)
def test_streams_of_three_servers_are_read(
    name, target, text, tokens, steps, drafted, accepted, pieces, step
):
    joiner = joined(name, step)
    reply = find_target(target).read(joiner.answer())
    assert joiner.done
    assert len(joiner.piece_times) == pieces
    assert reply.text == text
    assert reply.output_tokens == tokens
    found = (reply.num_drafts, reply.num_draft_tokens, reply.num_accepted_tokens)
    assert found == (steps, drafted, accepted)


@pytest.mark.parametrize(
    ("name", "reason", "server_ms"),
    [
        ("llamacpp_completion_stream.txt", "length", 2.181 + 4.398),
        ("llamacpp_chat_stream.txt", "length", 20.044 + 7.112),
        ("vllm_chat_stream.txt", "stop", None),
    ],
)
def test_the_end_of_a_stream_says_why_it_ended_and_how_long_it_took(name, reason, server_ms):
    reply = find_target("completions").read(joined(name).answer())
    assert reply.finish_reasons == (reason,)
    assert reply.server_ms == (None if server_ms is None else pytest.approx(server_ms))


def test_a_role_without_text_is_not_the_first_token():
    joiner = StreamJoiner()
    events = (FIXTURES / "vllm_chat_stream.txt").read_bytes().split(b"\n\n")
    for number, event in enumerate(events):
        joiner.feed(event + b"\n\n", float(number))
    assert joiner.piece_times[0] == 1.0


def test_recserves_own_counts_are_read():
    answer = msgspec.json.decode((FIXTURES / "recserve_completion.json").read_bytes())
    reply = find_target("completions", stream=False).read(answer)
    assert (reply.num_drafts, reply.num_draft_tokens, reply.num_accepted_tokens) == (2, 4, 1)
    assert reply.text == ", there was"


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"error": {"message": "out of pages"}}\n\n',
        b"data: not json\n\n",
        b"data: [1, 2]\n\n",
    ],
)
def test_a_broken_stream_is_an_error(data):
    with pytest.raises(MalformedReply):
        StreamJoiner().feed(data, 0.0)


@pytest.mark.parametrize("answer", [{}, {"items": None}, {"items": [{"id": 1}]}])
def test_an_answer_without_a_slate_is_an_error(answer):
    with pytest.raises(MalformedReply):
        find_target("recommend").read(answer)


def test_an_answer_without_choices_is_an_error():
    with pytest.raises(MalformedReply):
        find_target("chat").read({"object": "error"})


def test_bodies_hold_the_sample_and_the_fields():
    users = Sample(unit="u1", history=("a", "b"), candidates=("c",))
    body = msgspec.json.decode(find_target("rank").body(users, {"scorer": "ranker"}))
    assert body == {
        "user": {"id": "u1"},
        "history": ["a", "b"],
        "candidates": [{"item_id": "c"}],
        "scorer": "ranker",
    }
    prompt = Sample(unit="7", turns=("Hi", "Again"))
    chat = msgspec.json.decode(find_target("chat").body(prompt, {"max_tokens": 5}))
    assert chat == {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
    }
    plain = msgspec.json.decode(find_target("completions", stream=False).body(prompt, {}))
    assert plain == {"prompt": "Hi"}


def test_dotted_fields_nest_and_objects_merge():
    body = {"speculation": {"num_tokens": 5}, "k": 10}
    fields = {"speculation.drafter": "ngram", "exclude": {"seen": False}}
    assert merge_fields(body, fields) == {
        "speculation": {"num_tokens": 5, "drafter": "ngram"},
        "exclude": {"seen": False},
        "k": 10,
    }
    assert body == {"speculation": {"num_tokens": 5}, "k": 10}


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="expected one of recommend"):
        find_target("embeddings")
