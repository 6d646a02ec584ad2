"""Damaged files of drafters: each is refused in words that name folder, field and value."""

import copy
import json
import math
import random
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from recserve.models.drafters.mask_tokens_files import save_mask_tokens
from recserve.models.loading import (
    UnsupportedModel,
    load_language_model,
    opened_file,
    read_tensor,
)
from recserve.models.saving import save_language_model
from recserve.service.text.drafter_kind import drafter_files
from recserve.speculation.drafters.registry import build_drafter
from tests.support.drafter_folders import uneven_model, write_drawn
from tests.support.mask_tokens_drafter import mask_network

WRONG = (True, "", 0, -1, 1.5, math.nan, math.inf, 2**70, 10**400, [True], [], {}, {"a": 1})
NAMES = {"eagle-1": "eagle", "eagle-3": "eagle", "dflash": "block", "dspark": "block"}
# Fields by kind, each with those of the wrong values that are right there.
FIELDS = {
    "medusa": {
        "logit_scale": (1.5,),
        "medusa_accuracies": (),
        "medusa_num_layers": (),
        "original_lm_head": (True,),
    },
    "specformer": {"max_ahead": (), "hook_list": (), "is_causal": (True,)},
    "mask_tokens": {
        "r": (),
        "lora_alpha": (1.5,),
        "use_rslora": (True,),
        "target_modules": (),
    },
    "mtp": {"max_position_embeddings": (), "model_type": (), "rope_scaling": ({}, {"a": 1})},
    "eagle-1": {"num_hidden_layers": (), "max_position_embeddings": (), "model_type": ()},
    "dflash": {
        "max_position_embeddings": (),
        "rope_scaling": ({}, {"a": 1}),
        "rope_parameters": ({}, {"a": 1}),
        "num_hidden_layers": (),
        "model_type": (),
        "selector_top_k": (0,),
        "conv_kernel_size": (0,),
    },
}


TYPES = (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
DRAWN = ("eagle-1", "eagle-3", "mtp", "medusa", "specformer", "dflash", "dspark", "mask_tokens")


@pytest.fixture(scope="module")
def target():
    return uneven_model()


@pytest.fixture
def folder(kind, target, tmp_path):
    if kind == "mask_tokens":
        save_mask_tokens(mask_network(target), tmp_path)
        return tmp_path
    return write_drawn(kind, tmp_path)


def load(kind, folder, target):
    return build_drafter(NAMES.get(kind, kind), target, [folder])


@pytest.mark.parametrize("kind", FIELDS)
def test_a_wrong_value_is_refused_by_name(kind, folder, target):
    path = folder / ("adapter_config.json" if kind == "mask_tokens" else "config.json")
    fields = json.loads(path.read_text())
    for name, right in FIELDS[kind].items():
        for value in WRONG:
            if repr(value) in map(repr, right):
                continue
            path.write_text(json.dumps(fields | {name: value}))
            with pytest.raises(UnsupportedModel) as refusal:
                load(kind, folder, target)
            message = str(refusal.value)
            assert str(folder) in message and name in message, (name, value, message)
    path.write_text(json.dumps(fields))
    load(kind, folder, target)


@pytest.mark.parametrize(
    ("kind", "usual", "other"),
    [
        ("dflash", "mask_token_id", "ptd_token_id"),
        ("dflash", "block_size", "dspark_block_size"),
        ("eagle-3", "mask_token_id", "ptd_token_id"),
    ],
)
def test_a_field_has_its_name_of_the_file(kind, usual, other, folder, target):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields.get("dflash_config", fields).pop(usual, None)
    fields.pop(usual, None)
    path.write_text(json.dumps(fields | {other: "x"}))
    with pytest.raises(UnsupportedModel, match=f"config.json: {other} is 'x'"):
        load(kind, folder, target)


@pytest.mark.parametrize("kind", ["mask_tokens"])
def test_a_pattern_of_modules_is_a_regular_expression(kind, folder, target):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": "(q_proj"}))
    with pytest.raises(UnsupportedModel, match=r"target_modules is '\(q_proj', which is no regul"):
        load(kind, folder, target)


@pytest.mark.parametrize("kind", ["medusa"])
@pytest.mark.parametrize("rows", [[[0.5]] * 9, [[0.1] * 200], [[0.5], [1.5]], [[0.5], []]])
def test_measured_accuracies_fit_the_heads(kind, rows, folder, target):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"medusa_accuracies": rows}))
    with pytest.raises(UnsupportedModel, match="medusa_accuracies"):
        load(kind, folder, target)


