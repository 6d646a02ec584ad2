"""Files that no loader may read: FIFOs, folders, other JSON, deep nests, sizes without memory."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from recserve.features.vectors.quantizer import load_quantizer
from recserve.features.vectors.text_encoder import TextEncoder
from recserve.files import UnreadableFile, read_json_object, regular_file
from recserve.models.config import DecoderConfig
from recserve.models.drafters.block_files import load_block
from recserve.models.drafters.eagle_files import load_eagle, save_eagle
from recserve.models.drafters.mask_tokens_files import load_mask_tokens
from recserve.models.drafters.medusa_files import load_medusa
from recserve.models.drafters.mtp_files import load_mtp
from recserve.models.drafters.specformer_files import load_specformer
from recserve.models.item_heads import load_self_draft
from recserve.models.loading import UnsupportedModel, load_language_model
from recserve.models.ranker import load_ranker
from recserve.models.recommender import load_recommender
from recserve.models.sasrec import load_sasrec
from recserve.models.saving import save_language_model
from recserve.service.text.drafter_kind import drafter_files
from recserve.service.text.loader import TextSettings, load_text, open_drafters
from recserve.tokenizer.template_sandbox import TemplateError
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.scripted_text import byte_tokenizer
from tests.support.text_engines import eagle
from tests.support.text_plain import VOCABULARY, drawn_model

NEST = "[" * 100_000 + "]" * 100_000
TARGET = drawn_model(0)
WEIGHTS = "model.safetensors"
# Every loader, with its configuration and the file of its weights.
LOADERS = {
    "language model": (load_language_model, "config.json", WEIGHTS),
    "eagle": (partial(load_eagle, target=TARGET), "config.json", WEIGHTS),
    "block": (partial(load_block, target=TARGET), "config.json", WEIGHTS),
    "mtp": (partial(load_mtp, target=TARGET), "config.json", WEIGHTS),
    "specformer": (partial(load_specformer, target=TARGET), "config.json", WEIGHTS),
    "medusa": (partial(load_medusa, hidden_size=32, vocab_size=40), "config.json", WEIGHTS),
    "mask tokens": (
        partial(load_mask_tokens, target=TARGET),
        "adapter_config.json",
        "adapter_model.safetensors",
    ),
    "doctor": (drafter_files, "config.json", WEIGHTS),
    "recommender": (load_recommender, "config.json", WEIGHTS),
    "sasrec": (load_sasrec, "config.json", WEIGHTS),
    "self-draft": (partial(load_self_draft, target=None), "config.json", WEIGHTS),
    "ranker": (partial(load_ranker, vectors=np.zeros((1, 2), np.float32)), "config.json", WEIGHTS),
    "quantizer": (load_quantizer, "config.json", "quantizer.safetensors"),
    "text encoder": (TextEncoder.load, "terms.json", "text.safetensors"),
    "tokenizer": (TextTokenizer.open, "tokenizer.json", None),
}
# Loaders of language models and drafters.
TEXT = ("language model", "eagle", "block", "mtp", "specformer", "medusa", "mask tokens", "doctor")
TEXT += ("tokenizer",)
CONTENTS = {
    "a nest": NEST,
    "an object nest": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "no JSON": "{",
    "nothing": "",
    "bytes": b"\xff\xfe\x00",
    "a list": "[1, 2]",
    "a string": '"x"',
    "null": "null",
    "a number": "1" * 5000,
}


# Configurations of the loaders that read theirs before the weights.
OWN = {
    "specformer": {"max_ahead": 2, "hook_list": [0]},
    "mask tokens": {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]},
}


def valid(folder: Path, name: str) -> Path:
    """Writes weights that every loader can open, and a configuration."""
    save_language_model(TARGET, folder)
    weights = (folder / WEIGHTS).read_bytes()
    for _, config, file in LOADERS.values():
        if file:
            (folder / file).write_bytes(weights)
        (folder / config).write_text((folder / "config.json").read_text())
    own = OWN.get(name)
    if own is not None:
        (folder / LOADERS[name][1]).write_text(json.dumps(own))
    return folder


@pytest.mark.parametrize("name", LOADERS)
def test_other_json_is_refused_in_words(name, tmp_path):
    load, config, _ = LOADERS[name]
    folder = valid(tmp_path / "model", name)
    for content, text in CONTENTS.items():
        (folder / config).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=".") as refusal:
            load(folder)
        if name != "text encoder" or content not in ("a list", "a string", "null"):
            assert config in str(refusal.value), content  # its weights are refused there


@pytest.mark.parametrize("what", ["FIFO", "folder", "device"])
@pytest.mark.parametrize("name", LOADERS)
def test_what_is_no_file_is_refused_in_words(name, what, tmp_path):
    """Configuration and weights, unless the loader refuses these words as a configuration."""
    load, config, weights = LOADERS[name]
    own = name in ("recommender", "sasrec", "self-draft", "ranker", "quantizer")
    for file in {config} if own else {config, weights or config}:
        path = valid(tmp_path / file, name) / file
        path.unlink()
        if what == "FIFO":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        with pytest.raises(ValueError, match=f"{path.name} is a {what}; a regular file is needed"):
            load(path.parent)


@given(
    name=st.sampled_from(
        ["hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size"]
        + ["num_key_value_heads", "num_hidden_layers", "max_position_embeddings"]
    ),
    value=st.sampled_from([2**40, 2**63, 10**300, 0, -1, 1.5, True, "8", [8], {}]),
)
@settings(max_examples=40, deadline=None)
def test_sizes_without_memory_are_refused(tmp_path_factory, name, value):
    folder = tmp_path_factory.mktemp("model")
    save_language_model(TARGET, folder)
    fields = json.loads((folder / "config.json").read_text()) | {name: value}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=name):
        load_language_model(folder)


def test_sizes_of_a_decoder_are_bounded():
    for value in (2**40, 0, "8", None, [8], True):
        with pytest.raises(ValueError, match="hidden_size is .* expected an integer from 1 to"):
            DecoderConfig(value, 1, 1, 1, 8, 8)


@pytest.mark.parametrize("field", ["eagle_config", "transformer_layer_config"])
def test_objects_of_a_head_are_objects(field, tmp_path):
    save_eagle(eagle(TARGET, True).network, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for wrong in ([1], "x", 3):
        (tmp_path / "config.json").write_text(json.dumps(fields | {field: wrong}))
        with pytest.raises(UnsupportedModel, match=f"{field} is .* an object is needed"):
            load_eagle(tmp_path, TARGET)


@pytest.mark.parametrize("file", ["qwen.gguf", "Q4.GGUF", "q-00001-of-00002.gguf"])
@pytest.mark.parametrize("name", [n for n, (*_, file) in LOADERS.items() if n in TEXT])
def test_gguf_is_named(name, file, tmp_path):
    """As a file of the folder that is given, and in place of the folder."""
    (tmp_path / file).write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(ValueError, match=f"{file} is a GGUF file"):
            LOADERS[name][0](path)


def test_gguf_is_named_by_the_server(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "a.gguf"):
        with pytest.raises(ValueError, match="a.gguf is a GGUF file"):
            load_text(TextSettings(path), torch.device("cpu"))
    with pytest.raises(ValueError, match="a.gguf is a GGUF file"):
        open_drafters((f"eagle={tmp_path / 'a.gguf'}",), TARGET)


def test_a_joint_folder_of_medusa_opens_as_a_model(tmp_path):
    """Medusa-2 stores its heads beside the target."""
    save_language_model(TARGET, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    weights |= {"medusa_head.0.0.linear.weight": torch.randn(32, 32)}
    weights |= {"medusa_head.0.0.linear.bias": torch.randn(32)}
    weights |= {"medusa_head.0.1.weight": torch.randn(VOCABULARY, 32)}
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(UnsupportedModel, match="medusa_head"):
        load_language_model(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"medusa_num_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = load_language_model(tmp_path)
    assert torch.equal(model.tokens.weight, TARGET.tokens.weight)


def test_the_reader_names_what_it_found(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(UnreadableFile, match="cannot be read"):
        regular_file(path)
    path.write_text("[]")
    with pytest.raises(UnreadableFile, match="holds a list; a JSON object is needed"):
        read_json_object(path)


@pytest.mark.parametrize("what", ["FIFO", "folder", "bytes"])
def test_a_chat_template_that_is_no_text_is_refused(what, tmp_path):
    folder = byte_tokenizer(tmp_path)
    path = folder / "chat_template.jinja"
    if what == "FIFO":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"\xff{{ messages }}")
    with pytest.raises(TemplateError, match=r"chat template .*chat_template\.jinja cannot be used"):
        TextTokenizer.open(folder)
