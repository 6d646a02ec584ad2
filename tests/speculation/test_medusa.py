"""Medusa: guesses and trees, heads that know the text, heads that are trained."""

import numpy as np
import pytest
import torch

from recserve.drafters.medusa.drafter import MedusaDrafter
from recserve.drafters.medusa.files import load_accuracies
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.drafters.none import NoDrafter
from recserve.drafters.registry import (
    build_drafter,
    check_speculation,
)
from recserve.drafters.shared.rank_tree import rank_tree
from recserve.kernels.acceptance.noise import gumbel
from recserve.models.attention import DenseAttention
from recserve.speculation.draft import Budget
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.medusa import MedusaRecipe, MedusaTrainee
from tests.support.medusa_heads import E, K, V, context, drawn_heads
from tests.support.text_loop import check_draft, generate, tiny_model


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_are_the_ranked_guesses_of_each_head(temperature):
    """Ranks by logit, or by logit + temperature x the target's noise; kinds of requests mixed."""
    heads = drawn_heads()
    own = ((1,), (0,), (0, 2), (0, 2, 1))
    drafter = MedusaDrafter(heads, E, V)
    contexts = [
        context(torch.randn(E), temperature * (i != 2), i, i, tree=own if i % 2 else None)
        for i in range(4)
    ]
    contexts.append(context(None, id=9))
    budgets = [Budget(30, 9), Budget(30, 9), Budget(7, 2), Budget(3, 9), Budget(30, 9)]
    drafts = drafter.propose(contexts, budgets)
    assert len(drafts[4]) == 0 and len(drafts[1]) == 4 and len(drafts[0]) == 24
    for each, budget, draft in zip(contexts[:4], budgets, drafts, strict=False):
        check_draft(draft, budget, V)
        shape = rank_tree(each.speculation.tree or drafter.tree.paths).within(budget)
        for k in range(draft.depth):
            logits = heads(each.hidden[None])[k, 0]
            noise = gumbel(torch.tensor([each.params.seed]), torch.tensor([3 + k]), V)[0]
            ranked = (logits + noise * each.params.temperature).argsort(descending=True)
            for path, token in zip(shape.paths, draft.tokens.tolist(), strict=True):
                if len(path) == k + 1:
                    assert token == int(ranked[path[-1]])


def test_a_small_vocabulary_has_few_ranks():
    drafter = MedusaDrafter(drawn_heads(vocab_size=3), E, 3)
    assert drafter.tree.width == 3
    draft = drafter.propose([context(torch.ones(E), 0.7)], [Budget(30, 9)])[0]
    check_draft(draft, Budget(30, 9), 3)


def test_rules_for_chains_get_the_best_chain():
    heads = drawn_heads()
    draft = MedusaDrafter(heads, E, V).propose(
        [context(torch.ones(E), verifier="block")], [Budget(30, 9)]
    )[0]
    assert draft.depth == len(draft) == K
    assert draft.tokens.tolist() == heads(torch.ones(1, E)).argmax(-1)[:, 0].tolist()


def test_a_request_s_tree_must_fit_the_heads():
    drafter = MedusaDrafter(drawn_heads(), E, V)
    check_speculation(Speculation("medusa", tree=((0,), (0, 0))), drafter, True)
    for tree, message in (
        (((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)), "4 levels .* has 3 Medusa heads"),
        (((29,),), "ranks up to 29"),
        (((0, 1),), "not its parent"),
    ):
        with pytest.raises(ValueError, match=message):
            check_speculation(Speculation("medusa", tree=tree), drafter, True)
        with pytest.raises(ValueError, match=message):
            drafter.propose([context(torch.ones(E), tree=tree)], [Budget(9, 9)])


@torch.inference_mode()
def test_heads_that_know_the_text_are_accepted_whole():
    """Every token is followed by the next one up; head k says the one k + 2 up."""
    model = tiny_model()
    for weight in model.decoder.layers.parameters():
        weight.zero_()
    table = torch.randn(V, E, generator=torch.Generator().manual_seed(0)).double()
    model.tokens.weight.copy_(table)
    after = model.decoder.norm(table) * 4
    model.head.weight.copy_(after.roll(1, 0))
    heads = MedusaHeads(MedusaConfig(E, V, K)).double()
    heads.start_from(model)
    for k, output in enumerate(heads.outputs):
        output.weight.copy_(after.roll(k + 2, 0))
    params = SamplingParams(0.0, max_tokens=41)
    plain = generate(model, [[3, 4]], params, NoDrafter())[0]
    drafter = MedusaDrafter(heads, E, V)
    written = generate(model, [[3, 4]], params, drafter)[0]
    assert written.tokens == plain.tokens
    # The loop knows no hidden state before its first step, so that one has no draft.
    assert written.lengths == [0] + [K] * 10


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_is_the_plain_text(temperature):
    model = tiny_model()
    params = SamplingParams(temperature, seed=3, max_tokens=30)
    prompts = [[1, 2, 3], [5]]
    plain = generate(model, prompts, params, NoDrafter())
    heads = drawn_heads().double()
    for start in (False, True):
        if start:
            heads.start_from(model)
        written = generate(model, prompts, params, MedusaDrafter(heads, E, V))
        assert [w.tokens for w in written] == [w.tokens for w in plain]


@torch.inference_mode()
def own_text(model, rows: int, length: int) -> np.ndarray:
    """What a model writes by itself, many texts side by side."""
    tokens = torch.arange(rows)[:, None] % V
    g = torch.Generator().manual_seed(1)
    for _ in range(length - 1):
        hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())
        drawn = torch.multinomial((model.logits(hidden[:, -1]) / 0.5).softmax(-1), 1, generator=g)
        tokens = torch.cat([tokens, drawn], 1)
    return tokens.flatten().numpy()


@pytest.mark.slow
def test_training_makes_drafts_longer(tmp_path):
    model = tiny_model().float()
    text = own_text(model, 240, 32)
    recipe = MedusaRecipe(3, 1, 32, 16, 40, Schedule(12, 1e-2, weight_decay=0.0, averaging=0.0))
    report = MedusaTrainee.train_on(
        model,
        text[: 200 * 32],
        text[200 * 32 :],
        tmp_path,
        TrainOptions(device="cpu", precision="float32"),
        recipe,
    )
    accuracies = load_accuracies(tmp_path)
    assert len(accuracies) == 3 and len(accuracies[0]) == 10
    assert report.metrics["head_0"] == pytest.approx(accuracies[0][0], abs=1e-5)
    assert report.metrics["accept_length"] > report.history[0].metrics["accept_length"]
    trained = build_drafter("medusa", model, [tmp_path])
    fresh = MedusaHeads(trained.heads.config)
    fresh.start_from(model)
    params = SamplingParams(0.0, max_tokens=40)
    prompts = [[i] for i in range(8)]
    plain = generate(model.double(), prompts, params, NoDrafter())
    lengths = []
    for drafter in (MedusaDrafter(fresh, E, V, trained.tree), trained):
        written = generate(model, prompts, params, drafter)
        assert [w.tokens for w in written] == [w.tokens for w in plain]
        lengths.append(sum(w.mean_length for w in written) / len(written))
    assert lengths[1] > lengths[0] + 0.3 and lengths[1] > 1.0, lengths
    with pytest.raises(ValueError, match="needs at least a window of 32"):
        MedusaTrainee.train_on(model, text[:10], text, tmp_path, TrainOptions(), recipe)
