"""`recserve train distill`: the target writes, a run resumes to the same bytes, drafters train."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from recserve.cli import train as command
from recserve.cli.app import app
from recserve.models.loading import load_language_model
from recserve.speculation.sampling_params import SamplingParams
from recserve.tokenizer.tokenizer import TextTokenizer
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text import distillation, distilled_text
from recserve.training.text.distillation import TextWriter, distill
from recserve.training.text.distilled_text import (
    FORMAT,
    METADATA,
    DistillationSettings,
    DrafterText,
    read_distilled,
    read_drafter_text,
)
from recserve.training.text.drafters import kinds
from recserve.training.text.language_model import LanguageRecipe, encode, train_language_model
from tests.support.shared_folders import shared_folder
from tests.support.text_plain import plain

CPU = torch.device("cpu")
RECIPE = LanguageRecipe(
    vocab_size=280,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    max_positions=256,
    batch=8,
    window=32,
    steps=20,
    schedule=Schedule(1, 1e-2),
)
RHYME = "the cat sat on the mat and the dog ran to the log, then the cat ran after the dog.\n"
SMALL = DistillationSettings(tokens=300, prompt_tokens=6, length=20, seed=7, batch=4)


def make_folders(folder: Path) -> None:
    """Makes a text, a target whose texts end now and then, and what it has written.

    Three parts: 104, 104 and the rest of 300 tokens, or a little more.
    """
    text, target = folder / "rhyme.txt", folder / "target"
    text.write_text(RHYME * 300)
    train_language_model([RHYME] * 600, target, TrainOptions(device="cpu"), RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilled_text, "PART_TOKENS", 100)
        distill(target, [text], folder / "written", SMALL, CPU)


@pytest.fixture(scope="module")
def folders() -> Path:
    return shared_folder("distillation", make_folders)


@pytest.fixture(scope="module")
def text(folders) -> Path:
    return folders / "rhyme.txt"


@pytest.fixture(scope="module")
def llm(folders) -> Path:
    return folders / "target"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(distilled_text, "PART_TOKENS", 100)


@pytest.fixture(scope="module")
def written(folders) -> Path:
    return folders / "written"


def rows(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Returns prompt and continuation of each text."""
    found = read_distilled(folder)
    ends = [*found.texts[1:], len(found.tokens)]
    return [
        (found.tokens[a:b].tolist(), found.tokens[b:c].tolist())
        for a, b, c in zip(found.texts, found.continuations, ends, strict=True)
    ]


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_target_continues_passages_of_the_text(llm, text, written):
    corpus = encode(TextTokenizer.open(llm).tokenizer, [text.read_text()]).tolist()
    passages = {tuple(corpus[i : i + 6]) for i in range(len(corpus) - 5)}
    model, found = load_language_model(llm), rows(written)
    assert {tuple(prompt) for prompt, _ in found} <= passages
    assert len({tuple(continuation) for _, continuation in found}) > len(found) // 2
    assert sum(len(p) + len(c) for p, c in found) >= SMALL.tokens
    ended = [continuation for _, continuation in found if continuation[-1] == 0]
    assert ended and all(len(continuation) == 20 for _, c in found if (continuation := c)[-1])
    # The noise of each text is known, so the text is the one that plain decoding writes.
    random = np.random.default_rng((7, 0))
    random.integers(0, len(corpus) - 5, 4)
    for (prompt, continuation), seed in zip(found, random.integers(0, 2**63 - 1, 4), strict=False):
        params = SamplingParams(seed=int(seed), max_tokens=20, stop_token_ids=(0,))
        tokens, _, stop = plain(model, prompt, params)
        assert [*tokens, *([] if stop is None else [stop])] == continuation