@pytest.mark.parametrize("kind", ["medusa"])
def test_a_scale_that_overflows_is_refused(kind, folder, target):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"logit_scale": 1e6}))
    with pytest.raises(UnsupportedModel, match=r"infinity as torch.float16, with logit_scale"):
        load(kind, folder, copy.deepcopy(target).half())


@pytest.mark.parametrize("kind", DRAWN)
def test_a_weight_is_a_float(kind, folder, target):
    """Integers without scales, complex numbers and floats of 8 bits are no weights."""
    (file, *_) = sorted(folder.glob("*.safetensors"))
    weights = load_file(file)
    draw = random.Random(kind)
    for dtype in TYPES:
        name = draw.choice(sorted(name for name in weights if weights[name].is_floating_point()))
        save_file(weights | {name: weights[name].to(dtype)}, file)
        with pytest.raises(UnsupportedModel, match=f"{name} is {dtype}; expected float16, bf"):
            load(kind, folder, target)
    doubled = {n: w.double() for n, w in weights.items() if w.is_floating_point()}
    save_file(weights | doubled, file)
    load(kind, folder, target)


@pytest.mark.parametrize("kind", DRAWN)
def test_a_weight_of_another_shape_is_named(kind, folder, target):
    draw = random.Random(kind)
    changes = (torch.flatten, torch.t, lambda w: w[None], lambda w: w[:0], lambda w: w.flatten()[0])
    for file in sorted(folder.glob("*.safetensors")):
        weights = load_file(file)
        matrices = sorted(n for n, weight in weights.items() if len(set(weight.shape)) > 1)
        if kind == "specformer":
            matrices = [name for name in matrices if "k_proj" in name]
        name = draw.choice([n for n in matrices if n != "mask_embeddings"])
        for change in changes:
            save_file(weights | {name: change(weights[name]).contiguous().clone()}, file)
            with pytest.raises(UnsupportedModel, match=str(folder)):
                load(kind, folder, target)
        save_file(weights, file)
    load(kind, folder, target)


@pytest.mark.parametrize("kind", ["mask_tokens"])
def test_mask_tokens_need_a_mask_and_no_other_tensor(kind, folder, target):
    file = folder / "mtp_head.safetensors"
    weights = load_file(file)
    save_file(weights | {"mask_embeddings": weights["mask_embeddings"][:0]}, file)
    with pytest.raises(UnsupportedModel, match="no tensor 'mask_embeddings'"):
        load(kind, folder, target)
    save_file(weights | {"lora.embeddings": torch.zeros(3)}, file)
    with pytest.raises(UnsupportedModel, match="unknown tensor 'lora.embeddings'"):
        load(kind, folder, target)


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("eagle-1", "fc.weight", "model.fc.weight"),
        ("eagle-3", "midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("dflash", "fc.weight", "encoder.fc.weight"),
    ],
)
def test_a_tensor_of_two_names_is_refused(kind, name, other, folder, target):
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {other: weights[name] + 1}, file)
    with pytest.raises(UnsupportedModel, match="twice"):
        load(kind, folder, target)


@pytest.mark.parametrize("kind", ["dflash"])
def test_offsets_need_a_smaller_vocabulary(kind, folder, target):
    file = folder / "model.safetensors"
    weights = load_file(file)
    offsets = torch.zeros(target.config.vocab_size, dtype=torch.long)
    save_file(weights | {"d2t": offsets}, file)
    load(kind, folder, target)
    offsets[:2] = torch.tensor([1, -1])
    save_file(weights | {"d2t": offsets}, file)
    with pytest.raises(UnsupportedModel, match="d2t has offsets other than 0"):
        load(kind, folder, target)


