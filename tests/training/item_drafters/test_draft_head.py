"""The self-draft heads learn, the recommender stays as it is, the bundle keeps the heads."""

import hashlib
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from recserve.bundle.bundle import Bundle, BundleError
from recserve.cli import app
from recserve.kernels.trie.trie import build_trie
from recserve.models.attention import DenseAttention
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead, load_self_draft
from recserve.models.recommender import load_recommender
from recserve.training.item_drafters.draft_head import DrafterRecipe, train_drafter
from recserve.training.item_drafters.draft_head_loss import TargetStates, head_loss, read
from recserve.training.options import TrainOptions
from recserve.training.recommender.history_trees import HistoryTrees
from recserve.training.recommender.objectives import node_paths
from recserve.training.schedule import Schedule
from tests.support.tiny_bundle import tiny_bundle

QUIET = Console(quiet=True)


def load_target(bundle):
    catalog = bundle.catalog()
    codes = torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64))
    target = load_recommender(
        bundle.directory("recommender"), codes, torch.from_numpy(catalog.vectors)
    )
    return target, build_trie(codes, target.config.codebook_sizes)


def some_trees(bundle, target, trie):
    events = bundle.events().leave_one_out().train
    codes = bundle.catalog().semantic_ids.codes
    trees = HistoryTrees(events.offsets, events.item_rows, codes, trie, target.config)
    return trees.batch(np.arange(20))


@pytest.mark.parametrize("name", ["speculative", "nezha"])
def test_training_lowers_the_losses_and_keeps_the_head(tmp_path, name):
    bundle = Bundle.open(tiny_bundle(tmp_path))
    version = bundle.manifest.model_version
    weights = bundle.directory("recommender") / "model.safetensors"
    before = hashlib.sha256(weights.read_bytes()).hexdigest()
    nezha = name == "nezha"
    rates = (("tokens.", 4.0), ("cells.", 2.0)) if nezha else ()
    recipe = DrafterRecipe(2048, 20, 10, float(nezha), Schedule(6, 1e-2, rates=rates))
    report = train_drafter(bundle, TrainOptions(device="cpu", name=name), recipe, QUIET)
    part = "surprise" if nezha else "divergence"
    losses = [record.losses[part] for record in report.history]
    assert losses[-1] < 0.9 * losses[0]
    opened = Bundle.open(bundle.root)
    opened.verify()
    assert opened.has(f"drafters/{name}")
    assert opened.manifest.model_version == bundle.manifest.model_version != version
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == before
    target, _ = load_target(opened)
    head = load_self_draft(opened.directory(f"drafters/{name}"), target)
    assert head.config.hidden_size == 32 and head.config.placeholders == nezha


@pytest.mark.parametrize("form", ["items", "codes"])
def test_placeholders_see_the_history_before_them_and_nothing_else(tmp_path, form):
    """A batch of trees gives each predicted item what a plain forward of its own history gives."""
    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False))
    target, trie = load_target(bundle)
    if form == "codes":
        config = {**target.config.to_dict(), "decoder": target.config.decoder}
        config |= {"input": "codes", "vector_dim": 0, "id_embedding": False, "dense_head": False}
        codes = torch.from_numpy(bundle.catalog().semantic_ids.codes.astype(np.int64))
        target = type(target)(type(target.config)(**config)).eval()
        target.bind_items(codes)
    trees = some_trees(bundle, target, trie)
    head = SelfDraftHead(SelfDraftConfig(32, target.config.codebook_sizes, True))
    contexts = read(head, target, trees).contexts
    assert contexts.shape[:2] == (len(trees.trunk_rows), target.config.num_levels)
    for item in range(0, len(trees.trunk_rows), 17):
        tree, node = divmod(int(trees.trunk_nodes[item]), trees.tokens.shape[1])
        seen = [n for n in range(node + 1) if int(trees.ends[tree, n]) > node]
        x = torch.cat([target.embed(trees.tokens[tree, seen]), head.placeholders])
        hidden = target.decoder(x[None], torch.arange(len(x))[None], DenseAttention())[0]
        torch.testing.assert_close(hidden[len(seen) :], contexts[item], atol=1e-4, rtol=1e-4)


def test_gradients_reach_the_head_and_not_the_target(tmp_path):
    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False))
    target, trie = load_target(bundle)
    target.requires_grad_(False)
    trees = some_trees(bundle, target, trie)
    head = SelfDraftHead(SelfDraftConfig(32, target.config.codebook_sizes, True))
    sums = head_loss(head, target, trie, node_paths(trie), trees, read(head, target, trees))
    (sums.divergence + sums.surprise).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in head.parameters())
    assert all(weight.grad is None for weight in target.parameters())


def test_divergence_is_zero_only_for_the_target_itself(tmp_path):
    """A head whose logits are made the target's own has divergence 0; a drawn one has more."""
    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False))
    target, trie = load_target(bundle)
    trees = some_trees(bundle, target, trie)
    paths = node_paths(trie)
    with torch.no_grad():
        head = SelfDraftHead(SelfDraftConfig(32, target.config.codebook_sizes))
        reading = read(head, target, trees)
        assert head_loss(head, target, trie, paths, trees, reading).divergence > 0.1

        class Same(SelfDraftHead):
            def step(self, level, state, codes):
                return state

            def level_logits(self, context, state, level):
                nodes = trees.target_nodes[trees.target_levels == level]
                return target.level_logits(reading.hidden[nodes], level)

        same = Same(head.config)
        for contexts in (None, reading.hidden[trees.trunk_nodes, None].expand(-1, 9, -1)):
            given = TargetStates(reading.hidden, contexts)
            assert head_loss(same, target, trie, paths, trees, given).divergence.abs() < 1e-3


def test_surprise_is_what_the_search_says_of_the_true_item(tmp_path):
    """Summed over the levels that cost something, it is minus the log-probability of the item."""
    from recserve.search.beam_search import HeadScores

    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False))
    target, trie = load_target(bundle)
    trees = some_trees(bundle, target, trie)
    head = SelfDraftHead(SelfDraftConfig(32, target.config.codebook_sizes, True)).eval()
    with torch.no_grad():
        reading = read(head, target, trees)
        surprise = head_loss(head, target, trie, node_paths(trie), trees, reading).surprise
        tails = reading.hidden[trees.trunk_nodes]
        owners = torch.arange(len(tails))
        scores = HeadScores(trie, head, tails, reading.contexts)
        found = scores.of_paths(owners, trie.nodes_of_items(trees.trunk_rows))
    torch.testing.assert_close(-found.sum(), surprise, rtol=1e-4, atol=1e-3)


def test_the_command_trains_and_the_evaluation_reads_it(tmp_path):
    bundle = tiny_bundle(tmp_path, ranker=False)
    run = CliRunner().invoke
    train = ["train", "drafter", "--bundle", str(bundle), "--epochs", "1", "--device", "cpu"]
    done = run(app, [*train, "--name", "nezha"])
    assert done.exit_code == 0 and "ndcg@10" in done.output, done.output
    shown = run(app, ["evaluate", "--bundle", str(bundle), "--strategy", "nezha", "--users", "20"])
    assert shown.exit_code == 0 and "nezha" in shown.output, shown.output
    assert run(app, [*train, "--name", "medusa"]).exit_code != 0


def test_a_bundle_without_a_recommender_is_refused(tmp_path):
    bundle = Bundle.open(tiny_bundle(tmp_path, ranker=False, recommender=False))
    with pytest.raises(BundleError, match="no recommender"):
        train_drafter(bundle, TrainOptions(device="cpu"))
    shutil.rmtree(tmp_path)
