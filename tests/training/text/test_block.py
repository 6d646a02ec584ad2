"""Training of block drafters: packed blocks are drafts, and trained drafts are longer."""

import copy
from dataclasses import replace

import pytest
import torch

from recserve.drafters.block.drafter import BlockDrafter
from recserve.drafters.block.files import load_block
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.kernels.tree_batch import Prefixes
from recserve.speculation.drafter import StateSpan, TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.training.options import TrainOptions
from recserve.training.text.drafters.block import BlockTrainee
from recserve.training.text.drafters.block_recipe import BlockRecipe
from tests.support.drafter_training import FAST, ROWS, WINDOW, accepted_per_draft
from tests.support.grids import chosen

KINDS = ("dflash", "jetspec", "dspark", "dflash2")
OPTIONS = TrainOptions(device="cpu", precision="float32")


def recipe(kind: str, **more) -> BlockRecipe:
    sizes = {"layers": 1, "block_size": 4, "rank": 8, "anchors": 8, "window": WINDOW}
    settings = {"batch": 16, "validation_rows": 20, "schedule": FAST}
    return BlockRecipe(kind=kind, **sizes | settings | more)


class Seen:
    """Reads one text into a drafter's pages, and returns what it would draft after each prefix."""

    def __init__(self, network, model, tokens, states):
        self.drafter = BlockDrafter(network, model, num_candidates=4)
        self.engine = build_engine(
            EngineModels(text=model, drafters={"block": self.drafter}),
            EngineConfig(load_aware=False),
        )
        self.tokens, self.states = tokens, states

    def outputs(self, length: int) -> torch.Tensor:
        params, pool = SamplingParams(temperature=0.0), self.drafter.pool
        slots = torch.arange(len(self.tokens)) + pool.page_size
        tokens = self.tokens[:length].tolist()
        context = TextContext(1, tokens, 1, params, Speculation("block"), table=slots[None])
        self.drafter.read([StateSpan(context, 0, self.states[: length - 1])])
        known = Prefixes.of([slots[1:length]])
        return self.drafter.outputs(torch.tensor(tokens[-1:]), known)[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_packed_block_is_a_draft(kind, model, text):
    """The block at anchor a equals the draft after a + 1 committed tokens."""
    trainee = BlockTrainee(recipe(kind, layers=2), model, text, text, seed=3)
    for weight in trainee.model.parameters():
        weight.add_(0.1 * torch.randn(weight.shape))
    tokens, states, _ = trainee._target(trainee.train[:2])
    anchors = torch.tensor([[3, 11, 4], [1, 9, 2]])
    packed = trainee.outputs(tokens, states, anchors)
    for row in range(2):
        seen = Seen(trainee.model, model, tokens[row], states[row])
        for number, anchor in enumerate(anchors[row].tolist()):
            own = seen.outputs(anchor + 1)
            torch.testing.assert_close(packed[row, number], own, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", chosen(KINDS, "jetspec", "dspark"))
def test_training_makes_drafts_longer(kind, model, text, tmp_path):
    own, cut = recipe(kind), (ROWS - 20) * WINDOW
    fresh = BlockTrainee(own, model, text[:cut], text[cut:], seed=0).model.requires_grad_(False)
    before = accepted_per_draft(model, BlockDrafter(fresh.eval(), model, num_nodes=12))
    report = BlockTrainee.train_on(model, text[:cut], text[cut:], tmp_path, OPTIONS, own)
    assert report.metrics["accept_length"] > report.history[0].metrics["accept_length"]
    trained = load_block(tmp_path, model)
    assert trained.config == fresh.config
    drafted = accepted_per_draft(model, BlockDrafter(trained, model, num_nodes=12))
    assert drafted > before + 0.3
    chain = BlockDrafter(trained, model, num_nodes=12)
    assert drafted > accepted_per_draft(model, chain, verifier="block")


def test_an_older_network_is_the_start(model, text, tmp_path):
    """The target was trained again: its old network is a better start than a new one."""
    cut, one = (ROWS - 20) * WINDOW, recipe("dflash")
    BlockTrainee.train_on(model, text[:cut], text[cut:], tmp_path / "old", OPTIONS, one)
    later = copy.deepcopy(model)
    for weight in later.decoder.layers.parameters():
        weight.add_(0.03 * torch.randn(weight.shape))
    options = replace(OPTIONS, epochs=1)
    reports = [
        BlockTrainee.train_on(later, text[:cut], text[cut:], tmp_path / name, own, one)
        for name, own in (
            ("new", options),
            ("healed", replace(options, start_from=tmp_path / "old")),
        )
    ]
    assert reports[1].metrics["accept_length"] > reports[0].metrics["accept_length"] + 0.1
    wrong = replace(options, start_from=tmp_path / "old")
    with pytest.raises(ValueError, match="old: causal is .* the new network has"):
        BlockTrainee.train_on(
            model, text[:cut], text[cut:], tmp_path / "no", wrong, recipe("jetspec")
        )


def test_a_window_shorter_than_a_block_is_refused(model, text):
    with pytest.raises(ValueError, match="window is 4; a block has 8 rows"):
        BlockTrainee(recipe("dflash", window=4, block_size=8), model, text, text, seed=0)
