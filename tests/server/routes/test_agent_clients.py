"""litellm and LangChain recognise a context that is too small, and fall back.

Both run in an environment of their own, because they have other dependencies.
"""

from __future__ import annotations

import subprocess
import venv

import pytest

from tests.support.live_server import live
from tests.support.scripted_text import scripted

PACKAGES = ("litellm==1.110.2", "langchain-openai==1.7.4")
LITELLM = """
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
"""
LANGCHAIN = """
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
"""


@pytest.mark.slow
def test_a_full_context_is_recognised(tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", *PACKAGES]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the clients cannot be installed: {installed.stderr[-200:]}")
    with live(scripted(tmp_path, lambda prompt, seed: "yes")) as server:
        for script in (LITELLM, LANGCHAIN):
            command = [python, "-c", script, f"{server.base_url}/v1"]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert ended.returncode == 0, ended.stdout + ended.stderr
