"""Boost tuning: each model learns what the earlier ones miss, and the set drafts losslessly."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recserve.drafters.registry import build_drafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.attention import DenseAttention
from recserve.models.loading import load_language_model
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.boost import (
    BoostCorpus,
    BoostRecipe,
    BoostTrainee,
    chain_lengths,
    solved_samples,
    train_boost,
)
from recserve.training.text.language_model import LanguageRecipe
from tests.support.drafter_training import write_rows
from tests.support.paths import reference
from tests.support.shared_folders import shared_folder

WINDOW, ROWS, CUT, SPAN = 32, 160, 140, 3
OPTIONS = TrainOptions(device="cpu", precision="float32")
SIZES = LanguageRecipe(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    batch=16,
    window=WINDOW,
    steps=30,
    schedule=Schedule(3, 1e-2, averaging=0.9),
)
RECIPE = BoostRecipe(2, SPAN, SIZES)


@pytest.fixture(scope="module")
def target():
    return load_language_model(reference("stories260k"), torch.float32)


@pytest.fixture(scope="module")
def texts() -> tuple[np.ndarray, np.ndarray]:
    """What the target writes by itself, for training and validation."""
    tokens = np.load(shared_folder("boost-texts", write_texts) / "tokens.npy")
    return tokens[:CUT].flatten(), tokens[CUT:].flatten()


def write_texts(folder: Path) -> None:
    model = load_language_model(reference("stories260k"), torch.float32)
    tokens = write_rows(model, torch.ones(ROWS, dtype=torch.int64), WINDOW, 0.5)
    np.save(folder / "tokens.npy", tokens.numpy())


def test_chains_and_samples_equal_a_loop():
    right = torch.rand(5, 11, generator=torch.Generator().manual_seed(0)) < 0.7
    lengths = chain_lengths(right, SPAN)
    solved = solved_samples(right, SPAN)
    assert lengths.shape == (5, 9) and solved.shape == right.shape
    for row, own in enumerate(right.tolist()):
        for start in range(9):
            chain = own[start : start + SPAN]
            assert lengths[row, start] == (chain.index(False) if False in chain else SPAN)
        for place in range(11):
            first = place // SPAN * SPAN
            assert bool(solved[row, place]) == (
                first + SPAN <= 11 and all(own[first : first + SPAN])
            )


def test_only_tokens_of_unsolved_samples_have_a_loss(target, texts):
    """A finished model solves what it predicts; the next model's loss ignores those tokens."""
    corpus = BoostCorpus(target, *texts, RECIPE)
    trainee = BoostTrainee(corpus, target, seed=0)
    starts = np.arange(16) * 7
    whole = trainee.loss(starts).total
    torch.testing.assert_close(whole, super(BoostTrainee, trainee).loss(starts).total)
    assert corpus.unsolved.all() and not corpus.lengths.any()
    corpus.add(target)  # predicts much of its own text
    share = corpus.unsolved.mean()
    assert 0.2 < share < 0.8
    said = target.logits(
        target(torch.from_numpy(texts[0][None, :WINDOW]), torch.arange(WINDOW), DenseAttention())
    ).argmax(-1)[0]
    for place in range(0, WINDOW // SPAN * SPAN, SPAN):
        own = slice(place + 1, place + 1 + SPAN)
        right = said[place : place + SPAN].tolist() == texts[0][own].tolist()
        assert (~corpus.unsolved[own]).all() if right else corpus.unsolved[own].all()
    assert corpus.lengths.eq(SPAN).all()  # what the target says, it accepts
    later = BoostTrainee(corpus, target, seed=0)
    logits = later.model.logits(
        later.model(later.tokens[None, :WINDOW], torch.arange(WINDOW), DenseAttention())
    )[0].log_softmax(-1)
    chosen = np.flatnonzero(corpus.unsolved[1 : WINDOW + 1])
    wanted = -logits[chosen, texts[0][chosen + 1]].mean()
    torch.testing.assert_close(later.loss(np.array([0])).total, wanted)
    corpus.unsolved[:] = False
    nothing = BoostTrainee(corpus, target, seed=0).loss(starts).total
    assert nothing == 0.0


def test_the_set_accepts_more_than_its_first_model_and_serves_losslessly(target, texts, tmp_path):
    report = train_boost(target, *texts, tmp_path, OPTIONS, RECIPE)
    metrics = report.metrics
    assert metrics["accept_length"] > metrics["accept_length_first"] + 0.05
    folders = [tmp_path / f"model-{number}" for number in (1, 2)]
    models = [load_language_model(folder) for folder in folders]
    for model in models:
        assert model.config.eos_tokens == target.config.eos_tokens
        assert model.config.bos_token == target.config.bos_token
    drafters = {
        "specinfer": build_drafter("specinfer", target, folders),
        "draft_model": build_drafter("draft_model", target, folders[:1]),
    }
    engine = build_engine(
        EngineModels(text=target, drafters=drafters), EngineConfig(load_aware=False)
    )
    params = SamplingParams(temperature=0.0, max_tokens=30)
    prompts = [np.array([1, 403, 407, 261, 378][:n]) for n in range(2, 6)]
    plain = engine.run_many([TextQuery(p, params) for p in prompts])
    for name in drafters:
        drafted = engine.run_many([TextQuery(p, params, Speculation(name)) for p in prompts])
        for one, other in zip(plain, drafted, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
        assert sum(answer.counts.num_accepted_tokens for answer in drafted) > 0


def test_an_interrupted_run_keeps_finished_models(target, texts, tmp_path, monkeypatch):
    short = replace(RECIPE, model=replace(SIZES, steps=8, schedule=Schedule(2, 1e-2)))
    train_boost(target, *texts, tmp_path / "whole", OPTIONS, short)
    own = BoostTrainee.plan

    def interrupted(trainee, epoch):
        if trainee.corpus.first is not None and epoch == 1:
            raise KeyboardInterrupt
        return own(trainee, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(BoostTrainee, "plan", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_boost(target, *texts, tmp_path / "cut", OPTIONS, short)
    finished = tmp_path / "cut" / "model-1" / "model.safetensors"
    written = finished.stat().st_mtime_ns
    train_boost(target, *texts, tmp_path / "cut", replace(OPTIONS, resume=True), short)
    assert finished.stat().st_mtime_ns == written
    for number in (1, 2):
        whole, cut = (
            load_language_model(tmp_path / name / f"model-{number}") for name in ("whole", "cut")
        )
        for name, weight in whole.state_dict().items():
            torch.testing.assert_close(cut.state_dict()[name], weight)


def test_an_older_draft_model_is_the_start(target, texts, tmp_path):
    short = replace(RECIPE, num_models=1, model=replace(SIZES, steps=2, schedule=Schedule(1, 1e-9)))
    train_boost(target, *texts, tmp_path / "old", OPTIONS, short)
    old = tmp_path / "old" / "model-1"
    folder = reference("stories260k")
    healing = replace(OPTIONS, start_from=old, seed=5, llm=folder)
    train_boost(target, *texts, tmp_path / "new", healing, short)
    train_boost(target, *texts, tmp_path / "old", healing, short)  # in its own place
    for name in ("old", "new"):
        copied = tmp_path / name / "model-1" / "tokenizer.json"
        assert copied.read_bytes() == (folder / "tokenizer.json").read_bytes()
    models = [load_language_model(tmp_path / name / "model-1") for name in ("old", "new")]
    for name, weight in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], weight)
    other = replace(short, model=replace(short.model, intermediate_size=32))
    with pytest.raises(ValueError, match="older model is .*; the new model is"):
        train_boost(target, *texts, tmp_path / "no", healing, other)
