"""Every kind of draft head, from the training command to the slates of a service."""

import json
import shutil

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from recserve.bundle.bundle import Bundle, BundleError
from recserve.cli import app
from recserve.models.drafters.calibration import DraftPlan
from recserve.models.drafters.prefix_head import NETWORKS
from recserve.schemas.items import ItemsRequest, RecommendRequest, UserRef
from recserve.service import Service
from recserve.training.item_drafters.draft_head import DrafterRecipe, train_drafter
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from tests.support.tiny_bundle import shared_bundle, tiny_bundle

QUIET = Console(quiet=True)
KINDS = [kind for kind in NETWORKS if kind != "recurrent"]


def without_nezha(root, kind):
    """Removes the nezha head from a bundle if it reads placeholders, as this kind does."""
    if kind != "mask_tokens":
        return
    manifest = json.loads((root / "manifest.json").read_text())
    del manifest["sections"]["drafters/nezha"]
    files = manifest["files"]
    manifest["files"] = {k: v for k, v in files.items() if not k.startswith("drafters/nezha")}
    (root / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_divergence(kind, tmp_path):
    root = tiny_bundle(tmp_path, ranker=False)
    without_nezha(root, kind)
    bundle = Bundle.open(root)
    recipe = DrafterRecipe(2048, 20, 10, schedule=Schedule(6, 1e-2))
    report = train_drafter(bundle, TrainOptions(device="cpu", head=kind), recipe, QUIET)
    losses = [record.losses["divergence"] for record in report.history]
    assert losses[-1] < 0.9 * losses[0]
    features = [record.losses.get("features", 0.0) for record in report.history]
    assert (kind == "eagle") == (0 < features[-1] < 0.9 * features[0])
    opened = Bundle.open(bundle.root)
    opened.verify()
    with pytest.raises(BundleError, match=f"is a {kind} head"):
        train_drafter(bundle, TrainOptions(device="cpu", start_from=bundle.root), recipe, QUIET)


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_drafts_with_a_trained_head(kind, tmp_path):
    """The command trains it; the slates are beam search's, filtered and after a live change."""
    root = tmp_path / "bundle"
    shutil.copytree(shared_bundle(), root)
    without_nezha(root, kind)
    words = ["train", "drafter", "--head", kind, "--bundle", str(root), "--epochs", "1"]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert done.exit_code == 0 and "one_round" in done.output, done.output
    with Service.open(root, f"lmdb:{tmp_path}/store", "cpu") as service:
        strategy = service.runtime.engine._strategies["speculative"]
        assert strategy.head.kind == kind and strategy.head.calibration is not None
        strategy.only = DraftPlan(2.0, 0.0, 0.0, 1.0)  # always draft
        ids = service.runtime.snapshot.catalog.items.ids
        users = [UserRef(id=user) for user in service.samples(3, 3)["users"]]
        for change in (None, [{"item_id": f"new {n}", "title": f"Rose {n}"} for n in range(5)]):
            if change is not None:
                service.put_items(ItemsRequest(items=change))
            for fields in ({}, {"filter": {"in": ["item_id", [*ids[::3], "new 1", "new 3"]]}}):
                for user in users:
                    plain, drafted = (
                        service.recommend(
                            RecommendRequest(user=user, k=10, strategy=name, **fields)
                        )
                        for name in ("beam", "speculative")
                    )
                    assert drafted.exact and drafted.strategy == "speculative"
                    assert [i.item_id for i in drafted.items] == [i.item_id for i in plain.items]
                    np.testing.assert_allclose(
                        [i.score for i in drafted.items], [i.score for i in plain.items], atol=1e-4
                    )


def test_options_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="head is 'oracle'; choose one of"):
        TrainOptions(head="oracle")
    with pytest.raises(ValueError, match="nezha needs a recurrent head"):
        TrainOptions(head="mlp", name="nezha")


def test_mask_tokens_beside_nezha_are_refused(tmp_path):
    """Both would store states of their placeholders with the same cached prefix."""
    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False))
    options = TrainOptions(device="cpu", head="mask_tokens")
    with pytest.raises(BundleError, match="both read placeholders"):
        train_drafter(bundle, options, console=QUIET)
    without_nezha(bundle.root, "mask_tokens")
    bundle = Bundle.open(bundle.root)
    train_drafter(bundle, options, DrafterRecipe(2048, 5, 5, schedule=Schedule(1, 1e-3)), QUIET)
    with pytest.raises(BundleError, match="both read placeholders"):
        train_drafter(bundle, TrainOptions(device="cpu", name="nezha"), console=QUIET)
