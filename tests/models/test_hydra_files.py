"""Hydra's published layouts: written here tensor by tensor, read back, and refused where wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from recserve.models.decoder import FINAL_LAYER
from recserve.models.drafters.hydra_files import FILE, load_hydra, save_hydra
from recserve.models.loading import UnsupportedModel
from tests.support.hydra_drafter import hydra_network
from tests.support.text_plain import VOCABULARY, drawn_model

E, HEADS, BLOCKS = 32, 2, 3
SIZES = {
    "hydra_num_heads": HEADS,
    "hydra_num_layers": BLOCKS,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "transformers_version": "4.36.0",
}


@pytest.fixture(scope="module")
def target():
    return drawn_model(0)


def heads(prefix: bool, target, grounded: bool = True) -> dict[str, torch.Tensor]:
    """Returns the tensors of the published classes; shared modules are saved several times."""
    torch.manual_seed(0)
    weights = {"input_embed_fn.weight": target.tokens.weight.clone()}
    for i in range(HEADS):
        shared = torch.randn(E, E), torch.randn(E)
        for j in range(BLOCKS):
            place = f"hydra_mlp.{i}.{2 * j + 1 if prefix else j}"
            weight, bias = (own.clone() for own in shared)
            if grounded and j == 0:
                weight, bias = torch.randn(E, (i + 2) * E), torch.randn(E)
                weights[f"{place}.res_connection.weight"] = torch.randn(E, (i + 2) * E)
                weights[f"{place}.res_connection.bias"] = torch.randn(E)
            weights |= {f"{place}.linear.weight": weight, f"{place}.linear.bias": bias}
        place = f"hydra_lm_head.{i}{'.1' if prefix else ''}"
        weights |= {f"{place}.weight": torch.randn(VOCABULARY, E)}
        weights |= {f"{place}.bias": torch.randn(VOCABULARY)}
    if prefix:
        layer = "prefix_embeding_layer.layers.0"
        shapes = {"self_attn.q_proj": (32, E), "self_attn.k_proj": (16, E)}
        shapes |= {"self_attn.v_proj": (16, E), "self_attn.o_proj": (E, 32)}
        shapes |= {"mlp.gate_proj": (48, E), "mlp.up_proj": (48, E), "mlp.down_proj": (E, 48)}
        shapes |= {"input_layernorm": (E,), "post_attention_layernorm": (E,)}
        weights |= {f"{layer}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        weights[f"{layer}.self_attn.rotary_emb.inv_freq"] = torch.randn(4)
        weights["prefix_embeding_layer.norm.weight"] = torch.randn(E)
        weights["prefix_embeding_layer.embed_tokens.weight"] = torch.randn(VOCABULARY, E)
    return weights


def written(folder, fields, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / FILE)
    return folder


def res_block(x, weights, place):
    """Transcribes the published ResBlock."""
    linear = x @ weights[f"{place}.linear.weight"].T + weights[f"{place}.linear.bias"]
    own = x
    if f"{place}.res_connection.weight" in weights:
        own = x @ weights[f"{place}.res_connection.weight"].T
        own = own + weights[f"{place}.res_connection.bias"]
    return own + linear * torch.sigmoid(linear)


@pytest.mark.parametrize("grounded", [True, False], ids=["grounded", "independent"])
@pytest.mark.parametrize("prefix", [False, True], ids=["mlp", "prefix-mlp"])
@torch.inference_mode()
def test_heads_equal_the_published_forward(prefix, grounded, tmp_path, target):
    weights = heads(prefix, target, grounded)
    arch = {"hydra_head_arch": "prefix-mlp" if prefix else "mlp", "grounded_heads": grounded}
    network = load_hydra(written(tmp_path, SIZES | arch, weights), target)
    assert network.config.layer == FINAL_LAYER and (network.prefix is not None) == prefix
    inputs = torch.randn(5, (HEADS + 1) * E)
    for i in range(HEADS):
        own = inputs[:, : (i + 2) * E]
        x = own if grounded else own[:, :E]
        for j in range(BLOCKS):
            x = res_block(x, weights, f"hydra_mlp.{i}.{2 * j + 1 if prefix else j}")
        place = f"hydra_lm_head.{i}{'.1' if prefix else ''}"
        expected = x @ weights[f"{place}.weight"].T + weights[f"{place}.bias"]
        torch.testing.assert_close(network.logits(i, own), expected, rtol=1e-4, atol=1e-4)
    if prefix:
        names = [f"prefix_embeding_layer.layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
        (layer,) = network.prefix.layers
        assert torch.equal(layer.qkv.weight, torch.cat([weights[name] for name in names]))
        norm = weights["prefix_embeding_layer.norm.weight"]
        assert torch.equal(network.prefix.norm.weight, norm)


def test_an_offset_names_a_layer_of_the_target(tmp_path, target):
    fields = SIZES | {"hidden_state_offset": 1}
    network = load_hydra(written(tmp_path, fields, heads(False, target)), target)
    assert network.config.layer == 1  # of 2 layers


def places_without_dropout(fields, weights):
    for name in [n for n in weights if n.startswith("hydra_mlp")]:
        head, place, rest = name.removeprefix("hydra_mlp.").split(".", 2)
        weights[f"hydra_mlp.{head}.{int(place) // 2}.{rest}"] = weights.pop(name)


def no_bias(fields, weights):
    del weights["hydra_lm_head.1.1.bias"]


def no_residual(fields, weights):
    del weights["hydra_mlp.0.1.res_connection.weight"]


def blocks_of_their_own(fields, weights):
    weights["hydra_mlp.1.5.linear.weight"] += 1


def another_architecture(fields, weights):
    fields["hydra_head_arch"] = "cross-attn"


def eagle_attention(fields, weights):
    fields["hydra_head_arch"] = "eagle-attn"


def plain_heads(fields, weights):
    fields["hydra_head_arch"] = "mlp"


def independent_heads(fields, weights):
    fields["grounded_heads"] = False


def fewer_heads(fields, weights):
    fields["hydra_num_heads"] = 1


def unknown_field(fields, weights):
    fields["hydra_gate"] = 3


def deep_offset(fields, weights):
    fields["hidden_state_offset"] = 3


def another_embedding(fields, weights):
    weights["input_embed_fn.weight"] = torch.randn(VOCABULARY, E)


def another_size(fields, weights):
    weights["hydra_lm_head.0.1.weight"] = torch.randn(VOCABULARY + 1, E)


def not_finite(fields, weights):
    weights["hydra_lm_head.0.1.weight"][3] = float("nan")


FAULTS = {
    places_without_dropout: "blocks at even places",
    no_bias: "'hydra_lm_head.1.1.bias'",
    no_residual: "'hydra_mlp.0.1.res_connection.weight'",
    blocks_of_their_own: "hydra_mlp.1.3.linear.weight and hydra_mlp.1.5.linear.weight differ",
    another_architecture: "'cross-attn'",
    eagle_attention: "'eagle-attn'",
    plain_heads: "hydra_head_arch 'mlp'",
    independent_heads: "linear.weight",
    fewer_heads: "'hydra_lm_head.1.1.bias'",
    unknown_field: "'hydra_gate'",
    deep_offset: "hidden_state_offset is 3; the target has 2 layers",
    another_embedding: "input_embed_fn.weight",
    another_size: "hydra_lm_head.0.1.weight is",
    not_finite: "NaN",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named(fault, tmp_path, target):
    fields, weights = SIZES | {"hydra_head_arch": "prefix-mlp"}, heads(True, target)
    load_hydra(written(tmp_path, fields, weights), target)
    fault(fields, weights)
    with pytest.raises(UnsupportedModel, match=FAULTS[fault]):
        load_hydra(written(tmp_path, fields, weights), target)


def test_a_pickle_is_not_read(tmp_path, target):
    (tmp_path / "hydra_lm_head.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"convert hydra_lm_head\.pt offline with `python"):
        load_hydra(tmp_path, target)


@pytest.mark.parametrize("prefix", [False, True], ids=["mlp", "prefix-mlp"])
def test_what_is_saved_is_what_was_there(prefix, tmp_path, target):
    network = hydra_network(target, seed=2, prefix=prefix, layer=1)
    save_hydra(network, tmp_path)
    again = load_hydra(tmp_path, target)
    assert again.config == network.config
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    names = set(load_file(tmp_path / FILE))
    assert ("hydra_mlp.2.5.linear.weight" in names) == prefix  # the copy of block 3
