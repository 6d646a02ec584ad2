"""Training a small language model from plain text: tokenizer, model, and the folder that serves.

The folder is in Hugging Face's layout (a Llama with tied embeddings), so that this server and other
software read it alike.
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
PART = 2**18  # characters encoded at once; a tokenizer needs a hundred bytes for each


@dataclass(frozen=True)
class LanguageRecipe:
    """Sizes of model and training.

    vocab_size: tokens, END included. batch, window: texts of a step and tokens of each. steps: of
    an epoch. validation: share of the tokens kept apart, from the end.
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
        """The model's shape."""
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


# About 11 million weights, for megabytes of books; the default is a minute's work for a demo. An
# epoch, after which there is a checkpoint, is 0.2 million tokens.
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
# A seventh of that, two layers: drafts for a model whose tokenizer it shares.
DRAFT = replace(
    BOOKS, hidden_size=192, num_layers=2, num_heads=3, num_kv_heads=1, intermediate_size=512
)


class LanguageTrainee:
    """A language model on one long row of tokens, as the loop sees it."""

    selection = "log_likelihood"

    def __init__(
        self, recipe: LanguageRecipe, tokens: NDArray[np.int64], seed: int, device: torch.device
    ) -> None:
        """Raises ValueError where the text is shorter than a window and its validation."""
        kept = int(tokens.shape[0] * recipe.validation)
        if min(kept, tokens.shape[0] - kept) <= recipe.window:
            raise ValueError(
                f"the text has {tokens.shape[0]} tokens; training and validation each need more "
                f"than a window of {recipe.window}"
            )
        torch.manual_seed(seed)
        self.recipe, self.seed, self.device = recipe, seed, device
        self.tokens = torch.from_numpy(tokens[:-kept]).to(device)
        self.held_out = torch.from_numpy(tokens[-kept:]).to(device)
        self.model = LanguageModel(recipe.config()).to(device)
        for name, weight in self.model.named_parameters():
            if weight.ndim > 1:  # what adds to the stream adds the less the more layers there are
                adds = name.endswith(("output.weight", "down.weight"))
                std = 0.02 / (2 * recipe.num_layers) ** 0.5 if adds else 0.02
                torch.nn.init.normal_(weight, std=std)

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Where the windows of each batch begin."""
        random = np.random.default_rng((self.seed, epoch))
        last = self.tokens.shape[0] - self.recipe.window - 1
        return list(random.integers(0, last + 1, (self.recipe.steps, self.recipe.batch)))

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Cross-entropy of the next token, mean over all positions."""
        step = torch.arange(self.recipe.window + 1, device=self.device)
        rows = self.tokens[torch.from_numpy(batch).to(self.device)[:, None] + step]
        mean = self._cross_entropy(rows)
        return StepLoss(mean, {"loss": mean.detach()}, batch.shape[0] * self.recipe.window)

    def validate(self) -> dict[str, float]:
        """Mean log-likelihood of a token of the held-out text, at most 64 windows of it."""
        window = self.recipe.window
        count = min((self.held_out.shape[0] - 1) // window, 64)
        starts = torch.arange(count, device=self.device)[:, None] * window
        step = torch.arange(window + 1, device=self.device)
        total = 0.0
        for part in torch.split(starts + step, self.recipe.batch):
            total += float(self._cross_entropy(self.held_out[part])) * part.shape[0]
        return {self.selection: -total / count}

    def _cross_entropy(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [B, window + 1] tokens -> mean."""
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
    """Tokenizer and model from texts, written to the folder `out`, which is made when all that was
    given is known to be good.

    tokenizer: one that was trained before, None: a new one. Raises ValueError where there is too
    little text, or where the tokenizer is not of the recipe's size.
    """
    recipe = recipe or LanguageRecipe()
    if tokenizer is None:
        tokenizer = train_tokenizer(texts, recipe.vocab_size, END)
    elif tokenizer.get_vocab_size() != recipe.vocab_size or tokenizer.token_to_id(END) != 0:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens and {END} as number "
            f"{tokenizer.token_to_id(END)}; the recipe wants {recipe.vocab_size} and 0"
        )
    tokens = encode(tokenizer, texts)
    trainee = LanguageTrainee(recipe, tokens, options.seed, options.torch_device())
    report = fit(trainee, recipe.schedule.asked(options), options, out / "training", console)
    save_language_model(trainee.model, out)
    tokenizer.save(str(out / "tokenizer.json"))
    fields = {"bos_token": END, "eos_token": END, "model_max_length": recipe.max_positions}
    (out / "tokenizer_config.json").write_text(json.dumps(fields, indent=1) + "\n")
    return report


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> NDArray[np.int64]:
    """One row of tokens: each text after an END, a long one encoded in parts that end lines."""
    end = tokenizer.token_to_id(END)
    rows: list[NDArray[np.int64]] = []
    for text in texts:
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
    """UTF-8 texts of files, `.zst` ones unpacked. Raises ValueError for a file that is no text."""
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
    """Sources of Python's standard library in alphabetical order, tests left out."""
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
