"""Every format of files x every kind of damage: a refusal names the place, or nothing changes.

A format is a folder that a loader reads (`tests/support/file_formats.py`). The tests draw tensors,
fields and wrong values; the slow ones take all. Nothing falls back in silence: a wrong value is
refused with its field, or the file means the same without the field, or a table here allows it.
"""

import copy
import json
import math
import os
import random
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.support.file_formats import DRAWN, FORMATS, change_file, fingerprint

NETWORKS = [
    name for name in FORMATS if name not in ("tokenizer", "vectors", "item graph", "text", "doctor")
]
WEIGHED = [name for name in FORMATS if name != "doctor"]
# Families whose words name no folder, and that take fields of later versions.
PLAIN = ("llama", "qwen3", "residual", "product")
# How many tensors a test draws: all of them if slow.
DRAWS = pytest.mark.parametrize("draws", [6, pytest.param(None, marks=pytest.mark.slow)])


@pytest.fixture
def folder(name, tmp_path):
    """A whole folder of the format `name`."""
    path = tmp_path / "files"
    path.mkdir()
    return path


@pytest.fixture
def load(name, folder):
    own = FORMATS[name](folder)
    own()
    return own


def tensor_files(folder):
    return sorted(folder.rglob("*.safetensors"))


def json_files(folder):
    return sorted(folder.rglob("*.json"))


def drawn(name, values, draws):
    values = list(values)
    return values if draws is None else random.Random(name).sample(values, min(draws, len(values)))


def refusal(load) -> str:
    """The words of the refusal; they come from no library and no type of Python."""
    with pytest.raises(ValueError, match=".") as caught:
        load()
    assert not isinstance(caught.value, UnicodeError), caught.value
    return str(caught.value)


