"""The self-draft head learns its target: divergence falls, more answers are proved in one round."""

import shutil

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_bundle import tiny_bundle

from recserve.bundle import Bundle, BundleError
from recserve.kernels.trie import build_trie
from recserve.models.attention import DenseAttention
from recserve.models.drafters.nezha import SelfDraftConfig, SelfDraftHead, load_self_draft
from recserve.models.recommender import load_recommender
from recserve.training.data import HistoryTrees
from recserve.training.drafters import DrafterRecipe, divergence, train_drafter
from recserve.training.loop import Schedule
from recserve.training.objectives import node_paths
from recserve.training.options import TrainOptions

QUIET = Console(quiet=True)


def test_training_lowers_the_divergence_and_keeps_the_head(tmp_path):
    bundle = Bundle.open(tiny_bundle(tmp_path))
    recipe = DrafterRecipe(2048, 20, 10, Schedule(6, 1e-2))
    report = train_drafter(bundle, TrainOptions(device="cpu"), recipe, QUIET)
    losses = [record.losses["divergence"] for record in report.history]
    assert losses[-1] < 0.8 * losses[0]
    opened = Bundle.open(bundle.root)
    opened.verify()
    assert opened.has("drafters/nezha")
    assert opened.manifest.model_version == bundle.manifest.model_version
    codes = torch.from_numpy(opened.catalog().index.codes.astype(np.int64))
    target = load_recommender(
        opened.directory("recommender"), codes, torch.from_numpy(opened.catalog().vectors)
    )
    assert load_self_draft(opened.directory("drafters/nezha"), target).config.hidden_size == 32


def test_divergence_is_zero_only_for_the_target_itself(tmp_path):
    """A head whose logits are made the target's own has divergence 0; a drawn one has more."""
    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False))
    catalog = bundle.catalog()
    codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
    target = load_recommender(
        bundle.directory("recommender"), codes, torch.from_numpy(catalog.vectors)
    )
    trie = build_trie(codes, target.config.codebook_sizes)
    events = bundle.events().leave_one_out().train
    trees = HistoryTrees(events.offsets, events.item_rows, catalog.index.codes, trie, target.config)
    batch = trees.batch(np.arange(20))
    paths = node_paths(trie)
    with torch.no_grad():
        hidden = target(batch.tokens, batch.positions, DenseAttention(batch.mask())).flatten(0, 1)
        head = SelfDraftHead(SelfDraftConfig(32, target.config.codebook_sizes))
        assert divergence(head, target, trie, paths, batch, hidden) > 0.1

        class Same(SelfDraftHead):
            def step(self, level, state, tokens):
                return state

            def level_logits(self, root, state, level):
                nodes = batch.target_nodes[batch.target_levels == level]
                return target.level_logits(hidden[nodes], level)

        same = Same(head.config)
        assert divergence(same, target, trie, paths, batch, hidden).abs() < 1e-3


def test_a_bundle_without_a_recommender_is_refused(tmp_path):
    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False, recommender=False))
    with pytest.raises(BundleError, match="no recommender"):
        train_drafter(bundle, TrainOptions(device="cpu"))
    shutil.rmtree(tmp_path)
