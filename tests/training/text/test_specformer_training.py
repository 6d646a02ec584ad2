"""Training of SpecFormer networks: the accumulated loss is the plain one, in constant memory."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from recserve.drafters.specformer.drafter import SpecformerDrafter
from recserve.drafters.specformer.files import load_specformer
from recserve.engine.build import EngineModels, build_engine
from recserve.models.loading import load_language_model
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from recserve.training.options import TrainOptions
from recserve.training.text.drafters.specformer import SpecformerRecipe, SpecformerTrainee
from tests.support.drafter_training import FAST, accepted_per_draft
from tests.support.paths import reference
from tests.support.text_plain import VOCABULARY

WINDOW = 32
OPTIONS = TrainOptions(device="cpu", precision="float32")


def recipe(slots: int = 3, rows: int = 4096, window: int = WINDOW) -> SpecformerRecipe:
    return SpecformerRecipe(slots, rows, window, 8, 16, FAST)


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, 20 * WINDOW)


def written(target, count: int, length: int, temperature: float = 0.5) -> np.ndarray:
    """Returns texts that the target writes, one after another."""
    engine = build_engine(EngineModels(text=target))
    queries = [
        TextQuery(
            np.array([1 + seed % 30]),
            SamplingParams(temperature, max_tokens=length - 1, seed=seed),
        )
        for seed in range(count)
    ]
    answers = engine.run_many(queries)
    texts = [[q.prompt[0], *a.tokens] for q, a in zip(queries, answers, strict=True)]
    return np.array(texts).flatten()


def plain_loss(trainee, batch) -> torch.Tensor:
    """Returns the mean cross-entropy over the slots, all logits at once."""
    context, logits = trainee.context(trainee.train[batch])
    count, slots = len(batch), trainee.recipe.num_slots
    states = trainee.model.slots(context).unflatten(0, (count, -1))
    wanted, total = logits.unflatten(0, (count, -1)).softmax(-1), 0.0
    for slot in range(slots):
        said = trainee.target.logits(trainee.target.decoder.norm(states[:, : -1 - slot, slot]))
        total += -(wanted[:, 1 + slot :] * said.log_softmax(-1)).sum(-1).mean() / slots
    return total


def gradients(trainee, loss) -> dict[str, torch.Tensor]:
    trainee.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in trainee.model.named_parameters()}


@pytest.mark.parametrize("rows", [4096, 60, 1])
def test_the_accumulated_gradient_is_the_plain_one(rows, model, noise):
    trainee = SpecformerTrainee(recipe(5, rows), model, noise, noise, seed=1)
    batch = np.array([3, 0, 7])
    found = trainee.loss(batch)
    expected = plain_loss(trainee, batch)
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(trainee, 3 * found.total), gradients(trainee, 3 * expected)
    for name, own in ours.items():
        torch.testing.assert_close(own, theirs[name], rtol=1e-5, atol=1e-5, msg=name)
        assert own.abs().max() > 1e-4, name
    assert found.parts["slot_4"] > 0 and found.targets == 3 * WINDOW


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for backward passes, without weights.

    Attributes:
        live: Bytes that are kept now.
        peak: Most bytes that were kept at one time.
    """

    def __init__(self, weights) -> None:
        self.live = self.peak = 0
        self.weights = {w.untyped_storage().data_ptr() for w in weights}
        super().__init__(self._keep, lambda kept: kept.tensor)

    def _keep(self, tensor):
        return _Kept(tensor, self)


class _Kept:
    def __init__(self, tensor, counter) -> None:
        storage = tensor.untyped_storage()
        weight = storage.data_ptr() in counter.weights
        self.tensor, self.counter = tensor, counter
        self.size = 0 if weight else tensor.numel() * tensor.element_size()
        counter.live += self.size
        counter.peak = max(counter.peak, counter.live)

    def __del__(self) -> None:
        self.counter.live -= self.size


def saved_bytes(trainee, loss) -> int:
    """Returns the most bytes kept while a loss and its gradient are computed."""
    weights = [*trainee.model.parameters(), *trainee.target.parameters()]
    counter = SavedBytes(weights)
    with counter:
        trainee.model.zero_grad()
        loss().backward()
    return counter.peak


