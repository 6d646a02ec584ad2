"""Training of Medusa's heads: their loss, and old heads as a start."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.models.loading import load_language_model
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.medusa import DISCOUNT, MedusaRecipe, MedusaTrainee
from tests.support.drafter_training import write_rows
from tests.support.paths import reference
from tests.support.text_plain import VOCABULARY, drawn_model

WINDOW, ROWS, CUT = 32, 160, 140
FAST = Schedule(6, 1e-2, weight_decay=0.0, averaging=0.0)
OPTIONS = TrainOptions(device="cpu", precision="float32")


@pytest.fixture(scope="module")
def model():
    return load_language_model(reference("stories260k"), torch.float32)


@pytest.fixture(scope="module")
def text(model) -> np.ndarray:
    """What the target writes by itself, many rows side by side."""
    tokens = write_rows(model, torch.ones(ROWS, dtype=torch.int64), WINDOW, 0.7)
    return tokens.flatten().numpy()


@torch.inference_mode()
def test_the_loss_is_that_of_a_plain_loop():
    """Head k of position t is compared with the target at t + k + 1."""
    target, num_heads = drawn_model(0), 3
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 8 * 9)
    recipe = MedusaRecipe(num_heads, 2, window=9, batch=3, validation_rows=7)
    trainee = MedusaTrainee(recipe, target, tokens, tokens, seed=1)
    for weight in trainee.model.parameters():
        weight.add_(0.1 * torch.randn(weight.shape))
    rows = np.array([0, 5, 6])
    hidden, wanted = trainee._target(trainee.train[rows])
    losses = torch.zeros(num_heads)
    for row in range(3):
        for k in range(num_heads):
            for place in range(9 - k - 1):
                said = trainee.model(hidden[row, place][None])[k, 0].log_softmax(0)
                share = wanted[row, place + k + 1].softmax(0)
                losses[k] -= (share * said).sum() / (3 * (9 - k - 1))
    found = trainee.loss(rows)
    assert [float(own) for own in found.parts.values()] == pytest.approx(losses.tolist(), rel=1e-4)
    total = sum(DISCOUNT**k * float(own) for k, own in enumerate(losses))
    assert float(found.total) == pytest.approx(total, rel=1e-4) and found.targets == 3 * 9


@pytest.mark.slow
def test_older_heads_are_the_start(model, text, tmp_path):
    """The target was trained again: its old heads are a better start than new ones."""
    one = MedusaRecipe(3, 1, WINDOW, 10, 20, FAST)
    other = replace(one, num_layers=2)
    texts = text[: CUT * WINDOW], text[CUT * WINDOW :]
    MedusaTrainee.train_on(model, *texts, tmp_path / "old", OPTIONS, one)
    later = copy.deepcopy(model)
    draws = torch.Generator().manual_seed(0)
    for weight in later.decoder.layers.parameters():
        weight.add_(0.01 * torch.randn(weight.shape, generator=draws))
    short = replace(OPTIONS, epochs=1)
    healing = replace(short, start_from=tmp_path / "old")
    found = {
        name: MedusaTrainee.train_on(later, *texts, tmp_path / name, options, one).metrics[
            "accept_length"
        ]
        for name, options in (("new", short), ("healed", healing))
    }
    assert found["healed"] > found["new"]
    with pytest.raises(ValueError, match="old: num_layers is .*; the new network has"):
        MedusaTrainee.train_on(model, *texts, tmp_path / "no", healing, other)
