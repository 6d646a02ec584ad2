"""Bodies as third-party clients send them, field by field, are taken.

guidellm 0.8.1, lm-eval 0.4.13, litellm 1.106, langchain-openai 1.7 and aiperf 0.13 against a
running server.
"""

import json

import pytest
import torch

from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.paths import reference

STREAM = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
AGENT = [
    {"content": "hi", "role": "user"},
    {"content": None, "role": "assistant", "tool_calls": [CALL]},
    {"content": "7", "role": "tool", "tool_call_id": "c1"},
]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETIONS = {
    "aiperf": {"prompt": "Once upon", **WITH_USAGE, "max_tokens": 4},
    "guidellm": {"prompt": "Once", **STREAM, "max_tokens": 4, "stop": None, "ignore_eos": True},
    "lm-eval, scores": {
        **{"prompt": [[1, 5, 9, 30], [1, 7, 8]], "temperature": 0, "max_tokens": 1},
        **{"logprobs": 1, "seed": 1234, "echo": True},
    },
    "lm-eval, text": {
        **{"prompt": [[1, 5, 9]], "max_tokens": 4, "temperature": 0, "seed": 1234},
        "stop": [".", "</s>"],
    },
    "langchain": {
        **{"prompt": ["Once"], "temperature": 0.7, "max_tokens": 4, "top_p": 1, "n": 2},
        **{"frequency_penalty": 0, "presence_penalty": 0, "best_of": 2, "logit_bias": {}},
    },
}
CHATS = {
    "aiperf": {
        **{"messages": [{"role": "user", "content": "Once upon"}], **WITH_USAGE},
        "max_completion_tokens": 4,
    },
    "guidellm": {
        **{"messages": [{"role": "user", "content": [{"type": "text", "text": "Once"}]}], **STREAM},
        **{"max_completion_tokens": 4, "stop": None, "ignore_eos": True},
    },
    "lm-eval": {
        **{"messages": [{"role": "user", "content": "Once"}], "max_tokens": 4, "temperature": 0},
        **{"stop": ["."], "seed": 1234},
    },
    "langchain, agent": {"messages": AGENT, "max_completion_tokens": 4, "stream": False},
    "litellm, agent": {
        "messages": [*AGENT[:2], {**AGENT[2], "name": "f"}],
        "max_tokens": 4,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    settings = TextSettings(reference("stories260k"), chat_template=template)
    with live(Service.of_text(load_text(settings, torch.device("cpu")))) as running:
        yield running


@pytest.mark.parametrize("client", CHATS)
def test_a_chat(server, client):
    said = server.post("/v1/chat/completions", json={"model": "stories260k", **CHATS[client]})
    assert said.status_code == 200, said.text
    check(said, CHATS[client])


@pytest.mark.parametrize("client", COMPLETIONS)
def test_a_completion(server, client):
    said = server.post("/v1/completions", json={"model": "stories260k", **COMPLETIONS[client]})
    assert said.status_code == 200, said.text
    check(said, COMPLETIONS[client])


def check(said, body):
    """A stream has as many tokens as were wanted, and counts them where the body asks for it."""
    if not body.get("stream"):
        assert len(said.json()["choices"]) == body.get("n", 1) * prompts(body)
        return
    *chunks, end = [line for line in said.text.splitlines() if line]
    assert end == "data: [DONE]"
    counts = [json.loads(line.removeprefix("data: "))["usage"] for line in chunks]
    assert counts[-1]["completion_tokens"] == 4
    everywhere = body["stream_options"].get("continuous_usage_stats", False)
    assert all((count is not None) == everywhere for count in counts[:-1])
    assert all(count["completion_tokens"] <= 4 for count in counts if count)


def prompts(body):
    given = body.get("prompt", "")
    return len(given) if isinstance(given, list) else 1