EXTRA = ("extra", "head.weight", "x.lm_head.weight", "level_2", "norm.bias", "x.inv_freq")
SHAPES = (torch.flatten, torch.t, lambda w: w[None], lambda w: w[:0])
TYPES = (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
# Tensors without which a file describes a network without this norm, head or table; the weights
# of a part that nothing reads; and what is a row in any shape.
OPTIONAL = re.compile(
    r".*(t2d|embed_tokens\.weight|lm_head\.weight|head\.head\.weight|confidence_head.*)"
    r"|.*(embedding|lm_head)_layernorm\.weight|transformer\.input_layernorm\.weight"
    r"|mask_embedding|mask_hidden|repeat"
)


@pytest.mark.parametrize("name", WEIGHED)
def test_a_tensor_more_is_refused_by_name(name, folder, load):
    for file in tensor_files(folder):
        whole = file.read_bytes()
        more = [extra for extra in EXTRA if extra not in load_file(file)]
        for extra in drawn(name, more, 4):
            change_file(file, lambda own, extra=extra: own | {extra: torch.randn(3)})
            assert extra in refusal(load)
            file.write_bytes(whole)
    load()


@DRAWS
@pytest.mark.parametrize("name", WEIGHED)
def test_a_tensor_less_of_another_form_or_not_finite_is_refused(name, draws, folder, load):
    for file in tensor_files(folder):
        whole, tensors = file.read_bytes(), load_file(file)
        keys = sorted(key for key in tensors if not OPTIONAL.fullmatch(key))
        for key in drawn(name, keys, draws):
            own, changes = tensors[key], [None]
            changes += [change(own) for change in SHAPES if own.ndim in (1, 2)]
            changes.append(own.flatten()[0])
            types = TYPES if own.is_floating_point() else (torch.float32, torch.complex64)
            changes += [own.to(dtype) for dtype in types]
            for value in (math.nan, math.inf) if own.is_floating_point() else ():
                changes.append(own.clone())
                changes[-1].view(-1)[-1] = value
            rest = {n: w for n, w in tensors.items() if n != key}
            for new in changes:
                same = new is not None and (new.shape, new.dtype) == (own.shape, own.dtype)
                if same and new.isfinite().all():
                    continue  # a square matrix, or a row
                changed = rest if new is None else rest | {key: new}
                change_file(file, lambda _, changed=changed: changed)
                message = refusal(load)
                known = (key, folder.name, file.name, ".weight", ".bias", "vectors")
                assert any(word in message for word in known), (key, message)
            file.write_bytes(whole)
    load()


@pytest.mark.parametrize("name", DRAWN)
def test_a_weight_of_64_bits_is_a_weight(name, folder, load):
    plain = fingerprint(load())
    for file in tensor_files(folder):
        change_file(
            file,
            lambda own: {n: w.double() if w.is_floating_point() else w for n, w in own.items()},
        )
    assert fingerprint(load()) == plain


CONTENTS = {
    "a nest": "[" * 100_000 + "]" * 100_000,
    "an object nest": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "no JSON": "{",
    "nothing": "",
    "bytes": b"\xff\xfe\x00",
    "a list": "[1, 2]",
    "a string": '"x"',
    "null": "null",
    "a number": "1" * 5000,
}


# Files that may be absent.
ABSENT = {("medusa", "config.json"), ("history bonus", "history_bonus.safetensors")}
ABSENT |= {("tokenizer", "tokenizer_config.json"), ("doctor", "config.json")}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_without_its_content_is_refused_by_name(name, folder, load):
    """Cut, empty, other JSON, gone; a FIFO, a folder, a device."""
    for file in (*(tensor_files(folder) if name != "doctor" else ()), *json_files(folder)):
        whole = file.read_bytes()
        contents = {"half": whole[: len(whole) // 2], "nothing": b"", "no tensors": b"x" * 64}
        if file.suffix == ".json":
            contents = {w: c.encode() if isinstance(c, str) else c for w, c in CONTENTS.items()}
        for what, content in contents.items():
            file.write_bytes(content)
            message = refusal(load)
            assert file.name in message or folder.name in message, what
        file.unlink()
        if (name, file.name) not in ABSENT:
            message = refusal(load)
            assert file.name in message or folder.name in message
        for make, what in (
            (os.mkfifo, "FIFO"),
            (os.mkdir, "folder"),
            (lambda path: os.symlink("/dev/zero", path), "device"),
        ):
            make(file)
            assert f"{file.name} is a {what}; a regular file is needed" in refusal(load)
            file.rmdir() if what == "folder" else file.unlink()
        file.write_bytes(whole)
    load()


WRONG = (True, "", "x", 0, -1, 1.5, 1e30, math.nan, math.inf, 2**70, [True], [], {}, {"a": 1})
WRONG += (10**400, "Llama", "gemma2", ["x"], [["x"]], -0.5, -1e-6)
# Fields without an effect here, whatever their value is.
NEUTRAL = {
    *("architectures", "attention_dropout", "dtype", "torch_dtype", "initializer_range"),
    *("transformers_version", "use_cache", "pad_token_id", "auto_map", "AutoModel"),
    *("medusa_num_heads", "lora_dropout", "task_type", "enable_confidence_head", "num_anchors"),
    *("confidence_head_with_markov", "ttt_length", "step_loss_decay", "max_window_layers"),
    *("tie_word_embeddings", "layernorms", "speculators_config", "algorithm", "proposal_methods"),
    *("default_proposal_method", "verifier", "speculators_version", "linear_conv_kernel_dim"),
    *("sliding_window", "sliding_window_non_causal", "pretraining_tp", "original_lm_head"),
    *("normalizer", "layer_types", "logit_scale", "conversion_value"),
    "conversion_types",
}
# Values of WRONG that are right for a field; `...` if its absence means another value.
RIGHT = {
    **dict.fromkeys(("norm_output", "norm_before_residual", "causal", "causal_head"), (..., None)),
    **dict.fromkeys(("input", "normalization", "partial_rotary_factor"), (..., None)),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), (..., None, 0, [])),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), (..., None, 1.5)),
    "final_logit_softcapping": (..., None, 0, 1.5),
    "mask_token_id": (..., None, 0),
    "is_causal": (..., None, True),
    "sample_from_anchor": (True,),
    "rope_theta": (1.5,),
    "lora_alpha": (1.5,),
    "level_temperature": (0, 1.5),
    "outcomes": (["x"],),
    "input_scale": (..., 0, -1, 1.5, 1e30, 2**70, -0.5, -1e-6),
    "dropout": (0,),
}
FLAGS = ("bias", "attention_bias", "use_sliding_window", "is_neox_style", "qkv_bias")
# Fields that a file may have besides its own, by the drafter that reads it.
FURTHER = {
    "medusa": ("logit_scale", "medusa_accuracies", "original_lm_head", "medusa_fc_bias"),
    "eagle": (*FLAGS, "fc_norm", "add_para_norm", "eagle_config"),
    "block": ("is_causal", "is_neox_style", "shift_label", "rope_parameters", "selector_top_k"),
    "mtp": ("attn_output_gate", "mtp_use_dedicated_embeddings", "rope_scaling"),
    "specformer": ("rope_scaling", "bias"),
    "mask_tokens": ("use_rslora", "use_dora", "rank_pattern", "modules_to_save"),
    "llama": ("rope_scaling", "rope_theta", "quantization_config", "use_sliding_window"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_field_of_another_kind_is_refused_or_means_nothing(name, folder, load, draws=6):
    plain, family = fingerprint(load()), DRAWN.get(name, re.split("[ -]", name)[0])
    for file in json_files(folder):
        whole, fields = file.read_text(), json.loads(file.read_text())
        places = [(field,) for field in {**fields, **dict.fromkeys(FURTHER.get(family, ()))}]
        places += [
            (n, inner) for n, own in fields.items() if isinstance(own, dict) for inner in own
        ]
        names = {place[-1] for place in places} | {"layer_ids", "rope type", "quantizer"}
        for place in drawn(name, places, draws):
            for value in (*drawn(f"{name} {place}", WRONG, draws), None, ...):
                changed, field = copy.deepcopy(fields), place[-1]
                inner = changed if len(place) == 1 else changed[place[0]]
                if repr(inner.pop(field, ...)) == repr(value):
                    continue
                if value is not ...:
                    inner[field] = value
                file.write_text(json.dumps(changed))
                try:
                    found = fingerprint(load())
                except ValueError as error:
                    said = str(error)
                    assert any(word in said for word in (*names, ".weight", " tensor ")), said
                    assert folder.name in said or family in PLAIN, said
                    continue
                case = (place, value)
                if found == plain:
                    assert field in NEUTRAL or value in (..., True) or not value, case
                else:
                    assert repr(value) in map(repr, RIGHT.get(field, ())), case
            file.write_text(whole)
        for value in (3, None):
            change_file(file, lambda own, value=value: own | {"unknown_field": value})
            if family in PLAIN:
                load()
            else:
                assert "unknown_field" in refusal(load)
            file.write_text(whole)
    load()


EAGLE, BLOCK, MTP = "eagle of eagle-3", "block of dflash", "mtp of deepseek"
SLIDING = ["full_attention", "sliding_attention"]
IDS = "eagle_aux_hidden_state_layer_ids"
# Fields and tensors that contradict each other or the target: the format, fields (None: without
# it; a dot leads into an object), sizes of random tensors or tensors, and a part of the words.
CONTRADICTIONS = [
    (EAGLE, {}, {"d2t": torch.arange(0, 40, 2)}, "d2t"),
    (EAGLE, {}, {"t2d": torch.arange(40) % 2 == 1}, "d2t and t2d"),
    (EAGLE, {}, {"t2d": torch.zeros(41, dtype=torch.bool)}, r"t2d is \(41,\)"),
    (EAGLE, {}, {"d2t": torch.zeros(19, dtype=torch.int64)}, r"d2t is \(19,\)"),
    (EAGLE, {"fc_norm": True, "norm_before_fc": True}, {}, "fc_norm and norm_before_fc"),
    (EAGLE, {"fc_norm": True}, {}, "fc_norm.0.weight"),
    (EAGLE, {f"eagle_config.{IDS}": [0, 1, 9]}, {}, "layer 9 of its target, which has 2"),
    (EAGLE, {}, {"embed_tokens.weight": (40, 32)}, "embed_tokens.weight"),
    (EAGLE, {"speculators_model_type": "dflash"}, {}, "'dflash'"),
    (EAGLE, {}, {"mask_hidden": (1, 1, 96)}, "mask_token_id is missing"),
    (EAGLE, {"mask_token_id": 40}, {"mask_hidden": (1, 1, 96)}, "mask_token_id is 40"),
    (EAGLE, {"mask_token_id": 7, "speculators_model_type": "peagle"}, {}, "'mask_hidden'"),
    (EAGLE, {"ptd_token_id": "x"}, {}, "config.json: ptd_token_id is 'x'"),
    (EAGLE, {}, {"layers.0.mlp.up_proj.weight": (48, 32)}, "twice"),
    (EAGLE, {}, {"token_map": torch.arange(8)}, "'token_map' that has no place"),
    (EAGLE, {"use_input_layernorm_in_first_layer": False}, {}, "in_first_layer is False"),
    (EAGLE, {"use_last_layernorm": False}, {}, "use_last_layernorm is False"),
    (EAGLE, {"use_mtp_layernorm": True}, {}, "use_mtp_layernorm is True"),
    (EAGLE, {"next_layer_regular": False}, {}, "next_layer_regular is False"),
    (EAGLE, {"parallel_draft_step": 2}, {}, "parallel_draft_step is 2"),
    (EAGLE, {"num_target_layers": 3}, {}, "num_target_layers is 3"),
    (EAGLE, {"draft_num_hidden_layers": 2}, {}, "draft_num_hidden_layers is 2"),
    (EAGLE, {"vocab_size": 39}, {}, "vocab_size is 39"),
    (EAGLE, {"position_embedding_type": "alibi"}, {}, "position_embedding_type is 'alibi'"),
    (EAGLE, {"kv_lora_rank": 8}, {}, "unknown field 'kv_lora_rank'"),
    (EAGLE, {"model_type": "gemma4_assistant"}, {}, "is 'gemma4_assistant'; layers of llama"),
    ("eagle of eagle-1", {}, {"model.fc.weight": (32, 64)}, "twice"),
    ("eagle of deepspec", {}, {"layers.0.self_attn.q_norm.weight": None}, "q_norm"),
    *(
        (
            "eagle of speculators",
            {"transformer_layer_config.use_sliding_window": True} | more,
            {},
            w,
        )
        for more, w in (
            ({}, "sliding_window is None"),
            ({"transformer_layer_config.sliding_window": 2.5}, "sliding_window is 2.5"),
            (
                {"transformer_layer_config.layer_types": ["chunked_attention"]},
                "chunked_attention",
            ),
            ({"transformer_layer_config.layer_types": SLIDING}, "a list of 1 kinds"),
        )
    ),
    (BLOCK, {}, {"layers.0.self_attn.sinks": (4,)}, "sinks"),
    (BLOCK, {}, {"candidate_selector.x": (4,)}, "candidate_selector"),
    (BLOCK, {}, {"markov_head.markov_w1.weight": (40, 6)}, "markov_head.*no markov_rank"),
    (BLOCK, {"architectures": ["DFlash2DraftModel"]}, {}, "names no conv_kernel_size"),
    (BLOCK, {"dflash_config.mask_token_id": 40}, {}, "mask_token_id is 40.*no mask_embedding"),
    (BLOCK, {"dflash_config.target_layer_ids": [0, 2]}, {}, "layer 2 of its target, which has 2"),
    (BLOCK, {"num_target_layers": 36}, {}, "num_target_layers is 36"),
    (BLOCK, {"vocab_size": 50}, {}, "vocab_size is 50; the target has 40"),
    (BLOCK, {"dflash_config.target_hidden_size": 64}, {}, "target_hidden_size is 64"),
    (BLOCK, {"hidden_size": 64}, {}, "hidden_size is 64 and the target's 32"),
    (BLOCK, {}, {"hidden_dim_adapter.proj.weight": (32, 64)}, "an untrained adapter"),
    (BLOCK, {"dflash_config.causal": False, "dflash_config.causal_head": True}, {}, "contradict"),
    (BLOCK, {"layer_types": SLIDING, "sliding_window": 8}, {}, "8, not larger than the block"),
    (BLOCK, {"layer_types": SLIDING}, {}, "layer 1 has a window; config.json names none"),
    (
        BLOCK,
        {"dflash_config.output_multiplier": 2.0, "dflash_config.logit_scale": 3.0},
        {},
        "contradicts itself",
    ),
    (BLOCK, {"dflash_config.output_multiplier": 0}, {}, "output_multiplier is 0; expected a n"),
    (BLOCK, {"dflash_config.output_multiplier": -0.5}, {}, "output_multiplier is -0.5; expec"),
    (BLOCK, {"logit_scale": 1e30}, {}, r"logit_scale is 1e\+30; expected a number"),
    (BLOCK, {"dflash_config.final_logit_softcapping": 1e-30}, {}, "softcapping is 1e-30"),
    (BLOCK, {"dflash_config.final_logit_softcapping": -30}, {}, "softcapping is -30; expected"),
    (BLOCK, {"dflash_config.input_embedding_scale": 0.0}, {}, "embedding_scale is 0.0; expected"),
    (
        BLOCK,
        {"layer_types": None, "use_sliding_window": True, "max_window_layers": -1},
        {},
        "max_window_layers is -1",
    ),
    (BLOCK, {"dflash_config.attention_sink_bias": True}, {}, "attention sinks"),
    (BLOCK, {"dflash_config.projector_type": "domino"}, {}, "projector_type is 'domino'"),
    (BLOCK, {"draft_vocab_size": 20}, {}, "no tensor 'd2t'"),
    (BLOCK, {}, {"d2t": torch.arange(40) % 2}, "d2t has offsets other than 0"),
    (BLOCK, {"speculators_model_type": "eagle3"}, {}, "'eagle3'"),
    (BLOCK, {"dflash_config.markov_rank": 6, "dflash_config.markov_head_type": "lstm"}, {}, "lstm"),
    (BLOCK, {"dflash_config.mask_token_id": None, "ptd_token_id": "x"}, {}, "ptd_token_id is 'x'"),
    (BLOCK, {"dspark_markov_rank": 6}, {}, "'dspark_markov_rank'"),
    (BLOCK, {}, {"encoder.fc.weight": (32, 64)}, "twice"),
    (MTP, {}, {"model.layers.2.embed_tokens.weight": (40, 32)}, r"embed_tokens\.weight"),
    (MTP, {}, {"vision.weight": (4,)}, r"'vision\.weight'"),
    (MTP, {}, {"model.layers.2.eh_proj.weight": None}, "holds no MTP module"),
    (MTP, {}, {"model.layers.2.mlp.experts.0.gate_proj.weight": (4, 4)}, "mixture of experts"),
    (MTP, {}, {"model.layers.2.self_attn.kv_a_proj_with_mqa.weight": (4, 4)}, "latent attention"),
    (MTP, {"num_nextn_predict_layers": 2}, {}, "layers is 2; it holds 1 modules"),
    (MTP, {}, {"model.layers.4.mlp.down_proj.weight": (32, 48)}, r"'model\.layers\.4\.mlp"),
    (MTP, {"attn_output_gate": True, "qkv_bias": True}, {}, "attention_bias is True; with an out"),
    (MTP, {"attn_output_gate": True}, {}, "attn_output_gate"),
    (MTP, {"partial_rotary_factor": 0.4}, {}, "RoPE turns 3 of 8"),
    (
        MTP,
        {"partial_rotary_factor": 0.5},
        {"model.layers.2.self_attn.k_proj.weight": (12, 32)},
        r"k_proj\.weight has 12 rows",
    ),
    (MTP, {"speculators_model_type": "dflash"}, {}, "'dflash'"),
    (
        MTP,
        {"layer_types": ["sliding_attention"], "sliding_window": 8},
        {},
        "windows of 8 positions",
    ),
    *(
        ("mask_tokens", {name: value}, {}, name)
        for name, value in (
            ("use_dora", True),
            ("rank_pattern", {"q_proj": 8}),
            ("init_lora_weights", "pissa_niter_4"),
            ("layers_to_transform", [0]),
            ("bias", "all"),
        )
    ),
    ("mask_tokens", {"peft_type": "IA3"}, {}, "'IA3'"),
    ("mask_tokens", {"r": 3}, {}, "r and the target require"),
    ("mask_tokens", {"target_modules": "(q_proj"}, {}, r"is '\(q_proj', which is no regul"),
    ("mask_tokens", {"target_modules": ["q_proj", "lm_head"]}, {}, "'lm_head'"),
    ("mask_tokens", {"target_modules": ["q_proj"]}, {}, "down_proj.lora_A"),
    ("specformer", {"hook_list": [0, 1, 3, -1]}, {}, "layer 3 of its target, which has 2"),
    ("specformer", {"max_ahead": 9}, {}, r"positional.weight: \(\d+, 32\) .* \(288, 32\)"),
    ("specformer", {"num_target_layers": 36}, {}, "num_target_layers is 36; the target requires 2"),
    ("specformer", {"rope_theta": 1e6}, {}, "rope_theta is 1000000.0; the target requires 10000"),
    ("specformer", {}, {"mtp.down_samp.weight": (32, 128)}, "'down_samp.weight' twice"),
    ("specformer", {"model_type": "medusa"}, {}, "model_type is 'medusa'"),
    ("medusa", {"hydra_num_heads": 1}, {}, "unknown field 'hydra_num_heads'"),
    *(
        ("medusa", {name: value}, {}, f"{name} is {value}")
        for name, value in (
            *(("hidden_size", 33), ("vocab_size", 41), ("truncated_vocab_size", 39)),
            ("medusa_fc_bias", False),
        )
    ),
    ("medusa", {"medusa_accuracies": [[0.5]] * 9}, {}, "medusa_accuracies"),
    ("medusa", {"medusa_accuracies": [[0.5], [1.5]]}, {}, "medusa_accuracies"),
    ("medusa", {"medusa_accuracies": [[0.1] * 200]}, {}, "medusa_accuracies"),
    ("medusa", {}, {"1.0.linear.weight": None}, r"lacks '1\.0\.linear\.weight'"),
    ("medusa", {}, {"1.1.weight": None}, "lacks the output matrix of head 1"),
    ("medusa", {}, {"5.1.weight": (40, 32)}, "output matrix of head 5 .* no pl"),
    ("medusa", {}, {"blocks.0.layers.0.bias": (32,)}, "differs from another"),
    ("medusa", {}, {"1.1.linear.weight": (32, 32)}, r"1\.1\.linear' lies after"),
    ("medusa", {}, {"blocks.99999999999.layers.0.bias": (32,)}, "has no place in Medusa heads"),
    ("medusa", {}, {"1000.0.linear.bias": (32,)}, "1000.* has no place in Medusa heads"),
    ("medusa", {}, {"token_map": torch.tensor([1, 40])}, r"names tokens 1\.\.40"),
    ("medusa", {}, {"token_map": torch.zeros(8, dtype=torch.long)}, "names a token twice"),
    ("medusa", {}, {"token_map": torch.tensor(1)}, r"is \(\); a list of tokens"),
    ("llama", {"mlp_bias": True}, {}, "mlp_bias is True"),
    ("llama", {"use_sliding_window": True}, {}, "use_sliding_window is True"),
    ("llama", {"quantization_config": {"bits": 4}}, {}, "quantization_config"),
    ("llama", {"rope_parameters": {"rope_type": "ntk"}}, {}, "rope_parameters is 'ntk'; choose"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "is 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, {}, "factor is None"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, {}, "factor is 0"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}, "rotary_factor is 0.5"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"betas": 2}}, {}, "unknown field 'betas'"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}},
        {},
        "short_factor is .* a list of 4 numbers",
    ),
    ("llama", {"intermediate_size": 96}, {}, "gate_up.weight is .* config.json requires"),
    ("llama", {"num_hidden_layers": 4}, {}, "no tensor 'model.layers.3"),
    ("llama", {"num_hidden_layers": 2}, {}, "a tensor 'model.layers.2.* no place for"),
    ("llama", {"dtype": "int8"}, {}, "dtype is 'int8'"),
    ("llama", {"num_hidden_layers": 10**7}, {}, "is 10000000; expected at most 1000"),
    ("llama", {"eos_token_id": [2, 10**9]}, {}, "eos_token_id has 1000000000"),
    ("llama", {"bos_token_id": 61}, {}, "bos_token_id has 61"),
]


@pytest.mark.parametrize(
    ("name", "more", "tensors", "words"), CONTRADICTIONS, ids=[row[3] for row in CONTRADICTIONS]
)
def test_a_contradiction_is_refused_in_words(name, more, tensors, words, folder, load):
    (config,) = json_files(folder)
    fields = json.loads(config.read_text())
    for place, value in more.items():
        inner = fields
        *objects, field = place.split(".")
        for each in objects:
            inner = inner[each]
        inner.pop(field, None)
        if value is not None:
            inner[field] = value
    config.write_text(json.dumps(fields))
    own = {n: torch.randn(t) if isinstance(t, tuple) else t for n, t in tensors.items()}
    gone = {n for n, one in own.items() if one is None}
    change_file(
        tensor_files(folder)[-1],
        lambda there: {n: w for n, w in (there | own).items() if n not in gone},
    )
    with pytest.raises(ValueError, match=words):
        load()
