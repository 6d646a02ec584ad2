"""Mask tokens: drafts equal a transcription without any cache; the target keeps its bits."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recserve.drafters.mask_tokens.adapter import MaskTokensAdapter
from recserve.drafters.mask_tokens.drafter import (
    LinearMaskTokensDrafter,
    MaskLayout,
    MaskTokensDrafter,
)
from recserve.drafters.mask_tokens.files import save_mask_tokens
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.registry import build_drafter
from recserve.drafters.suffix.drafter import SuffixDrafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.runner import Runner
from recserve.engine.text_step_graph import StepShape
from recserve.kernels import backend
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.native import native
from recserve.kernels.tree import CANDIDATE, chain, from_parents
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.adapters import DecoderAdapter
from recserve.models.config import DecoderConfig
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.packing import pack_weights
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import Budget
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.eagle_transcription import rms
from tests.support.grids import covering
from tests.support.mask_tokens_drafter import mask_network, mask_tokens
from tests.support.recorded_steps import Counted, with_graphs
from tests.support.text_engines import (
    SPREAD,
    among_others,
    assert_forgotten,
    assert_no_leak,
    engine_for,
    plain_texts,
    prompts,
    shared_model,
)
from tests.support.text_plain import drawn_model

KINDS = [MaskTokensDrafter, LinearMaskTokensDrafter]


@pytest.fixture(scope="module")
def model():
    return drawn_model(1)


def transcribed_states(model, network, tokens: list[int]) -> torch.Tensor:
    """Returns [k, E] states of k masks after the tokens: the paper's gated LoRA, row by row."""
    c, lora = model.config.decoder, network.lora
    scale = network.config.alpha / network.config.rank
    masks = lora.num_masks
    x = torch.cat([model.tokens(torch.tensor(tokens)), lora.embeddings])
    gate = torch.tensor([0.0] * len(tokens) + [1.0] * masks)[:, None]
    angles = torch.arange(len(x))[:, None].float() * model.decoder._frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(y):
        low, high = y.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def product(linear, update, y):
        """W y + gate * alpha / r * B A y, projection by projection."""
        rank, delta = network.config.rank, []
        for number, up in enumerate(update.ups):
            down = update.down[number * rank : (number + 1) * rank]
            delta.append(scale * (y @ down.T) @ up.T)
        return y @ linear.weight.T + gate * torch.cat(delta, dim=-1)

    for layer, updates in zip(model.decoder.layers, lora.layers, strict=True):
        qkv = product(layer.qkv, updates["qkv"], rms(x, layer.attention_norm))
        qkv = qkv.view(len(x), -1, c.head_dim)
        query, key, value = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        query, key = turned(rms(query, layer.q_norm)), turned(rms(key, layer.k_norm))
        group = c.num_heads // c.num_kv_heads
        key, value = (y.repeat_interleave(group, 1) for y in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query, key) * c.head_dim**-0.5
        causal = torch.ones(len(x), len(x)).tril().bool()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        mixed = torch.einsum("hnm,mhd->nhd", weights, value).flatten(1)
        x = x + product(layer.output, updates["output"], mixed)
        gate_up = product(layer.gate_up, updates["gate_up"], rms(x, layer.mlp_norm))
        left, right = gate_up.chunk(2, dim=-1)
        x = x + product(layer.down, updates["down"], F.silu(left) * right)
    return rms(x, model.decoder.norm)[-masks:]


def transcribed_draft(model, network, tokens: list[int], length: int) -> list[int]:
    """Returns the greedy draft after the tokens, whose last one the masks did not see."""
    states, draft = transcribed_states(model, network, tokens[:-1]), [tokens[-1]]
    for state in states[:length]:
        x = torch.cat([model.tokens(torch.tensor(draft[-1])), state])
        for block in network.sampler:
            x = F.silu(block.linear.weight @ x + block.linear.bias)
            x = (x - x.mean()) / (x.var(unbiased=False) + block.norm.eps).sqrt()
            x = x * block.norm.weight + block.norm.bias
        draft.append(int(model.logits(x).argmax()))
    return draft[1:]