def test_memory_does_not_grow_with_the_draft_length(model, noise):
    batch, peaks, plain = np.arange(8), [], []
    for slots in (4, 8, 16):
        trainee = SpecformerTrainee(recipe(slots, 128), model, noise, noise, seed=1)
        # The gradients of the weights are kept too; the positional ones grow with the weights.
        weights = sum(p.numel() * 4 for p in trainee.model.parameters())
        peaks.append(saved_bytes(trainee, lambda: trainee.loss(batch).total) - weights)  # noqa: B023
        plain.append(saved_bytes(trainee, lambda: plain_loss(trainee, batch)))  # noqa: B023
    assert peaks[2] <= peaks[1] <= peaks[0]
    assert plain[2] > 1.6 * plain[1] > 2.5 * plain[0]
    assert peaks[0] < plain[0] / 3


@pytest.mark.slow
def test_a_trained_network_accepts_more_than_chance(tmp_path):
    """On a published model, compared with the best guess that reads nothing."""
    target = load_language_model(reference("stories260k"))
    text = written(target, 120, 64)
    cut = 104 * 64
    own = SpecformerRecipe(3, 4096, 64, 8, 16, replace(FAST, epochs=5))
    torch.manual_seed(0)
    fresh = SpecformerTrainee(own, target, text[:cut], text[cut:], seed=0)
    fresh.model.requires_grad_(False).eval()
    prompts = [np.array([1 + n]) for n in range(40, 46)]
    before = accepted_per_draft(target, SpecformerDrafter(fresh.model, target), prompts)
    report = SpecformerTrainee.train_on(target, text[:cut], text[cut:], tmp_path, OPTIONS, own)
    metrics = report.metrics
    assert set(metrics) == {"accept_length", "slot_0", "slot_1", "slot_2"}
    constant = np.bincount(text[cut:]).max() / len(text[cut:])
    assert metrics["slot_0"] > 2 * constant and metrics["slot_2"] > constant
    assert metrics["accept_length"] > 2 * constant
    drafter = SpecformerDrafter(load_specformer(tmp_path, target), target)
    assert accepted_per_draft(target, drafter, prompts) > before + 0.4


@pytest.mark.slow
def test_an_older_network_is_the_start(model, tmp_path):
    """The target was trained again: its old head is a better start than a new one."""
    text = written(model, 120, WINDOW, 0.3)
    train, valid, one = text[: 100 * WINDOW], text[100 * WINDOW :], recipe()
    SpecformerTrainee.train_on(model, train, valid, tmp_path / "old", OPTIONS, one)
    later = copy.deepcopy(model)
    for weight in later.decoder.layers.parameters():
        weight.add_(0.03 * torch.randn(weight.shape))
    options = replace(OPTIONS, epochs=1)
    starts = {"new": options, "healed": replace(options, start_from=tmp_path / "old")}
    found = {
        name: SpecformerTrainee.train_on(later, train, valid, tmp_path / name, own, one).metrics
        for name, own in starts.items()
    }
    assert found["healed"]["accept_length"] > found["new"]["accept_length"] + 0.1
    with pytest.raises(ValueError, match="old: num_slots is 3; the new network has 4"):
        SpecformerTrainee.train_on(
            model, train, valid, tmp_path / "no", starts["healed"], recipe(4)
        )


def test_validation_measures_only_positions_with_all_labels(model, noise):
    """A network that always says token 7 is right where the target says it."""

    class Sevens(nn.Module):
        def forward(self, states):
            return torch.eye(VOCABULARY)[7].expand(*states.shape[:-1], -1)

    target = copy.deepcopy(model)
    trainee = SpecformerTrainee(recipe(4), target, noise, noise, seed=1)
    said = trainee.context(trainee.valid[:16])[1].argmax(-1).view(16, WINDOW)
    right = torch.stack([said[:, 1 + n : WINDOW - 4 + n] == 7 for n in range(4)]).float()
    trainee.slot_loss.logits = Sevens()
    metrics = trainee.validate()
    for slot in range(4):
        assert metrics[f"slot_{slot}"] == pytest.approx(float(right[slot].mean()))
    assert metrics["accept_length"] == pytest.approx(float(right.cumprod(0).sum(0).mean()))


def test_a_window_too_short_for_the_slots_is_refused(model, noise):
    with pytest.raises(ValueError, match="window is 8; 7 slots need at least 9"):
        SpecformerTrainee(recipe(7, window=8), model, noise, noise, seed=0)
