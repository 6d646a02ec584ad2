"""Every body of a text route is refused before a text begins, or all of its texts end."""

import msgspec
import numpy as np
import pytest
import torch

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.schemas.items import InvalidRequest
from recserve.schemas.text import ChatRequest, CompletionRequest
from recserve.service.text.completions import TextService
from recserve.service.text.loader import TextSettings, load_text
from recserve.speculation.verifiers.registry import verifiers
from tests.support.grids import covering, thin
from tests.support.scripted_text import VOCABULARY
from tests.support.tiny_llm import tiny_llm

DRAFTERS = ("none", "ngram", "suffix", "lookahead", "draft_model", "ngram+draft_model")
CONTEXT = 4096


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tiny_llm(tmp_path_factory.mktemp("models") / "tiny")
    named = ("ngram", "suffix", f"draft_model={folder}", f"ngram+draft_model={folder}")
    loaded = load_text(TextSettings(folder, drafters=named), torch.device("cpu"))
    models = EngineModels(text=loaded.network, drafters=loaded.drafters)
    return TextService(build_engine(models, EngineConfig(load_aware=False)), loaded.model)


def drawn_body(random, chat: bool, drafter: str, rule: str):
    """Returns the fields of a body: most are usual, some are extreme, few are wrong."""

    def one_of(usual, *others, share=0.2):
        return others[random.integers(len(others))] if random.random() < share else usual

    def token():
        return int(random.integers(0, VOCABULARY + one_of(0, 3, share=0.02)))

    text = "so on and so on é😀 </s>"[: random.integers(1, 24)]
    ids = [token() for _ in range(random.integers(1, 9))]
    body = {
        "max_tokens": one_of(9, 1, 2, 30, CONTEXT, 0),
        "min_tokens": one_of(0, 1, 5, 40, share=0.1),
        "n": one_of(1, 2, 3),
        "temperature": 0 if rule == "greedy" else one_of(1, 0, 0.0, 1e-300, 1e-5, 2, share=0.5),
        "top_p": one_of(1, 0, 1e-9, 0.5),
        "top_k": one_of(0, -1, 1, 7, 2**31),
        "min_p": one_of(0, 1, 0.3),
        "repetition_penalty": one_of(1, 0.01, 100, 1.1),
        "presence_penalty": one_of(0, -2, 2),
        "frequency_penalty": one_of(0, -2, 2),
        "logit_bias": one_of({}, {str(token()): 100}, {str(token()): -100 for _ in range(9)}),
        "bad_words": one_of([], ["o", " ", "é"], ["so on"], [chr(n) for n in range(32, 96)]),
        "seed": one_of(1, -(2**63), 2**63 - 1, 0),
        "stop": one_of(None, " ", ["o", "x" * 256], "\ufffd"),
        "stop_token_ids": one_of([], [token()], [token() for _ in range(64)]),
        "ignore_eos": one_of(True, False),
        "speculation": {
            "drafter": drafter,
            "verifier": rule,
            "num_tokens": one_of(None, 1, 7, 256),
            "tree": one_of(None, [[0], [0, 0]], share=0.04),
        },
    }
    if chat:
        body["messages"] = [{"role": "user", "content": text}]
        body["max_tokens"] = one_of(9, 1, 30)
        if one_of(False, True):
            body |= {"logprobs": True, "top_logprobs": one_of(0, 5, 20)}
    else:
        body["prompt"] = one_of(text, ids, [ids, ids[:1]], [text, text], ids * 600, share=0.5)
        body["echo"], body["logprobs"] = one_of(False, True), one_of(None, 0, 20)
        body["prompt_logprobs"] = one_of(None, 0, 20)
    return body


@pytest.mark.parametrize("chat,drafter", thin(covering((False, True), DRAFTERS), 2))
def test_a_body_is_refused_at_once_or_answered(texts, drafter, chat):
    random, refused, pending = np.random.default_rng(len(drafter) + 100 * chat), 0, []
    for rule in [*verifiers()] * 3:
        fields = drawn_body(random, chat, drafter, rule)
        begin = texts.begin_chat if chat else texts.begin_completion
        try:
            body = msgspec.convert(fields, ChatRequest if chat else CompletionRequest)
            pending.append((fields, begin(body)))
        except (InvalidRequest, msgspec.ValidationError):
            refused += 1
        while texts.engine.step():
            pass
    for fields, work in pending:
        for future in work.futures:
            assert future.exception(0) is None, fields
        assert len(work.wait().choices) == len(work.streams)
    assert refused and len(pending) > 6
