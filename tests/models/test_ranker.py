"""The ranker network: a candidate's score is its own, the mask is MTGR's, weights survive disks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from recserve.kernels.tree import TokenTree, chain, root_branch
from recserve.models.attention import DenseSiluAttention
from recserve.models.inputs import NodeInputs
from recserve.models.ranker import (
    CANDIDATE,
    LONG,
    PROFILE,
    RECENT,
    Ranker,
    RankerConfig,
    load_ranker,
    node_inputs,
    save_ranker,
)

ITEMS, VECTOR, DENSE = 50, 12, 7
SHARED, RECENTS = 4, 5
PREFIX = SHARED + RECENTS
TOLERANCE = 1e-5


def make_ranker(seed: int = 0, **changes: object) -> Ranker:
    torch.manual_seed(seed)
    config = RankerConfig(
        ITEMS, VECTOR, DENSE, num_types=3, hidden_size=24, num_heads=2, head_dim=8, normalizer=8.0
    )
    model = Ranker(replace(config, **changes))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    model.bind_items(torch.randn(ITEMS + 5, VECTOR))
    return model.eval()


def rows(n: int, group: int, position: int | None = None, seed: int = 0) -> NodeInputs:
    noise = torch.Generator().manual_seed(seed)
    return NodeInputs(
        torch.randint(0, ITEMS + 5, (n,), generator=noise),
        torch.full((n,), group),
        torch.randint(0, 4, (n,), generator=noise),
        torch.arange(n) if position is None else torch.full((n,), position),
        torch.randn(n, DENSE, generator=noise),
    )


def make_prefix(seed: int = 0) -> NodeInputs:
    return NodeInputs.cat(
        [rows(1, PROFILE, 0, seed), rows(SHARED - 1, LONG, None, seed), rows(RECENTS, RECENT)]
    )


def visible(limits: Tensor) -> Tensor:
    index = torch.arange(limits.shape[0])
    return (index < limits[:, None]) | (index[:, None] == index)


def prefix_sees() -> Tensor:
    return torch.arange(1, PREFIX + 1).clamp(min=SHARED)


def score(model: Ranker, prefix: NodeInputs, candidates: NodeInputs, limits: Tensor) -> Tensor:
    """All in one dense pass, [M, tasks]."""
    inputs = NodeInputs.cat([prefix, candidates])
    mask = visible(torch.cat([prefix_sees(), limits]))[None, None]
    attend = DenseSiluAttention(mask, model.config.normalizer)
    with torch.no_grad():
        groups = inputs.groups[None]
        hidden = model(model.embed(inputs)[None], groups, attend)
        return model.heads(hidden[0, len(prefix) :])


@pytest.mark.parametrize("count", [63, 781, pytest.param(4096, marks=pytest.mark.slow)])
def test_candidate_alone_scores_as_in_company_in_any_order(count: int) -> None:
    model, prefix = make_ranker(), make_prefix()
    candidates = rows(count, CANDIDATE, PREFIX, seed=1)
    limits = torch.randint(SHARED, PREFIX + 1, (count,), generator=torch.Generator().manual_seed(2))
    together = score(model, prefix, candidates, limits)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    shuffled = score(model, prefix, candidates.select(order), limits[order])
    torch.testing.assert_close(shuffled, together[order], atol=TOLERANCE, rtol=0)
    for i in (0, count // 2, count - 1):
        alone = score(model, prefix, candidates.select(slice(i, i + 1)), limits[i : i + 1])
        torch.testing.assert_close(alone, together[i : i + 1], atol=TOLERANCE, rtol=0)
    assert together.std(0).min() > 0.01


def test_normaliser_that_counts_rows_would_break_independence() -> None:
    """The control: with N rows in the divisor, as in the paper, company changes the score.

    The norm after the attention hides most of a divisor; its epsilon lets through what is left.
    """
    model, prefix = make_ranker(), make_prefix()
    candidates, limits = rows(2000, CANDIDATE, PREFIX, seed=1), torch.full((2000,), PREFIX)

    def by_length(count: int) -> Tensor:
        inputs = NodeInputs.cat([prefix, candidates.select(slice(0, count))])
        mask = visible(torch.cat([prefix_sees(), limits[:count]]))[None, None]
        attend = DenseSiluAttention(mask, float(len(inputs)))
        with torch.no_grad():
            hidden = model(model.embed(inputs)[None], inputs.groups[None], attend)
            return model.heads(hidden[0, PREFIX : PREFIX + 1])

    assert (by_length(1) - by_length(2000)).abs().max() > 100 * TOLERANCE


def test_candidate_sees_no_event_after_its_exposure() -> None:
    model, prefix = make_ranker(), make_prefix()
    candidate = rows(1, CANDIDATE, PREFIX, seed=1)
    limits = torch.tensor([SHARED + 2])
    before = score(model, prefix, candidate, limits)
    tokens = prefix.tokens.clone()
    tokens[SHARED + 2] = (tokens[SHARED + 2] + 1) % ITEMS
    late = score(model, replace(prefix, tokens=tokens), candidate, limits)
    torch.testing.assert_close(late, before, atol=0, rtol=0)
    tokens = prefix.tokens.clone()
    tokens[SHARED + 1] = (tokens[SHARED + 1] + 1) % ITEMS
    early = score(model, replace(prefix, tokens=tokens), candidate, limits)
    assert (early - before).abs().max() > 1e-3


def test_long_history_sees_itself_both_ways_and_no_recent_event() -> None:
    model, prefix = make_ranker(), make_prefix()

    def hidden(inputs: NodeInputs) -> Tensor:
        attend = DenseSiluAttention(visible(prefix_sees())[None, None], 8.0)
        with torch.no_grad():
            return model(model.embed(inputs)[None], inputs.groups[None], attend)[0]

    before = hidden(prefix)

    def changed(place: int) -> Tensor:
        tokens = prefix.tokens.clone()
        tokens[place] = (tokens[place] + 1) % ITEMS
        return ((hidden(replace(prefix, tokens=tokens)) - before).abs().amax(1) > 1e-6).nonzero()[
            :, 0
        ]

    assert changed(SHARED - 1).tolist() == list(range(PREFIX))
    assert changed(SHARED + 2).tolist() == list(range(SHARED + 2, PREFIX))


def test_limits_say_the_same_as_the_token_tree() -> None:
    """Prefix: chain with `shared`; candidates: branches with `prefix_limits`. One mask, twice."""
    prefix = replace(chain(torch.arange(PREFIX)), shared=torch.tensor([SHARED]))
    limits = torch.tensor([SHARED, PREFIX, SHARED + 3])
    branches = root_branch(torch.arange(3), torch.arange(4))
    tree: TokenTree = replace(branches, prefix_limits=limits)
    whole = torch.zeros(PREFIX + 3, PREFIX + 3, dtype=torch.bool)
    whole[:PREFIX, :PREFIX] = prefix.dense_mask()
    whole[PREFIX:, :PREFIX] = torch.arange(PREFIX) < tree.prefix_limits[:, None]
    whole[PREFIX:, PREFIX:] = tree.dense_mask()
    assert torch.equal(whole, visible(torch.cat([prefix_sees(), limits])))


@dataclass
class CachedPrefix:
    """Two-step attention: candidates read the prefix's kept keys and values, and their own."""

    model: Ranker
    limits: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        normalizer = self.model.config.normalizer
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = key, value
            return DenseSiluAttention(visible(prefix_sees())[None, None], normalizer)(
                layer, query, key, value
            )
        scale = query.shape[-1] ** -0.5
        prefix = torch.einsum("bmhd,bnhd->bhmn", query, self.keys[layer]) * scale
        seen = torch.arange(PREFIX) < self.limits[:, None]
        out = torch.einsum("bhmn,bnhd->bmhd", prefix * prefix.sigmoid() * seen, self.values[layer])
        own = (query * key).sum(-1, keepdim=True) * scale
        return (out + own * own.sigmoid() * value) / normalizer


