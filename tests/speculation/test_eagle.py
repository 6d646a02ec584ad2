"""EAGLE: its network and its tree against plain transcriptions of the papers, without any cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.models.attention import DenseAttention, Rope
from recserve.models.decoder import FINAL_LAYER
from recserve.models.drafters.eagle import Eagle
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import Budget
from recserve.speculation.drafters.noisy import LEAST_SCALE
from recserve.speculation.drafters.rank_tree import rank_tree
from recserve.speculation.drafters.registry import check_speculation
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.text_engines import (
    assert_forgotten,
    assert_no_leak,
    eagle,
    engine_for,
    prompts,
)
from tests.support.text_plain import drawn_model


def target_states(model, tokens: list[int], layers) -> torch.Tensor:
    """Returns [n, F] states of the target, one full forward, layer by layer."""
    decoder, attend = model.decoder, DenseAttention()
    x = model.tokens(torch.tensor([tokens]))
    rope = Rope(torch.arange(len(tokens))[None], decoder._frequencies, x.dtype)
    found = {0: x}
    for number, layer in enumerate(decoder.layers):
        normed = layer.attention_norm(x)
        x = found[number + 1] = sum(layer(normed, x, rope, number, attend))
    found[FINAL_LAYER] = decoder.norm(x)
    return torch.cat([found[n] for n in layers], dim=-1)[0]


def rms(x, norm):
    return x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def turned(x, network: Eagle):
    """Rotates x [n, H, D] at the positions 0..n-1."""
    angles = torch.arange(len(x))[:, None].float() * network._frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def plain_layer(network, layer, inputs, residual, mask=None) -> torch.Tensor:
    """A decoder layer at the positions 0..n-1, with plain causal attention or a mask [n, n]."""
    c = network.config.decoder
    query, key, value = layer.qkv(inputs).split(
        [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim], -1
    )
    query, key, value = (x.view(len(x), -1, c.head_dim) for x in (query, key, value))
    if c.qk_norm:
        query, key = rms(query, layer.q_norm), rms(key, layer.k_norm)
    group = c.num_heads // c.num_kv_heads
    key, value = turned(key, network).repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", turned(query, network), key) * c.head_dim**-0.5
    causal = torch.ones(len(inputs), len(inputs)).tril().bool()
    weights = scores.masked_fill(~(causal if mask is None else mask), float("-inf")).softmax(-1)
    mixed = torch.einsum("hnm,mhd->nhd", weights, value).flatten(1)
    x = residual + layer.output(mixed)
    gate, up = layer.gate_up(rms(x, layer.mlp_norm)).chunk(2, dim=-1)
    x = x + layer.down(torch.nn.functional.silu(gate) * up)
    return x


def transcribed(network: Eagle, features, embedded) -> torch.Tensor:
    """Returns the outputs [n, E] of rows 0..n-1: the paper's layer with plain causal attention."""
    config, layer = network.config, network.layers[0]
    if config.fused:
        normed = rms(features, network.feature_norm)
        inputs = torch.cat([rms(embedded, network.input_norms[0]), normed], dim=-1)
        residual = normed if config.norm_before_residual else features
    else:
        residual = inputs = network.fc(torch.cat([embedded, features], dim=-1))
    x = plain_layer(network, layer, inputs, residual)
    return rms(x, network.norm) if config.norm_output else x


class PlainEagle:
    """EAGLE-2's algorithm, with everything computed again for every node."""

    def __init__(self, drafter, model, tokens):
        self.drafter, self.model, self.network = drafter, model, drafter.network
        states = target_states(model, tokens, drafter.hidden_layers)[:-1]
        self.features = self.first(states)
        self.embedded = model.tokens(torch.tensor(tokens[1:]))

    def first(self, states):
        """Returns the features of the target's states."""
        return self.network.features(states)

    def run(self, features, embedded):
        """Returns the outputs of all rows."""
        return transcribed(self.network, features, embedded)

    def children(self, path):
        """Returns (token, log-probability) of the best children of a path of draft tokens."""
        features, embedded = self.features, self.embedded
        output = self.run(features, embedded)[-1:]
        for token in path:
            features = torch.cat([features, output])
            embedded = torch.cat([embedded, self.model.tokens(torch.tensor([token]))])
            output = self.run(features, embedded)[-1:]
        config = self.network.config
        if config.fused:
            read = output if config.norm_output else rms(output, self.network.norm)
            logits = self.network.head(read)
        else:
            logits = self.model.logits(output)
        best = (logits[0] / LEAST_SCALE).log_softmax(-1).topk(self.drafter.width)
        tokens = best.indices.tolist()
        if self.network.token_map is not None:
            tokens = self.network.token_map[best.indices].tolist()
        return list(zip(tokens, best.values.tolist(), strict=True))

    def tree(self, depth, num_nodes):
        """Returns the paths of the tree's nodes."""
        found, frontier = {}, [((), 0.0)]
        for _ in range(depth):
            level = [
                ((*path, token), score + own)
                for path, score in frontier
                for token, own in self.children(path)
            ]
            found.update(level)
            frontier = sorted(level, key=lambda node: -node[1])[: self.drafter.width]
        return set(sorted(found, key=lambda path: -found[path])[:num_nodes])


