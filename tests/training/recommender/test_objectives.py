from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.kernels.trie.trie import Trie, build_trie
from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.recommender import Recommender
from recserve.training.recommender.full_softmax import full_softmax_loss
from recserve.training.recommender.history_trees import HistoryTrees
from recserve.training.recommender.objectives import (
    Objective,
    node_paths,
    sampled_softmax_loss,
    tree_losses,
)

SIZES = (3, 4, 2)
CODES = np.array([[0, 0, 0], [0, 1, 0], [1, 2, 0], [1, 2, 1], [2, 0, 0], [2, 3, 1]])
OFFSETS = np.array([0, 3, 4, 9])
ROWS = np.array([0, 2, 4, 5, 1, 3, 0, 5, 2], dtype=np.int32)


def trie() -> Trie:
    return build_trie(torch.from_numpy(CODES), SIZES)


def build(input: str, normalization: str, **values: object) -> Recommender:
    torch.manual_seed(0)
    decoder = DecoderConfig(16, 2, 2, 1, 8, 32)
    values = {"num_items": 6, "id_embedding": True, "dense_head": True, **values}
    if input == "codes":
        values |= {"id_embedding": False, "dense_head": False}
    config = RecommenderConfig(decoder, SIZES, input, normalization, **values)
    model = Recommender(config)
    for parameter in model.parameters():  # far from uniform, so that mistakes show
        torch.nn.init.normal_(parameter, std=0.3)
    model.bind_items(torch.from_numpy(CODES))
    return model.eval()


def history_tokens(model: Recommender, history: list[int]) -> list[int]:
    if model.config.input == "items":
        return [0, *(model.config.num_code_tokens + row for row in history)]
    return [0, *itertools.chain(*(model.item_tokens[row].tolist() for row in history))]


def next_log_p(
    model: Recommender, tokens: list[int], prefix: list[int], hide: set[int]
) -> torch.Tensor:
    """Log-probabilities of the codes after a prefix, one sequence at a time, by the definition."""
    level = len(prefix)
    offsets = model.config.level_offsets
    whole = torch.tensor([[*tokens, *(offsets[i] + code for i, code in enumerate(prefix))]])
    hidden = model(whole, torch.arange(whole.shape[1]), DenseAttention())[:, -1]
    if model.config.normalization == "vocabulary":
        start = offsets[level]
        return model.full_logits(hidden).log_softmax(-1)[0, start : start + SIZES[level]]
    alive = {
        int(c[level]) for r, c in enumerate(CODES) if list(c[:level]) == prefix and r not in hide
    }
    logits = model.level_logits(hidden, level)[0]
    keep = torch.tensor([code in alive for code in range(SIZES[level])])
    return logits.masked_fill(~keep, -torch.inf).log_softmax(-1)


def item_log_p(model: Recommender, history: list[int], row: int, hide: set[int]) -> torch.Tensor:
    tokens = history_tokens(model, history)
    codes = CODES[row].tolist()
    levels = (next_log_p(model, tokens, codes[:level], hide)[codes[level]] for level in range(3))
    return sum(levels, torch.zeros(()))


def trees_of(model: Recommender) -> HistoryTrees:
    return HistoryTrees(OFFSETS, ROWS, CODES, trie(), model.config)


@pytest.mark.parametrize("mask_seen", [False, True], ids=["kept", "masked"])
@pytest.mark.parametrize("normalization", ["children", "vocabulary"])
@pytest.mark.parametrize("input", ["items", "codes"])
def test_one_pass_equals_one_sequence_per_target(
    input: str, normalization: str, mask_seen: bool
) -> None:
    """All targets of a padded batch of trees, against each item scored by itself."""
    model = build(input, normalization)
    batch = trees_of(model).batch(np.array([0, 2, 1]))
    objective = Objective(mask_seen=mask_seen)
    with torch.no_grad():
        got = tree_losses(model, trie(), node_paths(trie()), batch, objective).parts["levels"]
        expected = 0.0
        for first, last in itertools.pairwise(OFFSETS):
            for step in range(first, last):
                history = ROWS[first:step].tolist()
                hide = {row for row in history if row != ROWS[step]} if mask_seen else set()
                expected -= float(item_log_p(model, history, int(ROWS[step]), hide))
    assert float(got) == pytest.approx(expected / len(ROWS), rel=1e-5)


