"""Training of EAGLE networks: unrolled steps are drafts, and trained drafts are longer."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recserve.drafters.eagle.drafter import EagleDrafter
from recserve.drafters.eagle.files import load_eagle
from recserve.training.options import TrainOptions
from recserve.training.text.drafters import eagle as eagle_module
from recserve.training.text.drafters.eagle import EagleRecipe, EagleTrainee
from tests.support.drafter_training import (
    FAST,
    ROWS,
    WINDOW,
    accepted_per_draft,
    read_lengths,
    write_lengths,
)
from tests.support.eagle_transcription import eagle_outputs
from tests.support.shared_folders import shared_folder

OPTIONS = TrainOptions(device="cpu", precision="float32")


def recipe(kind: str, words: int | None = None) -> EagleRecipe:
    return EagleRecipe(kind, 3, words, WINDOW, 16, 20, FAST)


@pytest.fixture(scope="module")
def trained(model, text):
    """By kind and words: the folder of a trained network."""

    def train(kind: str, words: int | None = None) -> Path:
        def make(folder: Path) -> None:
            cut, own = (ROWS - 20) * WINDOW, recipe(kind, words)
            report = EagleTrainee.train_on(model, text[:cut], text[cut:], folder, OPTIONS, own)
            write_lengths(folder, report)

        return shared_folder(f"trained-{kind}-{words}", make)

    return train


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@torch.inference_mode()
def test_an_unrolled_step_is_a_draft(kind, model, text):
    """Row t of step i equals a chain of i tokens drafted after t committed ones."""
    trainee = EagleTrainee(recipe(kind), model, text, text, seed=3)
    tokens, states, *_ = trainee._target(trainee.train[:1])
    unrolled = trainee._outputs(tokens, states, 3)
    network, embedded = trainee.model, model.tokens(tokens[0])
    features = network.features(states[0])
    for row in (0, 4, 11):
        inputs, words = features[: row + 1], embedded[1 : row + 2]
        for step in range(3):
            output = eagle_outputs(network, inputs, words)[-1:]
            torch.testing.assert_close(unrolled[step][0, row], output[0], rtol=1e-4, atol=1e-4)
            inputs = torch.cat([inputs, output])
            words = torch.cat([words, embedded[row + 2 + step][None]])


@pytest.mark.parametrize(("kind", "words"), [("eagle", None), ("eagle3", None), ("eagle3", 30)])
@torch.inference_mode()
def test_the_loss_is_that_of_a_plain_loop(kind, words, model, text, monkeypatch):
    """Each position's cross-entropy with the target, of those tokens that the network can say."""
    monkeypatch.setattr(eagle_module, "NOISE", 0.0)
    trainee = EagleTrainee(recipe(kind, words), model, text, text, seed=3)
    rows = np.array([0, 2, 3])
    tokens, states, final, logits = trainee._target(trainee.train[rows])
    network, total = trainee.model, 0.0
    for step, given in enumerate(trainee._outputs(tokens, states, 1 if kind == "eagle" else 3)):
        losses = []
        for own, wanted in zip(given, logits[:, 1 + step :].float(), strict=True):
            for state, target in zip(own, wanted, strict=True):
                if words is not None:
                    if target.argmax() not in network.token_map:
                        continue
                    target = target[network.token_map]
                said = network.logits(state[None], model)[0].log_softmax(0)
                losses.append(float(-(target.softmax(0) * said).sum()))
        mean = sum(losses) / len(losses)
        if kind == "eagle":
            difference = (given - final[:, 1:]).abs()
            smooth = torch.where(difference < 1, difference**2 / 2, difference - 0.5)
            total = float(smooth.mean()) + eagle_module.LOGITS_WEIGHT * mean
        else:
            total += trainee.discount**step * mean
    loss = trainee.loss(rows)
    assert float(loss.total) == pytest.approx(total, rel=1e-4)


def eagle_drafter(network, model) -> EagleDrafter:
    return EagleDrafter(network, model, width=3, depth=3, num_nodes=12)


@pytest.mark.parametrize(
    "kind,words",
    [
        pytest.param("eagle", None, marks=pytest.mark.slow),
        ("eagle3", 30),
        pytest.param("eagle3", None, marks=pytest.mark.slow),
    ],
)
def test_training_makes_drafts_longer(kind, words, model, text, trained):
    own = recipe(kind, words)
    cut = (ROWS - 20) * WINDOW
    torch.manual_seed(0)
    fresh = EagleTrainee(own, model, text[:cut], text[cut:], seed=0).model.requires_grad_(False)
    before = accepted_per_draft(model, eagle_drafter(fresh.eval(), model))
    folder = trained(kind, words)
    first, last = read_lengths(folder)
    assert last > first
    network = load_eagle(folder, model)
    if words is not None:
        assert network.token_map.shape == (30,)
    assert accepted_per_draft(model, eagle_drafter(network, model)) > before + 0.3


def test_an_older_network_is_the_start(model, text, trained, tmp_path):
    """The target was trained again: its old head is a better start than a new one."""
    cut = (ROWS - 20) * WINDOW
    one = recipe("eagle")
    old = trained("eagle")
    later = copy.deepcopy(model)
    torch.manual_seed(0)
    for weight in later.decoder.layers.parameters():
        weight.add_(0.03 * torch.randn(weight.shape))
    options = replace(OPTIONS, epochs=1)
    reports = [
        EagleTrainee.train_on(later, text[:cut], text[cut:], tmp_path / name, own, one)
        for name, own in (
            ("new", options),
            ("healed", replace(options, start_from=old)),
        )
    ]
    assert reports[1].metrics["accept_length"] > reports[0].metrics["accept_length"] + 0.2
    wrong = replace(options, start_from=old)
    with pytest.raises(ValueError, match=f"{old.name}: target_layers is .* the new network has"):
        EagleTrainee.train_on(
            model, text[:cut], text[cut:], tmp_path / "no", wrong, recipe("eagle3")
        )
