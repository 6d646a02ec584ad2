"""The command line: registers the commands and formats their errors.

Each command imports heavy modules in its own body, so that `recserve --help` starts fast.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from recserve import cores
from recserve.cli import (
    answers,
    bundle_swap,
    bundles,
    experiment_admin,
    experiments,
    fleet,
    retrain,
    serve,
    train,
)
from recserve.cli.batch import batch
from recserve.extras import describe_missing

FAILED = 1

app = typer.Typer(
    help="Generative recommendation server: build, train, serve, recommend and rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    serve.demo,
    bundles.build,
    bundles.evaluate,
    retrain.retrain,
    serve.serve,
    serve.scale,
    answers.recommend,
    answers.rank,
    batch,
    serve.doctor,
    experiments.bench,
    experiments.ab,
):
    app.command()(command)

app.add_typer(train.app, name="train")

bundle_app = typer.Typer(
    help="Verify, calibrate, import or export a bundle, or load it into a running server.",
    no_args_is_help=True,
)
bundle_app.command()(bundles.verify)
bundle_app.command()(bundles.calibrate)
bundle_app.command()(bundles.export)
bundle_app.command("import")(bundles.import_checkpoint)
bundle_app.command()(bundle_swap.load)
bundle_app.command()(bundle_swap.rollback)
bundle_app.command()(bundle_swap.status)
app.add_typer(bundle_app, name="bundle")

experiments_app = typer.Typer(help="Plan, list, stop or start experiments.", no_args_is_help=True)
experiments_app.command()(experiment_admin.plan)
experiments_app.command("list")(experiment_admin.list_experiments)
experiments_app.command()(experiment_admin.stop)
experiments_app.command()(experiment_admin.start)
app.add_typer(experiments_app, name="experiments")

history_app = typer.Typer(
    help="Show, delete, export, back up or restore stored histories.", no_args_is_help=True
)
history_app.command()(answers.show)
history_app.command()(answers.delete)
history_app.command()(answers.backup)
history_app.command()(answers.restore)
history_app.command()(answers.export)
app.add_typer(history_app, name="history")

fleet_app = typer.Typer(
    help="Show the servers that share a live catalogue in Redis.", no_args_is_help=True
)
fleet_app.command()(fleet.status)
app.add_typer(fleet_app, name="fleet")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"recserve {version('recserve')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "-v", "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error.")
    ] = False,
) -> None:
    """Options of every command."""
    cores.set_threads()
    if debug:
        logging.getLogger("recserve").setLevel(logging.DEBUG)


def main() -> None:
    """Runs a command. An error prints one line to stderr, or a traceback with `--debug`.

    Raises:
        SystemExit: With status 1 after an error.
    """
    try:
        app()
    except BrokenPipeError:
        # The reader of stdout has closed the pipe. The flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(FAILED) from None
    except ModuleNotFoundError as error:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        message = describe_missing(error, "this command", command)
        if message is None or "--debug" in sys.argv:
            raise
        typer.echo(f"error: {message}", err=True)
        raise SystemExit(FAILED) from None
    except (ValueError, LookupError, OSError, RuntimeError) as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(FAILED) from None
