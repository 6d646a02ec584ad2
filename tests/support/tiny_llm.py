"""An untrained language model on bytes, in a folder that a server can load."""

from pathlib import Path

import torch

from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.saving import save_language_model
from tests.support.scripted_text import END, VOCABULARY, byte_tokenizer


def tiny_llm(folder: Path, seed: int = 0) -> Path:
    """Writes the model into a new folder and returns the folder."""
    folder.mkdir(parents=True)
    byte_tokenizer(folder)
    torch.manual_seed(seed)
    decoder = DecoderConfig(64, 2, 2, 1, 32, 128, max_positions=4096)
    config = LanguageModelConfig(decoder, VOCABULARY, True, None, (END,))
    save_language_model(LanguageModel(config), folder)
    return folder
