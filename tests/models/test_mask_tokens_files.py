"""Mask tokens' files: PEFT's layout, written here tensor by tensor; wrong files are refused."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from recserve.models.drafters.mask_tokens_files import load_mask_tokens, save_mask_tokens
from recserve.models.loading import UnsupportedModel
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


def unknown_field(fields, adapter, head):
    fields["attention_sinks"] = 4


def another_method(fields, adapter, head):
    fields["peft_type"] = "IA3"


def dora(fields, adapter, head):
    fields["use_dora"] = True


def ranks_by_module(fields, adapter, head):
    fields["rank_pattern"] = {"q_proj": 8}


def changed_target(fields, adapter, head):
    fields["init_lora_weights"] = "pissa_niter_4"


def some_layers(fields, adapter, head):
    fields["layers_to_transform"] = [0]


def trained_biases(fields, adapter, head):
    fields["bias"] = "all"


def another_rank(fields, adapter, head):
    fields["r"] = 8


def no_alpha(fields, adapter, head):
    del fields["lora_alpha"]


def zero_alpha(fields, adapter, head):
    fields["lora_alpha"] = 0


def alpha_is_no_number(fields, adapter, head):
    fields["lora_alpha"] = float("nan")


def rank_is_true(fields, adapter, head):
    fields["r"] = True


def head_is_named(fields, adapter, head):
    fields["target_modules"] = [*fields["target_modules"], "lm_head"]


def not_named(fields, adapter, head):
    fields["target_modules"].remove("k_proj")


def no_b(fields, adapter, head):
    del adapter[name_of(1, "mlp.up_proj", "B")]


def layer_too_deep(fields, adapter, head):
    adapter[name_of(2, "mlp.up_proj", "B")] = torch.zeros(48, RANK)


def transposed(fields, adapter, head):
    name = name_of(0, "mlp.up_proj", "A")
    adapter[name] = adapter[name].T.contiguous()


def not_finite(fields, adapter, head):
    adapter[name_of(0, "self_attn.o_proj", "A")][1, 2] = float("nan")


def no_masks(fields, adapter, head):
    del head["mask_embeddings"]


def no_sampler(fields, adapter, head):
    del head["sampler.1.norm.bias"]


def third_block(fields, adapter, head):
    head["sampler.2.linear.weight"] = torch.zeros(32, 32)


def unknown_tensor(fields, adapter, head):
    head["lm_head.weight"] = torch.zeros(40, 32)


def another_size(fields, adapter, head):
    head["mask_embeddings"] = torch.zeros(MASKS, 64)


FAULTS = {
    unknown_field: "'attention_sinks'",
    another_method: "'IA3'",
    dora: "use_dora",
    ranks_by_module: "rank_pattern",
    changed_target: "init_lora_weights is 'pissa_niter_4'",
    some_layers: "layers_to_transform",
    trained_biases: "bias is 'all'",
    another_rank: "r and the target require",
    no_alpha: "lora_alpha is None",
    zero_alpha: "lora_alpha is 0; expected a number from",
    alpha_is_no_number: "lora_alpha is nan; expected a number from",
    rank_is_true: "r is True; an integer from 1",
    head_is_named: "'lm_head'",
    not_named: "k_proj.lora_A",
    no_b: "layers.1.mlp.up_proj.lora_B",
    layer_too_deep: "layers.2.mlp.up_proj",
    transposed: "layers.0.mlp.up_proj.lora_A",
    not_finite: "layers.0.output.down holds NaN",
    no_masks: "mask_embeddings",
    no_sampler: "sampler.1.norm.bias",
    third_block: "sampler.2.linear.weight",
    unknown_tensor: "'lm_head.weight'",
    another_size: "lora.embeddings",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named(fault, tmp_path, target):
    found = parts()
    fault(*found)
    with pytest.raises(UnsupportedModel, match=FAULTS[fault]):
        load_mask_tokens(written(tmp_path, *found), target)


@pytest.mark.parametrize(
    "file", ["adapter_config.json", "adapter_model.safetensors", "mtp_head.safetensors"]
)
def test_a_missing_file_is_named(file, tmp_path, target):
    written(tmp_path, *parts())
    (tmp_path / file).unlink()
    with pytest.raises(UnsupportedModel, match=file):
        load_mask_tokens(tmp_path, target)


def test_what_is_saved_is_what_was_there(tmp_path, target):
    network = mask_network(target)
    save_mask_tokens(network, tmp_path)
    again = load_mask_tokens(tmp_path, target)
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    names = {name_of(n, module, side) for n in range(2) for module in SHAPES for side in "AB"}
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == names
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == RANK
