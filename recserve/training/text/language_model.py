"""Training of a small language model from plain text: tokenizer, model and model folder.

The folder has Hugging Face's layout (a Llama with tied embeddings), so that this server and other
software can load it.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console

from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.saving import save_language_model
from recserve.tokenizer.training import Tokenizer, train_tokenizer
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.schedule import Schedule

END = "<|endoftext|>"
PART = 2**18  # characters per call of the tokenizer, which needs about 100 bytes for each


@dataclass(frozen=True)
class LanguageRecipe:
    """Sizes of a language model and settings of its training.

    Attributes:
        vocab_size: Number of tokens, including END.
        hidden_size: Size of the hidden states.
        num_layers: Number of layers.
        num_heads: Number of attention heads.
        num_kv_heads: Number of key and value heads.
        intermediate_size: Size of the feed-forward layers.
        max_positions: Maximum length of a sequence, in tokens.
        batch: Windows per step.
        window: Tokens per window.
        steps: Steps per epoch.
        validation: Share of the tokens, from the end, that is held out.
        schedule: Learning rate, averaging and stopping.
    """

    vocab_size: int = 1024
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 384
    max_positions: int = 1024
    batch: int = 16
    window: int = 256
    steps: int = 100
    validation: float = 0.05
    schedule: Schedule = field(
        default_factory=lambda: Schedule(10, 3e-3, weight_decay=0.1, averaging=0.98)
    )

    def config(self) -> LanguageModelConfig:
        """Returns the configuration of the model."""
        decoder = DecoderConfig(
            self.hidden_size,
            self.num_layers,
            self.num_heads,
            self.num_kv_heads,
            self.hidden_size // self.num_heads,
            self.intermediate_size,
            max_positions=self.max_positions,
        )
        return LanguageModelConfig(decoder, self.vocab_size, True, 0, (0,))


# About 11 million weights, for megabytes of books. The default recipe trains in about a minute, for
# a demo. An epoch, which ends with a checkpoint, is 0.2 million tokens.
BOOKS = LanguageRecipe(
    vocab_size=4096,
    hidden_size=384,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    intermediate_size=1024,
    batch=16,
    steps=50,
    schedule=Schedule(
        100, 5e-3, warmup=0.03, averaging=0.98, betas=(0.9, 0.95), orthogonal=("decoder.",)
    ),
)
# A draft model for BOOKS with a seventh of its weights and two layers; both share a tokenizer.
DRAFT = replace(
    BOOKS, hidden_size=192, num_layers=2, num_heads=3, num_kv_heads=1, intermediate_size=512
)


class LanguageTrainee:
    """A language model on one long row of tokens, for the training loop."""

    selection = "log_likelihood"

    def __init__(
        self,
        recipe: LanguageRecipe,
        train: NDArray[np.int64],
        valid: NDArray[np.int64],
        seed: int,
        device: torch.device,
    ) -> None:
        """Initialises the model.

        Raises:
            ValueError: If training or validation has no more tokens than one window.
        """
        if min(len(train), len(valid)) <= recipe.window:
            raise ValueError(
                f"the text has {len(train) + len(valid)} tokens; training and validation each need "
                f"more than a window of {recipe.window}"
            )
        torch.manual_seed(seed)
        self.recipe, self.seed, self.device = recipe, seed, device
        self.tokens = torch.from_numpy(train).to(device)
        self.held_out = torch.from_numpy(valid).to(device)
        self.model = LanguageModel(recipe.config()).to(device)
        for name, weight in self.model.named_parameters():
            if weight.ndim > 1:  # projections into the residual stream shrink with the depth
                adds = name.endswith(("output.weight", "down.weight"))
                std = 0.02 / (2 * recipe.num_layers) ** 0.5 if adds else 0.02
                torch.nn.init.normal_(weight, std=std)

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the first token of each window, for each batch."""
        random = np.random.default_rng((self.seed, epoch))
        last = self.tokens.shape[0] - self.recipe.window - 1
        return list(random.integers(0, last + 1, (self.recipe.steps, self.recipe.batch)))

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the cross-entropy of the next token, as the mean over all positions."""
        step = torch.arange(self.recipe.window + 1, device=self.device)
        rows = self.tokens[torch.from_numpy(batch).to(self.device)[:, None] + step]
        mean = self._cross_entropy(rows)
        return StepLoss(mean, {"loss": mean.detach()}, batch.shape[0] * self.recipe.window)

    def validate(self) -> dict[str, float]:
        """Returns the mean log-likelihood of a held-out token, over at most 64 windows."""
        window = self.recipe.window
        count = min((self.held_out.shape[0] - 1) // window, 64)
        starts = torch.arange(count, device=self.device)[:, None] * window
        step = torch.arange(window + 1, device=self.device)
        total = 0.0
        for part in torch.split(starts + step, self.recipe.batch):
            total += float(self._cross_entropy(self.held_out[part])) * part.shape[0]
        return {self.selection: -total / count}

    def _cross_entropy(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of rows [B, window + 1] of tokens."""
        positions = torch.arange(self.recipe.window, device=self.device).expand(rows.shape[0], -1)
        hidden = self.model(rows[:, :-1], positions, DenseAttention())
        logits = self.model.logits(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits, rows[:, 1:].flatten())


