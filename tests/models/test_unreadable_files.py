"""Files of other formats: GGUF, a joint folder of a model and its heads, templates."""

import json
import os
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from recserve.doctor.drafter_kind import drafter_files
from recserve.drafters.block.files import load_block
from recserve.drafters.eagle.files import load_eagle
from recserve.drafters.mask_tokens.files import load_mask_tokens
from recserve.drafters.medusa.files import load_medusa
from recserve.drafters.mtp.files import load_mtp
from recserve.drafters.specformer.files import load_specformer
from recserve.models.loading import UnsupportedModel, load_language_model
from recserve.models.saving import save_language_model
from recserve.service.text.loader import TextSettings, load_text, open_drafters
from recserve.tokenizer.template_sandbox import TemplateError
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.scripted_text import byte_tokenizer
from tests.support.text_plain import VOCABULARY, drawn_model

TARGET = drawn_model(0)
WEIGHTS = "model.safetensors"
# Loaders of language models and drafters.
LOADERS = {
    "language model": load_language_model,
    "eagle": partial(load_eagle, target=TARGET),
    "block": partial(load_block, target=TARGET),
    "mtp": partial(load_mtp, target=TARGET),
    "specformer": partial(load_specformer, target=TARGET),
    "medusa": partial(load_medusa, hidden_size=32, vocab_size=40),
    "mask tokens": partial(load_mask_tokens, target=TARGET),
    "doctor": drafter_files,
    "tokenizer": TextTokenizer.open,
}


@pytest.mark.parametrize("file", ["qwen.gguf", "Q4.GGUF", "q-00001-of-00002.gguf"])
@pytest.mark.parametrize("name", LOADERS)
def test_gguf_is_named(name, file, tmp_path):
    """As a file of the folder that is given, and in place of the folder."""
    (tmp_path / file).write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(ValueError, match=f"{file} is a GGUF file"):
            LOADERS[name](path)


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