def paths_of(draft) -> set[tuple[int, ...]]:
    """Returns the path of every node of a draft."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    assert draft.depth == max(map(len, paths))
    return set(paths)


def recording(drafter) -> list:
    """Notes tokens, budget and draft of every proposal."""
    notes, propose = [], drafter.propose

    def noted(contexts, budgets):
        drafts = propose(contexts, budgets)
        for context, budget, draft in zip(contexts, budgets, drafts, strict=True):
            notes.append((list(context.tokens), budget, draft))
        return drafts

    drafter.propose = noted
    return notes


def assert_as_transcribed(notes, drafter, model, least: int, plain=PlainEagle) -> None:
    filled = [note for note in notes if len(note[2])]
    assert len(filled) >= least
    for tokens, budget, draft in filled:
        depth = min(budget.depth, drafter.depth)
        expected = plain(drafter, model, tokens).tree(
            depth, min(budget.num_nodes, drafter.num_nodes)
        )
        assert paths_of(draft) == expected


def queries(texts, length=14) -> list[TextQuery]:
    params = SamplingParams(temperature=0.0, max_tokens=length)
    return [TextQuery(np.array(text), params, Speculation("eagle")) for text in texts]


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


@pytest.mark.parametrize("fused", [False, True], ids=["eagle-1", "eagle-3"])
@torch.inference_mode()
def test_drafts_equal_the_transcription(fused, model):
    """Four texts at once, prompts in chunks."""
    drafter = eagle(model, fused, seed=3)
    notes = recording(drafter)
    engine = engine_for(model, 300, {"eagle": drafter})
    engine.run_many(queries(p.tolist() for p in prompts(4)))
    assert_as_transcribed(notes, drafter, model, least=20)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_output": True},
        {"norm_before_residual": True},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True},
    ],
    ids=lambda fields: "+".join(fields),
)
@torch.inference_mode()
def test_drafts_of_the_variants(fields, model):
    drafter = eagle(model, True, seed=4, fields=fields)
    notes = recording(drafter)
    engine_for(model, 300, {"eagle": drafter}).run_many(queries(p.tolist() for p in prompts(2)))
    assert_as_transcribed(notes, drafter, model, least=4)


@torch.inference_mode()
def test_a_cached_prefix_is_cached_for_the_drafter_too(model):
    """The second text begins with the first one's prompt and text; the third ends in its page."""
    drafter = eagle(model, True, seed=5)
    engine = engine_for(model, 300, {"eagle": drafter})
    prompt = prompts(1, seed=2, low=18, high=19)[0].tolist()
    (first,) = engine.run_many(queries([prompt]))
    longer = prompt + first.tokens.tolist()
    notes = recording(drafter)
    for text in (longer + [3, 1], longer[:22], longer[:23] + [5, 5], prompt):
        before = len(notes)
        (answer,) = engine.run_many(queries([text], length=6))
        assert answer.timing.root_cached >= 16
        assert_as_transcribed(notes[before:], drafter, model, least=1)


@torch.inference_mode()
def test_a_prefix_without_the_drafter_s_entries_is_not_shared(model):
    drafter = eagle(model, False, seed=6)
    engine = engine_for(model, 300, {"eagle": drafter})
    prompt = prompts(1, seed=2, low=18, high=19)[0]
    engine.run(TextQuery(prompt, SamplingParams(temperature=0.0, max_tokens=4)))
    notes = recording(drafter)
    (answer,) = engine.run_many(queries([prompt.tolist()]))
    assert answer.timing.root_cached == 0
    assert_as_transcribed(notes, drafter, model, least=2)