def test_prefix_computed_once_gives_the_same_scores() -> None:
    model, prefix = make_ranker(), make_prefix()
    candidates, limits = (
        rows(20, CANDIDATE, PREFIX, seed=1),
        torch.arange(20) % (RECENTS + 1) + SHARED,
    )
    attend = CachedPrefix(model, limits)
    with torch.no_grad():
        model(model.embed(prefix)[None], prefix.groups[None], attend)
        hidden = model(model.embed(candidates)[None], candidates.groups[None], attend)
        cached = model.heads(hidden[0])
    expected = score(model, prefix, candidates, limits)
    torch.testing.assert_close(cached, expected, atol=TOLERANCE, rtol=0)


def test_each_group_has_norms_of_its_own() -> None:
    model = make_ranker().train()
    candidates = rows(6, CANDIDATE, PREFIX, seed=1)
    attend = DenseSiluAttention(torch.eye(6, dtype=torch.bool)[None, None], 8.0)
    hidden = model(model.embed(candidates)[None], candidates.groups[None], attend)
    model.heads(hidden).sum().backward()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.gain", "norm.bias")):
            assert parameter.grad is not None
            used = parameter.grad.abs().sum(1) > 0
            assert used.tolist() == [False, False, False, True], name


def test_profile_row_ignores_its_token() -> None:
    model, prefix = make_ranker(), make_prefix()
    tokens = prefix.tokens.clone()
    tokens[0] = (tokens[0] + 1) % ITEMS
    with torch.no_grad():
        embedded = model.embed(prefix)
        again = model.embed(replace(prefix, tokens=tokens))
    assert torch.equal(embedded, again)


