"""Block drafters: networks, heads and trees against plain transcriptions, without any cache."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recserve.drafters.block.files import save_block
from recserve.drafters.block.network import Block
from recserve.drafters.registry import build_drafter
from recserve.drafters.shared.noisy import LEAST_SCALE
from recserve.engine.text_scheduler import TextLimits
from recserve.kernels.acceptance.noise import gumbel
from recserve.models.packing import pack_weights
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.block_drafter import VARIANTS, block
from tests.support.eagle_transcription import paths_of, rms, rotate, target_states
from tests.support.text_engines import (
    SPREAD,
    among_others,
    assert_forgotten,
    assert_no_leak,
    engine_for,
    prompts,
    shared_model,
)
from tests.support.text_plain import drawn_model

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def rotated(x, network, positions):
    """Rotates x [n, H, D] at positions [n]."""
    whole = x.new_zeros(int(positions.max()) + 1, *x.shape[1:])
    whole[positions] = x
    return rotate(whole, network)[positions]


def convolved(conv, x, delta, side):
    """DFlash2's convolution, row by row and tap by tap: out_i = sum_t (base_t + delta_it) x_i-t."""
    size = x.shape[1] // conv.num_groups
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(conv.taps, row + 1)):
            dynamic = delta[row, tap].repeat_interleave(size)
            out[row] += (conv.base_kernel[side, tap] + dynamic) * x[row - tap]
    return out


def around(conv, x, sublayer):
    """A sublayer with DFlash2's convolutions before and after it, or without any."""
    if conv is None:
        return sublayer(x)
    kernels = F.linear(x, conv.kernel_projection.weight)
    kernels = kernels.view(len(x), 2, conv.taps, conv.num_groups)
    return convolved(conv, sublayer(convolved(conv, x, kernels[:, 0], 0)), kernels[:, 1], 1)


def attention(network, layer, causal, context, places):
    """Returns the attention sublayer: keys of the context and of the block, as in the paper."""
    c = network.config.decoder
    if network.config.windows:
        window = network.config.windows[list(network.layers).index(layer)]
        places = places[-(window - 1) - network.config.block_size :] if window else places
        context = context[-(window - 1) :] if window else context

    def attend(rows):
        count, size = len(context), len(rows)
        keys_values = layer.key_value(torch.cat([context, rows]))
        keys, values = keys_values.view(count + size, 2, c.num_kv_heads, c.head_dim).unbind(1)
        query = rms(layer.query(rows).view(size, c.num_heads, c.head_dim), layer.q_norm)
        query = rotated(query, network, places[count:])
        keys = rotated(rms(keys, layer.k_norm), network, places)
        group = c.num_heads // c.num_kv_heads
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("nhd,mhd->hnm", query, keys) * c.head_dim**-0.5
        if causal:
            seen = torch.ones(size, count + size).tril(count).bool()
            scores = scores.masked_fill(~seen, -math.inf)
        mixed = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)
        return layer.output(mixed.flatten(1))

    return attend


def transcribed(network: Block, model, tokens) -> torch.Tensor:
    """Returns the outputs [K, E] after committed tokens."""
    config = network.config
    states = target_states(model, tokens, config.target_layers)[:-1]
    context = rms(network.fc(states), network.hidden_norm)
    table = model.tokens.weight
    x = torch.stack([table[tokens[-1]]] + [table[config.mask_token]] * (config.block_size - 1))
    x = x * config.input_scale
    places = torch.arange(len(tokens) - 1 + config.block_size)
    for layer, causal in zip(network.layers, config.causal, strict=True):
        attend = attention(network, layer, causal, context, places)
        x = x + around(layer.attention_conv, rms(x, layer.attention_norm), attend)

        def mlp(rows, layer=layer):
            gate, up = layer.gate_up(rows).chunk(2, dim=-1)
            return layer.down(F.silu(gate) * up)

        x = x + around(layer.mlp_conv, rms(x, layer.mlp_norm), mlp)
    x = rms(x, network.norm)
    return x if config.from_anchor else x[1:]


class PlainMarkov:
    """DSpark's head along one path, as published: one step per token."""

    def __init__(self, head):
        self.head, self.state = head, torch.zeros(head.config.rank)

    def bias(self, hidden, token, advance=True):
        """Returns the bias [V] after a token."""
        head, vector = self.head, self.head.markov_w1.weight[token]
        if head.config.kind == "gated":
            gate = head.gate_proj(torch.cat([hidden, vector]))
            vector = torch.sigmoid(gate) * vector
        if head.config.kind == "rnn":
            joint = head.joint_proj(torch.cat([self.state, vector, hidden]))
            gate, candidate, out = joint.chunk(3)
            gate, vector = torch.sigmoid(gate), torch.tanh(out)
            if advance:
                self.state = gate * self.state + (1 - gate) * torch.tanh(candidate)
        return head.markov_w2 @ vector