def recording(drafter) -> list:
    """Notes tokens, states, draft and layout of every proposal."""
    notes, propose = [], drafter.propose

    def noted(contexts, budgets):
        states = [drafter._outputs.get(c.id, (0, None)) for c in contexts]
        drafts = propose(contexts, budgets)
        for context, own, draft in zip(contexts, states, drafts, strict=True):
            known = own[1] if own[0] == len(context.tokens) else None
            notes.append((list(context.tokens), known, draft, drafter._layouts.get(context.id)))
        return drafts

    drafter.propose = noted
    return notes


def queries(kind, texts, length=14, **fields) -> list[TextQuery]:
    params = SamplingParams(temperature=0.0, max_tokens=length)
    return [TextQuery(np.array(t), params, Speculation(kind.name, **fields)) for t in texts]


@pytest.mark.parametrize(
    "num_tokens,kind", covering((None, 8, 3, 2), {kind.name: kind for kind in KINDS})
)
@torch.inference_mode()
def test_drafts_equal_the_transcription(kind, num_tokens, model):
    """Four texts at once, prompts in chunks, whatever was accepted before."""
    network = mask_network(model)
    drafter = kind(network, model)
    notes = recording(drafter)
    engine = engine_for(model, 300, {kind.name: drafter})
    texts = [p.tolist() for p in prompts(4)]
    engine.run_many(queries(kind, texts, num_tokens=num_tokens))
    filled = [note for note in notes if note[1] is not None]
    assert len(filled) >= 15
    for tokens, states, draft, layout in filled:
        expected = transcribed_states(model, network, tokens[:-1])[: len(states)]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        length = layout.num_tokens
        candidates = draft.tokens[:length].tolist()
        assert candidates == transcribed_draft(model, network, tokens, length)
    assert sum(len(draft) for *_, draft, _ in notes) > 0
    assert_forgotten(drafter)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@torch.inference_mode()
def test_drafts_after_preemption_and_from_a_cached_prefix(kind, model):
    network = mask_network(model)
    drafter = kind(network, model)
    notes = recording(drafter)
    engine = engine_for(model, 16, {kind.name: drafter})
    preempted, preempt = [], engine.schedulers["text"]._preempt
    engine.schedulers["text"]._preempt = lambda s: (preempted.append(s), preempt(s))
    texts = [p.tolist() for p in prompts(6, low=8)]
    engine.run_many(queries(kind, texts))
    assert preempted
    (answer,) = engine.run_many(queries(kind, [texts[-1] + [3, 1]], length=6))
    assert answer.timing.prefix_cached > 0
    filled = [note for note in notes if note[1] is not None]
    assert len(filled) >= 20
    for tokens, states, *_ in filled:
        expected = transcribed_states(model, network, tokens[:-1])[: len(states)]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    assert_no_leak(engine)


@pytest.mark.parametrize("kind,name", covering({kind.name: kind for kind in KINDS}, SPREAD))
def test_texts_are_the_plain_ones(kind, name):
    """Eight texts, half of them with other parameters: launched steps and replayed ones."""
    model = shared_model()
    drafter = kind(mask_network(model), model)
    requests, wanted = among_others(name, Speculation(kind.name))
    engine = engine_for(model, 300, {kind.name: drafter})
    assert [a.tokens.tolist() for a in engine.run_many(requests)] == wanted
    assert_no_leak(engine)


def test_captured_steps_have_masks_too():
    """The states of replayed masks are those of launched ones, and texts are the plain ones."""
    model, counted = shared_model(), Counted()
    network = mask_network(model)
    shapes = (StepShape(24, 1, 8), StepShape(200, 8, 8))
    for name in ("everything",):
        drafter = MaskTokensDrafter(network, model)
        notes = recording(drafter)
        engine = with_graphs(model, counted, shapes, drafters={"mask_tokens": drafter})
        requests, wanted = among_others(name, Speculation("mask_tokens"))
        before = counted.replays
        assert [a.tokens.tolist() for a in engine.run_many(requests)] == wanted
        assert counted.replays > before
        filled = [note for note in notes if note[1] is not None]
        with torch.inference_mode():
            for tokens, states, *_ in filled[::3]:
                expected = transcribed_states(model, network, tokens[:-1])[: len(states)]
                torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        assert len(filled) > 20


