"""Language models trained from plain text: folders that serve, here and in transformers."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig, RopeScaling
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.loading import load_language_model
from recserve.models.saving import save_language_model
from recserve.tokenizer.tokenizer import TextTokenizer
from recserve.tokenizer.training import train_tokenizer
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.language_model import (
    BOOKS,
    LanguageRecipe,
    LanguageTrainee,
    read_texts,
    standard_library,
    train_language_model,
)
from tests.support.shared_folders import shared_folder

TINY = LanguageRecipe(
    vocab_size=280,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    max_positions=128,
    batch=8,
    window=32,
    steps=40,
    schedule=Schedule(3, 1e-2, averaging=0.9),
)
RHYME = "the cat sat on the mat and the dog ran to the log, then the cat ran after the dog. "


def train_rhyme(folder: Path) -> None:
    report = train_language_model([RHYME * 60] * 5, folder, TrainOptions(device="cpu"), TINY)
    assert (
        report.history[-1].metrics["log_likelihood"] > report.history[0].metrics["log_likelihood"]
    )
    assert report.metrics["log_likelihood"] > -1.0  # -5.6 by chance


@pytest.mark.parametrize("num_windows", [1, 3, 64, 65, 90])
@torch.inference_mode()
def test_validation_reads_at_most_64_windows(num_windows):
    """One after the other from the start; batches of any size weigh by their windows."""
    drawn, size = np.random.default_rng(0), TINY.window
    held_out = drawn.integers(280, size=num_windows * size + 1)
    trainee = LanguageTrainee(TINY, held_out, held_out, 0, torch.device("cpu"))
    rows = [held_out[size * n : size * (n + 1) + 1] for n in range(min(num_windows, 64))]
    losses = [float(trainee._cross_entropy(torch.from_numpy(row)[None])) for row in rows]
    assert trainee.validate()["log_likelihood"] == pytest.approx(-np.mean(losses), rel=1e-5)


@pytest.fixture(scope="module")
def trained() -> Path:
    return shared_folder("rhyme-model", train_rhyme)


@torch.inference_mode()
def test_it_learned_the_rhyme(trained):
    """A token of the rhyme has a likelihood of 1/280 by chance, and of over 1/3 after training."""
    model, tokenizer = load_language_model(trained), TextTokenizer.open(trained)
    tokens = torch.tensor([tokenizer.encode(RHYME)])
    hidden = model(tokens, torch.arange(tokens.shape[1])[None], DenseAttention())
    log_p = model.logits(hidden)[0, :-1].log_softmax(-1)
    learned = log_p.gather(1, tokens[0, 1:, None])[8:].mean()
    assert learned > -1.0


@torch.inference_mode()
def test_transformers_reads_the_folder(trained):
    theirs = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    tokens = torch.tensor([tokenizer("the dog ran")["input_ids"]])
    assert tokens[0].tolist() == TextTokenizer.open(trained).encode("the dog ran")
    ours = load_language_model(trained)
    hidden = ours(tokens, torch.arange(tokens.shape[1])[None], DenseAttention())
    torch.testing.assert_close(ours.logits(hidden), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "decoder",
    [
        DecoderConfig(48, 2, 6, 3, 8, 80),
        DecoderConfig(48, 2, 6, 3, 8, 80, attention_bias=True),
        DecoderConfig(48, 2, 6, 3, 16, 80, attention_bias=True, output_bias=True),
        DecoderConfig(48, 2, 6, 2, 16, 80, qk_norm=True, rope_theta=1e6),
        DecoderConfig(48, 2, 6, 2, 16, 80, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
    ],
    ids=["llama", "qwen2", "llama-biases", "qwen3", "llama-3.1"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_saved_models_load_the_same(decoder, tied, tmp_path):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(decoder, 50, tied, 1, (2, 3)))
    save_language_model(model, tmp_path)
    loaded = load_language_model(tmp_path)
    assert loaded.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_shape_that_no_family_has_is_refused(tmp_path):
    decoder = DecoderConfig(48, 2, 6, 3, 16, 80, attention_bias=True)
    with pytest.raises(ValueError, match="head_dim is 16"):
        save_language_model(LanguageModel(LanguageModelConfig(decoder, 50)), tmp_path)


def test_texts(tmp_path):
    (tmp_path / "a.txt").write_text("plain ä")
    with pa.CompressedOutputStream(str(tmp_path / "b.zst"), "zstd") as packed:
        packed.write("packed ö".encode())
    assert list(read_texts([tmp_path / "a.txt", tmp_path / "b.zst"])) == ["plain ä", "packed ö"]
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="c.txt is not UTF-8"):
        list(read_texts([tmp_path / "c.txt"]))
    sources = standard_library(200_000)
    assert 50_000 < sum(map(len, sources)) <= 200_000 and sources == standard_library(200_000)


def test_too_little_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="smaller vocabulary"):
        train_tokenizer(["abc"], 1000, "<end>")
    with pytest.raises(ValueError, match="more than a window of 32"):
        train_language_model([RHYME], tmp_path / "lm", TrainOptions(device="cpu"), TINY)
    assert list(tmp_path.iterdir()) == []


def test_the_larger_recipe_is_between_10_and_30_million():
    model = LanguageModel(BOOKS.config())
    assert 10e6 < sum(p.numel() for p in model.parameters()) < 30e6
