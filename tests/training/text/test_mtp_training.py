"""Training of MTP modules: unrolled steps are drafts, and trained drafts are longer."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from recserve.drafters.mtp.drafter import MtpDrafter
from recserve.drafters.mtp.files import load_mtp, save_mtp
from recserve.training.options import TrainOptions
from recserve.training.text.drafters.eagle import EagleRecipe
from recserve.training.text.drafters.mtp import MtpTrainee
from tests.support.drafter_training import FAST, ROWS, WINDOW, accepted_per_draft
from tests.support.published_mtp import Published

RECIPE = EagleRecipe("mtp", 3, None, WINDOW, 16, 20, FAST)
OPTIONS = TrainOptions(device="cpu", precision="float32")


@torch.inference_mode()
def test_an_unrolled_step_is_a_draft(model, text, tmp_path):
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


def mtp_drafter(network, model) -> MtpDrafter:
    return MtpDrafter(network, model, width=3, depth=3, num_nodes=12)


@pytest.mark.slow
def test_training_makes_drafts_longer(model, text, tmp_path):
    cut = (ROWS - 20) * WINDOW
    fresh = MtpTrainee(RECIPE, model, text[:cut], text[cut:], seed=0).model.requires_grad_(False)
    before = accepted_per_draft(model, mtp_drafter(fresh.eval(), model))
    report = MtpTrainee.train_on(model, text[:cut], text[cut:], tmp_path, OPTIONS, RECIPE)
    assert report.metrics["accept_length"] > report.history[0].metrics["accept_length"]
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 1
    assert accepted_per_draft(model, mtp_drafter(load_mtp(tmp_path, model), model)) > before + 0.3
    healed = replace(OPTIONS, epochs=1, start_from=tmp_path)
    again = MtpTrainee.train_on(model, text[:cut], text[cut:], tmp_path / "again", healed, RECIPE)
    assert again.metrics["accept_length"] > report.history[0].metrics["accept_length"]
