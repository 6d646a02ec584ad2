"""Training of mask tokens: one packed pass equals many, and trained drafts are longer."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recserve.drafters.mask_tokens.drafter import LinearMaskTokensDrafter, MaskTokensDrafter
from recserve.drafters.mask_tokens.files import load_mask_tokens
from recserve.drafters.mask_tokens.gated_lora import MaskRows
from recserve.models.attention import DenseAttention
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.mask_tokens import MaskTokensRecipe, MaskTokensTrainee
from tests.support.drafter_training import (
    ROWS,
    WINDOW,
    accepted_per_draft,
    read_lengths,
    write_lengths,
)
from tests.support.mask_tokens_drafter import mask_network
from tests.support.shared_folders import shared_folder

HELD_OUT = 20
OPTIONS = TrainOptions(device="cpu", precision="float32")
RECIPE = MaskTokensRecipe(
    num_masks=3,
    rank=8,
    alpha=16.0,
    blocks=10,
    window=WINDOW,
    batch=16,
    validation_rows=20,
    schedule=Schedule(10, 1e-2, weight_decay=0.0, averaging=0.0),
)


@pytest.fixture(scope="module")
def trained(model, text) -> Path:
    """The folder of trained mask tokens."""

    def make(folder: Path) -> None:
        cut = (ROWS - HELD_OUT) * WINDOW
        report = MaskTokensTrainee.train_on(model, text[:cut], text[cut:], folder, OPTIONS, RECIPE)
        write_lengths(folder, report)

    return shared_folder("trained-mask-tokens", make)


@torch.inference_mode()
def test_a_packed_pass_is_many_passes(model, text):
    """Each block's states are those of the prefix followed by its masks, and nothing else."""
    trainee = MaskTokensTrainee(RECIPE, model, text, text, seed=3)
    trainee.model = network = mask_network(model, masks=3)
    ends = torch.tensor([0, 2, 3, 11])
    states = trainee.states(trainee.train[:2], ends)
    plain = model(states.tokens, torch.arange(WINDOW), DenseAttention())
    torch.testing.assert_close(states.anchors, plain, rtol=1e-4, atol=1e-4)
    for place, end in enumerate(ends.tolist()):
        row = torch.cat([states.tokens[:, : end + 1], torch.zeros(2, 3, dtype=torch.long)], 1)
        numbers = torch.tensor([-1] * (end + 1) + [0, 1, 2])
        masks = MaskRows(network.lora, numbers)
        alone = masks.forward(model, row, torch.arange(end + 4), DenseAttention())[:, -3:]
        torch.testing.assert_close(states.given[:, place], alone, rtol=1e-4, atol=1e-4)
        assert states.labels[place].tolist() == [end + 1, end + 2, end + 3]


def test_the_target_gets_no_gradient(model, text):
    trainee = MaskTokensTrainee(RECIPE, model, text, text, seed=3)
    trainee.loss(np.arange(2)).total.backward()
    assert all(weight.grad is None for weight in model.parameters())
    grads = {name: weight.grad for name, weight in trainee.model.named_parameters()}
    # The updates begin as zero, so their matrices A have a gradient of zero in the first step.
    assert all(grad is not None for grad in grads.values())
    assert grads["lora.layers.0.qkv.ups.0"].any() and grads["sampler.0.linear.weight"].any()


@pytest.mark.slow
def test_training_makes_drafts_longer(model, text, trained):
    cut = (ROWS - HELD_OUT) * WINDOW
    fresh = MaskTokensTrainee(RECIPE, model, text[:cut], text[cut:], seed=0).model
    before = accepted_per_draft(model, MaskTokensDrafter(fresh.requires_grad_(False).eval(), model))
    first, last = read_lengths(trained)
    assert last > first
    network = load_mask_tokens(trained, model)
    quadratic = accepted_per_draft(model, MaskTokensDrafter(network, model))
    assert quadratic > before + 0.3
    # A rejection costs the linear layout a step without a draft.
    linear = accepted_per_draft(model, LinearMaskTokensDrafter(network, model))
    assert 0 < linear < quadratic


@pytest.mark.slow
def test_older_mask_tokens_are_the_start(model, text, trained, tmp_path):
    """The target was trained again: its old masks are a better start than new ones."""
    cut = (ROWS - HELD_OUT) * WINDOW
    later = copy.deepcopy(model)
    torch.manual_seed(0)
    for weight in later.decoder.layers.parameters():
        weight.add_(0.03 * torch.randn(weight.shape))
    once, old = replace(OPTIONS, epochs=1), trained
    reports = [
        MaskTokensTrainee.train_on(later, text[:cut], text[cut:], tmp_path / name, own, RECIPE)
        for name, own in (("new", once), ("healed", replace(once, start_from=old)))
    ]
    assert reports[1].metrics["accept_length"] > reports[0].metrics["accept_length"] + 0.2
    wrong = replace(once, start_from=old)
    with pytest.raises(ValueError, match=f"{old.name}: rank is 8; the new network has 4"):
        MaskTokensTrainee.train_on(
            model, text[:cut], text[cut:], tmp_path / "no", wrong, replace(RECIPE, rank=4)
        )
