"""SpecFormer's layout: written here tensor by tensor, read back, and refused where wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from recserve.drafters.specformer.files import load_specformer, save_specformer
from recserve.drafters.specformer.questions import specformer_questions
from recserve.models.attention import DenseAttention
from recserve.models.decoder import FINAL_LAYER
from recserve.models.loading import UnsupportedModel
from tests.support.specformer_drafter import specformer
from tests.support.text_plain import VOCABULARY, drawn_model

SLOTS = 3
# drawn_model(0): hidden size 32, 2 layers, 4 query heads and 2 KV heads of 8, gate 48.
SHAPES = {
    "down_samp": (32, 128),
    "decoder_input_norm": (32,),
    "positional_input_norm": (32,),
    "positional": (SLOTS * 32, 32),
    "encoder_input_norm": (32,),
    "encoder_ffn_input_norm": (32,),
    "encoder_ffn.up_proj": (48, 32),
    "encoder_ffn.gate_proj": (48, 32),
    "encoder_ffn.down_proj": (32, 48),
}
ATTENTION = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}


def parts() -> tuple[dict, dict]:
    """Returns the fields and tensors of a network, as the authors' module tree names them."""
    torch.manual_seed(0)
    shapes = SHAPES | {f"norms.{n}": (32,) for n in range(4)}
    shapes |= {
        f"{block}_att.{name}": shape
        for block in ("decoder", "encoder")
        for name, shape in ATTENTION.items()
    }
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    weights["positional.bias"] = torch.randn(SLOTS * 32)
    return {"max_ahead": SLOTS, "hook_list": [0, 1, -2, -1]}, weights


@pytest.fixture(scope="module")
def target():
    return drawn_model(0)


