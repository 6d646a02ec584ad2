"""Level heads as drafter of `speculative`: the answers of beam search, in torch and in C."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recserve.bundle.bundle import Bundle
from recserve.cli import app
from recserve.core.allowed import AllowedItems
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels import dispatch
from recserve.kernels.cpu import native
from recserve.models.drafters.calibration import Calibration, DraftPlan
from recserve.models.drafters.level_draft import LevelDraftHead
from recserve.models.drafters.prefix_head import load_prefix_head, save_prefix_head
from recserve.models.recommender import Recommender, load_recommender, save_recommender
from recserve.search.recommend_strategy import Heads
from recserve.search.strategies import SpeculativeStrategy
from tests.support.recommenders import CATALOGUES, draw_root, make
from tests.support.tiny_bundle import shared_bundle

SMALL = EngineConfig(kv_bytes=16 * 2**20)
COLLIDING = torch.tensor([[i % 3, i % 2, i // 6] for i in range(60)])
SHAPES = CATALOGUES | {"collisions": COLLIDING}


def joined(codes, temperature=0.0):
    """A recommender with level heads of its own, which were drawn."""
    plain, trie = make(codes, "items", "children")
    fields = {"level_heads": True, "level_temperature": temperature}
    model = Recommender(type(plain.config)(**{**vars(plain.config), **fields}))
    torch.manual_seed(4)
    model.load_state_dict(plain.state_dict(), strict=False)
    for head in model.level_heads:
        torch.nn.init.normal_(head.linear.weight, std=0.3)
    model.bind_items(codes)
    return model.eval(), trie


def asked_of(model, trie):
    """Narrow and wide beams, more items than there are, exclusions, half of the catalogue."""
    rng = np.random.default_rng(0)
    items = trie.num_items
    requests = []
    for i, (k, width) in enumerate(((1, 1), (2, 3), (3, 10), (2 * items, 5), (4, 40))):
        fields = {}
        if i % 2:
            fields["excluded"] = rng.integers(0, items, i)
        if i > 2:
            fields["allowed"] = AllowedItems.of(rng.random(items) < 0.5)
        root = draw_root(model, 1 + 2 * i, i)
        requests.append(SlateQuery(root, trie, k, width, "speculative", **fields))
    return requests


@pytest.mark.parametrize("temperature", [0.0, 0.07], ids=["products", "cosines"])
@pytest.mark.parametrize("codes", SHAPES.values(), ids=SHAPES.keys())
def test_the_answers_are_those_of_beam_search(codes, temperature, monkeypatch):
    """Slates, rounds and nodes are the same in C, where there is a compiler."""
    model, trie = joined(codes, temperature)
    model.pack()
    requests, found = asked_of(model, trie), []
    for path in ("auto", "torch"):
        monkeypatch.setattr(dispatch, "KERNELS", path)
        head = LevelDraftHead(model)
        head.pack()
        assert (head.search is not None) == (path == "auto" and native.library() is not None)
        engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
        slates = engine.run_many(requests)
        plain = engine.run_many([replace(request, strategy="beam") for request in requests])
        for drafted, searched in zip(slates, plain, strict=True):
            assert drafted.exact and drafted.rows.tolist() == searched.rows.tolist()
            np.testing.assert_allclose(drafted.scores, searched.scores, atol=2e-5)
        found.append([(s.rows.tolist(), s.rounds, s.timing.nodes) for s in slates])
    assert found[0] == found[1]


def test_what_is_drafted_is_what_the_heads_think_likely():
    """Of a catalogue in which every level is free, the draft of a wide margin holds the best item
    of the product of all levels, and proves a target that is that product in one round.
    """
    codes = torch.cartesian_prod(*[torch.arange(4)] * 3)
    model, trie = joined(codes)
    head = LevelDraftHead(model)
    root = draw_root(model, 9, 0)
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    engine.offer("speculative", SpeculativeStrategy(model, head, DraftPlan(20.0, 0, 0, 1), False))
    slate = engine.run(SlateQuery(root, trie, 3, 4, "speculative"))
    assert slate.rounds == 1  # 80 of 64 prefixes: nothing could be missing
    tail = torch.randn(2, 32)
    contexts = head.contexts(tail)
    for level in range(3):
        logits = head.level_logits(contexts[:, level], tail, level)
        torch.testing.assert_close(logits, model.parallel_logits(tail, level))


def test_it_is_kept_with_its_calibration(tmp_path):
    model, _ = joined(SHAPES["ordinary"])
    plans = Calibration({(10, 10): (DraftPlan(0.0, 24.0, 2.0, 0.0),)})
    (tmp_path / "model.safetensors").write_bytes(b"of another head")
    save_prefix_head(LevelDraftHead(model, plans), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    loaded = load_prefix_head(tmp_path, model)
    assert isinstance(loaded, LevelDraftHead) and loaded.calibration == plans
    plain, _ = make(SHAPES["ordinary"], "items", "children")
    with pytest.raises(ValueError, match="without level heads"):
        load_prefix_head(tmp_path, plain)
    (tmp_path / "config.json").write_text(json.dumps({"head": "levels", "calibration": {"x/y": 3}}))
    with pytest.raises(ValueError):
        load_prefix_head(tmp_path, model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not the config of a draft head"):
        load_prefix_head(tmp_path, model)


def test_the_command_measures_them(tmp_path):
    """`train drafter --head levels`: refused without level heads; then the bundle serves them."""
    root = tmp_path / "bundle"
    shutil.copytree(shared_bundle(), root)
    command = ["train", "drafter", "--head", "levels", "--bundle", str(root)]
    refused = CliRunner().invoke(app, command)
    assert "without level heads" in str(refused.exception)
    bundle = Bundle.open(root)
    catalog, folder = bundle.catalog(), bundle.directory("recommender")
    codes = torch.from_numpy(catalog.index.codes.astype(np.int64))
    model = load_recommender(folder, codes, torch.from_numpy(catalog.vectors))
    wider = Recommender(type(model.config)(**{**vars(model.config), "level_heads": True}))
    wider.load_state_dict(model.state_dict(), strict=False)
    save_recommender(wider, folder)
    bundle.commit("recommender", {})
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "one_round" in done.output
    opened = Bundle.open(root)
    opened.verify()
    target = load_recommender(folder, codes, torch.from_numpy(catalog.vectors))
    head = load_prefix_head(opened.directory("drafters/speculative"), target)
    assert isinstance(head, LevelDraftHead) and head.calibration is not None
    assert (50, 10) in head.calibration.plans
    nezha = CliRunner().invoke(app, [*command, "--name", "nezha"])
    assert "recurrent" in str(nezha.exception)
