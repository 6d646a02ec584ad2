"""The load generator against llama.cpp's own server, and against recserve with the same weights."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from benchmarks.support.baselines.llama_cpp import write_gguf
from benchmarks.support.baselines.llama_server import find_llama_server, llama_server
from recserve.engine.engine_config import EngineConfig
from recserve.experiments.load import Arm, Call, Design, LoadOptions, Shot, drive
from recserve.experiments.session import Workload, run_session
from recserve.experiments.targets import find_target
from recserve.models.loading import load_language_model
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.live_server import live
from tests.support.paths import reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_llama_server() is None,
        reason="NO llama-server on PATH or in LLAMA_SERVER: did not run",
    ),
]

PROMPTS = ("Once upon a time", "Lily and Tom went to the park", "The big dog was sad because")
TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
RATE, SECONDS = 8.0, 3.0


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    """The reference checkpoint with its tokenizer, as llama.cpp reads it."""
    folder = reference("stories260k")
    path = tmp_path_factory.mktemp("gguf") / "stories260k.gguf"
    write_gguf(load_language_model(folder), path, folder)
    return path


@pytest.fixture(scope="module")
def plain(gguf):
    with llama_server(gguf) as url:
        yield url


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"question_id": n, "turns": [prompt]} for n, prompt in enumerate(PROMPTS)]
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    return path


def measured(prompts, arms, target="completions", stream=True, mode="blocks", **fields):
    """A short open-loop run; all requests count."""
    workload = Workload(
        target=find_target(target, stream),
        data=prompts,
        fields={**GREEDY, **fields},
        rate=RATE,
        duration_s=SECONDS,
        warmup_s=0.0,
        calibrate=False,
    )
    return asyncio.run(run_session(workload, arms, Design(mode=mode), lambda stage, state: None))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("target", ["completions", "chat"])
def test_counts_times_and_finish_reasons(plain, prompts, target, stream):
    session = measured(prompts, [Arm("llama.cpp", plain)], target, stream)
    (summary,) = session.summaries
    assert not summary.errors, session.warnings
    assert summary.num_requests == len(session.columns.exchanges) > 5
    assert set(summary.text.finish_reasons) <= {"length", "stop"}
    assert sum(summary.text.finish_reasons.values()) == summary.num_requests
    for one in session.columns.exchanges:
        reply = one.reply
        assert reply.text and reply.prompt_tokens > 1
        if reply.finish_reasons == ("length",):
            assert reply.output_tokens == TOKENS
        assert 0 < reply.output_tokens <= TOKENS
        assert 0 < reply.server_ms < one.latency_ms
        assert (reply.num_drafts, reply.num_draft_tokens) == (0, 0)
        assert bool(one.pieces) == stream
        if stream:
            assert one.sent < one.pieces[0] <= one.pieces[-1] < one.done
            assert len(one.pieces) <= reply.output_tokens
    if stream:
        assert summary.text.ttft_ms.percentiles["p50"] < summary.latency_ms.percentiles["p50"]


def test_recserve_writes_the_same_texts(plain, prompts):
    """Greedy in float32: each request goes to both servers."""
    text = load_text(TextSettings(reference("stories260k")), torch.device("cpu"))
    with live(Service.of_text(text, EngineConfig(load_aware=False))) as client:
        ours = str(client.base_url).rstrip("/")
        arms = [Arm("llama.cpp", plain), Arm("recserve", ours)]
        session = measured(prompts, arms, mode="paired")
    texts, counts = {}, {}
    for one in session.columns.exchanges:
        assert one.error is None, one.detail
        texts.setdefault(one.sample, set()).add(one.reply.text)
        said = (one.reply.prompt_tokens, one.reply.output_tokens, one.reply.finish_reasons)
        counts.setdefault(one.sample, set()).add(said)
    assert len(texts) == len(PROMPTS)
    assert all(len(found) == 1 for found in texts.values()), texts
    assert all(len(found) == 1 for found in counts.values()), counts
    assert {one.num_requests for one in session.summaries} == {len(session.columns.exchanges) // 2}


@pytest.mark.parametrize("kind", ["draft-simple", "ngram-simple"])
def test_draft_counts(gguf, prompts, kind):
    """The model drafts for itself, so that nearly all is accepted; or earlier text drafts."""
    options = ["--spec-type", kind, "--spec-ngram-simple-size-n", "3"]
    if kind == "draft-simple":
        options += ["--spec-draft-model", str(gguf), "--spec-draft-n-max", "4"]
    with llama_server(gguf, *options) as url:
        session = measured(prompts, [Arm("llama.cpp", url)], max_tokens=200)
    (summary,) = session.summaries
    assert not summary.errors, session.warnings
    replies = [one.reply for one in session.columns.exchanges if one.reply.num_draft_tokens]
    assert replies
    for reply in replies:
        assert 0 <= reply.num_accepted_tokens <= reply.num_draft_tokens
        assert reply.num_drafts + reply.num_accepted_tokens < reply.output_tokens
    found = summary.text.drafting["all"]
    assert found.num_requests == len(replies)
    if kind == "draft-simple":
        assert found.num_requests == summary.num_requests
        assert found.acceptance_rate > 0.9
        assert 2 < found.tokens_per_step <= 5


def test_errors_and_a_client_that_leaves(plain):
    chat, path = find_target("completions"), find_target("completions").path
    bodies = [
        {"prompt": "word " * 2000, "stream": True},
        {"prompt": PROMPTS[0], "stream": True, "n_predict": "many"},
    ]
    shots = [
        Shot(0.0, (Call(url=plain + path, body=msgspec.json.encode(body)),)) for body in bodies
    ]
    run = asyncio.run(drive(shots, chat, LoadOptions()))
    assert all(one.error and one.error.startswith("http_") and one.detail for one in run.exchanges)
    endless = {"prompt": PROMPTS[0], "stream": True, "max_tokens": 400, "ignore_eos": True}
    shot = Shot(0.0, (Call(url=plain + path, body=msgspec.json.encode(endless)),))
    run = asyncio.run(drive([shot] * 8, chat, LoadOptions(timeout_s=0.02)))
    assert {one.error for one in run.exchanges} == {"timeout"}
    # The slots of the clients that left are free again.
    answer = httpx.post(plain + path, json={"prompt": PROMPTS[0], **GREEDY}, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == TOKENS
