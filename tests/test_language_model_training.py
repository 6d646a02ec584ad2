"""`recserve train lm`: a folder that transformers reads, and a model that has learned its text."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from recserve.models.attention import DenseAttention
from recserve.models.loading import load_language_model
from recserve.training.language_model import LanguageModelRecipe, train_language_model
from recserve.training.loop import Schedule
from recserve.training.options import TrainOptions
from recserve.training.text_data import Blocks, encode_text, read_text, train_tokenizer

LINES = [
    f"the {a} {b} over the {c}\n"
    for a in ["cat", "dog", "fox"]
    for b in ["runs", "jumps"]
    for c in ["hill", "gate"]
]
RECIPE = LanguageModelRecipe(
    32,
    2,
    2,
    64,
    vocab_size=300,
    context=24,
    batch=8,
    steps=60,
    validation_blocks=8,
    schedule=Schedule(2, 1e-2, averaging=0.9),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    rng = np.random.default_rng(0)
    for name, count in (("train", 800), ("valid", 100)):
        text = "".join(LINES[i] for i in rng.integers(0, len(LINES), count))
        with pa.CompressedOutputStream(str(folder / f"{name}.txt.zst"), "zstd") as file:
            file.write(text.encode())
    report = train_language_model(
        folder / "train.txt.zst",
        folder / "valid.txt.zst",
        folder / "out",
        TrainOptions(device="cpu", precision="float32"),
        RECIPE,
        console=Console(quiet=True),
    )
    return folder, report


def test_it_learns_and_keeps_the_best(trained):
    _, report = trained
    # Three choices of a line are free, log(12) in all; the rest of its tokens are certain.
    assert 1.3 < report.metrics["perplexity"] < 1.6
    assert report.history[1].losses["loss"] < 0.5 * report.history[0].losses["loss"]


def test_transformers_reads_the_folder_and_agrees(trained):
    folder, _ = trained
    theirs = AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    ours = load_language_model(folder / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    tokens = torch.tensor([tokenizer.encode("the cat jumps over", add_special_tokens=False)])
    with torch.inference_mode():
        hidden = ours(tokens, torch.arange(tokens.shape[1]), DenseAttention())
        torch.testing.assert_close(ours.logits(hidden), theirs(tokens).logits, atol=1e-4, rtol=0)
        written = theirs.generate(tokens, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(written[0]).startswith("the cat jumps over the")


def test_text_comes_back_whole_from_its_tokens(tmp_path):
    text = "Grüße, 世界\n\tand\0more\r\n" * 50 + "no newline at the end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    tokenizer = train_tokenizer(read_text(tmp_path / "a.txt"), 300)
    assert isinstance(tokenizer, Tokenizer)
    tokens = encode_text(tokenizer, read_text(tmp_path / "a.txt"))
    assert tokenizer.decode(tokens.tolist()) == text
    cut = "".join(read_text(tmp_path / "a.txt", 100))
    assert text.startswith(cut) and 90 < len(cut.encode()) <= 100


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe" * 50 + b"\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        list(read_text(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="4 tokens; a block needs 9"):
        Blocks(np.arange(4, dtype=np.int32), 8)


def test_windows_are_consecutive_tokens():
    blocks = Blocks(np.arange(100, dtype=np.int32), 8)
    for windows in (blocks.drawn(20, 3), blocks.spread(5)):
        np.testing.assert_array_equal(
            windows - windows[:, :1], np.tile(np.arange(9), (len(windows), 1))
        )
    assert len(blocks.spread(1000)) == 12
    np.testing.assert_array_equal(blocks.drawn(4, 1), blocks.drawn(4, 1))
