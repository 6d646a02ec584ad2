from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from recserve.bundle.bundle import Bundle
from recserve.training.optimizers import build_optimizers
from recserve.training.recommender.recommender import ITEMS, RecommenderRecipe, RecommenderTrainee
from recserve.training.schedule import Schedule
from tests.support.tiny_bundle import shared_bundle

SMALL = replace(ITEMS, hidden_size=16, num_heads=2, num_layers=1, intermediate_size=32)


def weights(recipe: RecommenderRecipe) -> dict[str, Tensor]:
    bundle = Bundle.open(shared_bundle())
    trainee = RecommenderTrainee(recipe, bundle.catalog(), bundle.events(), 0, torch.device("cpu"))
    return {name: p.detach() for name, p in trainee.model.named_parameters()}


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
