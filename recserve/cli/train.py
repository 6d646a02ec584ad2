"""Command `train`: one subcommand per model, with the flags that apply to it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from recserve.cli.flags import BundleFlag, DeviceFlag, with_flags

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recserve.models.language_model import LanguageModel
    from recserve.training.options import TrainOptions, TrainReport

FromFlag = Annotated[
    Path | None,
    typer.Option("--from", help="Older bundle whose head to start from, if its loss is lower."),
]
TextFlag = Annotated[
    list[Path], typer.Option("--text", help="Training text, plain or .zst; repeatable.")
]
DrafterTextFlag = Annotated[
    list[Path],
    typer.Option(
        "--text", help="Training text, plain or .zst, or a folder of `distill`; repeatable."
    ),
]
OutFlag = Annotated[Path, typer.Option("--out", help="Folder of the new model.")]


@dataclass(frozen=True)
class TrainingFlags:
    """Flags of every training."""

    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the data; default: the recipe's.")
    ] = None
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Time limit of the command; with --resume, earlier runs do not count."),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and sampling.")] = 0
    device: DeviceFlag = "auto"
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False

    def options(self) -> TrainOptions:
        """Returns the options of a training that starts now."""
        from recserve.training.options import TrainOptions

        return TrainOptions(**vars(self)).start()


app = typer.Typer(
    help="Train a model and save its best checkpoint on validation data.", no_args_is_help=True
)


@app.command()
@with_flags
def recommender(
    bundle: BundleFlag,
    input: Annotated[
        Literal["items", "codes"], typer.Option(help="One position per item, or its codes.")
    ] = "items",
    *,
    training: TrainingFlags,
    half_life_days: Annotated[
        float | None,
        typer.Option(help="Age in days at which an event counts half; default: none."),
    ] = None,
) -> None:
    """Train the recommender, which generates semantic ids."""
    from recserve.bundle.bundle import Bundle
    from recserve.training.recommender.recommender import train_recommender

    options = training.options()
    options = replace(options, input=input, half_life_days=half_life_days)
    _print(train_recommender(Bundle.open(bundle), options))


@app.command()
@with_flags
def ranker(
    bundle: BundleFlag,
    training: TrainingFlags,
    slate_log: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a slate log: shown items are negatives. RECSERVE_SIGNING_KEY is the "
            "key of its users."
        ),
    ] = None,
    negatives: Annotated[
        int | None, typer.Option(min=0, help="Sampled negatives per event; default: 4.")
    ] = None,
    unlooked_weight: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Weight of shown items below the last taken one; default: 1."
        ),
    ] = None,
    popularity_bias: Annotated[
        bool,
        typer.Option(
            "--popularity-bias", help="Explain clicks by popularity too, in training only."
        ),
    ] = False,
) -> None:
    """Train the ranker, which scores given items.

    With --slate-log it learns from what was shown, and the rank explains a part of the clicks.
    """
    if slate_log is None:
        for flag, given in (
            ("--unlooked-weight", unlooked_weight is not None),
            ("--popularity-bias", popularity_bias),
        ):
            if given:
                raise typer.BadParameter(f"{flag} has no effect without --slate-log")
    from recserve.bundle.bundle import Bundle
    from recserve.training.ranker.ranker import RankerRecipe, train_ranker

    options = training.options()
    recipe = RankerRecipe(popularity_bias=popularity_bias)
    if negatives is not None:
        recipe = replace(recipe, negatives=negatives)
    if unlooked_weight is not None:
        recipe = replace(recipe, unlooked_weight=unlooked_weight)
    key = os.environ.get("RECSERVE_SIGNING_KEY")
    signing_key = None if key is None else key.encode()
    opened = Bundle.open(bundle)
    report = train_ranker(opened, options, recipe, slate_log=slate_log, signing_key=signing_key)
    _print(report)


@app.command()
@with_flags
def drafter(
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Bundle whose recommender the head drafts for.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="`items`, a head for item search; or a drafter of a language model: "
            "medusa, medusa2, medusa2-distill, eagle, eagle3, mtp, dflash, jetspec, dspark, "
            "dflash2, specformer, mask_tokens, boost.",
        ),
    ] = "items",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Training text of a drafter for texts, or a folder of `distill`; repeatable."
        ),
    ] = None,
    llm: Annotated[
        Path | None, typer.Option(help="Folder of the language model to draft for.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of a new drafter for texts.")] = None,
    name: Annotated[
        Literal["speculative", "nezha"], typer.Option(help="The strategy that it is trained for.")
    ] = "speculative",
    start_from: FromFlag = None,
    *,
    training: TrainingFlags,
) -> None:
    """Train a draft head for item search, or a drafter for a language model."""
    from recserve.bundle.bundle import Bundle
    from recserve.training.item_drafters.draft_head import train_drafter

    options = training.options()
    if kind != "items":
        if not text or llm is None or out is None:
            raise typer.BadParameter(f"--kind {kind} needs --text, --llm and --out")
        options = replace(options, start_from=start_from)
        _print(train_text_drafter(kind, text, out, llm, options))
        return
    if bundle is None:
        raise typer.BadParameter("--bundle is missing; a head for item search needs it")
    options = replace(options, name=name, start_from=start_from)
    _print(train_drafter(Bundle.open(bundle), options))


@app.command()
@with_flags
def retriever(
    bundle: BundleFlag,
    start_from: FromFlag = None,
    *,
    training: TrainingFlags,
) -> None:
    """Train the dense retriever on the states of the frozen recommender."""
    from recserve.bundle.bundle import Bundle
    from recserve.training.recommender.retriever import train_retriever

    options = training.options()
    _print(train_retriever(Bundle.open(bundle), replace(options, start_from=start_from)))


@app.command()
def similar(bundle: BundleFlag) -> None:
    """Link items that follow each other, and choose the weight of the links for similar items."""
    from recserve.bundle.bundle import Bundle
    from recserve.training.similar import train_similar

    typer.echo(str(train_similar(Bundle.open(bundle))))


@app.command()
@with_flags
def sasrec(
    bundle: BundleFlag,
    ids_only: Annotated[
        bool, typer.Option("--ids-only", help="Train the published model, without item vectors.")
    ] = False,
    *,
    training: TrainingFlags,
) -> None:
    """Train SASRec, the baseline of `recserve evaluate`."""
    from recserve.bundle.bundle import Bundle
    from recserve.training.recommender.sasrec import PLAIN, VECTORS, train_sasrec

    options = training.options()
    _print(train_sasrec(Bundle.open(bundle), options, PLAIN if ids_only else VECTORS))


@app.command()
@with_flags
def lm(
    text: TextFlag,
    out: OutFlag,
    llm: Annotated[
        Path | None, typer.Option(help="Folder of a model to draft for, whose tokenizer it uses.")
    ] = None,
    *,
    training: TrainingFlags,
) -> None:
    """Train a language model from text, alone or as a draft model."""
    options = training.options()
    _print(train_language_model_from(text, out, llm, options))


@app.command()
@with_flags
def medusa(
    text: DrafterTextFlag,
    out: OutFlag,
    llm: Annotated[Path, typer.Option(help="Folder of the model whose states the heads read.")],
    training: TrainingFlags,
) -> None:
    """Train Medusa heads, which draft for a language model."""
    options = training.options()
    _print(train_text_drafter("medusa", text, out, llm, options))


@app.command()
def distill(
    llm: Annotated[Path, typer.Option(help="Folder of the language model that writes.")],
    text: Annotated[
        list[Path],
        typer.Option(help="Text whose passages are continued, plain or .zst; repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new text; the same command resumes.")],
    tokens: Annotated[
        int, typer.Option(min=1, help="Least number of tokens, prompts included.")
    ] = 1_000_000,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    length: Annotated[int, typer.Option(min=1, help="Most tokens of each continuation.")] = 224,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 draws nothing.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of passages and draws.")] = 0,
    batch: Annotated[
        int, typer.Option(min=1, max=1024, help="Texts that are written at once.")
    ] = 64,
    device: DeviceFlag = "auto",
) -> None:
    """Let a language model write the text that its drafters train on.

    The same command, run again, continues an interrupted run.
    """
    from recserve.training.options import TrainOptions
    from recserve.training.text.distillation import distill as write
    from recserve.training.text.distilled_text import DistillationSettings

    settings = DistillationSettings(tokens, prompt_tokens, length, temperature, seed, batch)
    report = write(_folder(llm), text, out, settings, TrainOptions(device=device).torch_device())
    resumed = f" ({report.resumed} by earlier runs)" if report.resumed else ""
    typer.echo(
        f"{report.tokens:,} tokens in {report.texts:,} texts and {report.parts} parts{resumed}, "
        f"{report.seconds:.0f} s"
    )


def train_language_model_from(
    texts: list[Path], out: Path, llm: Path | None, options: TrainOptions
) -> TrainReport:
    """Trains a language model.

    Args:
        texts: Files with the training text.
        out: Folder of the new model.
        llm: Folder of the model to draft for, whose tokenizer the new model shares; None trains
            an independent model.
        options: Limits of the training.

    Raises:
        BadParameter: If the folder `llm` does not exist.
    """
    from recserve.tokenizer.tokenizer import TextTokenizer
    from recserve.training.text.language_model import BOOKS, DRAFT, read_texts, train_language_model

    if llm is None:
        return train_language_model(list(read_texts(texts)), out, options, BOOKS)
    tokenizer = TextTokenizer.open(_folder(llm)).tokenizer
    return train_language_model(list(read_texts(texts)), out, options, DRAFT, tokenizer=tokenizer)


def train_text_drafter(
    kind: str, texts: list[Path], out: Path, llm: Path, options: TrainOptions
) -> TrainReport:
    """Trains a drafter for `llm`; the last twentieth of the tokens is the validation set.

    Args:
        kind: A name of `training.text.drafters.kinds.KINDS`.
        texts: Files with the training text, or folders of `recserve train distill`.
        out: Folder of the drafter.
        llm: Folder of the language model.
        options: Limits of the training.

    Raises:
        BadParameter: If the kind is unknown, or the folder `llm` does not exist.
    """
    from recserve.training.text.drafters.kinds import KINDS

    if kind not in KINDS:
        raise typer.BadParameter(f"--kind is {kind!r}; expected items, {', '.join(KINDS)}")
    options = replace(options, llm=llm)
    return KINDS[kind](*_target_and_texts(texts, llm, options), out, options)


def _target_and_texts(
    texts: list[Path], llm: Path, options: TrainOptions
) -> tuple[LanguageModel, NDArray[np.int64], NDArray[np.int64]]:
    """Returns the target, the training tokens, and the last twentieth, which validates."""
    from recserve.models.loading import load_language_model
    from recserve.training.text.distilled_text import read_drafter_text

    found = read_drafter_text(texts, _folder(llm))
    for folder in found.foreign:
        typer.echo(
            f"warning: {folder} was written by another model than {llm}, so drafters learn less "
            f"from it; `recserve train distill --llm {llm}` writes new text",
            err=True,
        )
    train, valid = found.split()
    return load_language_model(llm, device=options.torch_device()), train, valid


def _folder(llm: Path) -> Path:
    if not llm.is_dir():
        raise typer.BadParameter(f"--llm: there is no folder {llm}")
    return llm


def _print(report: TrainReport) -> None:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
    typer.echo(
        f"best epoch {report.best_epoch} of {report.epochs} by {report.selection} "
        f"(ended by {report.stopped}, {report.seconds:.0f} s): {metrics}"
    )
