"""Layouts of block drafters: written here tensor by tensor, read back, and refused where wrong."""

import pytest
import torch
from safetensors.torch import load_file

from recserve.drafters.block.files import load_block, save_block
from recserve.drafters.block.heads import ConvConfig, MarkovConfig, SelectorConfig
from recserve.drafters.block.network import BlockConfig
from recserve.models.loading import UnsupportedModel
from tests.support.block_drafter import VARIANTS, block_network
from tests.support.published_block import (
    LAYOUTS,
    backbone,
    deepspec,
    dflash,
    speculators,
)
from tests.support.published_mtp import write_folder as written
from tests.support.text_plain import VOCABULARY, drawn_model

# What differs from plain DFlash.
EXPECTED = {
    "dflash": {},
    "jetspec": {"causal": (True, True)},
    "nemo": {"causal": (True, True)},
    "glimmer": {"own_mask": True, "mask_token": 200},
    "dflash2": {
        "conv": ConvConfig(2, 8),
        "selector": SelectorConfig(6, 5),
        "input_scale": 2.0,
        "output_scale": 0.5,
        "softcap": 30.0,
    },
    "specforge": {"markov": MarkovConfig(6), "from_anchor": True},
    "deepspec-gated": {
        "markov": MarkovConfig(6, "gated"),
        "from_anchor": True,
        "block_size": 7,
        "own_embedding": True,
        "own_head": True,
    },
    "speculators-dflash": {"target_layers": (0, 2), "draft_vocab_size": 20, "own_head": True},
    "speculators-dflash2": {
        "target_layers": (0, 2),
        "conv": ConvConfig(2, 8),
        "selector": SelectorConfig(6, 5),
    },
    "speculators-dspark": {
        "target_layers": (0, 2),
        "markov": MarkovConfig(6),
        "from_anchor": True,
    },
}
EXPECTED["deepspec-rnn"] = EXPECTED["deepspec-gated"] | {"markov": MarkovConfig(6, "rnn")}
PLAIN = {
    "target_layers": (1, 2),  # layer i's output is the stream after i + 1 layers
    "vocab_size": VOCABULARY,
    "draft_vocab_size": VOCABULARY,
    "block_size": 8,
    "causal": (False, False),
    "mask_token": 39,
    "target_size": 32,
}


@pytest.fixture(scope="module")
def target():
    return drawn_model(0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_lies_in_its_place(name, tmp_path, target):
    torch.manual_seed(0)
    fields, weights = LAYOUTS[name]()
    network = load_block(written(tmp_path, fields, weights), target)
    config = network.config
    assert config == BlockConfig(decoder=config.decoder, **PLAIN | EXPECTED[name])
    assert config.decoder.rope_theta == 1e6 and config.decoder.qk_norm
    assert config.decoder.max_positions == target.config.decoder.max_positions
    plain = {n.removeprefix("model."): w for n, w in weights.items()}
    own = network.layers[1]
    if name == "glimmer":
        fused = plain["layers.1.self_attn.qkv_proj.weight"]
        assert torch.equal(torch.cat([own.query.weight, own.key_value.weight]), fused)
        assert torch.equal(own.gate_up.weight, plain["layers.1.mlp.gate_up_proj.weight"])
        assert torch.equal(network.fc.weight, plain["encoder.fc.weight"])
        assert torch.equal(network.mask_embedding, plain["mask_embedding"][0])
        return
    part = "layers.1.self_attn."
    assert torch.equal(own.query.weight, plain[f"{part}q_proj.weight"])
    both = [plain[f"{part}{letter}_proj.weight"] for letter in "kv"]
    assert torch.equal(own.key_value.weight, torch.cat(both))
    assert torch.equal(own.k_norm.weight, plain[f"{part}k_norm.weight"])
    assert torch.equal(own.output.weight, plain[f"{part}o_proj.weight"])
    assert torch.equal(own.mlp_norm.weight, plain["layers.1.post_attention_layernorm.weight"])
    assert torch.equal(network.hidden_norm.weight, plain["hidden_norm.weight"])
    if config.conv is not None:
        kernel = "layers.1.mlp_conv.base_kernel"
        assert torch.equal(own.mlp_conv.base_kernel, plain[kernel])
        codebook = plain["candidate_selector.successor_codebook"]
        assert torch.equal(network.selector.successors, codebook)
    if config.markov is not None:
        assert torch.equal(network.markov.successors, plain["markov_head.markov_w2.weight"])
        vectors = network.markov.markov_w1.weight
        assert torch.equal(vectors, plain["markov_head.markov_w1.weight"])
    if config.own_embedding:
        assert torch.equal(network.tokens.weight, plain["embed_tokens.weight"])
    if network.token_map is not None:
        assert network.token_map.tolist() == list(range(0, VOCABULARY, 2))
        assert torch.equal(network.head.weight, plain["lm_head.weight"])


def test_copies_of_the_target_s_embedding_and_head_are_not_kept(tmp_path, target):
    fields, weights = deepspec()
    weights["embed_tokens.weight"] = target.tokens.weight.clone()
    weights["lm_head.weight"] = target.head.weight.clone()
    config = load_block(written(tmp_path, fields, weights), target).config
    assert not config.own_embedding and not config.own_head


def flagged(top=(), nested=(), types=None):
    fields, _ = dflash()
    fields |= dict(top)
    fields["dflash_config"] = fields["dflash_config"] | dict(nested)
    if types is not None:
        fields["layer_types"] = [f"{kind}_attention" for kind in types]
    return fields


@pytest.mark.parametrize(
    "fields,causal",
    [
        (flagged({"is_causal": False}, {"causal_head": True}), (False, False)),
        (flagged({"is_causal": True}, {"causal": False}), (True, True)),
        (flagged({}, {"causal": False}, ("sliding", "full")), (False, False)),
        (flagged({}, {}, ("sliding", "full")), (True, False)),
        (flagged({"sliding_window_non_causal": True}, {}, ("sliding", "full")), (False, False)),
        (flagged({}, {"use_swa": True, "swa_window_size": 9999}), (False, False)),
    ],
    ids=["top-off", "top-on", "nested-off", "sliding", "sliding-both-ways", "use_swa"],
)
def test_the_causal_flags_have_an_order(fields, causal, tmp_path, target):
    fields["sliding_window"] = 4096
    network = load_block(written(tmp_path, fields, backbone()), target)
    assert network.config.causal == causal


def test_windows_that_the_target_cannot_fill_have_no_effect(tmp_path, target):
    for window, expected in ((4096, ()), (64, ()), (63, (63, 0))):
        fields = flagged({"sliding_window": window}, {}, ("sliding", "full"))
        network = load_block(written(tmp_path, fields, backbone()), target)
        assert network.config.windows == expected


def test_rope_of_neighbours_is_read_as_rope_of_halves(tmp_path, target):
    """Keys in either order have the same products, which is all that attention sees."""
    torch.manual_seed(1)
    fields, weights = dflash()
    network = load_block(written(tmp_path, fields | {"is_neox_style": False}, weights), target)
    states, places = torch.randn(6, 64), torch.arange(6)
    (keys, _), _ = network.entries(states, places)
    features = network.hidden_norm(network.fc(states))
    plain = (features @ weights["layers.0.self_attn.k_proj.weight"].T).view(6, 2, 8)
    plain = plain * (plain.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    plain = plain * weights["layers.0.self_attn.k_norm.weight"]
    angles = places[:, None] * 1e6 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(plain.view(6, 2, 4, 2).contiguous()) * turn
    expected = torch.view_as_real(pairs).flatten(-2)
    products = torch.einsum("nhd,mhd->hnm", keys, keys)
    wanted = torch.einsum("nhd,mhd->hnm", expected, expected)
    torch.testing.assert_close(products, wanted, rtol=1e-4, atol=1e-4)


def test_a_pickled_mask_is_refused(tmp_path, target):
    fields, weights = dflash()
    fields["dflash_config"]["mask_token_id"] = 200
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="mask_embedding.pt, which is a pickle"):
        load_block(written(tmp_path, fields, weights), target)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("mixed", "windows")])
