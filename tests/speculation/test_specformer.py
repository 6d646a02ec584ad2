"""SpecFormer: its network against a plain transcription of the paper, its trees against all paths.

The transcription computes a whole text at once, without any cache.
"""

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch

from recserve.drafters.shared.noisy import LEAST_SCALE
from recserve.drafters.shared.rank_tree import rank_tree
from recserve.engine.text_scheduler import TextLimits
from recserve.kernels.acceptance.noise import gumbel
from recserve.models.attention import DenseAttention
from recserve.speculation.completion import SpeculationCounts, TextQuery
from recserve.speculation.draft import Budget, TextDraft
from recserve.speculation.drafter import TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.eagle_transcription import paths_of, rms, rotate, target_states
from tests.support.grids import chosen
from tests.support.specformer_drafter import specformer
from tests.support.text_engines import (
    SPREAD,
    among_others,
    assert_forgotten,
    assert_no_leak,
    engine_for,
    prompts,
    shared_model,
)
from tests.support.text_plain import VOCABULARY, drawn_model


def attended(block, x, network, causal: bool, rotary: bool) -> torch.Tensor:
    """Returns x + attention(norm(x)) of rows x [n, E], written out."""
    c = block.config
    query, key, value = block.qkv(rms(x, block.norm)).split(
        [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim], -1
    )
    query, key, value = (part.view(len(x), -1, c.head_dim) for part in (query, key, value))
    if rotary:
        query, key = rotate(query, network), rotate(key, network)
    group = c.num_heads // c.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, key) * c.head_dim**-0.5
    if causal:
        later = torch.ones(len(x), len(x)).triu(1).bool()
        scores = scores.masked_fill(later, float("-inf"))
    mixed = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value).flatten(1)
    return x + block.output(mixed)


def transcribed(network, model, states) -> torch.Tensor:
    """Returns the logits [n, l_d, V] of the slots of each position, from its states [n, F]."""
    config = network.config
    size = config.decoder.hidden_size
    columns = zip(states.split(size, -1), network.state_norms, strict=True)
    parts = [rms(part, norm) for part, norm in columns]
    x = attended(network.context_attention, network.mix(torch.cat(parts, -1)), network, True, True)
    weight = network.positional.weight.view(config.num_slots, size, size)
    bias = network.positional.bias.view(config.num_slots, size)
    found = []
    for row in rms(x, network.positional_norm):
        slots = torch.stack([w @ row + b for w, b in zip(weight, bias, strict=True)])
        slots = attended(network.slot_attention, slots, network, config.causal, config.causal)
        gate, up = network.gate_up(rms(slots, network.mlp_norm)).chunk(2, -1)
        slots = slots + network.down(gate * torch.sigmoid(gate) * up)
        found.append(model.logits(rms(slots, model.decoder.norm)))
    return torch.stack(found)


def slot_logits(drafter, model, tokens) -> torch.Tensor:
    """Returns the logits [l_d, V] of the slots that draft after `tokens`."""
    states = target_states(model, tokens[:-1], drafter.hidden_layers)
    return transcribed(drafter.network, model, states)[-1]


def best_paths(logits, depth: int, num_nodes: int) -> set[tuple[int, ...]]:
    """Returns the likeliest paths of all, of any length up to `depth`."""
    values = [row.topk(num_nodes) for row in logits[:depth].log_softmax(-1)]
    columns = [list(zip(v.indices.tolist(), v.values.tolist(), strict=True)) for v in values]
    scores = {
        tuple(token for token, _ in path): math.fsum(value for _, value in path)
        for length in range(1, depth + 1)
        for path in product(*columns[:length])
    }
    return set(sorted(scores, key=lambda path: -scores[path])[:num_nodes])


class Note(NamedTuple):
    """A proposal; `output` is the drafter's context at the state before the last token."""

    context: TextContext
    tokens: list[int]
    budget: Budget
    draft: TextDraft
    output: torch.Tensor