def scored(model, tokens, parents, kinds, masks, root):
    """Returns the states of a tree's nodes below a root, and the keys and values in the pool."""
    adapter = DecoderAdapter(model)
    if masks is not None:
        adapter = MaskTokensAdapter(model, masks, "mask_tokens")
    pool = KVPool(adapter.kv_shape, 64, 1)
    runner, slots = Runner(adapter, pool), torch.arange(64)
    size, count = len(root), len(tokens)
    nothing, own = Prefixes.of([slots[:0]]), slots[size : size + count]
    before = TreeBatch(chain(root), None, slots[:size], nothing, inputs=NodeInputs(root))
    runner.forward([before])
    tree = from_parents(tokens, parents)
    if kinds is not None:
        tree = copy.copy(tree)
        object.__setattr__(tree, "kinds", kinds)
    prefixes = Prefixes.of([slots[:size]])
    piece = TreeBatch(tree, None, own, prefixes, inputs=NodeInputs(tokens))
    (hidden,) = runner.forward([piece])
    return hidden, pool.keys[:, size : size + count], pool.values[:, size : size + count]


def masked_tree(tokens: torch.Tensor):
    """Returns a node 0 and a chain below it with blocks of three masks, as columns."""
    draft = MaskLayout(len(tokens) - 1, 3, True).draft(tokens[1:])
    parents = torch.cat([torch.tensor([-1]), draft.parents + 1])
    kinds = torch.cat([torch.tensor([CANDIDATE]), draft.kinds])
    return torch.cat([tokens[:1], draft.tokens]), parents, kinds


@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_updates_change_no_bit_of_other_nodes(packed, model):
    """With any updates and mask embeddings, all other nodes have the same bits."""
    own = copy.deepcopy(model)
    if packed:
        pack_weights(own)
    root, tokens = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([2, 6, 5, 3])
    columns = masked_tree(tokens)
    networks = [mask_network(model, seed=seed).lora for seed in (0, 1)]
    found = [scored(own, *columns, masks, root) for masks in networks]
    text = columns[2] == CANDIDATE
    for one, other in zip(*found, strict=True):
        rows = one.ndim == 2
        same = (one[text], other[text]) if rows else (one[:, text], other[:, text])
        assert torch.equal(*same)
        differ = (one[~text], other[~text]) if rows else (one[:, ~text], other[:, ~text])
        assert not torch.equal(*differ)


@pytest.mark.skipif(
    native.library() is None or not backend.c_is_allowed(), reason="needs the products in C"
)
@torch.inference_mode()
def test_a_step_with_masks_has_the_bits_of_a_step_without():
    """In C no row depends on the others: node 0 and the chain equal a step without masks."""
    model = wide_model()
    network = mask_network(model)
    pack_weights(model)
    assert model.decoder.whole_decoder is not None
    root, tokens = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([2, 6, 5, 3])
    plain = scored(model, tokens, torch.arange(-1, 3), None, None, root)
    columns = masked_tree(tokens)
    masked = scored(model, *columns, network.lora, root)
    text = columns[2] == CANDIDATE
    assert torch.equal(plain[0], masked[0][text])
    for one, other in zip(plain[1:], masked[1:], strict=True):
        assert torch.equal(one, other[:, text])


def wide_model():
    """Returns a model whose layers run in one C call: heads of 32 dimensions."""
    torch.manual_seed(0)
    decoder = DecoderConfig(64, 3, 4, 2, 32, 96, max_positions=64, qk_norm=True)
    return LanguageModel(LanguageModelConfig(decoder, 40)).requires_grad_(False).eval()