def written(folder, fields, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["", "mtp."])
def test_every_tensor_lies_in_its_place(prefix, tmp_path, target):
    fields, weights = parts()
    named = {prefix + name: weight for name, weight in weights.items()}
    network = load_specformer(written(tmp_path, fields, named), target)
    config = network.config
    # The last two of three hidden states: before the last layer, and after the final norm.
    assert config.target_layers == (0, 1, 1, FINAL_LAYER)
    assert config.num_slots == SLOTS and config.causal  # as in the only public code
    assert config.decoder.max_positions == target.config.decoder.max_positions
    for number, norm in enumerate(network.state_norms):
        assert torch.equal(norm.weight, weights[f"norms.{number}.weight"])
    for ours, theirs in (
        ("mix", "down_samp"),
        ("positional_norm", "positional_input_norm"),
        ("positional", "positional"),
        ("mlp_norm", "encoder_ffn_input_norm"),
        ("down", "encoder_ffn.down_proj"),
        ("context_attention.norm", "decoder_input_norm"),
        ("context_attention.output", "decoder_att.o_proj"),
        ("slot_attention.norm", "encoder_input_norm"),
        ("slot_attention.output", "encoder_att.o_proj"),
    ):
        assert torch.equal(network.get_parameter(f"{ours}.weight"), weights[f"{theirs}.weight"])
    assert torch.equal(network.positional.bias, weights["positional.bias"])
    for ours, theirs in (("context_attention", "decoder_att"), ("slot_attention", "encoder_att")):
        qkv = [weights[f"{theirs}.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(network.get_parameter(f"{ours}.qkv.weight"), torch.cat(qkv))


@torch.inference_mode()
def test_silu_is_applied_to_up_proj_as_in_the_authors_code(tmp_path, target):
    fields, weights = parts()
    fields["is_causal"] = False
    network = load_specformer(written(tmp_path, fields, weights), target)
    context = torch.randn(5, 32)
    x = torch.nn.functional.rms_norm(context, (32,), weights["positional_input_norm.weight"], 1e-6)
    x = x @ weights["positional.weight"].T + weights["positional.bias"]
    seen = DenseAttention(torch.ones(SLOTS, SLOTS, dtype=torch.bool))
    x = network.slot_attention(x.view(5, SLOTS, 32), None, seen)
    y = torch.nn.functional.rms_norm(x, (32,), weights["encoder_ffn_input_norm.weight"], 1e-6)
    ffn = {name: weights[f"encoder_ffn.{name}_proj.weight"].T for name in ("up", "gate", "down")}
    expected = x + ((y @ ffn["gate"]) * torch.nn.functional.silu(y @ ffn["up"])) @ ffn["down"]
    torch.testing.assert_close(network.slots(context), expected, rtol=1e-4, atol=1e-4)


def test_slots_without_the_field_are_causal_as_in_the_authors_code(tmp_path, target):
    """The authors' code attends with is_causal=True and turns the slots by their positions."""
    fields, weights = parts()
    network = load_specformer(written(tmp_path, fields, weights), target)
    context = torch.randn(5, 32)
    x = torch.nn.functional.rms_norm(context, (32,), weights["positional_input_norm.weight"], 1e-6)
    x = (x @ weights["positional.weight"].T + weights["positional.bias"]).view(5, SLOTS, 32)
    inner = torch.nn.functional.rms_norm(x, (32,), weights["encoder_input_norm.weight"], 1e-6)
    query, key, value = (
        (inner @ weights[f"encoder_att.{part}_proj.weight"].T).view(5, SLOTS, -1, 8).transpose(1, 2)
        for part in "qkv"
    )
    angles = torch.arange(SLOTS)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turned(x):
        pairs = torch.complex(*x.chunk(2, dim=-1)) * turns
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    mixed = torch.nn.functional.scaled_dot_product_attention(
        turned(query), turned(key), value, is_causal=True, enable_gqa=True
    )
    x = x + mixed.transpose(1, 2).flatten(2) @ weights["encoder_att.o_proj.weight"].T
    y = torch.nn.functional.rms_norm(x, (32,), weights["encoder_ffn_input_norm.weight"], 1e-6)
    ffn = {name: weights[f"encoder_ffn.{name}_proj.weight"].T for name in ("up", "gate", "down")}
    expected = x + ((y @ ffn["gate"]) * torch.nn.functional.silu(y @ ffn["up"])) @ ffn["down"]
    torch.testing.assert_close(network.slots(context), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_the_files_cannot_name_is_refused(tmp_path, target):
    with pytest.raises(ValueError, match="the stream after all 1 layers"):
        save_specformer(specformer(target).network, tmp_path, 1)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_saved_is_what_was_there(causal, tmp_path, target):
    network = specformer(target, seed=2, causal=causal).network
    save_specformer(network, tmp_path, target.config.decoder.num_layers)
    again = load_specformer(tmp_path, target)
    assert again.config == network.config
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "encoder_ffn.up_proj.weight" in names and len(names) == 4 + 9 + 1 + 8
    wide = drawn_model(0)
    object.__setattr__(wide.config, "vocab_size", VOCABULARY + 1)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match="vocab_size is 40; the target requires 41"):
        load_specformer(tmp_path, wide)


@pytest.mark.parametrize(
    ("hooks", "named", "moved"),
    [
        ([0, 1, -2, -1], "0, 1, 1, 2", []),
        ([-1], "2", [[1]]),
        ([1, -2], "1, 1", [[2, 2], [0, 0]]),
        ([0], "0", [[1]]),
        ([0, 2], "0, 2", []),
    ],
)
def test_the_layers_are_named_with_those_beside_them(hooks, named, moved, tmp_path, target):
    """A layer counted from the end has its own number; other readings stay within the target."""
    fields, weights = parts()
    folder = written(tmp_path, {**fields, "hook_list": hooks}, weights)
    (question,) = (one for one in specformer_questions(folder, target) if one.name == "layers")
    assert question.default == named
    assert [reading.fields for reading in question.others] == [{"hook_list": m} for m in moved]