def test_an_interrupted_run_ends_with_the_same_bytes(llm, text, written, tmp_path, monkeypatch):
    out, console = tmp_path / "interrupted", Console(record=True, width=200)
    honest = TextWriter.part

    def stop(self, number, tokens, wrote):
        if number == 1:
            raise KeyboardInterrupt
        return honest(self, number, tokens, wrote)

    with monkeypatch.context() as patch:
        patch.setattr(TextWriter, "part", stop)
        with pytest.raises(KeyboardInterrupt):
            distill(llm, [text], out, SMALL, CPU, console)
    said = "interrupted after 1 of 3 parts; the same command continues there"
    assert said in console.export_text()
    assert list(parts(out)) == [METADATA, "part-00000.parquet"]
    with pytest.raises(ValueError, match="lacks 2 of 3 parts; run the same `recserve train dist"):
        read_distilled(out)
    (out / ".tmp-1-part-00001.parquet").write_bytes(b"PAR1")  # of a process that was killed
    report = distill(llm, [text], out, SMALL, CPU, console)
    assert (report.parts, report.resumed) == (3, 1)
    assert parts(out) == parts(written)
    again = distill(llm, [text], out, SMALL, CPU, console)
    assert again.resumed == 3 and again.tokens == report.tokens
    assert parts(out) == parts(written)


def test_a_finished_part_is_not_written_again(llm, text, written, monkeypatch):
    def forbidden(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(distillation, "load_language_model", forbidden)
    assert distill(llm, [text], written, SMALL, CPU).resumed == 3


def test_another_seed_writes_other_texts(llm, text, written, tmp_path):
    distill(llm, [text], tmp_path / "other", replace(SMALL, seed=8, tokens=100), CPU)
    assert not {tuple(c) for _, c in rows(written)} & {
        tuple(c) for _, c in rows(tmp_path / "other")
    }


def test_other_settings_texts_and_files_are_refused(llm, text, written, tmp_path):
    before = parts(written)
    with pytest.raises(ValueError, match="written with other values: seed is 7 there and 8 here"):
        distill(llm, [text], written, replace(SMALL, seed=8), CPU)
    (tmp_path / "other.txt").write_text(RHYME * 30)
    with pytest.raises(ValueError, match="text_sha256 is .*--text for each"):
        distill(llm, [tmp_path / "other.txt"], written, SMALL, CPU)
    assert parts(written) == before
    with pytest.raises(ValueError, match="holds other files; choose a new folder"):
        distill(llm, [text], llm, SMALL, CPU)


def test_a_folder_without_parts_takes_other_settings(llm, text, written, tmp_path):
    out = tmp_path / "new"
    out.mkdir()
    (out / METADATA).write_text(json.dumps({"format": FORMAT, "seed": 3}))
    distill(llm, [text], out, SMALL, CPU)
    assert parts(out) == parts(written)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"length": 251}, "prompt_tokens and length are 257 together; target has 256 positions"),
        ({"prompt_tokens": 200}, "the text has 3 tokens; a passage needs 200 of them"),
    ],
)
def test_what_cannot_be_written_leaves_no_folder(settings, said, llm, tmp_path):
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(ValueError, match=said):
        distill(llm, [tmp_path / "short.txt"], tmp_path / "out", replace(SMALL, **settings), CPU)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_puts_its_first_tokens_into_the_prompt(llm):
    corpus = np.arange(1, 60)
    writer = TextWriter(load_language_model(llm), corpus, [5, 6], (0,), SMALL)
    table = writer.part(0, 100, lambda tokens: None)
    for tokens in table.column("tokens").to_pylist():
        assert tokens[:2] == [5, 6] and tokens[3:6] == list(range(tokens[2] + 1, tokens[2] + 4))
    with pytest.raises(ValueError, match="the tokenizer puts 6 before each text"):
        TextWriter(load_language_model(llm), corpus, [5] * 6, (0,), SMALL)


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "has no distillation.json; `recserve train distill` writes such a folder"),
        ("{", "distillation.json is damaged"),
        ("[]", "distillation.json is damaged: it holds no object"),
        ("{}", "distillation.json: format is missing"),
        (json.dumps({"format": FORMAT}), "distillation.json: target_sha256 is missing"),
        (json.dumps({"format": FORMAT, "tokens": "many"}), "tokens is 'many'; expected int"),
    ],
)
def test_a_damaged_folder_is_refused(content, said, tmp_path):
    if content is not None:
        (tmp_path / METADATA).write_text(content)
    with pytest.raises(ValueError, match=said):
        read_distilled(tmp_path)