def test_layouts_stay_within_every_budget():
    for quadratic in (False, True):
        for size in range(1, 70):
            for depth in range(1, 12):
                for known in range(5):
                    budget = Budget(size, depth)
                    layout = MaskLayout.within(budget, known, 4, quadratic)
                    draft = layout.draft(torch.arange(layout.num_tokens))
                    assert len(draft) <= size and draft.depth <= depth
                    assert layout.num_tokens <= known and layout.block <= 4
                    assert draft.num_candidates == layout.num_tokens == draft.levels
                    if len(draft):
                        from_parents(draft.tokens, draft.parents)  # raises if not in preorder
                    for accepted in range(layout.num_tokens + 1):
                        first = layout.first_mask(accepted)
                        if first is not None:
                            assert int(draft.parents[first]) == accepted - 1
                    assert len(draft) or depth < 2 or size < 2


def test_the_default_layouts_are_the_papers():
    """k drafts, and k masks after each of them and after the last committed token."""
    assert MaskLayout.within(Budget(64, 30), 4, 4, True) == MaskLayout(4, 4, True)
    assert len(MaskLayout(4, 4, True).draft(torch.arange(4))) == 4 + 4 * 5
    assert MaskLayout.within(Budget(64, 30), 4, 4, False) == MaskLayout(4, 4, False)
    assert len(MaskLayout(4, 4, False).draft(torch.arange(4))) == 4 + 4


def test_rules_for_chains_get_no_draft(model):
    drafter = mask_tokens(model)
    engine = engine_for(model, 300, {"mask_tokens": drafter})
    request = TextQuery(
        prompts(1)[0], SamplingParams(1.0, max_tokens=9), Speculation("mask_tokens", "rejection")
    )
    answer = engine.run(request)
    assert len(answer.tokens) == 9 and answer.counts.num_drafts == 0


def test_masks_in_a_merged_tree(model):
    """The other source's nodes are merged with the chain; masks keep their numbers."""
    joined = MergedDrafter([mask_tokens(model), SuffixDrafter()])
    engine = engine_for(model, 300, {"both": joined})
    params = [plain_texts()["greedy", n][0] for n in range(8)]
    plain = engine_for(model).run_many(
        [TextQuery(p, own) for p, own in zip(prompts(8), params, strict=True)]
    )
    answers = engine.run_many(
        [TextQuery(p, o, Speculation("both")) for p, o in zip(prompts(8), params, strict=True)]
    )
    for one, other in zip(plain, answers, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_both_layouts_of_one_folder_serve_together(model, tmp_path):
    """Beside each other, and joined in one tree."""
    save_mask_tokens(mask_network(model), tmp_path)
    drafters = {kind.name: kind.from_folders([tmp_path], model) for kind in KINDS}
    drafters["joined"] = build_drafter("mask_tokens+mask_tokens_linear", model, [tmp_path] * 2)
    engine = engine_for(model, drafters=drafters)
    texts = []
    for name in ("none", *drafters):
        asked = [TextQuery(p, SamplingParams(max_tokens=8), Speculation(name)) for p in prompts(2)]
        texts.append([answer.tokens.tolist() for answer in engine.run_many(asked)])
    assert all(text == texts[0] for text in texts)


class OtherAdapter(DecoderAdapter):
    """What a plug-in makes of the target."""


def test_two_sets_of_masks_are_refused(model):
    drafters = {kind.name: kind(mask_network(model), model) for kind in KINDS}
    joined = {"joined": MergedDrafter(list(drafters.values()))}
    for together in (drafters, joined):
        with pytest.raises(ValueError, match=r"\['mask_tokens', 'mask_tokens_linear'\] have diff"):
            build_engine(EngineModels(text=model, drafters=together))
    with pytest.raises(ValueError, match="cannot share an engine with one .* by OtherAdapter"):
        drafters["mask_tokens"].adapt_target(OtherAdapter(model))
    with pytest.raises(ValueError, match="for a target of another shape"):
        MaskTokensDrafter(mask_network(model), wide_model())
