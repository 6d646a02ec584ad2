"""Training of MTP modules: unrolled steps are drafts, and trained drafts are longer."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.drafters.mtp_files import load_mtp, save_mtp
from recserve.models.loading import load_language_model
from recserve.speculation.completion import TextQuery
from recserve.speculation.drafters.mtp import MtpDrafter
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.eagle import EagleRecipe
from recserve.training.text.drafters.mtp import MtpTrainee, train_mtp
from tests.speculation.test_mtp import Published
from tests.support.paths import reference
from tests.support.text_plain import drawn_model
from tests.training.text.test_eagle_training import FAST, ROWS, WINDOW, text  # noqa: F401

RECIPE = EagleRecipe("mtp", 3, None, WINDOW, 16, 20, FAST)
OPTIONS = TrainOptions(device="cpu", precision="float32")


@pytest.fixture(scope="module")
def model():
    return drawn_model(0)


@torch.inference_mode()
def test_an_unrolled_step_is_a_draft(model, text, tmp_path):  # noqa: F811
    """Row t of step i equals a chain of i tokens drafted after t committed ones."""
    trainee = MtpTrainee(RECIPE, model, text, text, seed=3)
    save_mtp(trainee.model, tmp_path, 2)
    published = Published("deepseek", load_file(tmp_path / "model.safetensors"))
    tokens, states, *_ = trainee._target(trainee.train[:1])
    unrolled = trainee._outputs(tokens, states, 3)
    embedded = model.tokens(tokens[0])
    for row in (0, 4, 11):
        inputs, words = states[0][: row + 1], embedded[1 : row + 2]
        for step in range(3):
            output = published.outputs(inputs, words)[-1:]
            torch.testing.assert_close(unrolled[step][0, row], output[0], rtol=1e-4, atol=1e-4)
            inputs = torch.cat([inputs, output])
            words = torch.cat([words, embedded[row + 2 + step][None]])


def accepted(model, network, prompts, length: int = 30) -> float:
    """Returns accepted tokens per draft, and checks that the texts are the plain ones."""
    drafter = MtpDrafter(network, model, width=3, depth=3, num_nodes=12)
    engine = build_engine(
        EngineModels(text=model, drafters={"mtp": drafter}), EngineConfig(load_aware=False)
    )
    queries = [TextQuery(p, SamplingParams(0.0, max_tokens=length)) for p in prompts]
    plain = engine.run_many(queries)
    drafted = engine.run_many([replace(q, speculation=Speculation("mtp")) for q in queries])
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    counts = [answer.counts for answer in drafted]
    return sum(c.num_accepted_tokens for c in counts) / sum(c.num_drafts for c in counts)


@pytest.mark.slow
def test_training_makes_drafts_longer(model, text, tmp_path):  # noqa: F811
    cut = (ROWS - 20) * WINDOW
    prompts = [np.array([n]) for n in range(8)]
    fresh = MtpTrainee(RECIPE, model, text[:cut], text[cut:], seed=0).model.requires_grad_(False)
    before = accepted(model, fresh.eval(), prompts)
    report = train_mtp(model, text[:cut], text[cut:], tmp_path, OPTIONS, RECIPE)
    assert report.metrics["accept_length"] > report.history[0].metrics["accept_length"]
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 1
    assert accepted(model, load_mtp(tmp_path, model), prompts) > before + 0.3
    healed = replace(OPTIONS, epochs=1, start_from=tmp_path)
    again = train_mtp(model, text[:cut], text[cut:], tmp_path / "again", healed, RECIPE)
    assert again.metrics["accept_length"] > report.history[0].metrics["accept_length"]


@pytest.mark.slow
def test_a_module_of_a_trained_model(tmp_path):
    """stories260k: the module guesses its stories far better than chance, 1 in 512."""
    model = load_language_model(reference("stories260k"))
    engine = build_engine(EngineModels(text=model))
    params = [SamplingParams(1.0, seed=seed, max_tokens=120) for seed in range(96)]
    stories = engine.run_many([TextQuery(np.array([1]), own) for own in params])
    written = np.concatenate([np.append(1, story.tokens) for story in stories])
    recipe = EagleRecipe("mtp", 3, None, 64, 8, 16, Schedule(6, 3e-3, weight_decay=0.0))
    cut = len(written) * 9 // 10
    train_mtp(model, written[:cut], written[cut:], tmp_path, OPTIONS, recipe)
    prompts = [np.array([1, 403, 407, 261, 378]), np.array([1])]
    assert accepted(model, load_mtp(tmp_path, model), prompts, length=60) > 0.8
