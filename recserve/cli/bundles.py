"""`recserve build`, `train`, `evaluate`, `bundle verify|calibrate|export`: what makes bundles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from recserve.cli.flags import BundleFlag, DeviceFlag, numbers

Model = Literal["recommender", "ranker", "drafter", "retriever", "sasrec", "lm", "medusa"]


def build(
    items: Annotated[Path, typer.Option(help="Parquet: item_id, title, categories, more.")],
    events: Annotated[Path, typer.Option(help="Parquet: user_id, item_id, timestamp/position.")],
    out: Annotated[Path, typer.Option(help="Folder of the new bundle.")],
    embeddings: Annotated[
        Path | None, typer.Option(help="Item vectors, .npy or Parquet; without: from text.")
    ] = None,
    quantizer: Annotated[
        Literal["residual", "product"], typer.Option(help="How vectors become semantic ids.")
    ] = "residual",
    levels: Annotated[int, typer.Option(min=1, max=64, help="Codes per semantic id.")] = 4,
    codes: Annotated[int, typer.Option(min=2, max=65536, help="Codes per level.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of vectors and quantiser.")] = 0,
    on_bad_rows: Annotated[
        Literal["error", "skip"], typer.Option(help="What becomes of a row that cannot be used.")
    ] = "error",
) -> None:
    """Turn items and events into a bundle: vectors, semantic ids, catalogue."""
    from recserve.bundle.building import BuildOptions, build_bundle

    options = BuildOptions(
        items=items,
        events=events,
        out=out,
        embeddings=embeddings,
        quantizer=quantizer,
        levels=levels,
        codes=codes,
        seed=seed,
        on_bad_rows=on_bad_rows,
    )
    build_bundle(options, typer.echo)


def train(
    model: Annotated[Model, typer.Argument(help="What to train.")],
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Folder of the bundle; not for lm and medusa.")
    ] = None,
    input: Annotated[
        Literal["items", "codes"],
        typer.Option(help="A recommender reads one position per item, or its codes."),
    ] = "items",
    name: Annotated[
        Literal["speculative", "nezha"],
        typer.Option(help="The strategy that a drafter is trained for."),
    ] = "speculative",
    head: Annotated[
        Literal["recurrent", "levels"],
        typer.Option(
            help="Of a drafter: a network of its own, or the recommender's level heads, which are "
            "not trained but measured."
        ),
    ] = "recurrent",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the users; default: the recipe's.")
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="End within so long; with --resume, earlier runs do not count."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and sampling.")] = 0,
    device: DeviceFlag = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    text: Annotated[
        list[Path] | None, typer.Option(help="lm, medusa: a text to learn from, .zst or plain.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="lm, medusa: folder of the new model.")] = None,
    llm: Annotated[
        Path | None, typer.Option(help="lm, medusa: folder of the model to draft for.")
    ] = None,
) -> None:
    """Train a model of the bundle, or one of text; the best checkpoint on validation is kept."""
    from recserve.bundle.bundle import Bundle
    from recserve.cli.language import train_from_text
    from recserve.training.item_drafters.draft_head import train_drafter
    from recserve.training.options import TrainOptions, TrainReport
    from recserve.training.ranker.ranker import train_ranker
    from recserve.training.recommender.recommender import train_recommender
    from recserve.training.recommender.retriever import train_retriever
    from recserve.training.recommender.sasrec import train_sasrec

    options = TrainOptions(
        epochs=epochs,
        max_minutes=max_minutes,
        seed=seed,
        device=device,
        resume=resume,
        input=input,
        name=name,
        head=head,
    )
    trainers: dict[str, Callable[[Bundle, TrainOptions], TrainReport]] = {
        "recommender": train_recommender,
        "ranker": train_ranker,
        "drafter": train_drafter,
        "retriever": train_retriever,
        "sasrec": train_sasrec,
    }
    if model == "lm" or model == "medusa":
        report = train_from_text(model, text, out, llm, options)
    elif bundle is None:
        raise typer.BadParameter(f"train {model} needs --bundle")
    else:
        report = trainers[model](Bundle.open(bundle), options)
    kept = ", ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
    typer.echo(
        f"kept epoch {report.best_epoch} of {report.epochs} by {report.selection} "
        f"(ended by {report.stopped}, {report.seconds:.0f} s): {kept}"
    )


def evaluate(
    bundle: BundleFlag,
    split: Annotated[
        Literal["valid", "test"], typer.Option(help="The last event but one, or the last.")
    ] = "test",
    strategy: Annotated[
        str,
        typer.Option(help="A strategy, auto or all; dense_head, exhaustive, sasrec."),
    ] = "auto",
    k: Annotated[str, typer.Option("--k", "-k", help="Cut-offs, commas between.")] = "5,10",
    beam_width: Annotated[int, typer.Option(min=1, help="Kept prefixes.")] = 50,
    dense_weight: Annotated[
        float | None, typer.Option(help="Of the dense head; default: the bundle's.")
    ] = None,
    users: Annotated[int | None, typer.Option(min=1, help="Only so many users.")] = None,
    device: DeviceFlag = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --strategy all: quality over time, as a PNG.")
    ] = None,
) -> None:
    """NDCG and recall of leave-one-out over all items; --strategy all compares the strategies."""
    cutoffs = numbers(k, "--k")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)  # fails now or not after minutes
    from recserve.bundle.bundle import Bundle
    from recserve.training.evaluation.evaluation import Evaluation, evaluate_bundle
    from recserve.training.evaluation.fidelity import Fidelity, compare_strategies
    from recserve.training.options import TrainOptions

    opened, place = Bundle.open(bundle), TrainOptions(device=device).torch_device()
    if strategy == "all":
        fidelity = compare_strategies(
            opened, split, cutoffs, width=beam_width, users=users, device=place
        )
        if plot is not None:
            fidelity.save_plot(plot)
        evaluation: Evaluation | Fidelity = fidelity
    else:
        evaluation = evaluate_bundle(
            opened,
            split,
            strategy,
            cutoffs,
            width=beam_width,
            dense_weight=dense_weight,
            users=users,
            device=place,
        )
    typer.echo(str(evaluation))
    typer.echo(f"{evaluation.seconds:.1f} s")
    if json_file is not None:
        json_file.write_text(json.dumps(evaluation.to_dict(), indent=1) + "\n", encoding="utf-8")


def verify(path: Annotated[Path, typer.Argument(metavar="BUNDLE")]) -> None:
    """Compare every file of a bundle with its sha256."""
    from recserve.bundle.bundle import Bundle

    bundle = Bundle.open(path)
    bundle.verify()
    versions = f"model {bundle.manifest.model_version}, catalogue {bundle.manifest.catalog_version}"
    typer.echo(f"{path}: {len(bundle.manifest.files)} files match, {versions}")


def calibrate(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE")], device: DeviceFlag = "auto"
) -> None:
    """Measure anew what drafts of the trained draft head are worth; training does so by itself."""
    from recserve.bundle.bundle import Bundle
    from recserve.training.item_drafters.calibration import recalibrate
    from recserve.training.options import TrainOptions

    found = recalibrate(Bundle.open(path), TrainOptions(device=device).torch_device())
    for (width, k), plans in found.plans.items():
        for plan in plans:
            typer.echo(
                f"beam {width}, k {k}, margin {plan.margin:g}: {plan.nodes:.0f} nodes, "
                f"{plan.proved:.0%} in one round, {plan.repairs:.2f} further rounds"
            )


def export(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    out: Annotated[Path, typer.Option(help="New folder for the model and the items' tokens.")],
    format: Annotated[Literal["hf"], typer.Option(help="A Hugging Face Llama.")] = "hf",
) -> None:
    """Write the recommender (trained with --input codes) as a Hugging Face Llama."""
    from recserve.bundle.bundle import Bundle
    from recserve.bundle.exporting import export_llama

    for file in export_llama(Bundle.open(path), out):
        typer.echo(f"{file}: {file.stat().st_size:,} bytes")
