"""Layouts of MTP modules: written here tensor by tensor, read back, and refused where wrong."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from recserve.drafters.mtp.files import load_mtp, save_mtp
from recserve.models.attention import DenseAttention
from recserve.models.loading import UnsupportedModel, load_language_model
from recserve.models.saving import save_language_model
from tests.support.mtp_drafter import mtp
from tests.support.published_mtp import (
    LAYOUTS,
    deepseek,
    draw_layer,
    draw_weight,
    qwen3_next,
    write_folder,
)
from tests.support.text_plain import DRAWN_SIZES, drawn_model


@pytest.fixture(scope="module")
def target():
    return drawn_model(0)


def beside(folder, target, fields, weights):
    """Writes the target's folder and adds a module to it."""
    save_language_model(target, folder)
    own = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    return write_folder(folder, own | fields, stored | weights)


@pytest.mark.parametrize("name", ["deepseek", "qwen3-next"])
def test_a_target_s_folder_holds_both(name, tmp_path, target):
    """The target ignores the module, and the module's loader ignores the target's tensors."""
    torch.manual_seed(0)
    fields, weights = LAYOUTS[name]()
    fields = {k: v for k, v in fields.items() if k not in (*DRAWN_SIZES, "model_type")}
    if name == "qwen3-next":  # a plain target: its family has neither gates nor centred norms
        weights |= draw_layer("mtp.layers.0.")
        fields["partial_rotary_factor"] = 1.0
    folder = beside(tmp_path, target, fields, weights)
    again = load_language_model(folder)
    tokens = torch.arange(9)[None]
    states = [m(tokens, torch.arange(9), DenseAttention()) for m in (target, again)]
    assert torch.equal(*states)
    network = load_mtp(folder, again)
    fc = "model.layers.2.eh_proj.weight" if name == "deepseek" else "mtp.fc.weight"
    assert torch.equal(network.blocks[0].fc.weight, weights[fc])


def test_a_target_s_folder_with_another_layer_is_refused(tmp_path, target):
    fields, weights = deepseek(number=2)
    folder = beside(tmp_path, target, {}, weights)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.2\."):
        load_language_model(folder)  # num_nextn_predict_layers is missing


def test_what_is_saved_is_what_was_there(tmp_path, target):
    network = mtp(target, seed=2).network
    save_mtp(network, tmp_path, target.config.decoder.num_layers)
    again = load_mtp(tmp_path, target)
    assert again.config == network.config
    for name, own in network.state_dict().items():
        assert torch.equal(own, again.state_dict()[name]), name
    assert "model.layers.2.eh_proj.weight" in load_file(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="without gate"):
        save_mtp(mtp(target, qwen=True).network, tmp_path, 2)


def test_fields_of_this_project_override_the_layout(tmp_path, target):
    """What is fed back and which state goes in: no layout says so."""
    fields, weights = deepseek()
    own = {"norm_output": True, "target_layer_ids": [2]}
    network = load_mtp(write_folder(tmp_path, fields | own, weights), target)
    assert network.config.feeds_norm and network.config.target_layers == (2,)
    with pytest.raises(UnsupportedModel, match=r"target_layer_ids is \[1\]"):
        load_mtp(write_folder(tmp_path, fields | {"target_layer_ids": [1]}, weights), target)
    with pytest.raises(ValueError, match="layout holds modules"):
        save_mtp(network, tmp_path, 2)


# Fields of the published configurations of Qwen3-Next and of Qwen3.5 and 3.6, as far as they are
# not sizes of the module.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "use_sliding_window": False,
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",  # Qwen3.6: of linear attention alone
        "pad_token_id": None,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "tie_word_embeddings": False,
    "video_token_id": 248057,
    "vision_config": {"depth": 27},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def test_published_configurations_of_qwen_are_read(tmp_path, target):
    fields, weights = qwen3_next()
    expected = load_mtp(write_folder(tmp_path / "plain", fields, weights), target)
    next_ = load_mtp(write_folder(tmp_path / "next", fields | QWEN3_NEXT, weights), target)
    text = {n: v for n, v in fields.items() if n not in ("model_type", "partial_rotary_factor")}
    outside = QWEN3_5 | {"text_config": text | QWEN3_5["text_config"]}
    dense = load_mtp(write_folder(tmp_path / "dense", outside, weights), target)
    for network in (next_, dense):
        assert network.config == expected.config
        assert torch.equal(network._frequencies, expected._frequencies)
        for name, one in expected.state_dict().items():
            assert torch.equal(one, network.state_dict()[name]), name


