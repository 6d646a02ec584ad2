"""`recserve build`, `train`, `evaluate`, `bundle verify`: what makes and checks a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from recserve.cli.flags import BundleFlag, DeviceFlag, numbers

Model = Literal["recommender", "ranker", "drafter", "sasrec"]


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
    from recserve.building import BuildOptions, build_bundle

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
    bundle: BundleFlag,
    input: Annotated[
        Literal["items", "codes"],
        typer.Option(help="A recommender reads one position per item, or its codes."),
    ] = "items",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the users; default: the recipe's.")
    ] = None,
    max_minutes: Annotated[float | None, typer.Option(help="End within so long.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and sampling.")] = 0,
    device: DeviceFlag = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
) -> None:
    """Train a model of the bundle; the best checkpoint on validation is kept."""
    from recserve.bundle import Bundle
    from recserve.training.drafters import train_drafter
    from recserve.training.options import TrainOptions, TrainReport
    from recserve.training.ranker import train_ranker
    from recserve.training.recommender import train_recommender
    from recserve.training.sasrec import train_sasrec

    options = TrainOptions(
        epochs=epochs,
        max_minutes=max_minutes,
        seed=seed,
        device=device,
        resume=resume,
        input=input,
    )
    trainers: dict[str, Callable[[Bundle, TrainOptions], TrainReport]] = {
        "recommender": train_recommender,
        "ranker": train_ranker,
        "drafter": train_drafter,
        "sasrec": train_sasrec,
    }
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
        typer.Option(help="auto, beam, parallel, exhaustive, dense; sasrec for the baseline."),
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
) -> None:
    """NDCG and recall of leave-one-out over all items, seen items kept and filtered."""
    cutoffs = numbers(k, "--k")
    from recserve.bundle import Bundle
    from recserve.training.evaluate import evaluate_bundle
    from recserve.training.options import TrainOptions

    evaluation = evaluate_bundle(
        Bundle.open(bundle),
        split,
        strategy,
        cutoffs,
        width=beam_width,
        dense_weight=dense_weight,
        users=users,
        device=TrainOptions(device=device).torch_device(),
    )
    typer.echo(str(evaluation))
    typer.echo(f"{evaluation.seconds:.1f} s")
    if json_file is not None:
        json_file.write_text(json.dumps(evaluation.to_dict(), indent=1) + "\n", encoding="utf-8")


def verify(path: Annotated[Path, typer.Argument(metavar="BUNDLE")]) -> None:
    """Compare every file of a bundle with its sha256."""
    from recserve.bundle import Bundle

    bundle = Bundle.open(path)
    bundle.verify()
    versions = f"model {bundle.manifest.model_version}, catalogue {bundle.manifest.catalog_version}"
    typer.echo(f"{path}: {len(bundle.manifest.files)} files match, {versions}")
