"""Hydra's tree against a plain transcription, which computes every node again without any cache."""

import pytest
import torch

from recserve.models.attention import DenseAttention
from recserve.models.decoder import FINAL_LAYER
from recserve.speculation.drafters.noisy import LEAST_SCALE
from recserve.speculation.sampling_params import Speculation
from tests.speculation.test_eagle import paths_of, queries, recording, target_states
from tests.support.hydra_drafter import hydra
from tests.support.text_engines import PARAMETERS, among_others, engine_for, prompts, shared_model
from tests.support.text_plain import drawn_model


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


def expected_tree(drafter, model, tokens, depth, num_nodes) -> set[tuple[int, ...]]:
    """Returns the paths of the likeliest nodes."""
    network = drafter.network
    states = target_states(model, tokens, drafter.hidden_layers)[:-1]
    if network.prefix is not None:
        positions = torch.arange(len(states))[None]
        states = network.prefix(states[None], positions, DenseAttention())[0]
    found, frontier = {}, [((), 0.0)]
    for level in range(depth):
        below = []
        for path, score in frontier:
            words = model.tokens(torch.tensor([tokens[-1], *path]))
            logits = network.logits(level, torch.cat([states[-1], words.flatten()]))
            best = (logits / LEAST_SCALE).log_softmax(-1).topk(drafter.width)
            below += [
                ((*path, token), score + own)
                for token, own in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        found.update(below)
        frontier = sorted(below, key=lambda node: -node[1])[: drafter.width]
    return set(sorted(found, key=lambda path: -found[path])[:num_nodes])


def assert_as_transcribed(notes, drafter, model, least: int) -> None:
    filled = [note for note in notes if len(note[2])]
    assert len(filled) >= least
    for tokens, budget, draft in filled:
        depth = min(budget.depth, drafter.network.config.num_heads)
        count = min(budget.num_nodes, drafter.num_nodes)
        assert paths_of(draft) == expected_tree(drafter, model, tokens, depth, count)


def renamed(found):
    """Gives queries of EAGLE's tests to this drafter."""
    return [type(q)(q.prompt, q.params, Speculation("hydra")) for q in found]


@pytest.mark.parametrize(
    "fields",
    [{}, {"grounded": False}, {"layer": 1}, {"prefix": True}, {"prefix": True, "layer": 1}],
    ids=["mlp", "independent", "layer-1", "prefix", "prefix-layer-1"],
)
@torch.inference_mode()
def test_drafts_equal_the_transcription(fields, model):
    """Eight texts at once, prompts in chunks."""
    drafter = hydra(model, seed=3, **fields)
    notes = recording(drafter)
    engine = engine_for(model, 300, {"hydra": drafter})
    engine.run_many(renamed(queries(p.tolist() for p in prompts(8))))
    assert_as_transcribed(notes, drafter, model, least=20)


@pytest.mark.parametrize("prefix", [False, True], ids=["mlp", "prefix"])
@torch.inference_mode()
def test_drafts_below_a_cached_prefix_and_after_preemption(prefix, model):
    drafter = hydra(model, seed=5, prefix=prefix)
    engine = engine_for(model, 300, {"hydra": drafter})
    prompt = prompts(1, seed=2, low=18, high=19)[0].tolist()
    (first,) = engine.run_many(renamed(queries([prompt])))
    longer = prompt + first.tokens.tolist()
    notes = recording(drafter)
    for text in (longer + [3, 1], longer[:22], prompt):
        before = len(notes)
        (answer,) = engine.run_many(renamed(queries([text], length=6)))
        assert answer.timing.root_cached >= 16
        assert_as_transcribed(notes[before:], drafter, model, least=1)
    engine = engine_for(model, 16, {"hydra": drafter})
    preempted, preempt = [], engine.schedulers["text"]._preempt
    engine.schedulers["text"]._preempt = lambda s: (preempted.append(s), preempt(s))
    notes.clear()
    engine.run_many(renamed(queries(p.tolist() for p in prompts(6, low=8))))
    assert preempted
    assert_as_transcribed(notes, drafter, model, least=20)


@pytest.mark.parametrize("name", PARAMETERS)
def test_texts_are_the_plain_texts(name):
    """Eight texts at once, under every set of parameters."""
    drafter = hydra(shared_model(), seed=1, layer=FINAL_LAYER, prefix=True)
    requests, wanted = among_others(name, Speculation("hydra"))
    answers = engine_for(shared_model(), drafters={"hydra": drafter}).run_many(requests)
    assert [answer.tokens.tolist() for answer in answers] == wanted