def train_language_model(
    texts: Sequence[str],
    out: Path,
    options: TrainOptions,
    recipe: LanguageRecipe | None = None,
    console: Console | None = None,
    tokenizer: Tokenizer | None = None,
) -> TrainReport:
    """Trains a tokenizer and a model on texts and writes them to a folder.

    Args:
        texts: The texts.
        out: Folder of the model; it is created after the arguments are checked.
        options: Options of the run.
        recipe: Sizes and settings; None means the defaults.
        console: Where progress is printed; None means standard error.
        tokenizer: A trained tokenizer; None trains a new one.

    Returns:
        The report of the run.

    Raises:
        ValueError: If there is too little text, or if the tokenizer does not fit the recipe.
    """
    recipe = recipe or LanguageRecipe()
    if tokenizer is None:
        tokenizer = train_tokenizer(texts, recipe.vocab_size, END)
    elif tokenizer.get_vocab_size() != recipe.vocab_size or tokenizer.token_to_id(END) != 0:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens and {END} has id "
            f"{tokenizer.token_to_id(END)}; the recipe needs {recipe.vocab_size} and 0"
        )
    tokens = encode(tokenizer, texts)
    split = len(tokens) - int(len(tokens) * recipe.validation)
    trainee = LanguageTrainee(
        recipe, tokens[:split], tokens[split:], options.seed, options.torch_device()
    )
    report = fit(trainee, recipe.schedule.with_options(options), options, out / "training", console)
    save_language_model(trainee.model, out)
    tokenizer.save(str(out / "tokenizer.json"))
    fields = {"bos_token": END, "eos_token": END, "model_max_length": recipe.max_positions}
    (out / "tokenizer_config.json").write_text(
        json.dumps(fields, indent=1) + "\n", encoding="utf-8"
    )
    return report


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> NDArray[np.int64]:
    """Returns all texts as one row of tokens, with an END before each text.

    A tokenizer of another maker may have no END; then nothing separates the texts. A long text is
    encoded in parts that end at line ends.
    """
    end = tokenizer.token_to_id(END)
    rows: list[NDArray[np.int64]] = []
    for text in texts:
        if end is not None:
            rows.append(np.array([end], dtype=np.int64))
        start = 0
        while start < len(text):
            stop = text.find("\n", start + PART)
            stop = len(text) if stop < 0 else stop + 1
            part = tokenizer.encode(text[start:stop], add_special_tokens=False)
            rows.append(np.array(part.ids, np.int64))
            start = stop
    return np.concatenate(rows)


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yields the UTF-8 texts of files; files with suffix `.zst` are decompressed.

    Raises:
        ValueError: If a file does not exist or is not UTF-8 text.
    """
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        with pa.OSFile(str(path), "rb") as file:
            raw = pa.CompressedInputStream(file, "zstd") if path.suffix == ".zst" else file
            try:
                yield raw.read().decode("utf-8")
            except (UnicodeDecodeError, OSError) as error:
                raise ValueError(f"{path.name} is not UTF-8 text: {error}") from error


def standard_library(max_bytes: int = 4_000_000) -> list[str]:
    """Returns the sources of Python's standard library in alphabetical order, without tests.

    Args:
        max_bytes: Bound on the total size, in characters.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts, size = [], 0
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if parts[0] in {"site-packages", "dist-packages"} or "test" in parts or "tests" in parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if size + len(text) > max_bytes:
            break
        texts.append(text)
        size += len(text)
    return texts
