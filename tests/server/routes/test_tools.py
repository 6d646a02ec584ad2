"""Calls of tools, thoughts and formats over HTTP, with OpenAI's own client."""

from __future__ import annotations

import json
import random

import openai
import pydantic
import pytest

from recserve.client import Client
from recserve.schemas.chat_messages import ChatMessage
from recserve.schemas.constraints import FunctionName, NamedTool, Tool, ToolFunction
from recserve.schemas.text import ChatRequest
from tests.support.chat_templates import TEMPLATES, THINKS
from tests.support.live_server import live
from tests.support.scripted_text import scripted

pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zoë"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TEXTS = {
    "calls": CALLS,
    "thoughtful": f"<think>\nhm — two\n\ncalls\n</think>\n\nLook: {CALLS}",
    "answer": '<think>\nyes\n</think>\n\n{"city":"Ulm"}',
    "long thoughts": "<think>\n" + "a" * 300,
    "plain": "It rains.\n",
}


def script(prompt: str, seed: int) -> str:
    return next((text for name, text in TEXTS.items() if f"user: {name}" in prompt), prompt)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    service = scripted(folder, script, source=TEMPLATES["hermes"] + THINKS, context=4000)
    with live(service) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as made:
        yield made


def ask(text: str, **fields):
    return {"model": "toy", "messages": [{"role": "user", "content": text}], **fields}


def calls_of(message) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


BOTH = [("weather", '{"city": "Zoë"}'), ("now", "{}")]


def test_calls_and_thoughts(client):
    choice = client.chat.completions.create(**ask("calls", tools=TOOLS)).choices[0]
    assert (calls_of(choice.message), choice.message.content) == (BOTH, None)
    assert choice.finish_reason == "tool_calls"
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2 and all(one.startswith("call_") for one in ids)
    choice = client.chat.completions.create(**ask("thoughtful", tools=TOOLS)).choices[0]
    assert choice.message.reasoning_content == "hm — two\n\ncalls"
    assert (calls_of(choice.message), choice.message.content) == (BOTH, "Look:")
    answer = client.chat.completions.create(**ask("long thoughts", max_tokens=20))
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (None, "a" * 12)
    assert answer.choices[0].finish_reason == "length"
    hidden = ask("thoughtful", tools=TOOLS, extra_body={"include_reasoning": False})
    message = client.chat.completions.create(**hidden).choices[0].message
    assert not hasattr(message, "reasoning_content") and message.content == "Look:"
    cut = client.chat.completions.create(**ask("calls", tools=TOOLS, stop=["oë"])).choices[0]
    assert (calls_of(cut.message), cut.finish_reason) == ([("weather", '{"city": "Z')], "stop")
    plain = client.chat.completions.create(**ask("plain", tools=TOOLS)).choices[0]
    assert (plain.message.content, plain.finish_reason) == (TEXTS["plain"], "stop")
    assert plain.message.tool_calls is None and not hasattr(plain.message, "reasoning_content")


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_is_the_whole_answer(client, server, text):
    """The client's own accumulator, and the raw deltas: id, type and name once, then arguments."""
    body = ask(text, tools=TOOLS, max_tokens=random.Random(text).choice([150, 400]))
    whole = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        deltas = [event.chunk.choices[0].delta for event in stream if event.type == "chunk"]
        streamed = stream.current_completion_snapshot.choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or None) == (whole.message.content or None)
    assert calls_of(streamed.message) == calls_of(whole.message)
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (thoughts or None) == getattr(whole.message, "reasoning_content", None)
    begun = [call for delta in deltas for call in delta.tool_calls or [] if call.id]
    assert [call.function.name for call in begun] == [name for name, _ in calls_of(whole.message)]
    assert all(call.type == "function" for call in begun)
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])


def test_parsed_answers_and_tools(client):
    class City(pydantic.BaseModel):
        city: str

    parsed = client.chat.completions.parse(**ask("answer"), response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Ulm")
    tool = openai.pydantic_function_tool(City, name="weather")
    parsed = client.chat.completions.parse(**ask("calls"), tools=[tool])
    first = parsed.choices[0].message.tool_calls[0]
    assert first.function.parsed_arguments == City(city="Zoë")


def test_a_conversation_with_results_reaches_the_template(client, server):
    engine = server.app.state.lifecycle.service.engine
    call = client.chat.completions.create(**ask("calls", tools=TOOLS)).choices[0].message
    engine.requests.clear()
    turns = [
        {"role": "user", "content": "plain"},
        call.model_dump(exclude_none=True),
        {
            "role": "tool",
            "tool_call_id": call.tool_calls[0].id,
            "content": [{"type": "text", "text": "su"}, {"type": "text", "text": "nny"}],
        },
    ]
    client.chat.completions.create(model="toy", messages=turns, tools=TOOLS)
    tokenizer = engine.tokenizer
    prompt = tokenizer.decode(engine.requests[0].prompt.tolist())
    tools = "".join(map(json.dumps, TOOLS))
    expected = f"{tools}user: plainassistant: {CALLS}tool: sunnyassistant:"
    assert prompt.replace("\n", "") == expected.replace("\n", "")
    assert engine.requests[0].constraint is not None


def test_a_result_has_the_name_of_its_function(tmp_path):
    """Templates of Hermes refuse results without it, and OpenAI's API has none."""
    source = "{% for m in messages %}{{ m.role }} {{ m.name }}\n{% endfor %}"
    call = {"id": "c", "function": {"name": "now", "arguments": ""}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c"},
        {"role": "tool", "content": "x", "tool_call_id": "other"},
    ]
    with live(scripted(tmp_path, script, source=source)) as server:
        answer = server.post("/tokenize", json={"messages": turns}).json()
        prompt = server.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert [line.strip() for line in prompt.splitlines()] == [
        "user",
        "assistant",
        "tool now",
        "tool",
    ]


def test_thoughts_that_the_prompt_ends_are_none(client, server):
    answer = server.post(
        "/v1/chat/completions",
        json={
            "messages": [
                {"role": "user", "content": "plain"},
                {"role": "assistant", "content": "<think>so"},
            ],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ).json()
    message = answer["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "It rains.",
    }


def test_refusals_have_the_status_of_texts(server):
    for fields, param in (
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "q"}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json.uniqueItems"),
    ):
        answer = server.post("/v1/chat/completions", json=ask("plain", **fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_typed_client_streams_calls(server):
    body = ChatRequest(
        messages=[ChatMessage(role="user", content="calls")],
        tools=[
            Tool(function=ToolFunction(name="now")),
            Tool(function=ToolFunction(name="weather")),
        ],
        tool_choice=NamedTool(function=FunctionName(name="now")),
    )
    with Client(str(server.base_url)) as client:
        deltas = [c.choices[0].delta for c in client.stream_chat(body) if c.choices]
        message = client.chat(body).choices[0].message
    parts = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.id] == ["weather", "now"]
    assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