def test_what_is_saved_is_what_was_there(variant, tmp_path, target):
    network = block_network(target, variant, seed=2, fields={"own_mask": True})
    save_block(network, tmp_path)
    again = load_block(tmp_path, target)
    assert again.config == network.config
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"layers.0.self_attn.k_proj.weight", "mask_embedding"} <= names


def test_a_draft_vocabulary_is_saved(tmp_path, target):
    network = block_network(target, fields={"draft_vocab_size": 20})
    save_block(network, tmp_path)
    assert load_block(tmp_path, target).token_map.tolist() == list(range(0, 40, 2))


def test_a_mixture_of_variants_is_not_saved(tmp_path, target):
    with pytest.raises(ValueError, match="mixture"):
        save_block(block_network(target, "mixed"), tmp_path)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_dspark_as_modelopt_names_it(kind, tmp_path, target):
    """Parts without the heads' names; `shift_label` says that the anchor predicts."""
    torch.manual_seed(0)
    fields, weights = deepspec(kind)
    expected = load_block(written(tmp_path / "deepspec", fields, weights), target)
    renamed = {
        name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): one
        for name, one in weights.items()
    }
    assert "markov_w1.weight" in renamed and "confidence_proj.weight" in renamed
    inner = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type")
    nested = {name: fields[name] for name in inner}
    nested |= {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True}
    top = {n: v for n, v in fields.items() if n not in inner and n != "enable_confidence_head"}
    top |= {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
    network = load_block(written(tmp_path / "modelopt", top, renamed), target)
    assert network.config == expected.config and network.config.from_anchor
    for name, weight in expected.state_dict().items():
        assert torch.equal(weight, network.state_dict()[name]), name
    top["sample_from_anchor"] = False
    with pytest.raises(UnsupportedModel, match="shift_label"):
        load_block(written(tmp_path / "both", top, renamed), target)


def test_the_window_of_speculators_lies_before_the_anchor(tmp_path, target):
    """Its mask is `kv >= anchor - window`; z-lab's window counts the anchor's own position."""
    torch.manual_seed(0)
    fields, weights = speculators()
    inner = fields["transformer_layer_config"]
    layers = inner["num_hidden_layers"]
    window = {"sliding_window": 20, "use_sliding_window": True}
    fields["transformer_layer_config"] = (
        inner | window | {"layer_types": ["sliding_attention"] * layers}
    )
    network = load_block(written(tmp_path / "speculators", fields, weights), target)
    assert network.config.windows == (21,) * layers
    fields, weights = dflash()
    fields |= window | {"layer_types": ["sliding_attention"] * layers}
    network = load_block(written(tmp_path / "z-lab", fields, weights), target)
    assert network.config.windows == (20,) * layers