def test_a_published_folder_of_qwen_holds_other_parts_too(tmp_path, target):
    """The text model under another name, and a model of images."""
    fields, weights = qwen3_next()
    expected = load_mtp(write_folder(tmp_path / "alone", fields, weights), target)
    others = ("language_model.layers.1.linear_attn.out_proj", "visual.blocks.0.attn.proj")
    more = weights | {f"model.{name}.weight": torch.zeros(4) for name in others}
    more |= {"model.language_model.embed_tokens.weight": target.tokens.weight.clone()}
    more |= {"model.language_model.norm.weight": target.decoder.norm.weight - 1}  # as in the module
    network = load_mtp(write_folder(tmp_path / "whole", fields, more), target)
    for name, one in expected.state_dict().items():
        assert torch.equal(one, network.state_dict()[name]), name


@pytest.mark.parametrize("seed", range(8))
def test_modules_of_specforge_are_read_or_refused(seed, tmp_path, target):
    """Its `model_type` is Qwen3's, its layers are those of Qwen3.5; copies of the target's lie in.

    A head of its own is read. What is no copy, and what does not tell how norms are stored, is
    refused by name.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    fields, weights = qwen3_next()
    plain = load_mtp(write_folder(tmp_path / "plain", fields, weights), target)
    del fields["linear_conv_kernel_dim"]
    shares = rng.choice((None, True, False))
    fields |= {
        "architectures": ["Qwen3_5MTPDraftModel"],
        "attn_output_gate": True,
        "model_type": "qwen3",
        "mtp_config": {} if shares is None else {"share_lm_head": shares},
        "num_hidden_layers": 1,
    }
    copies = {
        rng.choice(("", "mtp.")) + "embed_tokens.weight": target.tokens.weight.clone(),
        "mtp.lm_head.weight": target.logits(torch.eye(32)).T.contiguous(),
    }
    if shares is False:
        copies["mtp.lm_head.weight"] = draw_weight(*copies["mtp.lm_head.weight"].shape)
    network = load_mtp(write_folder(tmp_path / "whole", fields, weights | copies), target)
    for name, one in plain.state_dict().items():
        assert torch.equal(one, network.state_dict()[name]), name
    assert network.config.own_head == (shares is False)
    if shares is False:
        assert torch.equal(network.blocks[0].head.weight, copies["mtp.lm_head.weight"])
    other = rng.choice([name for name in copies if shares is not False or "lm_head" not in name])
    refused = {
        "'heads' inside mtp_config": ({"mtp_config": {"heads": 2}}, {}),
        "share_lm_head": ({"mtp_config": {"share_lm_head": "yes"}}, {}),
        "mtp_config is": ({"mtp_config": [1]}, {}),
        "mtp_config.*attn_output_gate": ({"attn_output_gate": rng.choice((None, False))}, {}),
        other.replace(".", r"\."): ({}, {other: draw_weight(*copies[other].shape)}),
    }
    for number, (message, (changed, drawn)) in enumerate(refused.items()):
        folder = write_folder(tmp_path / f"{number}", fields | changed, weights | copies | drawn)
        with pytest.raises(UnsupportedModel, match=message):
            load_mtp(folder, target)


OTHERS = {
    "model.mtp_layers.0.input_proj.weight": "MiMo are not read",
    "model.mtp_block.0.self_attn.q_proj.weight": r"ERNIE 4\.5",
    "model.mtp.layers.0.eh_proj.weight": "LongCat-Flash",
    "model.mtp.layers.0.enorm.m.weight": "MiMo-V2",
    "pre_projection.weight": "holds no MTP module",  # Gemma's assistant
}


@pytest.mark.parametrize("name", OTHERS)
def test_modules_of_other_families_are_named(name, tmp_path, target):
    weights = {name: draw_weight(32, 64), "model.embed_tokens.weight": draw_weight(40, 32)}
    with pytest.raises(UnsupportedModel, match=OTHERS[name]):
        load_mtp(write_folder(tmp_path, dict(DRAWN_SIZES), weights), target)
