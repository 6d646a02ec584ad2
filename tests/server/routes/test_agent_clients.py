"""Clients of other makers: contexts that are too small, calls of tools, and answers of a schema.

They run in an environment of their own, because they have other dependencies. `AGENT_CLIENTS`
names one that has them. Without it the tests make one, and skip loudly if that fails; where CI is
set they fail instead.
"""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from tests.support.chat_templates import TEMPLATES, THINKS
from tests.support.live_server import live
from tests.support.scripted_text import scripted

pytestmark = pytest.mark.slow  # hundreds of megabytes are installed

PACKAGES = (
    "litellm==1.110.2",
    "langchain-openai==1.7.4",
    "instructor==1.17.0",
    "pydantic-ai-slim[openai]==2.38.0",
)
FULL = {
    "litellm": """
import sys
import litellm

url, long = sys.argv[1], [{"role": "user", "content": "hello " * 300}]
for provider in ("openai", "hosted_vllm"):
    model = {"model": f"{provider}/toy", "api_base": url, "api_key": "-"}
    short = litellm.completion(
        messages=[{"role": "user", "content": "hi"}], max_tokens=3, **model
    )
    assert short.choices[0].message.content == "yes", short
    try:
        litellm.completion(messages=long, **model)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError(f"{provider}: no error")
large = {**model, "mock_response": "from the large one"}
router = litellm.Router(
    model_list=[
        {"model_name": "small", "litellm_params": model},
        {"model_name": "large", "litellm_params": large},
    ],
    context_window_fallbacks=[{"small": ["large"]}],
    num_retries=0,
)
answer = router.completion("small", long)
assert answer.choices[0].message.content == "from the large one", answer
""",
    "langchain": """
import sys
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import FakeListChatModel
from langchain_openai import ChatOpenAI

small = ChatOpenAI(model="toy", base_url=sys.argv[1], api_key="-", max_retries=0)
assert small.invoke("hi", max_tokens=3).content == "yes"
try:
    small.invoke("hello " * 300)
except ContextOverflowError:
    pass
else:
    raise AssertionError("no error")
large = FakeListChatModel(responses=["from the large one"])
chain = small.with_fallbacks([large], exceptions_to_handle=(ContextOverflowError,))
assert chain.invoke("hello " * 300).content == "from the large one"
""",
}
TOOLS = {
    "openai": """
import sys
import openai
import pydantic

class weather(pydantic.BaseModel):
    city: str

client = openai.OpenAI(base_url=sys.argv[1], api_key="-", max_retries=0)
ask = lambda text: [{"role": "user", "content": text}]
tools = [openai.pydantic_function_tool(weather)]
answer = client.chat.completions.parse(model="toy", messages=ask("call"), tools=tools)
(call,) = answer.choices[0].message.tool_calls
assert call.function.parsed_arguments == weather(city="Ulm"), answer
answer = client.chat.completions.parse(model="toy", messages=ask("json"), response_format=weather)
assert answer.choices[0].message.parsed == weather(city="Ulm"), answer
with client.chat.completions.stream(model="toy", messages=ask("call"), tools=tools) as stream:
    names = [event.type for event in stream]
    final = stream.get_final_completion()
assert "tool_calls.function.arguments.done" in names, names
assert final.choices[0].message.tool_calls[0].function.parsed_arguments == weather(city="Ulm")
""",
    "langchain": """
import sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

@tool
def weather(city: str) -> str:
    '''Tells the weather.'''
    return "sunny in " + city

class City(BaseModel):
    city: str

model = ChatOpenAI(model="toy", base_url=sys.argv[1], api_key="-", max_retries=0)
agent = model.bind_tools([weather])
turns = [HumanMessage("call")]
answer = agent.invoke(turns)
(call,) = answer.tool_calls
assert (call["name"], call["args"]) == ("weather", {"city": "Ulm"}), answer
turns += [answer, weather.invoke(call)]
assert isinstance(turns[-1], ToolMessage)
assert agent.invoke(turns).content == "It is sunny.", agent.invoke(turns)
whole = None
for chunk in agent.stream([HumanMessage("call")]):
    whole = chunk if whole is None else whole + chunk
assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("weather", {"city": "Ulm"})]
for method in ("json_schema", "function_calling"):
    text = "json" if method == "json_schema" else "city"
    assert model.with_structured_output(City, method=method).invoke(text) == City(city="Ulm")
""",
    "instructor": """
import sys
import instructor
import openai
import pydantic

class City(pydantic.BaseModel):
    city: str

for mode, text in (
    (instructor.Mode.TOOLS, "city"), (instructor.Mode.JSON, "json"),
    (instructor.Mode.JSON_SCHEMA, "json"),
):
    client = instructor.from_openai(
        openai.OpenAI(base_url=sys.argv[1], api_key="-", max_retries=0), mode=mode
    )
    found = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": text}], response_model=City,
        max_retries=0,
    )
    assert found.city == "Ulm", (mode, found)
""",
    "litellm": """
import sys
import json
import litellm
import pydantic

class City(pydantic.BaseModel):
    city: str

function = {"name": "weather", "parameters": City.model_json_schema()}
tools = [{"type": "function", "function": function}]
for provider in ("openai", "hosted_vllm"):
    model = {"model": f"{provider}/toy", "api_base": sys.argv[1], "api_key": "-"}
    ask = lambda text: {"messages": [{"role": "user", "content": text}], **model}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        found = litellm.completion(**ask("call"), tools=tools, tool_choice=choice).choices[0]
        (call,) = found.message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments)["city"]
        assert found.finish_reason == "tool_calls", found
    chunks = list(litellm.completion(**ask("call"), tools=tools, stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message
    assert built.tool_calls[0].function.arguments == '{"city": "Ulm"}', built
    found = litellm.completion(**ask("json"), response_format=City).choices[0].message
    assert json.loads(found.content) == {"city": "Ulm"}, found
    assert found.reasoning_content == "hm", found
""",
    "pydantic-ai": """
import sys
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

class City(BaseModel):
    city: str

provider = OpenAIProvider(base_url=sys.argv[1], api_key="-")
model = OpenAIChatModel("toy", provider=provider)
agent = Agent(model)

@agent.tool_plain
def weather(city: str) -> str:
    "Tells the weather."
    return "sunny in " + city

assert agent.run_sync("call").output == "It is sunny."
native = Agent(model, output_type=NativeOutput(City))
assert native.run_sync("json").output == City(city="Ulm")
called = Agent(model, output_type=City)
assert called.run_sync("final").output == City(city="Ulm")
""",
}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def script(prompt: str, seed: int) -> str:
    """What a model would write that follows the constraints of these clients."""
    asked = prompt.rpartition("user: ")[2]
    if "sunny in Ulm" in asked:
        return "It is sunny."
    if asked.startswith("call"):
        return call("weather", '{"city": "Ulm"}')
    if asked.startswith("city"):
        return call("City", '{"city": "Ulm"}')
    if asked.startswith("final"):
        return call("final_result", '{"city": "Ulm"}')
    return '<think>\nhm\n</think>\n\n{"city":"Ulm"}'


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment with the clients."""
    given = os.environ.get("AGENT_CLIENTS")
    if given:
        return Path(given) / "bin" / "python"
    folder = tmp_path_factory.mktemp("clients") / "env"
    venv.create(folder, with_pip=True)
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        reason = f"the clients cannot be installed: {installed.stderr[-200:]}"
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)
    return folder / "bin" / "python"


def run(python: Path, text: str, url: str) -> None:
    ended = subprocess.run([python, "-c", text, url], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("client", FULL)
def test_a_full_context_is_recognised(tmp_path, python, client):
    with live(scripted(tmp_path, lambda prompt, seed: "yes")) as server:
        run(python, FULL[client], f"{server.base_url}/v1")


@pytest.mark.parametrize("client", TOOLS)
def test_calls_and_schemas_make_the_round_trip(tmp_path, python, client):
    pytest.importorskip("llguidance")
    template = TEMPLATES["hermes"] + THINKS
    with live(scripted(tmp_path, script, source=template, context=9000)) as server:
        run(python, TOOLS[client], f"{server.base_url}/v1")
