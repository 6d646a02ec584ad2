"""Commands `build`, `evaluate` and `bundle verify|calibrate|export|import`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recserve.cli.flags import (
    BundleFlag,
    ColumnFlag,
    Device,
    DeviceFlag,
    ImportFlags,
    ItemsFlag,
    ScoringFlag,
    column_names,
    json_value,
    numbers,
    pairs,
    with_flags,
)


def build(
    items: ItemsFlag,
    events: Annotated[
        list[Path],
        typer.Option(
            help="As --items: user_id, item_id, timestamp/position, type, value; or the folder of "
            "an event log. Repeat the flag to join several."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new bundle.")],
    embeddings: Annotated[
        Path | None,
        typer.Option(help="Item vectors: .npy, Parquet or its parts; default: from text."),
    ] = None,
    quantizer: Annotated[
        Literal["residual", "product"], typer.Option(help="How vectors become semantic ids.")
    ] = "residual",
    levels: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Codes per semantic id; default: 4, or as --codes names."),
    ] = None,
    codes: Annotated[
        str | None,
        typer.Option(
            help="Codes per level, one number for all or one per level, as in 1024,256,256; "
            "default: 256, and up to 4096 on the first level of a large catalogue."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of vectors and quantiser.")] = 0,
    device: Annotated[
        Device, typer.Option(help="Where vectors are clustered; codes may differ between devices.")
    ] = "cpu",
    ids_from: Annotated[
        Path | None,
        typer.Option(help="Older bundle: its items keep their ids, new ones get ids of its kind."),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="With --ids-from: add the items of this journal folder.")
    ] = None,
    on_bad_rows: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with unusable rows.")
    ] = "error",
    split: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=SEPARATOR: divide a text column of the items, as in --split categories='|'."
        ),
    ] = None,
    column: ColumnFlag = None,
    positive: Annotated[
        list[str] | None,
        typer.Option(help="Event type that says that a user wants the item, as most do."),
    ] = None,
    read: Annotated[
        list[str] | None,
        typer.Option(help="Event type that says only that a user has seen the item."),
    ] = None,
    negative: Annotated[
        list[str] | None,
        typer.Option(
            help="Event type that says that a user does not want the item; 'rating<2.5': events "
            "of a type with a lower value. Default: hide, dislike, skip and the like."
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            help="How much events count in training and in `popular`, as in purchase=3, or "
            "'rating<3.5=0.5' for lower values; a negative type: in lowering similar items. "
            "Default: 1, and 0 for negative types."
        ),
    ] = None,
    holdout_users: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most users whose last two events are kept for validation; default: all."
        ),
    ] = None,
) -> None:
    """Build a bundle from items and events: vectors, semantic ids, catalogue."""
    from recserve.bundle.building import BuildOptions, build_bundle
    from recserve.features.history.event_kinds import EventKinds
    from recserve.features.history.event_weights import EventWeights

    options = BuildOptions(
        items=items,
        events=events[0] if len(events) == 1 else tuple(events),
        out=out,
        embeddings=embeddings,
        quantizer=quantizer,
        levels=levels,
        codes=None if codes is None else _codes(codes),
        seed=seed,
        device=device,
        ids_from=ids_from,
        journal=journal,
        on_bad_rows=on_bad_rows,
        split=pairs(split, "--split", "NAME=SEPARATOR"),
        columns=column_names(column),
        event_kinds=EventKinds(tuple(positive or ()), tuple(read or ()), tuple(negative or ())),
        event_weights=EventWeights(tuple(weight or ())),
        holdout_users=holdout_users,
    )
    build_bundle(options, typer.echo)


def _codes(text: str) -> int | tuple[int, ...]:
    """Returns the value of --codes: one number for all levels, or one per level."""
    sizes = numbers(text, "--codes")
    return sizes if len(sizes) > 1 else sizes[0]


def evaluate(
    bundle: BundleFlag,
    split: Annotated[
        Literal["valid", "test"], typer.Option(help="Predict the last event but one, or the last.")
    ] = "test",
    strategy: Annotated[
        str,
        typer.Option(
            help="A strategy, auto or all; dense_head, exhaustive; sasrec, popularity, "
            "popularity_week, item_knn, transitions_2, transitions_3; similar, similar_vectors, "
            "similar_links."
        ),
    ] = "auto",
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Show baselines too. A SASRec that is missing is trained for it.",
        ),
    ] = False,
    card: Annotated[
        bool,
        typer.Option(
            "--card", help="Print an audit card in Markdown: baselines, groups, collisions."
        ),
    ] = False,
    time_split: Annotated[
        bool,
        typer.Option(
            "--time-split",
            help="Train the recommender again on the first 90 % of the events, predict later ones.",
        ),
    ] = False,
    max_minutes: Annotated[
        float | None, typer.Option(help="Time limit of the training of --time-split.")
    ] = None,
    k: Annotated[str, typer.Option("--k", "-k", help="Cut-offs, separated by commas.")] = "5,10",
    beam_width: Annotated[int, typer.Option(min=1, help="Beam width.")] = 50,
    dense_weight: Annotated[
        float | None, typer.Option(help="Weight of the dense head; default: the bundle's.")
    ] = None,
    scoring: ScoringFlag = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate so many users, drawn at random with seed 0."),
    ] = None,
    session_minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Only held-out events so many minutes after the one before."),
    ] = None,
    device: DeviceFlag = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the metrics to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="With --card: write the card to this file too.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="PNG: the card, or with --strategy all quality over time."),
    ] = None,
) -> None:
    """Measure leave-one-out NDCG and recall over all items, with 95 % intervals.

    With --strategy all, compare the strategies. With --card, compare with baselines in detail.
    """
    cutoffs = numbers(k, "--k")
    if strategy == "all" and session_minutes is not None:
        raise typer.BadParameter("--session-minutes has no effect with --strategy all")
    if scoring is not None and (strategy == "all" or card or time_split):
        raise typer.BadParameter(
            "--scoring has no effect with --strategy all, --card or --time-split"
        )
    if strategy == "all" and (baselines or card or time_split):
        flag = "--baselines" if baselines else "--card" if card else "--time-split"
        raise typer.BadParameter(f"{flag} needs one strategy; --strategy all compares several")
    if plot is not None and not (card or strategy == "all"):
        raise typer.BadParameter("--plot has no effect without --card or --strategy all")
    if markdown is not None and not card:
        raise typer.BadParameter("--markdown has no effect without --card")
    if max_minutes is not None and not time_split:
        raise typer.BadParameter("--max-minutes has no effect without --time-split")
    for path in (json_file, markdown, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)  # fails now instead of after minutes
    from recserve.bundle.bundle import Bundle
    from recserve.evaluation.cases import SAMPLE_SEED
    from recserve.evaluation.evaluation import (
        Evaluation,
        EvaluationOptions,
        evaluate_bundle,
    )
    from recserve.evaluation.fidelity import compare_strategies
    from recserve.training.baselines import BaselineComparison, compare_with_baselines
    from recserve.training.card import make_card
    from recserve.training.options import TrainOptions
    from recserve.training.time_split import TimeSplit, past_bundle

    opened, place = Bundle.open(bundle), TrainOptions(device=device).torch_device()
    drawn = ""
    if users is not None:
        drawn = f"\nat most {users:,} users, drawn at random with seed {SAMPLE_SEED}"
    if strategy == "all":
        fidelity = compare_strategies(
            opened, split, cutoffs, width=beam_width, users=users, device=place
        )
        if plot is not None:
            fidelity.save_plot(plot)
        _print(f"{fidelity}{drawn}", fidelity.to_dict(), json_file)
        return
    options = EvaluationOptions(
        split=split,
        strategy=strategy,
        k=cutoffs,
        width=beam_width,
        dense_weight=dense_weight,
        scoring=None if scoring is None else json_value(scoring, "--scoring"),
        users=users,
        device=place,
        session_s=None if session_minutes is None else 60 * session_minutes,
    )
    past: TimeSplit | None = None
    with ExitStack() as stack:
        if time_split:
            opened, options, past = stack.enter_context(past_bundle(opened, options, max_minutes))
        if card:
            made = make_card(opened, compare_with_baselines(opened, options), past)
            if plot is not None:
                made.save_plot(plot)
            text, figures = f"{made.to_markdown()}{drawn}", made.to_dict()
            if markdown is not None:
                markdown.write_text(text + "\n", encoding="utf-8")
        else:
            found: Evaluation | BaselineComparison = (
                compare_with_baselines(opened, options)
                if baselines
                else evaluate_bundle(opened, options)
            )
            text, figures = f"{found}{drawn}", found.to_dict()
            if past is not None:
                text, figures = f"{past}\n{text}", figures | {"time_split": asdict(past)}
        _print(text, figures, json_file)


def _print(text: str, figures: dict[str, Any], json_file: Path | None) -> None:
    """Prints an evaluation, and writes its JSON if a file is given."""
    typer.echo(text)
    typer.echo(f"{figures['seconds']:.1f} s")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def verify(path: Annotated[Path, typer.Argument(metavar="BUNDLE")]) -> None:
    """Compare every file of a bundle with its recorded sha256, and read its catalogue."""
    from recserve.bundle.bundle import Bundle

    bundle = Bundle.open(path)
    bundle.verify()
    bundle.check_parts()
    versions = f"model {bundle.manifest.model_version}, catalogue {bundle.manifest.catalog_version}"
    typer.echo(f"{path}: {len(bundle.manifest.files)} files match, {versions}")


def calibrate(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    auto_for: Annotated[
        Literal["quality", "latency"] | None,
        typer.Option(
            "--auto-for",
            help="Choose strategy and dense weight of `auto` by validation, for this goal.",
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, help="With --auto-for: validation users, drawn at random; 2,000."),
    ] = None,
    device: DeviceFlag = "auto",
) -> None:
    """Measure the benefit of the draft head again, or choose what `auto` serves.

    Training measures the draft head automatically.
    """
    if users is not None and auto_for is None:
        raise typer.BadParameter("--users has no effect without --auto-for")
    from recserve.bundle.bundle import Bundle
    from recserve.training.auto_choice import USERS, choose_auto
    from recserve.training.item_drafters.calibration import recalibrate
    from recserve.training.options import TrainOptions

    opened, place = Bundle.open(path), TrainOptions(device=device).torch_device()
    if auto_for is not None:
        for column, choice in choose_auto(opened, auto_for, place, users or USERS).items():
            typer.echo(f"auto, seen items {column}: {choice}")
        return
    found = recalibrate(opened, place)
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


@with_flags
def import_checkpoint(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    items: ItemsFlag,
    out: Annotated[Path, typer.Option(help="Folder of the new bundle.")],
    flags: ImportFlags,
    events: Annotated[
        Path | None, typer.Option(help="Events as of `recserve build`, for histories.")
    ] = None,
    shared_ids: Annotated[
        Literal["popular", "first", "all"],
        typer.Option(help="Which of several items with one id are recommended."),
    ] = "popular",
    only_rule: Annotated[
        bool,
        typer.Option(
            "--only-rule",
            help="Leave out the tokens that other rules need; no request can name `vocabulary`.",
        ),
    ] = False,
) -> None:
    """Import a recommender that was trained elsewhere, from a Hugging Face folder."""
    from recserve.formats.conversion import import_checkpoint as convert

    options = flags.options(
        folder, items, out, events=events, shared_ids=shared_ids, only_rule=only_rule
    )
    convert(options, typer.echo)