def slot_scores(drafter, model, tokens, params) -> list[tuple[list[int], torch.Tensor]]:
    """Returns for each slot its candidates, and log-probabilities [P, C] given their predecessors.

    Predecessors are the candidates of the slot before, or the anchor.
    """
    network, count = drafter.network, drafter.num_candidates
    outputs = transcribed(network, model, tokens)
    scale = max(params.temperature, LEAST_SCALE)
    found, above = [], [tokens[-1]]
    head = PlainMarkov(network.markov) if network.config.markov is not None else None
    for slot, hidden in enumerate(outputs):
        logits = model.logits(hidden)
        noise = torch.zeros_like(logits)
        if params.temperature:
            place = torch.tensor([len(tokens) + slot])
            noise = gumbel(torch.tensor([params.seed]), place, len(logits))[0] * params.temperature
        if head is not None:
            pairs = torch.stack([logits + head.bias(hidden, p, advance=False) for p in above])
            head.bias(hidden, above[0])
            pairs = (pairs + noise) / scale
            chosen = pairs[0].topk(count).indices
            logprobs = pairs[:, chosen].log_softmax(-1)
        else:
            values = (logits + noise) / scale
            chosen = values.topk(count).indices
            if network.config.selector is None:
                logprobs = values.log_softmax(-1)[chosen][None]
            else:
                selector = network.selector
                weight = selector.hidden_projection.weight @ hidden
                a, b = selector.predecessor_codebook, selector.successor_codebook
                bonus = torch.stack([(a[p] * weight) @ b[chosen].T for p in above])
                logprobs = (values[chosen] + bonus / scale).log_softmax(-1)
        above = chosen.tolist()
        found.append((above, logprobs))
    return found


def brute_tree(slots, depth, num_nodes) -> set[tuple[int, ...]]:
    """Returns the likeliest of all paths."""
    nodes, level = {}, [((), (), 0.0)]
    for candidates, logprobs in slots[:depth]:
        level = [
            ((*path, token), (*ranks, rank), score + float(value))
            for path, ranks, score in level
            for rank, token in enumerate(candidates)
            for value in [logprobs[ranks[-1] if ranks and len(logprobs) > 1 else 0, rank]]
        ]
        nodes |= {path: score for path, _, score in level}
    return set(sorted(nodes, key=lambda path: -nodes[path])[:num_nodes])


def recording(drafter) -> list:
    """Notes parameters, tokens, budget, lattice and draft of every proposal."""
    notes, propose, lattice = [], drafter.propose, drafter.lattice

    def noted_lattice(contexts, depth):
        made = lattice(contexts, depth)
        for row, context in enumerate(contexts):
            rows[context.id] = made.tokens[row], made.logprobs[row]
        return made

    def noted(contexts, budgets):
        rows.clear()
        drafts = propose(contexts, budgets)
        for context, budget, draft in zip(contexts, budgets, drafts, strict=True):
            if len(draft):
                own = rows[context.id]
                notes.append((context.params, list(context.tokens), budget, own, draft))
        return drafts

    rows: dict = {}
    drafter.propose, drafter.lattice = noted, noted_lattice
    return notes


def assert_as_transcribed(notes, drafter, model, least: int) -> None:
    assert len(notes) >= least
    for params, tokens, budget, (found, logprobs), draft in notes:
        slots = slot_scores(drafter, model, tokens, params)
        for slot, (candidates, expected) in enumerate(slots[: len(found)]):
            assert found[slot].tolist() == candidates
            rows = logprobs[slot, : len(expected)]
            torch.testing.assert_close(rows, expected, **CLOSE)
        size = min(budget.num_nodes, drafter.num_nodes)
        assert paths_of(draft) == brute_tree(slots, budget.depth, size)


def queries(texts, length=12, temperature=0.0) -> list[TextQuery]:
    params = SamplingParams(temperature=temperature, max_tokens=length, seed=5)
    return [TextQuery(np.array(text), params, Speculation("block")) for text in texts]


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


