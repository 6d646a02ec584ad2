"""Folders of drafters, drawn or trained for a few seconds, and changes of their files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from recserve.drafters.block.files import save_block
from recserve.drafters.eagle.files import save_eagle
from recserve.drafters.medusa.files import save_medusa
from recserve.drafters.mtp.files import save_mtp
from recserve.drafters.specformer.files import save_specformer
from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel
from recserve.training.options import TrainOptions
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.block import BlockTrainee
from recserve.training.text.drafters.block_recipe import BlockRecipe
from recserve.training.text.drafters.eagle import EagleRecipe, EagleTrainee
from recserve.training.text.drafters.mtp import MtpTrainee
from tests.support.block_drafter import block_network
from tests.support.mtp_drafter import mtp
from tests.support.specformer_drafter import specformer
from tests.support.text_engines import eagle, medusa
from tests.support.text_plain import drawn_model

WINDOW, ROWS, VALID = 24, 320, 20
# Layers, rows of a block, epochs. The direction of attention matters in longer blocks.
BLOCKS = {"dflash": (1, 4, 12), "jetspec": (2, 8, 30)}
SCHEDULE = Schedule(12, 1e-2, weight_decay=0.0, averaging=0.0)
OPTIONS = TrainOptions(device="cpu", precision="float32")
# A change of a drafter's files: it edits the fields of config.json and the tensors.
Change = Callable[[dict, dict], None]


def uneven_model() -> LanguageModel:
    """Returns drawn_model(0), with the weights of the final norm far apart and the same logits.

    Its final state and the stream before the final norm then differ as they do in large models.
    """
    model = drawn_model(0)
    scale = uneven(model.config.decoder.hidden_size)
    model.decoder.norm.weight.mul_(scale)
    model.head.weight.div_(scale)
    return model


def uneven(size: int) -> torch.Tensor:
    """Returns positive factors that lie far apart."""
    return (1.2 * torch.randn(size, generator=torch.Generator().manual_seed(3))).exp()


def write_drawn(kind: str, folder: Path) -> Path:
    """Writes a drafter with drawn weights for uneven_model()."""
    model = uneven_model()
    if kind in ("eagle-1", "eagle-3"):
        save_eagle(eagle(model, kind == "eagle-3").network, folder)
    elif kind == "mtp":
        save_mtp(mtp(model).network, folder, model.config.decoder.num_layers)
    elif kind == "medusa":
        save_medusa(medusa(model).heads, folder)
    elif kind == "specformer":
        save_specformer(specformer(model).network, folder, model.config.decoder.num_layers)
    else:
        save_block(block_network(model, kind), folder)
    return folder


def write_trained(kind: str, folder: Path) -> Path:
    """Trains a drafter for uneven_model() on what it writes; takes seconds."""
    model = uneven_model()
    text, cut = own_text(model), (ROWS - VALID) * WINDOW
    train, valid = text[:cut], text[cut:]
    if kind in ("eagle3", "mtp"):
        recipe = EagleRecipe(kind, 3, None, WINDOW, 16, VALID, SCHEDULE)
        run = MtpTrainee.train_on if kind == "mtp" else EagleTrainee.train_on
        run(model, train, valid, folder, OPTIONS, recipe)
    else:
        layers, size, epochs = BLOCKS[kind]
        block = BlockRecipe(
            kind=kind,
            layers=layers,
            block_size=size,
            rank=8,
            anchors=8,
            window=WINDOW,
            batch=16,
            validation_rows=VALID,
            schedule=replace(SCHEDULE, epochs=epochs),
        )
        BlockTrainee.train_on(model, train, valid, folder, OPTIONS, block)
    return folder


def own_text(model) -> np.ndarray:
    """Returns what the model writes at a low temperature, many rows one after another."""
    tokens = torch.arange(ROWS)[:, None] % model.config.vocab_size
    draws = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for _ in range(WINDOW - 1):
            hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())
            shares = (model.logits(hidden[:, -1]) / 0.3).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=draws)], 1)
    return tokens.flatten().numpy()


def changed_copy(folder: Path, copy: Path, change: Change) -> Path:
    """Writes the drafter of a folder with changed fields and tensors to a new folder."""
    copy.mkdir()
    fields = json.loads((folder / "config.json").read_text())
    (file,) = (
        path for path in folder.glob("*.safetensors") if not path.name.startswith("checkpoint")
    )
    weights = load_file(file)
    change(fields, weights)
    (copy / "config.json").write_text(json.dumps(fields))
    save_file({n: w.contiguous() for n, w in weights.items()}, copy / file.name)
    return copy
