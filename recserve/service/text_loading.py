"""From a language model's folder, and its drafters', to what the engine and the routes need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from recserve.core.text import Drafter
from recserve.models.language_model import LanguageModel
from recserve.models.loading import DTYPES, load_language_model
from recserve.service.text_model import TextModel
from recserve.text.tokenizer import TextTokenizer
from recserve.verify.rules import RULES


@dataclass(frozen=True)
class TextSettings:
    """name: None is the folder's. dtype: None is the folder's own. drafters: `NAME` or `NAME=DIR`,
    the first is the default of requests.
    """

    folder: Path
    name: str | None = None
    dtype: str | None = None
    chat_template: Path | None = None
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedText:
    """network and drafters: for the engine. model: for the routes."""

    network: LanguageModel
    drafters: Mapping[str, Drafter]
    model: TextModel

    @property
    def parts(self) -> tuple[LanguageModel, Mapping[str, Drafter]]:
        """What the engine takes."""
        return self.network, self.drafters


def load_text(settings: TextSettings, device: torch.device) -> LoadedText:
    """Load what the settings name.

    Raises UnsupportedModel, UnsupportedTokenizer, TemplateError, or ValueError for a drafter that
    is not there, naming what was expected and what came.
    """
    folder = settings.folder
    if not folder.is_dir():
        raise ValueError(f"llm: there is no folder {folder}")
    dtype = None if settings.dtype is None else DTYPES[settings.dtype]
    tokenizer = TextTokenizer.open(folder, settings.chat_template)
    network = load_language_model(folder, dtype, device)
    config = network.config
    if len(tokenizer.all_bytes) > config.vocab_size:
        raise ValueError(
            f"tokenizer.json of {folder.name} has {len(tokenizer.all_bytes)} tokens, the model "
            f"scores {config.vocab_size}; they do not belong together"
        )
    drafters, default = open_drafters(settings.drafters, network)
    model = TextModel(
        name=settings.name or folder.resolve().name,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        context=config.decoder.max_positions,
        parameters=sum(p.numel() for p in network.parameters()),
        drafters=("none", *(name for name in drafters if name != "none")),
        verifiers=tuple(RULES),
        exact_verifiers=tuple(name for name, rule in RULES.items() if rule.exact),
        default_drafter=default,
    )
    return LoadedText(network, drafters, model)


def open_drafters(named: tuple[str, ...], network: LanguageModel) -> tuple[dict[str, Drafter], str]:
    """Drafters by name, and the default one. named: `NAME` or `NAME=DIR`."""
    wanted = {name: folder for name, _, folder in (part.partition("=") for part in named)}
    for name in wanted:
        if name != "none":
            raise ValueError(f"drafters: there is {'none'}, got {name!r}")
    return {}, next(iter(wanted), "none")