@pytest.mark.parametrize("kind", ["eagle-3", "dflash"])
def test_drafted_tokens_have_one_table(kind, folder, target):
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"token_map": torch.arange(8)}, file)
    with pytest.raises(UnsupportedModel, match="'token_map' that has no place"):
        load(kind, folder, target)


@pytest.mark.parametrize("name", ["d2t", "t2d", "token_map"])
def test_a_table_of_tokens_has_integers(name, tmp_path):
    path = tmp_path / "a.safetensors"
    for dtype in (torch.float32, torch.complex64, torch.float8_e4m3fn):
        save_file({f"model.{name}": torch.zeros(4).to(dtype)}, path)
        with opened_file(path) as file, pytest.raises(UnsupportedModel, match=f"{name} is {dtype}"):
            read_tensor(file, f"model.{name}", path)


@pytest.mark.parametrize("kind", ["medusa"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (torch.zeros(8, dtype=torch.long), "names a token twice"),
        (torch.tensor(1), r"is \(\); a list of tokens"),
        (torch.zeros(0, dtype=torch.long), r"is \(0,\); a list of tokens"),
        (torch.zeros(2, 2, dtype=torch.long), r"is \(2, 2\); a list of tokens"),
    ],
)
def test_a_map_of_tokens_is_a_list_of_them(kind, words, message, folder, target):
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file) | {"token_map": words}, file)
    with pytest.raises(UnsupportedModel, match=f"token_map of .* {message}"):
        load(kind, folder, target)


@pytest.mark.parametrize("kind", ["medusa"])
@pytest.mark.parametrize("number", ["1000", "99999999999"])
@pytest.mark.parametrize(
    "form", ["blocks.5.layers.{}.weight", "blocks.{}.layers.0.bias", "{}.0.linear.bias"]
)
def test_a_number_of_a_head_is_small(kind, number, form, folder, target):
    """A larger one would build so many heads or blocks."""
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file) | {form.format(number): torch.zeros(32)}, file)
    with pytest.raises(UnsupportedModel, match=f"{number}.* has no place in Medusa heads"):
        load(kind, folder, target)


@pytest.mark.parametrize("kind", DRAWN[:3] + DRAWN[4:7])
def test_an_index_names_the_file_of_each_tensor(kind, folder, target):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    lost = sorted(weights)[0]
    files = dict.fromkeys(weights, "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    del weights[lost]
    save_file(weights, folder / files[lost])
    with pytest.raises(UnsupportedModel, match=re.escape(lost)):
        load(kind, folder, target)


def test_a_model_is_read_by_the_same_rules(target, tmp_path):
    save_language_model(target, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"].to(torch.int8)}, file)
    with pytest.raises(UnsupportedModel, match="model.norm.weight is torch.int8; expected float16"):
        load_language_model(tmp_path)
    file.rename(tmp_path / "a.safetensors")
    files = dict.fromkeys((*weights, "model.layers.0.x"), "a.safetensors")
    files["model.norm.weight"] = "b.safetensors"
    save_file({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(
        UnsupportedModel, match=r"a.safetensors holds a tensor 'model.norm.weight' that"
    ):
        load_language_model(tmp_path)


@pytest.mark.parametrize("kind", ["specformer"])
def test_null_counts_as_absent(kind, folder, target):
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"is_causal": None, "hidden_size": None}
    path.write_text(json.dumps(fields))
    assert load(kind, folder, target).network.config.causal


@pytest.mark.parametrize("kind", ["dflash"])
@pytest.mark.parametrize("value", [[1], "x", 3])
def test_the_doctor_refuses_what_is_no_object(kind, value, folder):
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"transformer_layer_config": value}
    path.write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match="transformer_layer_config is .* object is needed"):
        _ = drafter_files(folder).fields
