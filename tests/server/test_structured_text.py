"""Calls and schemas over HTTP, with a model and an engine: valid, and alike with any drafter."""

from __future__ import annotations

import json

import pytest
import torch

from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.chat_templates import TEMPLATES, THINKS
from tests.support.live_server import live
from tests.support.tiny_llm import tiny_llm

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

ANSWER = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Bonn", "Ulm"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
    "required": ["place"],
    "additionalProperties": False,
}
ANSWER["properties"]["days"]["maxItems"] = 2  # type: ignore[index]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": ANSWER}},
    {"type": "function", "function": {"name": "now"}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
VALID = jsonschema_rs.validator_for(ANSWER)


@pytest.fixture(scope="module", params=TEMPLATES)
def server(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("model")
    template = folder / "chat.jinja"
    template.write_text(TEMPLATES[request.param] + THINKS)
    settings = TextSettings(tiny_llm(folder / "toy"), chat_template=template)
    with live(Service.of_text(load_text(settings, torch.device("cpu")))) as running:
        yield running


def ask(server, drafter: str, **fields) -> list[dict]:
    body = {
        **{"messages": [{"role": "user", "content": "hi"}], "n": 4, "max_tokens": 150, "seed": 3},
        **{"speculation": {"drafter": drafter}, **fields},
    }
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()["choices"]
    choices = [{"message": {"content": ""}} for _ in range(4)]
    *lines, done = [line for line in answer.text.splitlines() if line]
    assert done == "data: [DONE]"
    for line in lines:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            whole, delta = choices[choice["index"]], choice["delta"]
            message = whole["message"]
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            whole["finish_reason"] = choice["finish_reason"]
    return choices


def plain(choices: list[dict]) -> list[tuple]:
    """Returns what two answers share: no ids."""
    found = []
    for choice in choices:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        content, thoughts = message["content"] or "", message.get("reasoning_content", "")
        found.append((content, thoughts, calls, choice["finish_reason"]))
    return found


@pytest.mark.parametrize("temperature", [0, 1])
def test_calls_fit_their_schemas_with_any_drafter(server, temperature):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    fields["temperature"] = temperature
    wanted = plain(ask(server, "none", **fields))
    for content, thoughts, calls, reason in wanted:
        assert not content and (calls or thoughts)
        assert len(calls) == (reason == "tool_calls")
        for call in calls:
            arguments = json.loads(call["arguments"])
            assert VALID.is_valid(arguments) if call["name"] == "weather" else arguments == {}
    for drafter in ("ngram", "suffix"):
        assert plain(ask(server, drafter, **fields)) == wanted
    assert plain(ask(server, "ngram", **fields, stream=True)) == wanted


def test_answers_fit_their_schema(server):
    wanted = plain(ask(server, "none", response_format=FORMAT))
    assert any(content for content, *_ in wanted)
    for content, thoughts, calls, reason in wanted:
        assert not calls and (reason == "length" or VALID.is_valid(json.loads(content)))
        assert content or thoughts
    for stream in (False, True):
        assert plain(ask(server, "suffix", response_format=FORMAT, stream=stream)) == wanted