def test_level_heads_alone_learn_from_a_trunk_without_branches() -> None:
    """All targets of a padded batch, against each level of each item by itself; the trunk learns
    too."""
    model = build(
        "items",
        "children",
        dense_head=False,
        level_heads=True,
        level_temperature=0.2,
        autoregressive=False,
    )
    batch = trees_of(model).batch(np.array([0, 2, 1]))
    assert batch.tokens.numel() == 3 * 5 and not batch.target_nodes.numel()
    losses = tree_losses(model, trie(), node_paths(trie()), batch, Objective(heads_weight=1.0))
    assert set(losses.parts) == {"heads"}
    expected = 0.0
    for first, last in itertools.pairwise(OFFSETS):
        for step in range(first, last):
            tokens = torch.tensor([history_tokens(model, ROWS[first:step].tolist())])
            hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())[:, -1]
            for level, code in enumerate(CODES[ROWS[step]]):
                log_p = model.parallel_logits(hidden, level).log_softmax(-1)
                expected -= float(log_p[0, int(code)].detach()) / len(SIZES)
    assert losses.total.item() == pytest.approx(expected / len(ROWS), rel=1e-5)
    losses.total.backward()
    assert model.decoder.layers[0].qkv.weight.grad.abs().max() > 0


def test_tree_of_a_history_looks_as_drawn() -> None:
    """User 1 has one event, item 5 = (2, 3, 1): level 2 has one child, so the branch stops after
    two codes."""
    model = build("items", "children")
    batch = trees_of(model).batch(np.array([1]))
    # Item 5: root has 3 children, prefix (2) has 2, prefix (2, 3) has one: codes 2 is the only
    # branch node.
    assert batch.tokens.tolist() == [[0, 3]]
    assert batch.ends.tolist() == [[2, 2]]
    assert batch.target_levels.tolist() == [0, 1]
    assert batch.target_nodes.tolist() == [0, 1]


def test_long_history_is_cut_and_every_event_is_a_target_once() -> None:
    model = build("items", "children", max_history_items=2)
    data = trees_of(model)
    assert np.diff(data.step_starts).tolist() == [3, 1, 3, 2]
    batches = [data.batch(trees) for trees in data.epoch(0, 0, 10)]
    rows = torch.cat([batch.trunk_rows for batch in batches])
    assert sorted(rows.tolist()) == sorted(ROWS.tolist())
    assert all(batch.tokens.numel() <= 10 or batch.tokens.shape[0] == 1 for batch in batches)


def test_epoch_order_depends_on_seed_and_epoch_only() -> None:
    config = build("items", "children").config
    data = HistoryTrees(np.arange(51), np.arange(50, dtype=np.int32) % 6, CODES, trie(), config)
    orders = [
        [t.tolist() for t in data.epoch(s, e, 1)] for s, e in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] == orders[1]
    assert len({str(order) for order in orders}) == 3


def test_no_event_is_refused() -> None:
    model = build("items", "children")
    with pytest.raises(ValueError, match="no event to train on"):
        HistoryTrees(np.array([0]), ROWS[:0], CODES, trie(), model.config)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_full_softmax_in_chunks_equals_cross_entropy(chunk: int) -> None:
    torch.manual_seed(0)
    query, items = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    targets = torch.tensor([0, 3, 3, 10, 9, 1, 2])
    hidden = torch.tensor([[0, 4], [0, 5], [3, 0], [6, 10]])
    logits = query @ items.T
    out = torch.zeros_like(logits, dtype=torch.bool)
    out[hidden[:, 0], hidden[:, 1]] = True
    wanted = torch.nn.functional.cross_entropy(
        logits.masked_fill(out, -torch.inf), targets, reduction="sum"
    )
    got = full_softmax_loss(query, items, targets, hidden, chunk)
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(2 * loss, (query, items)) for loss in (wanted, got)]
    torch.testing.assert_close(grads[1], grads[0])


def test_dense_loss_hides_what_was_seen_before() -> None:
    model = build("items", "children")
    batch = trees_of(model).batch(np.array([0]))
    with torch.no_grad():
        got = tree_losses(
            model, trie(), node_paths(trie()), batch, Objective(dense_weight=1.0)
        ).parts["dense"]
        expected = 0.0
        for step in range(3):
            tokens = torch.tensor([history_tokens(model, ROWS[:step].tolist())])
            hidden = model(tokens, torch.arange(step + 1), DenseAttention())[:, -1]
            scores = model.dense_scores(hidden)[0]
            scores[ROWS[:step]] = -torch.inf
            expected -= float(scores.log_softmax(-1)[ROWS[step]])
    assert float(got) == pytest.approx(expected / 3, rel=1e-5)