@torch.inference_mode()
def test_drafts_after_preemption(model):
    drafter = eagle(model, True, seed=7)
    notes = recording(drafter)
    engine = engine_for(model, 16, {"eagle": drafter})
    preempted, preempt = [], engine.schedulers["text"]._preempt
    engine.schedulers["text"]._preempt = lambda s: (preempted.append(s), preempt(s))
    engine.run_many(queries(p.tolist() for p in prompts(6, low=8)))
    assert preempted
    assert_as_transcribed(notes, drafter, model, least=20)


@torch.inference_mode()
def test_a_drafter_that_fails_to_read_fails_only_its_texts(model):
    drafter = eagle(model, True, seed=9)
    read, calls = drafter.read, []

    def failing(parts):
        calls.append(len(parts))
        if len(calls) == 4:
            raise RuntimeError("no memory")
        read(parts)

    drafter.read = failing
    engine = engine_for(model, 300, {"eagle": drafter})
    plain = SamplingParams(temperature=0.0, max_tokens=14)
    others = [TextQuery(p, plain) for p in prompts(3)]
    futures = [engine.submit(q) for q in [*queries(p.tolist() for p in prompts(2)), *others]]
    while engine.step():
        pass
    assert {type(f.exception()) for f in futures[:2]} == {RuntimeError}
    assert all(f.exception() is None for f in futures[2:])
    assert_no_leak(engine)
    assert_forgotten(drafter)


class StaticEagle(PlainEagle):
    """EAGLE-1's tree: the ranks of a static tree, cut to the budget as Medusa's trees are."""

    TREE = (
        *((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0)),
        *((0, 0, 0), (0, 1, 1), (1, 0, 0), (0, 0, 0, 0)),
    )

    def tree(self, depth, num_nodes):
        wanted = rank_tree(self.TREE).within(Budget(num_nodes, depth))
        found = {}
        for ranks in wanted.paths:  # preorder: parents first
            above = found.get(ranks[:-1], ())
            found[ranks] = (*above, self.children(above)[ranks[-1]][0])
        return set(found.values())


@pytest.mark.parametrize("fused", [False, True], ids=["eagle-1", "eagle-3"])
@torch.inference_mode()
def test_a_request_s_static_tree(fused, model):
    """Trees shrink near a text's end. Requests with dynamic trees run beside."""
    drafter = eagle(model, fused, seed=3)
    notes = recording(drafter)
    engine = engine_for(model, 300, {"eagle": drafter})
    spoken = Speculation("eagle", tree=StaticEagle.TREE)
    dynamic = queries(p.tolist() for p in prompts(5))
    static = [replace(query, speculation=spoken) for query in dynamic]
    plain = engine.run_many([replace(query, speculation=Speculation()) for query in dynamic])
    answers = engine.run_many(static)
    drafter.depth, drafter.num_nodes = 4, len(StaticEagle.TREE)  # bounds of the comparison
    assert_as_transcribed(notes, drafter, model, least=20, plain=StaticEagle)
    assert len({len(draft) for *_, draft in notes if len(draft)}) > 1
    mixed = engine.run_many([*static, *dynamic[:3]])
    for one, other in zip([*plain, *plain, *plain[:3]], [*answers, *mixed], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_a_static_tree_must_fit(model):
    drafter = eagle(model, True)
    check_speculation(Speculation("eagle", tree=StaticEagle.TREE), drafter, True)
    for tree in (tuple((rank,) for rank in range(21)), tuple((0,) * n for n in range(1, 70))):
        with pytest.raises(ValueError, match="has no memory for it"):
            check_speculation(Speculation("eagle", tree=tree), drafter, True)


def test_a_rule_that_refuses_forks_gets_chains(model):
    drafter = eagle(model, False, seed=2)
    notes = recording(drafter)
    engine = engine_for(model, 300, {"eagle": drafter})
    params = SamplingParams(temperature=0.0, max_tokens=14)
    spoken = Speculation("eagle", "rejection", tree=StaticEagle.TREE)
    engine.run(TextQuery(prompts(1)[0], params, spoken))
    assert any(len(draft) > 1 for *_, draft in notes)
    assert all(draft.depth == len(draft) for *_, draft in notes)