def recording(drafter) -> list[Note]:
    """Notes every proposal."""
    notes, propose = [], drafter.propose

    def noted(contexts, budgets):
        drafts = propose(contexts, budgets)
        for context, budget, draft in zip(contexts, budgets, drafts, strict=True):
            known = drafter._contexts_by_row.of(context.table)[context.row].clone()
            notes.append(Note(context, list(context.tokens), budget, draft, known))
        return drafts

    drafter.propose = noted
    return notes


def assert_as_transcribed(notes, drafter, model, least: int) -> None:
    filled = [note for note in notes if len(note.draft)]
    assert len(filled) >= least
    for context, tokens, budget, draft, output in filled:
        states = target_states(model, tokens[:-1], drafter.hidden_layers)[None]
        whole = drafter.network.context(states, torch.arange(len(tokens) - 1), DenseAttention())
        torch.testing.assert_close(output, whole[0, -1], rtol=1e-4, atol=1e-4)
        logits = slot_logits(drafter, model, tokens)
        params = context.params
        if params.temperature:
            places = torch.arange(len(logits)) + len(tokens)
            seeds = torch.full((len(logits),), params.seed)
            logits = logits + params.temperature * gumbel(seeds, places, VOCABULARY)
        depth = min(budget.depth, drafter.network.config.num_slots)
        size = min(budget.num_nodes, drafter.num_nodes)
        scale = max(params.temperature, LEAST_SCALE)
        assert paths_of(draft) == best_paths(logits / scale, depth, size)