def test_sampled_softmax_estimates_the_full_one() -> None:
    """300 items, 20,000 drawn with replacement: each is drawn 67 times on average, error under 1
    %."""
    torch.manual_seed(0)
    codes = torch.cartesian_prod(*(torch.arange(size) for size in (10, 10, 3)))
    decoder = DecoderConfig(16, 1, 2, 2, 8, 32)
    model = Recommender(RecommenderConfig(decoder, (10, 10, 3), dense_head=True))
    model.bind_items(codes)
    torch.nn.init.normal_(model.tokens.weight)
    query = model.dense_query_rows(torch.randn(5, 16)) / 4
    targets = torch.tensor([0, 7, 7, 299, 150])
    hidden = torch.tensor([[0, 4], [0, 5], [4, 0]])
    objective = Objective(dense_negatives=20_000)
    with torch.no_grad():
        wanted = full_softmax_loss(query, model.dense_item_rows(), targets, hidden)
        got = sampled_softmax_loss(model, query, targets, hidden, objective)
        unmasked = sampled_softmax_loss(model, query, targets, hidden[:0], objective)
    assert got.item() == pytest.approx(wanted.item(), rel=0.01)
    assert unmasked.item() > got.item()


def test_heads_learn_without_touching_the_trunk() -> None:
    model = build("items", "children", level_heads=True)
    batch = trees_of(model).batch(np.array([0, 2]))
    objective = replace(Objective(), heads_weight=1.0)
    with_heads = tree_losses(model, trie(), node_paths(trie()), batch, objective).total
    without = tree_losses(model, trie(), node_paths(trie()), batch, Objective()).total
    parameters = [p for n, p in model.named_parameters() if n.startswith("decoder")]
    assert with_heads.item() > without.item()
    grads = [torch.autograd.grad(loss, parameters) for loss in (with_heads, without)]
    torch.testing.assert_close(grads[0], grads[1])
    head = model.level_heads[1].linear.weight
    assert (
        torch.autograd.grad(
            tree_losses(model, trie(), node_paths(trie()), batch, objective).total, head
        )[0]
        .abs()
        .sum()
        > 0
    )


@pytest.mark.parametrize("kind", ["children", "vocabulary", "heads", "dense", "sampled"])
def test_each_target_counts_its_weight(kind: str) -> None:
    """Losses and gradients with weights, against a sum over targets that count alone."""
    levels = kind not in ("heads", "dense", "sampled")
    model = build(
        "items",
        kind if levels else "children",
        level_heads=kind == "heads",
        autoregressive=kind != "heads",
    )
    objective = Objective(
        label_smoothing=0.1,
        mask_seen=False,
        dense_weight=1.0 if kind in ("dense", "sampled") else 0.0,
        dense_negatives=1 if kind == "sampled" else 16_384,
    )
    plain = trees_of(model)
    trees, parameters = np.array([0, 2, 1]), list(model.parameters())
    name = kind if kind in ("heads", "dense") else "dense" if kind == "sampled" else "levels"

    def losses(weights: np.ndarray | None) -> tuple[float, list[torch.Tensor | None]]:
        data = HistoryTrees(OFFSETS, ROWS, CODES, trie(), model.config, weights)
        torch.manual_seed(0)
        found = tree_losses(model, trie(), node_paths(trie()), data.batch(trees), objective)
        grads = torch.autograd.grad(found.total, parameters, allow_unused=True)
        return float(found.parts[name]), list(grads)

    rows = plain.batch(trees).trunk_rows
    weights = np.random.default_rng(3).uniform(0, 3, len(ROWS)).astype(np.float32)
    alone = [losses(np.eye(len(ROWS), dtype=np.float32)[event]) for event in range(len(ROWS))]
    got, grads = losses(weights)
    expected = sum(float(w) * one for w, (one, _) in zip(weights, alone, strict=True))
    assert got == pytest.approx(expected, rel=1e-4)
    every, _ = losses(None)
    assert sum(one for one, _ in alone) == pytest.approx(every, rel=1e-4)
    for place, grad in enumerate(grads):
        if grad is not None:
            parts = [float(w) * one[1][place] for w, one in zip(weights, alone, strict=True)]
            torch.testing.assert_close(grad, torch.stack(parts).sum(0), atol=1e-5, rtol=1e-3)
    # The weight of an event belongs to its own target.
    data = HistoryTrees(OFFSETS, ROWS, CODES, trie(), model.config, ROWS.astype(np.float32))
    batch = data.batch(trees)
    assert torch.equal(batch.trunk_weights, rows.float())
    assert torch.equal(batch.target_weights, batch.target_rows.float())
