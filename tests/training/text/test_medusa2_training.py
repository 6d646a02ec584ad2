"""Medusa-2: target and heads learn together; the new target stays good and serves losslessly."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.drafters.registry import build_drafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.loading import load_language_model
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.medusa import MedusaRecipe
from recserve.training.text.drafters.medusa2 import Medusa2Recipe, Medusa2Trainee, train_medusa2
from tests.support.drafter_training import write_rows
from tests.support.grids import chosen
from tests.support.paths import reference

WINDOW, ROWS, CUT = 32, 120, 100
OPTIONS = TrainOptions(device="cpu", precision="float32")
HEADS = MedusaRecipe(3, 1, WINDOW, 10, 20, Schedule(3, 1e-2, weight_decay=0.0, averaging=0.0))
JOINT = Schedule(3, 1e-4, weight_decay=0.0, averaging=0.0, rates=(("heads.", 4.0),))
RECIPE = Medusa2Recipe(HEADS, schedule=JOINT)
BOUND = 0.05  # nats per token that the target may lose


@pytest.fixture(scope="module")
def model():
    return load_language_model(reference("stories260k"), torch.float32)


@pytest.fixture(scope="module")
def texts(model) -> tuple[np.ndarray, np.ndarray]:
    """What the target writes by itself, for training and validation."""
    tokens = write_rows(model, torch.ones(ROWS, dtype=torch.int64), WINDOW, 1.0)
    return tokens[:CUT].flatten().numpy(), tokens[CUT:].flatten().numpy()


@pytest.fixture
def few(texts) -> tuple[np.ndarray, np.ndarray]:
    """A fifth of them: enough for runs of which only the course matters."""
    return texts[0][: CUT // 5 * WINDOW], texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("distill", chosen({"text": False, "distilled": True}, "distilled"))
def test_the_new_target_stays_good_and_its_heads_serve_losslessly(distill, model, texts, tmp_path):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    recipe = replace(RECIPE, distill=distill)
    report = train_medusa2(model, *texts, tmp_path, OPTIONS, recipe)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert report.metrics["log_likelihood_change"] > -BOUND
    assert report.metrics["objective"] > report.history[0].metrics["objective"]
    new = load_language_model(tmp_path / "target")
    assert new.config == model.config
    moved = (new.state_dict()[name] - weight for name, weight in before.items())
    assert any(change.abs().max() > 1e-4 for change in moved)
    drafter = build_drafter("medusa", new, [tmp_path / "heads"])
    engine = build_engine(
        EngineModels(text=new, drafters={"medusa": drafter}), EngineConfig(load_aware=False)
    )
    params = SamplingParams(temperature=0.0, max_tokens=30)
    prompts = [np.array([1, 403, 407, 261, 378][:n]) for n in range(2, 6)]
    plain = engine.run_many([TextQuery(p, params) for p in prompts])
    drafted = engine.run_many([TextQuery(p, params, Speculation("medusa")) for p in prompts])
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert sum(answer.counts.num_accepted_tokens for answer in drafted) > 0


@pytest.mark.slow
def test_an_interrupted_run_continues_where_it_was(model, few, tmp_path, monkeypatch):
    train_medusa2(model, *few, tmp_path / "whole", OPTIONS, RECIPE)
    own = Medusa2Trainee.plan

    def interrupted(trainee, epoch):
        if epoch == 1:
            raise KeyboardInterrupt
        return own(trainee, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(Medusa2Trainee, "plan", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_medusa2(model, *few, tmp_path / "cut", OPTIONS, RECIPE)
    assert not (tmp_path / "cut" / "target").exists()
    (tmp_path / "cut" / "warm-up" / "checkpoint.safetensors").unlink()  # no longer needed
    train_medusa2(model, *few, tmp_path / "cut", replace(OPTIONS, resume=True), RECIPE)
    whole, cut = (load_language_model(tmp_path / name / "target") for name in ("whole", "cut"))
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(cut.state_dict()[name], weight)
