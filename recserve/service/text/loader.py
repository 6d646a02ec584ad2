"""Loads a language model and its drafters from folders, for the engine and the text routes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from recserve.drafters.registry import build_drafter, weightless_drafters
from recserve.files import gguf_hint
from recserve.kernels.linear.products import fastest_dtype
from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.loading import DTYPES, UnsupportedModel, load_language_model, read_folder
from recserve.models.packing import pack_weights
from recserve.models.weight_check import is_finite
from recserve.service.memory import ModelSize, available_bytes
from recserve.service.model_loader import resolve_dtype
from recserve.service.text.model import TextModel
from recserve.speculation.drafter import Drafter
from recserve.speculation.verifiers.registry import verifiers
from recserve.tokenizer.tokenizer import TextTokenizer

# File of a model folder: a prompt whose continuation shows what the model can do.
EXAMPLE_PROMPT, MAX_EXAMPLE = "example_prompt.txt", 2000
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextSettings:
    """Which language model to load, and how.

    Attributes:
        folder: Folder of the model.
        name: Name in requests; None means the folder's name.
        dtype: A type's name, or `auto` for the fastest type that fits. None means the type of the
            weights, or float32 on a CPU where that is faster and fits.
        chat_template: File of a chat template; None means the folder's own.
        drafters: `NAME` or `NAME=DIR`; the first is the default of requests.
        aliases: Further names in requests.
        weights: Format of the model's matrices; None means its type. Drafters keep their type.
    """

    folder: Path
    name: str | None = None
    dtype: str | None = None
    chat_template: Path | None = None
    drafters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    weights: str | None = None


@dataclass(frozen=True)
class LoadedText:
    """A loaded language model.

    Attributes:
        network: The network, for the engine.
        drafters: Drafters by name, for the engine.
        model: The served model, for the routes.
    """

    network: LanguageModel
    drafters: Mapping[str, Drafter]
    model: TextModel


def load_text(settings: TextSettings, device: torch.device) -> LoadedText:
    """Loads the model and the drafters that the settings name.

    Raises:
        UnsupportedModel: If the network cannot be loaded.
        UnsupportedTokenizer: If the tokeniser cannot be loaded.
        TemplateError: If the chat template is invalid.
        ValueError: If a drafter is missing. The message names the expected and the given value.
        PluginError: If an installed distribution registers an unusable drafter or rule.
    """
    folder = settings.folder
    if not folder.is_dir():
        raise ValueError(f"llm is {folder}; there is no such folder{gguf_hint(folder)}")
    tokenizer = TextTokenizer.open(folder, settings.chat_template)
    network = load_language_model(folder, _dtype(settings, device), device)
    _probe(network, folder)
    unite_end_tokens(network, tokenizer)
    config = network.config
    if len(tokenizer.all_bytes) > config.vocab_size:
        raise ValueError(
            f"tokenizer.json of {folder.name} has {len(tokenizer.all_bytes)} tokens, but the model "
            f"scores only {config.vocab_size}; use the model's own tokenizer.json"
        )
    verifiers()  # so that a broken plugin fails at startup and not in a request
    drafters = open_drafters(settings.drafters or ("none",), network)
    model = TextModel(
        name=settings.name or folder.resolve().name,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        end_tokens=config.eos_tokens,
        context=config.decoder.max_positions,
        parameters=sum(p.numel() for p in network.parameters()),
        device=device,
        drafters=drafters,
        default_drafter=next(iter(drafters)),
        example_prompt=_example_prompt(folder),
        aliases=settings.aliases,
    )
    pack_weights(network, settings.weights or _exact_format(folder, network))
    return LoadedText(network, drafters, model)


def unite_end_tokens(network: LanguageModel, tokenizer: TextTokenizer) -> None:
    """Adds the tokenizer's end tokens to those of the network.

    Chat models often name the end of a turn in one file, and the end of a text in another.
    """
    ends = tuple(dict.fromkeys(network.config.eos_tokens + tokenizer.end_tokens))
    network.config = replace(network.config, eos_tokens=ends)


def _probe(network: LanguageModel, folder: Path) -> None:
    """Computes the logits after one token. Raises UnsupportedModel if they are not finite."""
    token = torch.tensor([[network.config.bos_token or 0]], device=network.tokens.weight.device)
    with torch.inference_mode():
        logits = network.logits(network(token, torch.zeros_like(token), DenseAttention()))
    if not is_finite(logits):
        raise UnsupportedModel(
            f"{folder.name} computes NaN or infinity after its token {int(token)}; its weights, or "
            "rms_norm_eps or rope_theta in config.json, are damaged"
        )


def _exact_format(folder: Path, network: LanguageModel) -> str | None:
    """Returns float16 if the network computes in float32 and its folder holds float16 numbers."""
    widened = network.tokens.weight.dtype == torch.float32
    return "float16" if widened and read_folder(folder)[1] == torch.float16 else None


def _example_prompt(folder: Path) -> str | None:
    path = folder / EXAMPLE_PROMPT
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(MAX_EXAMPLE).strip() or None


def _dtype(settings: TextSettings, device: torch.device) -> torch.dtype:
    """Returns the type to compute in."""
    if settings.dtype not in (None, "auto"):
        return DTYPES[settings.dtype]
    config, stored = read_folder(settings.folder)
    size = ModelSize(_count_weights(config), weights=settings.weights)
    if settings.dtype == "auto":
        return resolve_dtype("auto", device, size)
    if device.type == "cuda" or stored == torch.float32:
        return stored
    found = fastest_dtype((stored, torch.float32))
    free = available_bytes(device)
    if free is not None and not size.fits(found, free):
        return stored
    if found != stored:
        log.info("%s computes in float32, which is faster on this processor", settings.folder.name)
    return found


def _count_weights(config: LanguageModelConfig) -> int:
    """Returns the number of served weights; a head that is the embedding is packed beside it."""
    with torch.device("meta"):
        model = LanguageModel(config)
    tied = model.tokens.weight.numel() if model.head is None else 0
    return sum(p.numel() for p in model.parameters()) + tied


def open_drafters(named: Sequence[str], network: LanguageModel) -> dict[str, Drafter]:
    """Builds the named drafters, then those that need no weights.

    Args:
        named: `NAME` or `NAME=DIR`. A repeated name adds one more folder.
        network: The target model.

    Returns:
        Drafters by name, in that order.

    Raises:
        ValueError: If a name is unknown, or weights are missing or do not fit.
        PluginError: If an installed distribution registers an unusable drafter.
    """
    folders: dict[str, list[Path]] = {}
    for part in named:
        name, _, folder = part.partition("=")
        folders.setdefault(name, []).extend([Path(folder)] if folder else [])
    drafters = {}
    for name, given in folders.items():
        missing = [folder for folder in given if not folder.is_dir()]
        if missing:
            raise ValueError(
                f"drafters: {name} is {missing[0]}; there is no such folder{gguf_hint(missing[0])}"
            )
        drafters[name] = build_drafter(name, network, given)
    for name in weightless_drafters():
        drafters.setdefault(name, build_drafter(name, network))
    return drafters
