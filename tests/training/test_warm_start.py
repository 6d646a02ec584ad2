"""A head that is trained anew starts from the old bundle's head where that helps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from recserve.bundle.bundle import Bundle, BundleError
from recserve.cli import app
from recserve.models.recommender import load_recommender, save_recommender
from recserve.training.item_drafters.draft_head import DrafterRecipe, train_drafter
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.recommender.retriever import RetrieverRecipe, train_retriever
from recserve.training.schedule import Schedule
from tests.support.grids import chosen
from tests.support.tiny_bundle import tiny_bundle, with_models

QUIET = Console(quiet=True)


def drafted(bundle: Bundle, name: str, epochs: int, old: Path | None = None) -> TrainReport:
    recipe = DrafterRecipe(2048, 20, 10, float(name == "nezha"), Schedule(epochs, 1e-2))
    options = TrainOptions(device="cpu", name=name, start_from=old)
    return train_drafter(bundle, options, recipe, QUIET)


def retrained(old: Path, folder: Path, noise: float) -> Bundle:
    """A copy of a bundle whose recommender has moved, as by training with later events."""
    shutil.copytree(old, folder)
    bundle = Bundle.open(folder)
    model = load_recommender(bundle.directory("recommender"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * weight.std(correction=0) * drawn)
    save_recommender(model, bundle.directory("recommender"))
    bundle.commit("recommender", {})
    return bundle


@pytest.mark.parametrize("name", chosen(("speculative", "nezha"), "nezha"))
def test_an_old_head_starts_at_a_lower_loss_than_a_fresh_one(tmp_path, name):
    old = Bundle.open(tiny_bundle(tmp_path / "old", ranker=False))
    drafted(old, name, epochs=4)
    part = "surprise" if name == "nezha" else "divergence"
    first = {}
    for start in (None, old.root):
        bundle = retrained(old.root, tmp_path / f"new-{start is None}", noise=0.02)
        first[start] = drafted(bundle, name, 1, start).history[0].losses[part]
        recorded = bundle.manifest.sections[f"drafters/{name}"].get("start")
        assert (recorded is None) == (start is None)
    assert first[old.root] < first[None]
    losses = recorded["losses"]
    assert recorded["chosen"] == "old head" and losses["old head"] < losses["fresh"]


def test_a_retriever_starts_from_the_old_one(tmp_path):
    old = Bundle.open(tiny_bundle(tmp_path / "old", ranker=False))
    recipe = RetrieverRecipe(validation_users=20, schedule=Schedule(3, 3e-3))
    train_retriever(old, TrainOptions(device="cpu"), recipe, QUIET)
    bundle = retrained(old.root, tmp_path / "new", noise=0.02)
    train_retriever(bundle, TrainOptions(device="cpu", start_from=old.root), recipe, QUIET)
    start = bundle.manifest.sections["retriever"]["start"]
    assert start["chosen"] == "old head"
    assert start["losses"]["old head"] < start["losses"]["fresh"]


def test_a_head_that_does_not_help_is_not_taken(tmp_path):
    """The old head is untrained, and its recommender has nothing to do with the new one."""
    old = tiny_bundle(tmp_path / "old", ranker=False)
    shutil.copytree(old, tmp_path / "new")
    bundle = Bundle.open(with_models(tmp_path / "new", ranker=False, seed=9))
    drafted(bundle, "speculative", 1, old)
    start = bundle.manifest.sections["drafters/speculative"]["start"]
    assert start["losses"][start["chosen"]] == min(start["losses"].values())
    assert start["losses"]["fresh"] < start["losses"]["old head"]


def test_a_bundle_without_such_a_head_is_refused(tmp_path):
    bare = Bundle.open(tiny_bundle(tmp_path / "bare", ranker=False, recommender=False))
    bundle = Bundle.open(tiny_bundle(tmp_path / "new", ranker=False))
    with pytest.raises(BundleError, match="no drafters/speculative to start from"):
        drafted(bundle, "speculative", 1, bare.root)
    with pytest.raises(BundleError, match="no retriever to start from"):
        train_retriever(bundle, TrainOptions(device="cpu", start_from=bare.root), console=QUIET)


def test_the_command_takes_the_old_bundle(tmp_path):
    old = tiny_bundle(tmp_path / "old", ranker=False)
    shutil.copytree(old, tmp_path / "new")
    words = ["train", "drafter", "--bundle", str(tmp_path / "new"), "--from", str(old)]
    done = CliRunner().invoke(app, [*words, "--epochs", "1", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "start" in Bundle.open(tmp_path / "new").manifest.sections["drafters/speculative"]
