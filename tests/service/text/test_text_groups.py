"""Later texts of a large body are later groups, so that they give way to other bodies."""

from concurrent.futures import Future

import pytest
import torch

from recserve.drafters.none import NoDrafter
from recserve.schemas.text import CompletionRequest
from recserve.service.text.completions import TextService
from recserve.service.text.model import TextModel
from recserve.speculation.completion import GROUP_COST, OUTPUT_COST, TextQuery
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.scripted_text import VOCABULARY, byte_tokenizer


class Recorder:
    """An engine that records its requests."""

    def __init__(self) -> None:
        self.requests: list[TextQuery] = []

    def submit_all(self, requests, client):
        self.requests += requests
        return [Future() for _ in requests]


@pytest.fixture
def texts(tmp_path):
    tokenizer = TextTokenizer.open(byte_tokenizer(tmp_path))
    none, cpu = {"none": NoDrafter()}, torch.device("cpu")
    return TextService(Recorder(), TextModel("toy", tokenizer, VOCABULARY, (), 4096, 1, cpu, none))


def groups(texts: TextService, prompt: list[list[int]], max_tokens: int, n: int = 1) -> list[int]:
    """Returns the groups of a body's texts."""
    texts.begin_completion(CompletionRequest(prompt=prompt, max_tokens=max_tokens, n=n))
    return [request.group for request in texts.engine.requests]


def test_one_text_is_of_the_first_group(texts):
    assert groups(texts, [[5] * 2000], 2000) == [0]


def test_prompts_and_output_count(texts):
    cost = 100 + OUTPUT_COST * 20
    expected = [number * cost // GROUP_COST for number in range(64)]
    assert groups(texts, [[5] * 100] * 64, 20) == expected and expected[-1] > 9


def test_copies_of_a_text_compute_its_prompt_once(texts):
    cost = OUTPUT_COST * 50
    expected = [0, *[(900 + number * cost) // GROUP_COST for number in range(1, 16)]]
    assert groups(texts, [[5] * 900], 50, n=16) == expected