# Attention does not know the temperature; the heads of dflash2 and dspark rank by it.
TEMPERATURES = {"dflash": (0.0,), "jetspec": (0.8,), "mixed": (0.0,), "windows": (0.8,)}
TEMPERATURES |= {"dspark-gated": (0.0,), "dspark-rnn": (0.8,)}


@pytest.mark.parametrize(
    "variant,temperature",
    [
        pytest.param(name, value, marks=[pytest.mark.slow] * (number > 0))
        for name in VARIANTS
        for number, value in enumerate(TEMPERATURES.get(name, (0.8, 0.0)))
    ],
)
@torch.inference_mode()
def test_drafts_equal_the_transcription(variant, temperature, model):
    """Two texts at once, prompts in chunks."""
    drafter = block(model, variant, seed=3)
    notes = recording(drafter)
    engine = engine_for(model, 300, {"block": drafter})
    engine.schedulers["text"].limits = TextLimits(prefill_tokens=16)
    texts = [p.tolist() for p in prompts(2, low=3)]
    engine.run_many(queries(texts, length=8, temperature=temperature))
    assert_as_transcribed(notes, drafter, model, least=4)


@torch.inference_mode()
def test_greedy_texts_beside_drawn_ones(model):
    drafter = block(model, "dspark", seed=4)
    notes = recording(drafter)
    engine = engine_for(model, 300, {"block": drafter})
    texts = [p.tolist() for p in prompts(4, low=3)]
    engine.run_many([*queries(texts[:2], 6), *queries(texts[2:], 6, 0.9)])
    assert_as_transcribed(notes, drafter, model, least=8)


@pytest.mark.parametrize(
    "fields",
    [
        {"input_scale": 3.0, "output_scale": 0.5, "softcap": 2.0},
        {"draft_vocab_size": 20},
    ],
    ids=lambda fields: "+".join(fields),
)
@torch.inference_mode()
def test_factors_and_draft_vocabularies(fields, model):
    drafter = block(model, seed=6, fields=fields)
    network = drafter.network
    hidden = torch.randn(3, model.config.decoder.hidden_size)
    logits = model.logits(hidden)
    if network.token_map is not None:
        logits = logits[:, network.token_map]
    elif network.config.softcap:
        logits = 2.0 * torch.tanh(0.5 * logits / 2.0)
    torch.testing.assert_close(network.logits(hidden, model), logits, **CLOSE)
    notes = recording(drafter)
    engine_for(model, 300, {"block": drafter}).run_many(queries([[3, 1, 4, 1, 5]]))
    assert notes
    if network.token_map is not None:
        drawn = {token for *_, draft in notes for token in draft.tokens.tolist()}
        assert drawn <= set(network.token_map.tolist())


@pytest.mark.parametrize("variant", ["dspark", "dspark-gated", "dspark-rnn", "dflash2"])
@torch.inference_mode()
def test_a_chain_is_the_published_walk(variant, model):
    """Under a rule that takes chains only: one token after another, over the whole vocabulary."""
    drafter = block(model, variant, seed=8)
    notes = recording(drafter)
    engine = engine_for(model, 300, {"block": drafter})
    params = SamplingParams(temperature=0.0, max_tokens=10)
    chain = Speculation("block", verifier="block")
    engine.run_many([TextQuery(np.array([2, 7, 1, 8]), params, chain)])
    assert len(notes) > 3
    for _, tokens, budget, _, draft in notes:
        outputs, walk = transcribed(drafter.network, model, tokens), []
        markov = PlainMarkov(drafter.network.markov) if "dspark" in variant else None
        for hidden in outputs[: min(budget.depth, budget.num_nodes)]:
            before, logits = ([tokens[-1]] + walk)[-1], model.logits(hidden)
            if markov is not None:
                walk.append(int((logits + markov.bias(hidden, before)).argmax()))
                continue
            selector = drafter.network.selector
            best = logits.topk(selector.config.num_candidates)
            weight = selector.hidden_projection.weight @ hidden
            a, b = selector.predecessor_codebook, selector.successor_codebook
            scores = best.values + b[best.indices] @ (a[before] * weight)
            walk.append(int(best.indices[scores.argmax()]))
        assert draft.tokens.tolist() == walk
        assert draft.parents.tolist() == list(range(-1, len(walk) - 1))


