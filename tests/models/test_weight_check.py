"""A weight that is NaN or infinite is refused when it is loaded, by file and name."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from recserve.bundle.bundle import Bundle
from recserve.models.loading import UnsupportedModel, load_language_model
from recserve.models.saving import save_language_model
from recserve.models.weight_check import is_finite
from recserve.service import Service, ServiceOptions
from recserve.service.text.loader import TextSettings, load_text
from tests.support.text_plain import drawn_model
from tests.support.tiny_bundle import shared_bundle
from tests.support.tiny_llm import tiny_llm

BAD = [float("nan"), float("inf"), -float("inf")]
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 63, 781, 4096])
def test_every_place_is_looked_at(dtype, size):
    weight = torch.linspace(-3, 3, size).to(dtype)
    assert is_finite(weight)
    for value in BAD:
        for place in {0, size // 2, size - 1}:
            bad = weight.clone()
            bad[place] = value
            assert not is_finite(bad)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_numbers_of_a_type_are_finite(dtype):
    """A sum of them is not."""
    most = torch.finfo(dtype).max
    assert is_finite(torch.tensor([most, most, -most], dtype=dtype))


def test_whole_numbers_and_empty_weights_are_finite():
    assert is_finite(torch.arange(3)) and is_finite(torch.empty(0)) and is_finite(torch.empty(3, 0))


def spoil(file, value=float("nan")):
    """One number of the last weight of a file; returns the weight's name."""
    weights = load_file(file)
    name = sorted(n for n, w in weights.items() if w.is_floating_point() and w.numel())[-1]
    weights[name].view(-1)[-1] = value
    save_file(weights, file)
    return name


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    "section", ["recommender", "ranker", "drafters/speculative", "drafters/nezha"]
)
def test_a_bundle_with_such_a_weight_is_not_opened(tmp_path, section, value):
    """The hashes of the manifest are right: the model itself went wrong."""
    folder = tmp_path / "bundle"
    shutil.copytree(shared_bundle(), folder)
    bundle = Bundle.open(folder)
    file = bundle.directory(section) / "model.safetensors"
    name = spoil(file, value)
    bundle.commit(section, {})
    bundle.verify()
    with pytest.raises(ValueError, match="holds NaN or infinity") as caught:
        Service.open(
            folder, f"lmdb:{tmp_path}/store", "cpu", ServiceOptions(journal=tmp_path / "items")
        ).close()
    assert str(caught.value).startswith(f"{file}: {name} holds")


def test_a_weight_that_is_too_large_for_the_type_served_is_refused(tmp_path):
    save_language_model(drawn_model(), tmp_path)
    name = spoil(tmp_path / "model.safetensors", 1e6)
    load_language_model(tmp_path, torch.bfloat16)
    with pytest.raises(UnsupportedModel, match=f"{name} holds NaN or infinity as torch.float16"):
        load_language_model(tmp_path, torch.float16)


def test_a_weight_whose_products_overflow_is_refused(tmp_path):
    save_language_model(drawn_model(), tmp_path)
    name = spoil(tmp_path / "model.safetensors", 3e38)
    with pytest.raises(UnsupportedModel, match=rf"{name} holds a number of size 3e\+38"):
        load_language_model(tmp_path)


def test_a_model_whose_first_logits_are_not_finite_is_not_served(tmp_path):
    """Every weight is allowed, but not their product."""
    folder = tiny_llm(tmp_path / "toy")
    load_text(TextSettings(folder), torch.device("cpu"))
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith(("up_proj.weight", "gate_proj.weight", "down_proj.weight")):
            weights[name] = torch.full_like(weights[name], 1e15)
    save_file(weights, file)
    with pytest.raises(UnsupportedModel, match="computes NaN or infinity after its token 0"):
        load_text(TextSettings(folder), torch.device("cpu"))
