"""A text ends at the end tokens of all files of a model's folder."""

import json

import numpy as np
import pytest
import torch

from recserve.models.loading import UnsupportedModel
from recserve.schemas.text import CompletionRequest, SpeculationOptions
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from recserve.tokenizer.token_bytes import UnsupportedTokenizer
from tests.support.grids import covering
from tests.support.scripted_text import BEGIN, END
from tests.support.tiny_llm import tiny_llm

CPU = torch.device("cpu")
FIRST = ord("!")  # token 0 of the tokeniser of bytes; the next characters follow
NAMES = {BEGIN: "<s>", END: "</s>", **{ord(c) - FIRST: c for c in "ABC"}}
NUMBER_FILES = ("config.json", "generation_config.json")
WORD_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@pytest.fixture
def folder(tmp_path):
    return tiny_llm(tmp_path / "tiny")


def change(folder, file, **fields):
    """Changes fields of a JSON file of the folder; None removes one."""
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    merged = {name: value for name, value in (known | fields).items() if value is not None}
    path.write_text(json.dumps(merged))


def loaded(folder, *drafters):
    return load_text(TextSettings(folder, drafters=drafters), CPU)


def draw_ends(folder, random):
    """Names end tokens in some of the files, in any form; returns all of them."""
    ends = set()
    for file in NUMBER_FILES:
        own = [int(t) for t in random.choice(list(NAMES), random.integers(0, 3), replace=False)]
        ends.update(own)
        value = own[0] if len(own) == 1 and random.random() < 0.5 else own
        change(folder, file, eos_token_id=value or None)
    for file in WORD_FILES:
        token = int(random.choice(list(NAMES)))
        word = NAMES[token]
        forms = [None, word, {"content": word}, {"content": word, "__type": "AddedToken"}]
        form = forms[random.integers(len(forms))]
        change(folder, file, eos_token=form)
        ends.update([] if form is None else [token])
    return ends


@pytest.mark.parametrize("seed", range(5))
def test_all_files_name_end_tokens(folder, seed):
    ends = draw_ends(folder, np.random.default_rng(seed))
    text = loaded(folder)
    assert set(text.model.end_tokens) == ends
    assert len(text.model.end_tokens) == len(ends)
    assert text.network.config.eos_tokens == text.model.end_tokens  # what drafters see


@pytest.mark.parametrize("file,drafter", covering([*NUMBER_FILES, *WORD_FILES], ("none", "ngram")))
def test_a_text_ends_at_the_token_of_each_file(folder, file, drafter):
    with Service.of_text(loaded(folder)) as service:
        body = CompletionRequest(prompt="so on", max_tokens=60, temperature=1, seed=1)
        plain = service.text.begin_completion(body).wait().choices[0].text
    word = next(c for place, c in enumerate(plain) if place > 3 and "!" < c <= "~")
    named = {"eos_token_id": ord(word) - FIRST} if file in NUMBER_FILES else {"eos_token": word}
    change(folder, file, **named)
    drafting = SpeculationOptions(drafter=drafter)
    fields = {"prompt": "so on", "max_tokens": 60, "temperature": 1, "seed": 1}
    with Service.of_text(loaded(folder)) as service:
        body = CompletionRequest(**fields, speculation=drafting)
        answer = service.text.begin_completion(body).wait()
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].text == plain[: plain.index(word)]
        body = CompletionRequest(**fields, speculation=drafting, ignore_eos=True)
        assert service.text.begin_completion(body).wait().usage.completion_tokens == 60


@pytest.mark.parametrize("file", NUMBER_FILES)
@pytest.mark.parametrize("value", [-1, 258, 2**40, True, 1.5, "</s>", [1, None], [[1]], {"id": 1}])
def test_a_bad_end_number_is_refused(folder, file, value):
    change(folder, file, eos_token_id=value)
    with pytest.raises(UnsupportedModel, match=f"{file}: eos_token_id has .*from 0 to 257"):
        loaded(folder)


@pytest.mark.parametrize("file", WORD_FILES)
@pytest.mark.parametrize(
    "value, words",
    [
        ("<|im_end|>", "eos_token is '<|im_end|>'; tokenizer.json has no such token"),
        ({"content": "<x>"}, "eos_token is '<x>'; tokenizer.json has no such token"),
        ({}, "eos_token is {}; expected a token's text"),
        ({"content": 7}, "expected a token's text"),
        (7, "eos_token is 7; expected a token's text"),
    ],
)
def test_a_bad_end_word_is_refused(folder, file, value, words):
    change(folder, file, eos_token=value)
    with pytest.raises(UnsupportedTokenizer) as caught:
        loaded(folder)
    assert str(caught.value).startswith(f"{file}: ") and words in str(caught.value)


@pytest.mark.parametrize("file", WORD_FILES)
@pytest.mark.parametrize("content", ["[]", "null", "{", "7"])
def test_a_file_that_holds_no_object_is_refused(folder, file, content):
    (folder / file).write_text(content)
    with pytest.raises(UnsupportedTokenizer, match=file):
        loaded(folder)
