"""Boost tuning: a set of small language models whose guesses cover the target's text together.

The models are trained one after another, each on the samples that no earlier model predicts:

    model 1    all samples
    model 2    samples that model 1 does not predict
    model 3    samples that neither model 1 nor model 2 predicts

A sample is a few tokens after all the text before them. A model predicts a sample if it is greedily
right in all its tokens. Later models start from the weights of the first one. They are meant to
draft together in one tree (`specinfer`), which accepts the longest of their guesses.

Source: SpecInfer (arXiv 2305.09781, section 3.2, merge-based construction with adaptive boosting).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel
from recserve.models.loading import load_language_model
from recserve.models.saving import save_language_model
from recserve.tokenizer.tokenizer import copy_tokenizer
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.text.language_model import DRAFT, LanguageRecipe, LanguageTrainee

IGNORED = -100  # label of a token that has no loss
VALIDATION_ROWS = 64
FOLDER = "model-{}"


@dataclass(frozen=True)
class BoostRecipe:
    """Settings of a set of models.

    Attributes:
        num_models: Number of models.
        span: Tokens of a sample.
        model: Sizes and schedule of each model. The vocabulary and the positions are the target's.
    """

    num_models: int = 3
    span: int = 4
    model: LanguageRecipe = DRAFT


class BoostCorpus:
    """The text that all models of a set learn, and what the finished models predict of it.

    Attributes:
        train: [n] int64 training tokens.
        valid: [m] int64 validation tokens.
        unsolved: [n] bool, True for the tokens of samples that no finished model predicts.
        rows: [r, window + 1] int64 validation rows.
        wanted: [r, window] int64 token that the target says at each place of these rows.
        lengths: [r, window - span + 1] accepted tokens of the best of the finished models' guesses.
        first: Mean of the first model's lengths; None before it is finished.
    """

    def __init__(
        self,
        target: LanguageModel,
        train: NDArray[np.int64],
        valid: NDArray[np.int64],
        recipe: BoostRecipe,
    ) -> None:
        """Asks the target for its tokens of the validation rows.

        Raises:
            ValueError: If a text has no more tokens than one window.
        """
        self.train, self.valid, self.recipe = train, valid, recipe
        if min(len(train), len(valid)) <= recipe.model.window:
            raise ValueError(
                f"the texts have {len(train)} and {len(valid)} tokens; training and validation "
                f"each need more than a window of {recipe.model.window}"
            )
        self.device = target.tokens.weight.device
        self.unsolved = np.ones(len(train), dtype=bool)
        self.rows = self._cut(valid)[:VALIDATION_ROWS]
        self.wanted = self._predict_next(target, self.rows)
        self.lengths = torch.zeros_like(self.wanted.unfold(1, recipe.span, 1)[..., 0])
        self.first: float | None = None

    def add(self, model: LanguageModel) -> None:
        """Adds a finished model: its samples are solved, its guesses join the others'."""
        window, rows = self.recipe.model.window, self._cut(self.train)
        right = self._predict_next(model, rows) == torch.from_numpy(rows[:, 1:].copy()).to(
            self.device
        )
        solved = solved_samples(right, self.recipe.span).cpu().numpy().ravel()
        # Row r says the tokens r * window + 1 .. (r + 1) * window.
        self.unsolved[1 : 1 + len(rows) * window] &= ~solved
        own = self.count_accepted(model)
        self.lengths = torch.maximum(self.lengths, own)
        self.first = float(own.float().mean()) if self.first is None else self.first

    def count_accepted(self, model: LanguageModel) -> Tensor:
        """Returns how many tokens of a model's guess the target accepts, from each place of the
        validation rows: the shape is that of `lengths`.
        """
        return chain_lengths(self._predict_next(model, self.rows) == self.wanted, self.recipe.span)

    def _cut(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns rows [n, window + 1]; the last token of a row is the first of the next one."""
        window = self.recipe.model.window
        return np.lib.stride_tricks.sliding_window_view(tokens, window + 1)[::window]

    @torch.inference_mode()
    def _predict_next(self, model: LanguageModel, rows: NDArray[np.int64]) -> Tensor:
        """Returns the likeliest next token [n, window] at each place of rows [n, window + 1]."""
        positions = torch.arange(rows.shape[1] - 1, device=self.device)
        found = []
        for part in np.array_split(rows, -(-len(rows) // self.recipe.model.batch)):
            tokens = torch.from_numpy(part[:, :-1].copy()).to(self.device)
            hidden = model(tokens, positions, DenseAttention())
            found.append(model.logits(hidden).argmax(-1))
        return torch.cat(found)


class BoostTrainee(LanguageTrainee):
    """One model of a set, for the training loop: its loss is that of the unsolved samples.

    The union's accept length selects the checkpoint.
    """

    selection = "accept_length"

    def __init__(self, corpus: BoostCorpus, target: LanguageModel, seed: int) -> None:
        """Initialises the model.

        Raises:
            ValueError: If a text has no more tokens than one window.
        """
        sizes = replace(
            corpus.recipe.model,
            vocab_size=target.config.vocab_size,
            max_positions=target.config.decoder.max_positions,
        )
        super().__init__(sizes, corpus.train, corpus.valid, seed, corpus.device)
        special = target.config
        self.model.config = replace(
            self.model.config, bos_token=special.bos_token, eos_tokens=special.eos_tokens
        )
        self.corpus = corpus
        labels = np.where(corpus.unsolved, corpus.train, IGNORED)
        self.labels = torch.from_numpy(labels).to(corpus.device)

    def start_from(self, model: LanguageModel) -> None:
        """Copies the weights of a model.

        Raises:
            ValueError: If it has another shape.
        """
        theirs, own = model.config, self.model.config
        if (theirs.decoder, theirs.vocab_size, theirs.tied) != (
            own.decoder,
            own.vocab_size,
            own.tied,
        ):
            raise ValueError(f"the older model is {theirs}; the new model is {own}")
        self.model.load_state_dict(model.state_dict())

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the cross-entropy of the tokens of unsolved samples, as their mean."""
        window = self.recipe.window
        starts = torch.from_numpy(batch).to(self.device)[:, None]
        step = torch.arange(window, device=self.device)
        hidden = self.model(self.tokens[starts + step], step, DenseAttention())
        logits = self.model.logits(hidden).flatten(0, 1).float()
        labels = self.labels[starts + step + 1].flatten()
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        mean = total / (labels != IGNORED).sum().clamp_min(1)
        return StepLoss(mean, {"loss": mean.detach()}, batch.shape[0] * window)

    def validate(self) -> dict[str, float]:
        """Returns the accept lengths of the union, of this model alone and of the first model."""
        own = self.corpus.count_accepted(self.model)
        alone = float(own.float().mean())
        return {
            "accept_length": float(torch.maximum(own, self.corpus.lengths).float().mean()),
            "accept_length_alone": alone,
            "accept_length_first": alone if self.corpus.first is None else self.corpus.first,
        }


def chain_lengths(right: Tensor, span: int) -> Tensor:
    """Returns how many of the next `span` guesses are right before the first wrong one.

    Args:
        right: [n, T] bool.
        span: Longest chain.

    Returns:
        [n, T - span + 1] int64.
    """
    return right.long().unfold(1, span, 1).cumprod(-1).sum(-1)


def solved_samples(right: Tensor, span: int) -> Tensor:
    """Returns which tokens belong to a sample that is right in all its tokens.

    The samples follow one another from the start of a row; tokens after the last whole sample
    belong to none.

    Args:
        right: [n, T] bool.
        span: Tokens of a sample.

    Returns:
        [n, T] bool.
    """
    count = right.shape[1] // span
    samples = right[:, : count * span].reshape(-1, count, span).all(-1)
    solved = torch.zeros_like(right)
    solved[:, : count * span] = samples.repeat_interleave(span, dim=1)
    return solved


def train_boost(
    target: LanguageModel,
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
    directory: Path,
    options: TrainOptions,
    recipe: BoostRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Trains a set of small models and writes each to its folder, `model-1`, `model-2` and so on.

    Each model takes an equal share of what is left of `max_minutes`. `--resume` loads finished
    models and continues the first unfinished one.

    Args:
        target: The language model that the set drafts for; its tokens validate.
        train: [n] int64 training tokens, preferably text that the target wrote.
        valid: [n] int64 validation tokens.
        directory: Folder that receives the folders of the models.
        options: Options of the run. The first model starts from the draft model of `start_from`.
            The models get the tokenizer of `llm`.
        recipe: Sizes and settings; None means the defaults.
        console: Where progress is printed; None means standard error.

    Returns:
        The report of the last model.

    Raises:
        ValueError: If a text is too short, or a model in a folder has another shape.
    """
    options = options.start()
    recipe, console = recipe or BoostRecipe(), console or Console(stderr=True)
    corpus = BoostCorpus(target, train, valid, recipe)
    folders = [directory / FOLDER.format(number + 1) for number in range(recipe.num_models)]
    # Read before `_count_finished`, which may remove the files of this very folder.
    start = None if options.start_from is None else _open(options.start_from)
    done = _count_finished(folders, options.resume)
    reports = []
    for number, folder in enumerate(folders):
        trainee = BoostTrainee(corpus, target, options.seed + number)
        if number:
            start = _open(folders[0])
        if number < done:
            start = _open(folder)
        if start is not None:
            trainee.start_from(start)
        if number >= done:
            left = float(corpus.unsolved.mean())
            console.print(f"model {number + 1} of {len(folders)}: {left:.0%} of the text is new")
            schedule = recipe.model.schedule.with_options(options)
            part = options.part(1 / (len(folders) - number))
            reports.append(fit(trainee, schedule, part, folder / "training", console))
            save_language_model(trainee.model, folder)
            if options.llm is not None:
                copy_tokenizer(options.llm, folder)
        if number + 1 < len(folders):  # what the next models train on
            corpus.add(trainee.model.eval())
    return reports[-1]


def _open(folder: Path) -> LanguageModel:
    """Returns the model of a folder in float32."""
    return load_language_model(folder, torch.float32)


def _count_finished(folders: Sequence[Path], resume: bool) -> int:
    """Returns how many models an interrupted run has finished, at most all but one.

    A fresh run removes the files that a later `resume` would take for its own.
    """
    weights = [folder / "model.safetensors" for folder in folders]
    if resume:
        present = [path.exists() for path in weights[:-1]]
        return present.index(False) if False in present else len(present)
    for path in weights:
        path.unlink(missing_ok=True)
        (path.parent / "training" / "checkpoint.safetensors").unlink(missing_ok=True)
    return 0
