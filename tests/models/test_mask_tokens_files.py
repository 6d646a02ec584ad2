"""Mask tokens' files: PEFT's layout, written here tensor by tensor; wrong files are refused."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from recserve.drafters.mask_tokens.files import load_mask_tokens, save_mask_tokens
from tests.support.mask_tokens_drafter import mask_network
from tests.support.text_plain import drawn_model

# drawn_model(0): hidden size 32, 2 layers, 4 query heads and 2 KV heads of 8, gate 48.
SHAPES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (32, 16),
    "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (32, 48),
    "mlp.up_proj": (32, 48),
    "mlp.down_proj": (48, 32),
}
RANK, MASKS = 4, 3
# The fields that `LoraConfig(...).save_pretrained` writes.
FIELDS = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "target",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": RANK,
    "rank_pattern": {},
    "revision": None,
    "target_modules": [name.split(".")[1] for name in SHAPES],
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}


def name_of(layer: int, module: str, side: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"


def parts(modules=tuple(SHAPES)) -> tuple[dict, dict, dict]:
    """Returns configuration, adapter and head."""
    torch.manual_seed(0)
    adapter = {}
    for layer in range(2):
        for module in modules:
            inner, outer = SHAPES[module]
            adapter[name_of(layer, module, "A")] = torch.randn(RANK, inner)
            adapter[name_of(layer, module, "B")] = torch.randn(outer, RANK)
    head = {"mask_embeddings": torch.randn(MASKS, 32)}
    for number, inner in ((0, 64), (1, 32)):
        head[f"sampler.{number}.linear.weight"] = torch.randn(32, inner)
        for name in ("linear.bias", "norm.weight", "norm.bias"):
            head[f"sampler.{number}.{name}"] = torch.randn(32)
    fields = FIELDS | {"target_modules": [name.split(".")[1] for name in modules]}
    return dict(fields), adapter, head


def written(folder, fields, adapter, head):
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(adapter, folder / "adapter_model.safetensors")
    save_file(head, folder / "mtp_head.safetensors")
    return folder


@pytest.fixture(scope="module")
def target():
    return drawn_model(0)


def assert_updates(network, adapter, scale: float) -> None:
    """Asserts that each projection's update is scale * B A x, or 0 where the file has none."""
    ours = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    for number, layer in enumerate(network.lora.layers):
        for part, modules in ours.items():
            x = torch.randn(5, SHAPES[modules[0]][0])
            wanted = []
            for module in modules:
                if name_of(number, module, "A") in adapter:
                    down, up = (adapter[name_of(number, module, side)] for side in "AB")
                    wanted.append(scale * x @ down.T @ up.T)
                else:
                    wanted.append(torch.zeros(5, SHAPES[module][1]))
            torch.testing.assert_close(layer[part](x), torch.cat(wanted, 1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("slope,scale", [(False, 2.0), (True, 4.0)], ids=["alpha/r", "rslora"])
def test_every_tensor_lies_in_its_place(slope, scale, tmp_path, target):
    fields, adapter, head = parts()
    fields["use_rslora"] = slope  # alpha / sqrt(r)
    network = load_mask_tokens(written(tmp_path, fields, adapter, head), target)
    assert torch.equal(network.lora.embeddings, head["mask_embeddings"])
    for name in head.keys() - {"mask_embeddings"}:
        assert torch.equal(network.state_dict()[name], head[name]), name
    assert_updates(network, adapter, scale)


def test_the_network_has_the_targets_type(tmp_path, target):
    folder = written(tmp_path, *parts())
    network = load_mask_tokens(folder, copy.deepcopy(target).to(torch.bfloat16))
    assert {weight.dtype for weight in network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "named", [["q_proj", "v_proj"], ["self_attn.q_proj", "self_attn.v_proj"], r".*\.[qv]_proj"]
)
def test_projections_without_an_adapter_are_not_updated(named, tmp_path, target):
    fields, adapter, head = parts(("self_attn.q_proj", "self_attn.v_proj"))
    fields["target_modules"] = named
    network = load_mask_tokens(written(tmp_path, fields, adapter, head), target)
    assert_updates(network, adapter, 2.0)


def test_all_linear_names_every_projection(tmp_path, target):
    fields, adapter, head = parts()
    fields["target_modules"] = "all-linear"
    assert_updates(load_mask_tokens(written(tmp_path, fields, adapter, head), target), adapter, 2.0)


def test_what_is_saved_is_what_was_there(tmp_path, target):
    network = mask_network(target)
    save_mask_tokens(network, tmp_path)
    again = load_mask_tokens(tmp_path, target)
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    names = {name_of(n, module, side) for n in range(2) for module in SHAPES for side in "AB"}
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == names
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == RANK