def test_saved_ranker_scores_the_same_and_takes_new_items(tmp_path) -> None:
    model, prefix = make_ranker(), make_prefix()
    model.fit_dense(torch.randn(DENSE), torch.rand(DENSE))
    save_ranker(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_ranker(tmp_path, model.item_vectors.numpy())
    assert loaded.config == model.config
    candidates, limits = rows(30, CANDIDATE, PREFIX, seed=1), torch.full((30,), PREFIX)
    assert (candidates.tokens >= ITEMS).any()
    expected = score(model, prefix, candidates, limits)
    got = score(loaded, prefix, candidates, limits)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_frozen_items_go_when_training_goes_on() -> None:
    model = make_ranker()
    model.freeze_items()
    assert model.item_table is not None and model.item_table.shape == (ITEMS + 5, 24)
    assert model.train().item_table is None


def test_new_catalogue_is_bound_without_touching_known_items() -> None:
    model = make_ranker()
    model.freeze_items()
    old, table = model.item_vectors, model.item_table
    model.bind_items(torch.cat([old, torch.randn(3, VECTOR)]))
    assert table is not None and model.item_table is not None
    assert model.item_table.shape == (ITEMS + 8, 24)
    torch.testing.assert_close(model.item_table[: ITEMS + 5], table)


def test_id_dropout_makes_items_live_on_their_vector() -> None:
    model = make_ranker(id_dropout=0.999999, dropout=0.0).train()
    candidates = rows(8, CANDIDATE, PREFIX, seed=1)
    with torch.no_grad():
        dropped = model.embed(candidates)
        model.id_embedding.weight.zero_()
        torch.testing.assert_close(model.eval().embed(candidates), dropped)


def test_damaged_or_misfit_files_are_refused(tmp_path) -> None:
    model = make_ranker()
    save_ranker(model, tmp_path)
    with pytest.raises(ValueError, match=r"shape \(55, 3\); expected \[I, 12\]"):
        load_ranker(tmp_path, np.zeros((55, 3), np.float32))
    with pytest.raises(
        ValueError, match="got 10 item vectors; the model was trained with 50 items"
    ):
        load_ranker(tmp_path, np.zeros((10, VECTOR), np.float32))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(ValueError, match="does not fit its config.json: id_embedding.weight"):
        load_ranker(tmp_path, model.item_vectors)
    (tmp_path / "config.json").write_text(json.dumps(config | {"colour": 1}))
    with pytest.raises(ValueError, match="colour"):
        load_ranker(tmp_path, model.item_vectors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:100])
    with pytest.raises(ValueError, match="no usable ranker"):
        load_ranker(tmp_path, model.item_vectors)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_items": 0}, r"num_items is 0; it must be in 1\.\."),
        ({"head_dim": -1}, r"head_dim is -1; it must be in 1\.\."),
        ({"dropout": 1.0}, r"dropout is 1.0; it must be in \[0, 1\)"),
        ({"normalizer": 0.0}, "normalizer is 0.0; it must be above 0"),
        ({"tasks": ("click", "click")}, "name at least one, each once"),
    ],
)
def test_config_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RankerConfig(ITEMS, VECTOR, DENSE), **change)  # type: ignore[arg-type]


def test_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match="needs tokens, groups, types, times and dense"):
        make_ranker().embed(NodeInputs(torch.zeros(3, dtype=torch.int64)))


def test_numpy_columns_become_tensors() -> None:
    inputs = node_inputs({"tokens": np.arange(3), "dense": np.ones((3, 2), np.float32)})
    assert (
        inputs.tokens.tolist() == [0, 1, 2] and inputs.dense is not None and inputs.groups is None
    )


def test_appended_items_are_those_of_a_ranker_bound_to_all():
    torch.manual_seed(0)
    config = RankerConfig(num_items=10, vector_size=6, dense_size=3)
    live, whole = Ranker(config).eval(), Ranker(config).eval()
    whole.load_state_dict(live.state_dict())
    vectors = torch.randn(2000, 6)
    whole.bind_items(vectors)
    whole.freeze_items()
    live.bind_items(vectors[:12])
    with pytest.raises(ValueError, match="freeze_items"):
        live.append_items(vectors[12:], torch.full((1988,), -1))
    live.freeze_items()
    learned = torch.full((1988,), -1)
    rows = (7, 0, 9, 10, 11)  # the first, the last, and bound items without an embedding
    learned[1:6] = torch.tensor(rows)
    for first, last in ((12, 15), (15, 2000)):
        live.append_items(vectors[first:last], learned[first - 12 : last - 12])
    expected = whole.item_table.clone()
    for item, row in enumerate(rows, 13):
        if row < config.num_items:
            expected[item] += live.id_embedding.weight.detach()[row]
    assert live.num_bound_items == 2000
    torch.testing.assert_close(live.item_table[:2000], expected)
    torch.testing.assert_close(live.item_vectors[:2000], vectors)
