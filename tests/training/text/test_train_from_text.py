"""`recserve train lm` and `train medusa`: what drafts for a model shares its tokens."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from recserve.cli.app import app
from recserve.cli.train import train_language_model_from, train_text_drafter
from recserve.models.loading import load_language_model
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text import language_model
from recserve.training.text.language_model import BOOKS, END, LanguageRecipe, train_language_model

TINY = LanguageRecipe(
    vocab_size=280,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    max_positions=256,
    batch=8,
    window=32,
    steps=5,
    schedule=Schedule(1, 1e-2),
)
RHYME = "the cat sat on the mat and the dog ran to the log, then the cat ran after the dog.\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text(RHYME * 1500)
    return path


@pytest.mark.slow
def test_what_drafts_for_a_model_shares_its_tokens(text, tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "BOOKS", TINY)
    monkeypatch.setattr(language_model, "DRAFT", TINY)
    target, draft, heads = (tmp_path / name for name in ("target", "draft", "heads"))
    options = TrainOptions(epochs=1, device="cpu")
    train_language_model_from([text], target, None, options)
    train_language_model_from([text], draft, target, options)
    assert (draft / "tokenizer.json").read_text() == (target / "tokenizer.json").read_text()
    assert load_language_model(draft).config.vocab_size == TINY.vocab_size
    report = train_text_drafter("medusa", [text], heads, target, options)
    assert report.selection == "accept_length"
    assert (heads / "medusa_lm_head.safetensors").exists()
    both = tmp_path / "both"
    report = train_text_drafter("medusa2", [text], both, target, options)
    assert report.selection == "objective" and (both / "heads" / "config.json").exists()
    same = ("tokenizer.json", "tokenizer_config.json")
    assert all((both / "target" / n).read_text() == (target / n).read_text() for n in same)
    assert load_language_model(both / "target").config == load_language_model(target).config


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    tokenizer = language_model.train_tokenizer([RHYME * 10], 280, END)
    with pytest.raises(ValueError, match="tokenizer has 280 tokens .* recipe needs 4096 and 0"):
        train_language_model([RHYME], tmp_path, TrainOptions(), BOOKS, tokenizer=tokenizer)


def test_a_long_text_is_encoded_in_parts(monkeypatch):
    text = "".join(f"line {number} of a text\n" for number in range(200)) + "no end of line"
    tokenizer = language_model.train_tokenizer([text], 280, END)
    whole = language_model.encode(tokenizer, [text, text])
    monkeypatch.setattr(language_model, "PART", 100)
    assert np.array_equal(language_model.encode(tokenizer, [text, text]), whole)
    assert (whole == 0).sum() == 2 and whole[0] == 0
    another = language_model.train_tokenizer([text], 280, "</s>")
    assert another.token_to_id(END) is None
    assert another.decode(language_model.encode(another, [text, text]).tolist()) == text + text


@pytest.mark.parametrize(
    "content,said",
    [
        (RHYME.encode(), "the text yields 2.. tokens, not 4096; give more text"),
        (b"", "the text yields 257 tokens, not 4096; give more text"),
        (b"\xff\xfe", "wrong.txt is not UTF-8 text"),
        (None, "wrong.txt: no such file"),
    ],
    ids=["short", "empty", "no-text", "missing"],
)
def test_a_text_that_cannot_be_learned_from_leaves_nothing(content, said, tmp_path):
    text = tmp_path / "wrong.txt"
    if content is not None:
        text.write_bytes(content)
    result = CliRunner().invoke(app, ["train", "lm", "--text", text, "--out", tmp_path / "lm"])
    assert result.exit_code == 1 and re.search(said, str(result.exception))
    assert not (tmp_path / "lm").exists()


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["lm", "--out", "b"], "Missing option '--text'"),
        (["lm", "--text", "a"], "Missing option '--out'"),
        (["medusa", "--text", "a", "--out", "b"], "Missing option '--llm'"),
        (["lm", "--text", "a", "--out", "b", "--llm", "none"], "there is no folder none"),
        (["ranker"], "Missing option '--bundle'"),
        (["ranker", "--bundle", "b", "--input", "codes"], "No such option: --input"),
        (["recommender", "--bundle", "b", "--head", "levels"], "No such option: --head"),
        (["retriever", "--bundle", "b", "--out", "c"], "No such option: --out"),
        (["lm", "--text", "a", "--out", "b", "--name", "nezha"], "No such option: --name"),
    ],
)
def test_the_command_says_which_flag_is_missing_or_does_not_apply(arguments, said):
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2 and said in result.output
