"""Training of Hydra's and Medusa's heads: trained heads draft longer, and old heads heal."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.engine.build import EngineModels, build_engine
from recserve.models.attention import DenseAttention
from recserve.models.drafters.hydra import Hydra
from recserve.models.drafters.hydra_files import load_hydra
from recserve.models.loading import load_language_model
from recserve.speculation.completion import TextQuery
from recserve.speculation.drafters.hydra import HydraDrafter
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.hydra import HydraRecipe, HydraTrainee, train_hydra
from recserve.training.text.drafters.medusa import MedusaRecipe, train_medusa
from tests.support.paths import reference

WINDOW, ROWS, CUT = 32, 160, 140
FAST = Schedule(6, 1e-2, weight_decay=0.0, averaging=0.0)
OPTIONS = TrainOptions(device="cpu", precision="float32")


@pytest.fixture(scope="module")
def model():
    return load_language_model(reference("stories260k"), torch.float32)


@pytest.fixture(scope="module")
def text(model) -> np.ndarray:
    """What the target writes by itself, many rows side by side."""
    tokens, draws = torch.ones(ROWS, 1, dtype=torch.int64), torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for _ in range(WINDOW - 1):
            hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())
            shares = (model.logits(hidden[:, -1]) / 0.7).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=draws)], 1)
    return tokens.flatten().numpy()


def recipe(prefix: bool = False) -> HydraRecipe:
    return HydraRecipe(3, 2, prefix, WINDOW, 10, 20, FAST)


def accepted(model, network: Hydra) -> float:
    """Returns accepted tokens per draft, and checks that the texts are the plain ones."""
    drafter = HydraDrafter(network, model, width=3, num_nodes=9)
    engine = build_engine(EngineModels(text=model, drafters={"hydra": drafter}))
    params = SamplingParams(temperature=0.0, max_tokens=30)
    prompts = [np.array([1, 403, 407, 261, 378][:n]) for n in range(2, 6)]
    plain = engine.run_many([TextQuery(p, params) for p in prompts])
    drafted = engine.run_many([TextQuery(p, params, Speculation("hydra")) for p in prompts])
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    counts = [answer.counts for answer in drafted]
    return sum(c.num_accepted_tokens for c in counts) / sum(c.num_drafts for c in counts)


@pytest.mark.parametrize("prefix", [False, True], ids=["hydra", "hydra++"])
def test_training_makes_drafts_longer(prefix, model, text, tmp_path):
    own, split = recipe(prefix), CUT * WINDOW
    fresh = HydraTrainee(own, model, text[:split], text[split:], seed=0).model
    before = accepted(model, fresh.requires_grad_(False).eval())
    report = train_hydra(model, text[:split], text[split:], tmp_path, OPTIONS, own)
    assert report.metrics["accept_length"] > report.history[0].metrics["accept_length"]
    assert set(report.metrics) == {"accept_length", "head_0", "head_1", "head_2"}
    assert accepted(model, load_hydra(tmp_path, model)) > before + 0.3


@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_older_heads_are_the_start(kind, model, text, tmp_path):
    """The target was trained again: its old heads are a better start than new ones."""
    train, one = train_hydra, recipe()
    other = replace(one, num_layers=1)
    if kind == "medusa":
        train, one = train_medusa, MedusaRecipe(3, 1, WINDOW, 10, 20, FAST)
        other = replace(one, num_layers=2)
    texts = text[: CUT * WINDOW], text[CUT * WINDOW :]
    train(model, *texts, tmp_path / "old", OPTIONS, one)
    later = copy.deepcopy(model)
    draws = torch.Generator().manual_seed(0)
    for weight in later.decoder.layers.parameters():
        weight.add_(0.01 * torch.randn(weight.shape, generator=draws))
    short = replace(OPTIONS, epochs=1)
    healing = replace(short, start_from=tmp_path / "old")
    found = {
        name: train(later, *texts, tmp_path / name, options, one).metrics["accept_length"]
        for name, options in (("new", short), ("healed", healing))
    }
    assert found["healed"] > found["new"]
    with pytest.raises(ValueError, match="old holds .*; the new heads are"):
        train(model, *texts, tmp_path / "no", healing, other)
