from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from recserve.bundle.bundle import Bundle
from recserve.evaluation.accuracy import ranks_of, slate_metrics
from recserve.evaluation.slates import SlateOptions, Slates, dense_log_p
from recserve.models.recommender import Recommender
from recserve.training.optimizers import build_optimizers
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import (
    ITEMS,
    ITEMS_MASKED,
    PARALLEL,
    RecommenderRecipe,
    RecommenderTrainee,
    train_recommender,
)
from recserve.training.schedule import Schedule
from tests.support.tiny_bundle import shared_bundle

SMALL = replace(ITEMS, hidden_size=16, num_heads=2, num_layers=1, intermediate_size=32)


def trainee_of(recipe: RecommenderRecipe) -> RecommenderTrainee:
    bundle = Bundle.open(shared_bundle())
    return RecommenderTrainee(recipe, bundle.catalog(), bundle.events(), 0, torch.device("cpu"))


def weights(recipe: RecommenderRecipe) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in trainee_of(recipe).model.named_parameters()}


def test_input_scale_is_in_the_weights_of_the_input() -> None:
    plain, scaled = weights(replace(SMALL, scale_input=False)), weights(SMALL)
    larger = {name for name in plain if not torch.equal(plain[name], scaled[name])}
    assert larger == {"tokens.weight", "ids.weight", "vector_projection.weight"}
    for name in larger:
        torch.testing.assert_close(scaled[name], 4 * plain[name])


def test_a_tied_model_has_no_scaled_input() -> None:
    with pytest.raises(ValueError, match="tied and scale_input are set; choose one"):
        replace(SMALL, tied=True)


class Product(nn.Module):
    """A table that is read with a factor."""

    def __init__(self, start: Tensor, factor: float) -> None:
        super().__init__()
        self.ids, self.factor = nn.Embedding.from_pretrained(start.clone(), freeze=False), factor

    def forward(self) -> Tensor:
        read = self.ids.weight * self.factor
        return ((read - torch.arange(6.0).reshape(2, 3)) ** 2).sum()


@pytest.mark.parametrize("size, scale", [(16, 4.0), (64, 8.0)])
def test_a_scaled_rate_learns_like_a_scaled_input(size: int, scale: float) -> None:
    """Twenty steps of AdamW with weight decay: table * scale and a scaled table stay equal."""
    start = torch.tensor([[0.1, -0.2, 0.3], [0.4, 0.1, -0.1]])
    recipe = replace(SMALL, hidden_size=size, schedule=Schedule(1, 0.05, weight_decay=0.3))
    assert recipe.input_scale == scale
    factor, rate = Product(start, scale), Product(start * scale, 1.0)
    for model, schedule in ((factor, recipe.schedule), (rate, recipe.scaled_schedule())):
        (optimizer,) = build_optimizers(model, schedule)
        for group in optimizer.param_groups:  # as the loop sets it at each step
            group["lr"] = schedule.learning_rate * group["rate"]
        for _ in range(20):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    torch.testing.assert_close(rate.ids.weight, factor.ids.weight * scale, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(rate.ids.weight, start * scale, atol=0.1)


def dense_figures(trainee: RecommenderTrainee) -> dict[str, float]:
    """Metrics of the dense head's ranking without the history, case by case."""
    cases = trainee.cases
    scores = dense_log_p(trainee.model, trainee.codes, cases, np.arange(len(cases)))
    for case, row in enumerate(scores):
        row[cases.history(case)] = -np.inf
    return slate_metrics(ranks_of(np.argsort(-scores, axis=1)[:, :10], cases.held), (10,))


def beam_figures(trainee: RecommenderTrainee) -> dict[str, float]:
    """Metrics of served slates with the history in them."""
    answers = Slates(trainee.model, trainee.trie, trainee.codes)
    options = SlateOptions(width=20, filtered=False)
    made = answers(trainee.cases, np.arange(len(trainee.cases)), 10, options)
    return slate_metrics(ranks_of(made, trainee.cases.held), (10,))


@pytest.mark.parametrize(
    "weight, figures", [(2.0, dense_figures), (0.0, beam_figures)], ids=["reranks", "beam alone"]
)
def test_validation_measures_what_weighs_most(
    weight: float, figures: Callable[[RecommenderTrainee], dict[str, float]]
) -> None:
    """The dense head's ranking of all items if it reranks, and else the served slates."""
    trainee = trainee_of(replace(SMALL, rerank_weight=weight))
    trainee.model.eval()
    with torch.no_grad():
        assert trainee.validate() == pytest.approx(figures(trainee))
    assert dense_figures(trainee) != beam_figures(trainee)


def test_a_model_without_beams_does_not_rerank() -> None:
    with_dense_head = replace(PARALLEL.objective, dense_weight=2.0)
    assert not replace(PARALLEL, objective=with_dense_head, rerank_weight=2.0).reranks


@pytest.mark.parametrize("recipe", [ITEMS, ITEMS_MASKED], ids=["items", "masked"])
def test_falling_validation_does_not_end_the_schedule(
    recipe: RecommenderRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate falls to its end in any case. The best epoch is kept."""
    figures = iter([0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    monkeypatch.setattr(RecommenderTrainee, "validate", lambda self: {"ndcg@10": next(figures)})
    small = replace(
        recipe,
        hidden_size=32,
        num_heads=2,
        num_layers=1,
        intermediate_size=32,
        schedule=replace(recipe.schedule, epochs=6),
    )
    text = StringIO()
    options = TrainOptions(device="cpu", precision="float32")
    bundle = Bundle.open(Path(shutil.copytree(shared_bundle(), tmp_path / "bundle")))
    report = train_recommender(bundle, options, small, Console(file=text, width=200))
    assert (report.epochs, report.stopped, report.best_epoch) == (6, "epochs", 1)
    assert "history bonus: links" in text.getvalue() and "auto, seen items" in text.getvalue()


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (2, 0)])
def test_items_are_embedded_alike_in_training(shape: tuple[int, ...]) -> None:
    """The same bits as outside of it, and the same gradients."""
    model: Recommender = trainee_of(SMALL).model
    rows = torch.randint(model.num_bound_items, shape, generator=torch.Generator().manual_seed(1))
    upper = torch.randn(*shape, 16, generator=torch.Generator().manual_seed(2))
    found = []
    for training in (True, False):
        model.train(training)
        model.zero_grad()
        embedded = model.embed_items(rows)
        embedded.backward(upper)
        found.append((embedded.detach(), model.tokens.weight.grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)
