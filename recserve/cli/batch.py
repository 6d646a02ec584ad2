"""Command `batch`: answers for a whole file or folder, without a server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from recserve.cli.flags import (
    ColumnFlag,
    DeviceFlag,
    FieldsFlag,
    ScoringFlag,
    StoreFlag,
    column_names,
    ids,
)
from recserve.cli.shared_items import warn_of_shared_items

if TYPE_CHECKING:
    from recserve.batch.job import PartRunner
    from recserve.batch.recipe import Recipe

BAD_USAGE = 2


class Stopped(BaseException):
    """A signal asks the command to end.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def batch(
    input: Annotated[
        Path,
        typer.Option(help="File or folder: Parquet of users, or prompts as JSONL or Parquet."),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder of the answers; the same job resumes in it.")
    ],
    bundle: Annotated[Path | None, typer.Option(help="Folder of the bundle.")] = None,
    llm: Annotated[
        Path | None, typer.Option(help="Language model, for prompts: a Hugging Face folder.")
    ] = None,
    llm_name: Annotated[
        str | None, typer.Option(help="Name of the language model; default: the folder's name.")
    ] = None,
    llm_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the language model's weights; default: the folder's own."),
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="NAME, or NAME=DIR with weights; as for serve.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Chat template to use instead of the folder's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of texts that set none.")] = 0,
    k: Annotated[int, typer.Option("-k", "--k", help="Default for rows without k.")] = 50,
    strategy: Annotated[str, typer.Option(help="Default for rows without one.")] = "auto",
    beam_width: Annotated[int | None, typer.Option(min=1, help="Beam width.")] = None,
    scoring: ScoringFlag = None,
    fields: FieldsFlag = None,
    column: ColumnFlag = None,
    rows_per_part: Annotated[int, typer.Option(min=1, help="Rows per output file.")] = 20_000,
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Rows computed together; default: 64, text: 256."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Processes.")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads of each process.")] = 1,
    max_error_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Stop when more than this share is rejected.")
    ] = 0.1,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes here, or actors of Ray.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Cluster for --engine ray; default: one on this machine.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete an earlier job's parts and start anew.")
    ] = False,
    progress: Annotated[
        Literal["rich", "json"], typer.Option(help="A progress bar, or lines of JSON, on stderr.")
    ] = "rich",
    store: StoreFlag = None,
    device: DeviceFlag = "auto",
) -> None:
    """Recommend items for every user of a file or folder, or complete every prompt.

    The same command, run again, continues an interrupted job. The exit status is 1 if the job
    fails, 2 if an argument is invalid, 130 after Ctrl-C and 143 after SIGTERM.
    """
    from recserve.batch.generate import COLUMNS, Defaults
    from recserve.batch.job import Job, check, run
    from recserve.batch.manifest import OutputExists
    from recserve.batch.processes import LocalWorkers
    from recserve.batch.prompt_columns import PROMPT_COLUMNS, check_prompts
    from recserve.batch.recipe import SlateRecipe, TextRecipe, WrongOption
    from recserve.batch.source import check_lines, input_paths, is_lines
    from recserve.cli.terminal import format_count, job_progress
    from recserve.features.tables.column_names import check_columns

    if ray_address is not None and engine != "ray":
        raise _usage_error("--ray-address needs --engine ray")
    if engine == "ray":
        from recserve.batch.ray_workers import RayWorkers
    if (bundle is None) == (llm is None):
        raise _usage_error("give either --bundle or --llm")
    for flag, value in {
        "--store": bundle is None and store,
        "--beam-width": bundle is None and beam_width,
        "--scoring": bundle is None and scoring,
        "--fields": bundle is None and fields,
        "--llm-name": llm is None and llm_name,
        "--llm-dtype": llm is None and llm_dtype,
        "--drafter": llm is None and drafter,
        "--chat-template": llm is None and chat_template,
        "--seed": llm is None and seed,
    }.items():
        if value:
            raise _usage_error(f"{flag} has no effect with {'--llm' if llm else '--bundle'}")
    names = column_names(column)
    job = Job(input, output, rows_per_part, overwrite, max_error_rate, names)
    recipe: Recipe
    try:
        if names and is_lines(input_paths(input)[0]):
            raise ValueError("--column has no effect with JSON lines; it names columns of Parquet")
        check_columns(names, {"input": COLUMNS if llm is None else PROMPT_COLUMNS})
        if bundle is not None:
            warn_of_shared_items(store)
            recipe = SlateRecipe(
                bundle=str(bundle.resolve()),
                defaults=Defaults(
                    k,
                    strategy,
                    beam_width=beam_width,
                    fields=tuple(ids(fields) or ()),
                    scoring=scoring,
                ),
                store=_absolute(store),
                device=device,
                in_flight=in_flight or 64,
                threads=threads,
            )
            plan, noun = check(job), "user"
        else:
            assert llm is not None
            lines = is_lines(input_paths(input)[0])
            recipe = TextRecipe(
                llm=str(llm.resolve()),
                lines=lines,
                name=llm_name or llm.resolve().name,
                dtype=llm_dtype,
                drafters=tuple(drafter or ()),
                chat_template=None if chat_template is None else str(chat_template.resolve()),
                device=device,
                in_flight=in_flight or 256,
                threads=threads,
                seed=seed,
            )
            plan = check(job, check_lines if lines else check_prompts)
            noun = "line" if lines else "prompt"
    except ValueError as error:
        raise _usage_error(str(error)) from None
    if plan.unused_columns:
        typer.echo(f"{input}: columns not used: {', '.join(plan.unused_columns)}", err=True)
    runner: PartRunner = LocalWorkers(recipe, workers)
    if engine == "ray":
        runner = RayWorkers(recipe, workers, ray_address)
    try:
        with _until_signal(), job_progress(progress) as tell:
            report = run(plan, runner, tell)
    except (WrongOption, OutputExists) as error:
        raise _usage_error(str(error)) from None
    except Stopped as error:
        without = " without --overwrite" if overwrite else ""
        typer.echo(
            f"stopped by {signal.Signals(error.number).name}; finished parts are in {output}. "
            f"Run the same command again{without} to continue",
            err=True,
        )
        raise typer.Exit(128 + error.number) from None
    refused = f", {report.errors} refused (see _errors)" if report.errors else ""
    resumed = f" ({report.resumed} by earlier runs)" if report.resumed else ""
    typer.echo(
        f"{format_count(report.users, noun)}, {format_count(report.rows, 'row')} in "
        f"{format_count(len(report.parts), 'part')}{resumed}{refused}, {report.seconds:.1f} s"
    )


@contextmanager
def _until_signal() -> Iterator[None]:
    """Raises Stopped in the block when SIGINT or SIGTERM arrives."""

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _absolute(store: str | None) -> str | None:
    """Returns the URL of a store with an absolute path, for processes in other folders."""
    if store is None or not store.startswith("lmdb:"):
        return store
    return f"lmdb:{Path(store.removeprefix('lmdb:')).resolve()}"


def _usage_error(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(BAD_USAGE)