def test_a_damaged_part_is_refused(written, tmp_path):
    for name, content in parts(written).items():
        (tmp_path / name).write_bytes(content[:100] if name == "part-00001.parquet" else content)
    with pytest.raises(ValueError, match="has a damaged part"):
        read_distilled(tmp_path)


def test_drafters_train_on_the_ids(llm, text, written, monkeypatch):
    """Ids are not decoded and encoded again."""
    given = {}

    def train(target, train, valid, directory, options):
        given.update(train=train, valid=valid)

    monkeypatch.setattr(kinds, "KINDS", {"fake": train})
    command.train_text_drafter("fake", [written], written, llm, TrainOptions(device="cpu"))
    found = read_distilled(written)
    assert np.array_equal(np.concatenate([given["train"], given["valid"]]), found.tokens)
    assert 0 < len(given["valid"]) <= len(found.tokens) // 20
    command.train_text_drafter("fake", [written, text], written, llm, TrainOptions(device="cpu"))
    corpus = encode(TextTokenizer.open(llm).tokenizer, [text.read_text()])
    whole = np.concatenate([found.tokens, corpus])
    assert np.array_equal(given["valid"], whole[-(len(whole) // 20) :])


def test_validation_begins_with_a_text():
    tokens = np.arange(200)
    for texts, cut in (((0, 7, 193), 193), ((0, 190, 195), 190), ((0, 7), 190), ((), 190)):
        train, valid = DrafterText(tokens, np.array(texts), ()).split()
        assert (len(train), len(valid)) == (cut, 200 - cut)


def test_text_of_another_model_or_tokenizer(llm, text, written, tmp_path, capsys):
    other = tmp_path / "other"
    recipe, options = replace(RECIPE, steps=1), TrainOptions(device="cpu", seed=1)
    tokenizer = TextTokenizer.open(llm).tokenizer
    train_language_model([RHYME] * 300, other, options, recipe, tokenizer=tokenizer)
    assert read_drafter_text([written], llm).foreign == ()
    assert read_drafter_text([written], other).foreign == (written,)
    command._target_and_texts([written], other, options)
    assert (
        f"warning: {written} was written by another model than {other}" in capsys.readouterr().err
    )
    said = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**said, "pad_token": "a"}))
    with pytest.raises(ValueError, match="the tokens of another tokenizer than .* or give a text"):
        read_drafter_text([written], other)


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.mark.slow
def test_the_commands_from_text_to_heads(llm, text, tmp_path, monkeypatch):
    monkeypatch.setattr(distilled_text, "PART_TOKENS", 2**16)
    out, heads = tmp_path / "own", tmp_path / "heads"
    sizes = ["--tokens", 16_000, "--length", 224, "--batch", 32]
    result = run("distill", "--llm", llm, "--text", text, "--out", out, *sizes)
    assert result.exit_code == 0 and "texts and 1 parts, " in result.stdout
    flags = ["--text", out, "--llm", llm, "--out", heads, "--epochs", 1, "--device", "cpu"]
    result = run("drafter", "--kind", "medusa", *flags)
    assert result.exit_code == 0 and "accept_length" in result.stdout
    assert (heads / "medusa_lm_head.safetensors").exists()


@pytest.mark.parametrize(
    "flag, value", [("tokens", 0), ("length", 0), ("batch", 2000), ("temperature", -1)]
)
def test_bounds_of_the_command(flag, value, llm, text, tmp_path):
    out = tmp_path / "out"
    result = run("distill", "--llm", llm, "--text", text, "--out", out, f"--{flag}", value)
    assert result.exit_code == 2 and f"--{flag}" in result.output
    assert not out.exists()
