"""What a response counts is what its client got: usage, accepted drafts and paused steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.schemas.items import InvalidRequest
from recserve.schemas.text import CompletionRequest, SpeculationOptions
from recserve.service.text.completions import TextService
from recserve.service.text.loader import TextSettings, load_text
from tests.support.grids import covering, thin
from tests.support.tiny_llm import tiny_llm

DRAFTERS = ("ngram", "suffix", "lookahead", "ngram+suffix", "draft_model")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A model that repeats itself, drafted by all drafters without weights and by itself."""
    folder = tiny_llm(tmp_path_factory.mktemp("models") / "tiny")
    named = (*DRAFTERS[:-1], f"draft_model={folder}")
    loaded = load_text(TextSettings(folder, drafters=named), torch.device("cpu"))
    models = EngineModels(text=loaded.network, drafters=loaded.drafters)
    return TextService(build_engine(models, EngineConfig(load_aware=False)), loaded.model)


def write(texts, body, steps=None):
    """Returns the pending texts and their pieces, after some steps or all."""
    pieces = []
    work = texts.begin_completion(body, listener=pieces.append)
    while steps != 0 and texts.engine.step():
        steps = None if steps is None else steps - 1
    return work, pieces


def counts_of(work):
    return work.metrics().speculative_decoding


def drawn_body(random, plain_text):
    """Returns fields that end a text somewhere: in a draft, between two, or not at all."""
    start = int(random.integers(0, len(plain_text)))
    stop = plain_text[start : start + int(random.integers(1, 6))]
    ends = ({"stop": stop}, {"stop": [stop, "never"]}, {"stop_token_ids": list(stop.encode()[:1])})
    fields = ends[random.integers(3)] if random.random() < 0.8 else {}
    return fields | {
        "max_tokens": int(random.integers(1, 60)),
        "min_tokens": 0 if random.random() < 0.7 else 1,
        "n": int(random.integers(1, 4)),
        "logprobs": None if random.random() < 0.7 else 1,
    }


@pytest.mark.parametrize("drafter, advice", [("eagle", "eagle=FOLDER`"), ("eagel", "'eagel'")])
def test_a_drafter_that_the_server_did_not_load_is_refused_with_the_option_that_loads_it(
    texts, drafter, advice
):
    options = SpeculationOptions(drafter=drafter)
    with pytest.raises(InvalidRequest, match=f"expected one of ngram, .*{advice}$") as caught:
        texts.begin_completion(CompletionRequest(prompt="so", speculation=options))
    assert caught.value.param == "speculation.drafter"


@pytest.mark.parametrize("temperature,drafter", thin(covering((0.0, 0.4), DRAFTERS), 2))
def test_the_counts_are_those_of_the_text(texts, drafter, temperature):
    random, num_cut = np.random.default_rng(int(10 * temperature) + len(drafter)), 0
    usual = {"prompt": "so on and so on", "seed": 3, "temperature": temperature, "ignore_eos": True}
    plain = CompletionRequest(
        **usual, max_tokens=60, speculation=SpeculationOptions(drafter="none")
    )
    whole = write(texts, plain)[0].wait().choices[0].text
    for _ in range(8):
        plain = replace_fields(plain, drawn_body(random, whole))
        expected, _ = write(texts, plain)
        drafted = replace_fields(plain, {"speculation": SpeculationOptions(drafter=drafter)})
        work, pieces = write(texts, drafted)
        answer, wanted = work.wait(), expected.wait()
        assert [c.text for c in answer.choices] == [c.text for c in wanted.choices]
        assert answer.usage.completion_tokens == wanted.usage.completion_tokens
        assert expected.metrics().speculative_decoding is None
        counts, written = counts_of(work), answer.usage.completion_tokens
        assert counts.num_accepted_tokens == sum(counts.per_position)
        # Each drafted step but the last one of a text also gives the bonus token.
        copies = plain.n or 1
        assert counts.num_accepted_tokens + max(counts.num_drafts - copies, 0) <= written
        length = counts.num_accepted_tokens / max(counts.num_drafts, 1)
        assert counts.mean_acceptance_length == pytest.approx(1 + length)
        named = [a for piece in pieces for a in piece.token_accepted]
        # Characters that were held back are one more entry of their token.
        assert 0 <= sum(named) - counts.num_accepted_tokens <= copies
        num_cut += counts.num_accepted_tokens < sum(
            future.result().counts.num_accepted_tokens for future in work.futures
        )
    if (temperature, drafter) == (0, "draft_model"):  # its drafts are right
        assert num_cut, "no stop string was found inside a draft"


def replace_fields(body, fields):
    """Returns a request with other fields. A field that ends texts replaces the earlier ones."""
    ends = {"stop": None, "stop_token_ids": None} if "max_tokens" in fields else {}
    known = {name: getattr(body, name) for name in body.__struct_fields__}
    return CompletionRequest(**(known | ends | fields))


def test_a_text_that_is_aborted(texts):
    body = CompletionRequest(
        prompt="so on and so on",
        max_tokens=300,
        temperature=0,
        ignore_eos=True,
        speculation=SpeculationOptions(drafter="ngram"),
    )
    work, _ = write(texts, body, steps=30)
    work.cancel()
    while texts.engine.step():
        pass
    counts, written = counts_of(work), work.usage().completion_tokens
    assert 0 < counts.num_drafts <= counts.num_accepted_tokens + counts.num_drafts <= written < 300


@pytest.mark.parametrize("max_tokens", [0, 1, 40])
def test_a_request_with_a_drafter_has_metrics_while_drafts_are_paused(texts, max_tokens):
    policy = texts.engine.schedulers["text"]._proposer.policy
    record = policy.record("ngram")
    policy.records["ngram"] = replace(record, paused=True)
    body = CompletionRequest(
        prompt="so on and so on",
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        speculation=SpeculationOptions(drafter="ngram"),
    )
    try:
        counts = counts_of(write(texts, body)[0])
    finally:
        policy.records["ngram"] = record
    assert (counts.drafter, counts.num_drafts, counts.num_accepted_tokens) == ("ngram", 0, 0)
    assert (counts.mean_acceptance_length, counts.draft_acceptance_rate) == (1.0, 0.0)
    # The last token of a text is never drafted.
    assert counts.num_paused_steps == max(max_tokens - 1, 0)