def queries(texts, length=14, temperature=0.0, **drafting) -> list[TextQuery]:
    options = Speculation("specformer", **drafting)
    return [
        TextQuery(text, SamplingParams(temperature, max_tokens=length, seed=n), options)
        for n, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


@pytest.mark.parametrize("causal", [False, True], ids=["paper", "released-code"])
@torch.inference_mode()
def test_the_network_equals_the_transcription(causal, model):
    network = specformer(model, seed=1, causal=causal).network
    states = torch.randn(9, 4 * 32)
    context = network.context(states[None], torch.arange(9), DenseAttention())[0]
    logits = model.logits(model.decoder.norm(network.slots(context)))
    torch.testing.assert_close(logits, transcribed(network, model, states), rtol=1e-4, atol=1e-4)
    fewer = network.slots(context, 2)
    torch.testing.assert_close(fewer, network.slots(context)[:, :2], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_slot_sees_the_slots_after_it_unless_the_file_says_otherwise(model):
    """The last slot's bias moves the first slot's state only under the paper's attention."""
    for causal in (False, True):
        network = specformer(model, seed=2, causal=causal).network
        context = torch.randn(3, 32)
        before = network.slots(context)[:, 0]
        network.positional.bias[-32:] += 1
        assert torch.equal(before, network.slots(context)[:, 0]) == causal


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@torch.inference_mode()
def test_drafts_are_the_likeliest_paths(temperature, model):
    """Two texts at once, prompts in chunks, contexts in pages."""
    drafter = specformer(model, seed=3, slots=3)
    notes = recording(drafter)
    engine = engine_for(model, 300, {"specformer": drafter})
    engine.schedulers["text"].limits = TextLimits(prefill_tokens=8)
    engine.run_many(queries(prompts(2), temperature=temperature))
    assert_as_transcribed(notes, drafter, model, least=10)


@torch.inference_mode()
def test_a_request_chooses_a_chain_or_a_tree_of_its_own(model):
    drafter = specformer(model, seed=4, slots=4)
    paths = ((0,), (1,), (0, 0), (0, 2), (0, 2, 1))
    for drafting in ({"verifier": "block"}, {"tree": paths}, {"tree": paths, "num_tokens": 3}):
        notes = recording(drafter)
        engine = engine_for(model, 300, {"specformer": drafter})
        engine.run_many(queries(prompts(3), **drafting))
        filled = [note for note in notes if len(note.draft)]
        assert len(filled) > 8
        for _, tokens, budget, draft, _ in filled:
            ranked = slot_logits(drafter, model, tokens).topk(3).indices
            if "tree" in drafting:
                shape = rank_tree(paths).within(budget).paths
            else:
                shape = [(0,) * (n + 1) for n in range(min(4, budget.depth))]
            assert paths_of(draft) == {
                tuple(int(ranked[level, rank]) for level, rank in enumerate(path)) for path in shape
            }


@torch.inference_mode()
def test_kappa_of_chains_and_trees(model):
    """kappa is tokens per step with a draft, times levels of the draft per drafted token."""
    drafter = specformer(model, seed=4, slots=4, num_nodes=20)
    for rule in ("block", "sample"):
        notes = recording(drafter)
        engine = engine_for(model, 300, {"specformer": drafter})
        (answer,) = engine.run_many(queries(prompts(1), verifier=rule))
        drafts = [note.draft for note in notes if len(note.draft)]
        accepted = 1 + answer.counts.num_accepted_tokens / len(drafts)
        levels, nodes = sum(d.depth for d in drafts), sum(map(len, drafts))
        assert answer.counts.kappa == pytest.approx(accepted * levels / nodes)
        assert (levels == nodes) == (rule == "block")
    assert SpeculationCounts().kappa == 1.0
    chains = SpeculationCounts()
    chains.add(4, 2)
    chains.add(2, 0)
    assert chains.kappa == 2.0


def test_a_tree_that_the_slots_cannot_fill_is_refused(model):
    drafter = specformer(model, slots=2)
    for tree in (((0,), (0, 0), (0, 0, 0)), ((VOCABULARY,),)):
        with pytest.raises(ValueError, match="this network has 2 slots with 40 tokens each"):
            drafter.check_tree(Speculation("specformer", tree=tree))


@torch.inference_mode()
def test_a_cached_prefix_is_cached_for_the_drafter_too(model):
    """The second text begins with the first one's prompt and text; others end inside a page."""
    drafter = specformer(model, seed=5, slots=3)
    engine = engine_for(model, 300, {"specformer": drafter})
    prompt = prompts(1, seed=2, low=18, high=19)[0].tolist()
    (first,) = engine.run_many(queries([torch.tensor(prompt).numpy()]))
    longer = prompt + first.tokens.tolist()
    notes = recording(drafter)
    for text in (longer + [3, 1], longer[:22], longer[:23] + [5, 5], prompt):
        before = len(notes)
        (answer,) = engine.run_many(queries([torch.tensor(text).numpy()], length=6))
        assert answer.timing.prefix_cached >= 16
        assert_as_transcribed(notes[before:], drafter, model, least=1)


@pytest.mark.slow
@torch.inference_mode()
def test_drafts_after_preemption(model):
    drafter = specformer(model, seed=7, slots=3)
    notes = recording(drafter)
    engine = engine_for(model, 16, {"specformer": drafter})
    preempted, preempt = [], engine.schedulers["text"]._preempt
    engine.schedulers["text"]._preempt = lambda s: (preempted.append(s), preempt(s))
    engine.run_many(queries(prompts(6, low=8)))
    assert preempted
    assert_as_transcribed(notes, drafter, model, least=20)
    assert_no_leak(engine)


def test_a_network_for_another_hidden_size_is_refused(model):
    drafter = specformer(model)
    other = drawn_model(1)
    object.__setattr__(other.config.decoder, "hidden_size", 48)
    with pytest.raises(ValueError, match="hidden size 32, the target has 48"):
        type(drafter)(drafter.network, other)


@pytest.mark.parametrize("name", chosen(SPREAD, "everything"))
@torch.inference_mode()
def test_texts_are_the_plain_texts(name):
    """Eight texts with different parameters; with few pages; again, from cached prefixes."""
    drafter = specformer(shared_model(), seed=8)
    num_drafts = 0
    for pages in (300, 14):
        engine = engine_for(shared_model(), pages, {"specformer": drafter})
        for _ in range(2):
            requests, wanted = among_others(name, Speculation("specformer"))
            answers = engine.run_many(requests)
            assert [answer.tokens.tolist() for answer in answers] == wanted
            num_drafts += sum(answer.counts.num_drafts for answer in answers)
        assert_no_leak(engine)
    assert num_drafts > 100
    assert_forgotten(drafter)
