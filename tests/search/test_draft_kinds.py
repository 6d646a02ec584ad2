"""Every kind of trained draft head: the slates of beam search, under filters and live changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.attention import DenseAttention
from recserve.models.drafters.calibration import Calibration, DraftPlan
from recserve.models.drafters.draft_network import SelfDraftConfig
from recserve.models.drafters.nezha import load_self_draft
from recserve.models.drafters.prefix_head import NETWORKS, load_prefix_head, save_prefix_head
from recserve.search.recommend_strategy import Heads
from recserve.search.strategies import SpeculativeStrategy
from tests.support.draft_heads import make_network, make_nezha_head
from tests.support.grids import covering
from tests.support.recommenders import CATALOGUES, FORMS, draw_root, make
from tests.support.tries import SHAPES, Changed, engine_of

SMALL = EngineConfig(kv_bytes=16 * 2**20)
WEIGHTS = ("drawn", "from-target", "adversarial")


def requests_of(model, trie):
    """Narrow and wide beams; exclusions for two requests, half of the catalogue for the others."""
    rng = np.random.default_rng(0)
    requests = []
    for i, (k, width) in enumerate(((1, 1), (2, 3), (3, 10), (5, 40))):
        fields = {}
        if i % 2:
            fields["excluded"] = rng.integers(0, trie.num_rows, i)
        elif i:
            fields["allowed"] = AllowedItems.of(rng.random(trie.num_rows) < 0.5)
        requests.append(
            SlateQuery(draw_root(model, 1 + 2 * i, i), trie, k, width, "speculative", **fields)
        )
    return requests


def assert_exact(engine, requests):
    """Compares ids, order and scores with beam search, in a batch and again from the cache."""
    plain = engine.run_many([replace(request, strategy="beam") for request in requests])
    for _ in range(2):
        for drafted, searched in zip(engine.run_many(requests), plain, strict=True):
            assert drafted.exact and (drafted.timing.drafted or not drafted.rounds)
            assert drafted.rows.tolist() == searched.rows.tolist()
            np.testing.assert_allclose(drafted.scores, searched.scores, atol=2e-5)


@pytest.mark.parametrize(
    "kind,codes,form,weights", covering(NETWORKS, CATALOGUES, FORMS, WEIGHTS, pairs=True)
)
def test_the_slates_are_those_of_beam_search(kind, codes, form, weights):
    model, trie = make(codes, *form)
    head = make_network(model, kind.kind, weights)
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    assert_exact(engine, requests_of(model, trie))


@pytest.mark.parametrize("kind,shape", covering(NETWORKS, SHAPES))
def test_the_slates_follow_a_live_catalogue(kind, shape):
    """Items that were added, replaced and hidden after the trie and the head were made."""
    changed = Changed(*shape)
    model, _ = engine_of(changed)
    head = make_network(model, kind.kind, "from-target")
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    for trie in (changed.base, changed.overlay, changed.rebuilt):
        assert_exact(engine, requests_of(model, trie))


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_good_head_saves_rounds(kind):
    """A wide draft of any kind proves a slate in one round, where beam search needs several."""
    model, trie = make(CATALOGUES["ordinary"], "items", "children")
    head = make_network(model, kind, "drawn")
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    engine.offer("speculative", SpeculativeStrategy(model, head, DraftPlan(50.0, 0, 0, 1), False))
    request = SlateQuery(draw_root(model, 9, 0), trie, 10, 60, "speculative")
    assert engine.run(request).rounds == 1 < engine.run(replace(request, strategy="beam")).rounds


@pytest.mark.parametrize("kind", NETWORKS)
def test_cached_tables_change_no_logit(kind):
    """Logits of the served head equal those with gradients, which read no cached table."""
    model, _ = make(CATALOGUES["ordinary"], "items", "children")
    head = make_network(model, kind, "drawn")
    last, sizes = torch.randn(5, 32), model.config.codebook_sizes
    states = None if head.placeholders is None else torch.randn(5, len(sizes) - 1, 32)
    codes = torch.stack([torch.randint(0, size, (5,)) for size in sizes], 1)

    def logits():
        state, contexts = head.first_state(last), head.contexts(last, states)
        found = []
        for level in range(1, len(sizes)):
            state = head.step(level - 1, state, codes[:, level - 1])
            found.append(head.level_logits(contexts[:, level], state, level).detach())
        return found

    with torch.inference_mode():
        first, second = logits(), logits()
    for level, (one, two, free) in enumerate(zip(first, second, logits(), strict=True), start=1):
        assert one.shape == (5, sizes[level])
        assert torch.equal(one, two)
        torch.testing.assert_close(one, free)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_saved_head_names_its_kind(kind, tmp_path):
    model, _ = make(CATALOGUES["ordinary"], "items", "children")
    head = make_network(model, kind, "drawn")
    head.calibration = Calibration({(10, 10): (DraftPlan(0.0, 24.0, 2.0, 0.0),)})
    save_prefix_head(head, tmp_path)
    loaded = load_prefix_head(tmp_path, model)
    assert type(loaded) is NETWORKS[kind] and loaded.calibration == head.calibration
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    if kind != "recurrent":
        with pytest.raises(ValueError, match=f"of kind '{kind}', not 'recurrent'"):
            load_self_draft(tmp_path, model)
    other, _ = make(CATALOGUES["deep"], "items", "children")
    with pytest.raises(ValueError, match="was made for"):
        load_prefix_head(tmp_path, other)


def test_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"head": "oracle"}')
    with pytest.raises(ValueError, match="names the head 'oracle'; known heads: recurrent, mlp"):
        load_prefix_head(tmp_path, make(CATALOGUES["ordinary"], "items", "children")[0])


def test_the_mlp_head_is_its_formula():
    """z_l = A_l h + sum of B_lj e(c_j) + b_l; logits_l = E_l (h + W_l silu(z_l))."""
    torch.manual_seed(0)
    sizes = (5, 3, 7, 4)
    head = NETWORKS["mlp"](SelfDraftConfig(8, sizes)).eval()
    last, codes = torch.randn(6, 8), torch.stack([torch.randint(0, s, (6,)) for s in sizes], 1)
    state, contexts = head.first_state(last), head.contexts(last)
    for level in range(1, 4):
        state = head.step(level - 1, state, codes[:, level - 1])
        z = (last @ head.roots.weight.T + head.roots.bias)[:, 8 * (level - 1) : 8 * level]
        for j in range(level):
            rows = 8 * (level - 1 - j)
            embedded = head.tokens.weight[1 + sum(sizes[:j]) + codes[:, j]]
            z = z + embedded @ head.by_code[j].weight[rows : rows + 8].T
        hidden = last + torch.nn.functional.silu(z) @ head.outputs[level - 1].weight.T
        start = 1 + sum(sizes[:level])
        wanted = hidden @ head.head.weight[start : start + sizes[level]].T
        torch.testing.assert_close(head.level_logits(contexts[:, level], state, level), wanted)


def test_the_lattice_head_scores_pairs_of_adjacent_codes():
    """logits_l(p -> c) = <E_l[c], h_l> + <A[p] * V h_l, B[c]>, whatever came before p."""
    torch.manual_seed(0)
    sizes = (5, 3, 7, 4)
    head = NETWORKS["lattice"](SelfDraftConfig(8, sizes)).eval()
    for slot in head.slots:
        torch.nn.init.normal_(slot.linear.weight)
    last = torch.randn(6, 8)
    contexts = head.contexts(last)
    for level in range(1, 4):
        first, own = 1 + sum(sizes[: level - 1]), 1 + sum(sizes[:level])
        codes = torch.randint(0, sizes[level - 1], (6,))
        h = last + torch.nn.functional.silu(head.slots[level - 1].linear(last))
        for state in (head.first_state(last), torch.randn(6, 64)):
            after = head.step(level - 1, state, codes)
            found = head.level_logits(contexts[:, level], after, level)
            for n in range(6):
                gate = head.predecessors.weight[first + codes[n]] * (head.hidden.weight @ h[n])
                for c in range(sizes[level]):
                    wanted = head.head.weight[own + c] @ h[n]
                    wanted = wanted + gate @ head.successors.weight[own + c]
                    torch.testing.assert_close(found[n, c], wanted)


def test_the_eagle_head_is_a_decoder_layer_over_its_prefix():
    """A transcription over whole prefixes: features one by one, attention under a causal mask."""
    torch.manual_seed(0)
    sizes, E = (5, 3, 7, 4), 64
    head = NETWORKS["eagle"](SelfDraftConfig(E, sizes)).eval()
    for linear in (head.features, head.qkv):
        torch.nn.init.normal_(linear.weight, std=0.2)
    last, codes = torch.randn(6, E), torch.stack([torch.randint(0, s, (6,)) for s in sizes], 1)
    features, rows = [last], []
    for level in range(3):
        embedded = head.tokens.weight[1 + sum(sizes[:level]) + codes[:, level]]
        x = head.codes(embedded) + head.features(features[-1]) + head.positions.weight[level]
        rows.append(x)
        every = torch.stack(rows, 1)
        normed = every * (every.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        q, k, v = (
            part.view(6, -1, 2, 32).transpose(1, 2) for part in head.qkv(normed).chunk(3, -1)
        )
        read = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + head.out(read.transpose(1, 2).flatten(2)[:, -1])
        gate, up = head.gate_up(x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).chunk(2, -1)
        features.append(x + head.down(torch.nn.functional.silu(gate) * up))
    state = head.first_state(last)
    for level in range(1, 4):
        state = head.step(level - 1, state, codes[:, level - 1])
        torch.testing.assert_close(head.feature(state), features[level], atol=1e-4, rtol=1e-4)
        start = 1 + sum(sizes[:level])
        wanted = features[level] @ head.head.weight[start : start + sizes[level]].T
        found = head.level_logits(head.contexts(last)[:, level], state, level)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_the_mask_token_head_samples_each_slot_from_the_code_before_it():
    """z_l = A m_l + B_l e(c_{l-1}) + b; logits_l = <E_l, m_l + W_l silu(z_l)>."""
    torch.manual_seed(0)
    sizes = (5, 3, 7, 4)
    head = NETWORKS["mask_tokens"](SelfDraftConfig(8, sizes)).eval()
    last, masks = torch.randn(6, 8), torch.randn(6, 3, 8)
    contexts = head.contexts(last, masks)
    for level in range(1, 4):
        codes = torch.randint(0, sizes[level - 1], (6,))
        embedded = head.tokens.weight[1 + sum(sizes[: level - 1]) + codes]
        own = masks[:, level - 1]
        z = head.masks(own) + embedded @ head.by_code[level - 1].weight.T
        hidden = own + torch.nn.functional.silu(z) @ head.outputs[level - 1].weight.T
        start = 1 + sum(sizes[:level])
        wanted = hidden @ head.head.weight[start : start + sizes[level]].T
        state = head.step(level - 1, torch.randn(6, 8), codes)
        torch.testing.assert_close(head.level_logits(contexts[:, level], state, level), wanted)
    with pytest.raises(ValueError, match="states at the placeholders"):
        head.contexts(last)


@pytest.mark.parametrize("form", ["items", "codes"])
def test_mask_tokens_see_the_history_and_change_no_score(form):
    """Their states are those of a plain forward; a prefix cached without them gets them later."""
    model, trie = make(CATALOGUES["ordinary"], form, "children")
    head = make_network(model, "mask_tokens", "from-target")
    root = draw_root(model, 9, 0)
    request = SlateQuery(root, trie, 5, 10, "speculative")
    engine = build_engine(EngineModels(model, heads=Heads(head)), SMALL)
    plain = engine.run(replace(request, strategy="beam"))  # caches the prefix without mask tokens
    for _ in range(2):
        slate = engine.run(request)
        assert slate.rows.tolist() == plain.rows.tolist() and slate.timing.root_computed == 0
        np.testing.assert_allclose(slate.scores, plain.scores, atol=2e-5)
    found = engine.schedulers["recommender"].cache.match(root.keys).placeholder_states
    with torch.no_grad():
        x = torch.cat([model.embed(root.inputs.tokens), head.placeholders])
        hidden = model.decoder(x[None], torch.arange(len(x))[None], DenseAttention())[0]
    torch.testing.assert_close(found, hidden[-3:], atol=1e-4, rtol=1e-4)


def test_two_heads_with_placeholders_are_refused():
    model, _ = make(CATALOGUES["ordinary"], "items", "children")
    heads = Heads(make_network(model, "mask_tokens"), make_nezha_head(model))
    with pytest.raises(ValueError, match="both read placeholders"):
        build_engine(EngineModels(model, heads=heads), SMALL)