@pytest.mark.parametrize(
    "variant,names",
    [
        ("dflash2", SPREAD),
        pytest.param("dflash", ("greedy", "everything"), marks=pytest.mark.slow),
        pytest.param("dspark-rnn", ("hot", "everything"), marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_texts_are_the_plain_texts_under_all_parameters(variant, names):
    """Eight texts of different parameters together; then with few pages, so that some wait."""
    drafter = block(shared_model(), variant, seed=2, num_nodes=16)
    for pages, chosen in ((300, names), (16, names[-1:])):
        engine = engine_for(shared_model(), pages, {"block": drafter})
        for name in chosen:
            requests, expected = among_others(name, Speculation("block"))
            answers = engine.run_many(requests)
            assert [answer.tokens.tolist() for answer in answers] == expected
            assert sum(answer.counts.num_drafts for answer in answers)
        assert_no_leak(engine)
        assert_forgotten(drafter)


@torch.inference_mode()
def test_a_cached_prefix_is_cached_for_the_drafter_too(model):
    """The second text begins with the first one's prompt and text; the third ends in its page."""
    drafter = block(model, seed=5)
    engine = engine_for(model, 300, {"block": drafter})
    prompt = prompts(1, seed=2, low=18, high=19)[0].tolist()
    (first,) = engine.run_many(queries([prompt]))
    longer = prompt + first.tokens.tolist()
    notes = recording(drafter)
    for text in (longer + [3, 1], longer[:22], longer[:23] + [5, 5], prompt):
        before = len(notes)
        (answer,) = engine.run_many(queries([text], length=6))
        assert answer.timing.prefix_cached >= 16
        assert_as_transcribed(notes[before:], drafter, model, least=1)


@pytest.mark.slow
@torch.inference_mode()
def test_drafts_after_preemption(model):
    drafter = block(model, seed=7)
    notes = recording(drafter)
    engine = engine_for(model, 16, {"block": drafter})
    preempted, preempt = [], engine.schedulers["text"]._preempt
    engine.schedulers["text"]._preempt = lambda s: (preempted.append(s), preempt(s))
    engine.run_many(queries([p.tolist() for p in prompts(6, low=8)]))
    assert preempted
    assert_as_transcribed(notes, drafter, model, least=20)
    assert_no_leak(engine)
    assert_forgotten(drafter)


def test_a_network_for_another_target_is_refused(model):
    drafter = block(model)
    other = drawn_model(0)
    other.config = type(other.config)(other.config.decoder, 41)
    with pytest.raises(ValueError, match="40 tokens, the target has 32 and 41"):
        type(drafter)(drafter.network, other)


@pytest.mark.parametrize("variant", ["jetspec", "dflash2", "dspark-gated"])
@torch.inference_mode()
def test_a_drafter_from_a_folder_drafts_as_the_one_that_was_saved(variant, tmp_path):
    """Target and network are packed for serving, as a server loads them."""
    target = drawn_model(1)
    drafter = block(target, variant, seed=9)
    save_block(drafter.network, tmp_path)
    drafts = []
    for packed in (False, True):
        if packed:
            pack_weights(target)
            drafter = build_drafter("block", target, [tmp_path])
            drafter.num_nodes, drafter.num_candidates = 12, min(6, drafter.num_candidates)
        notes = recording(drafter)
        engine = engine_for(target, 300, {"block": drafter})
        engine.run_many(queries([p.tolist() for p in prompts(4, low=3)], 8))
        drafts.append([paths_of(draft) for *_, draft in notes])
    assert drafts[0] == drafts[1] and len(drafts[0]) > 8


@torch.inference_mode()
def test_an_embedding_a_mask_and_a_head_of_its_own_are_used(model):
    own = {"own_embedding": True, "own_mask": True, "own_head": True, "input_scale": 2.0}
    drafter = block(model, seed=10, fields=own)
    network, anchors = drafter.network, torch.tensor([3, 17])
    rows = network.embed(anchors, model)
    assert torch.equal(rows[:, 0], 2.0 * network.tokens.weight[anchors])
    assert torch.equal(rows[:, 1:], (2.0 * network.mask_embedding).expand(2, 4, -1))
    hidden = torch.randn(3, model.config.decoder.hidden_size)
    expected = hidden @ network.head.weight.T
    torch.testing.assert_close(network.logits(hidden, model), expected, **CLOSE)
    engine = engine_for(model, 300, {"block": drafter})
    requests = queries([p.tolist() for p in prompts(3)])
    plain = [TextQuery(request.prompt, request.params) for request in requests]
    drafted, undrafted = engine.run_many(requests), engine.run_many(plain)
    assert [a.tokens.tolist() for a in drafted] == [a.tokens.tolist() for a in undrafted]
    assert sum(answer.counts.num_drafts for answer in drafted)
