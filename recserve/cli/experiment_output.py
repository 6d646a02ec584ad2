"""Progress and tables of `recserve bench` and `recserve ab`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from recserve.load.generator import LoadProgress
    from recserve.load.measurements import TextSummary
    from recserve.load.report import ReportDocument

Result = TypeVar("Result")


def run(
    start: Callable[[Callable[[str, LoadProgress | None], None]], Coroutine[Any, Any, Result]],
) -> Result:
    """Runs a session with its progress on standard error, on uvloop where there is one."""
    with progress() as tell:
        try:
            import uvloop
        except ImportError:
            return asyncio.run(start(tell))
        return uvloop.run(start(tell))


@contextmanager
def progress() -> Iterator[Callable[[str, LoadProgress | None], None]]:
    """Shows the stage of a session and a bar of its requests on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Bar(
        *columns, TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("starting", total=None, rate="")

        def tell(stage: str, state: LoadProgress | None) -> None:
            if state is None:
                bar.update(task, description=stage)
                return
            rate = f"{state.done / max(state.seconds, 1e-9):.0f}/s"
            rate += f", {state.errors} failed" if state.errors else ""
            bar.update(task, description=stage, completed=state.done, total=state.total, rate=rate)

        yield tell


def write(result: ReportDocument, report: Path | None, as_json: bool) -> None:
    """Prints the result, and writes the page where one is wanted."""
    from recserve.load.report import page, to_json

    if as_json:
        typer.echo(to_json(result).decode())
    else:
        print_tables(result)
    if report:
        report.write_text(page(result), encoding="utf-8")
        typer.echo(f"report: {report}", err=True)


def print_tables(result: ReportDocument) -> None:
    """Prints verdicts, latencies and effects for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for comparison in result.comparisons:
        console.print(Text(comparison.verdict, style="bold"))
    table = Table(title=f"latency in ms, {result.title}", title_justify="left")
    names = ("p50", "p90", "p95", "p99", "p99.9")
    for heading in ("arm", "requests", "per s", "failed", "mean", *names, "max"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for one in result.summaries:
        latency = one.latency_ms
        cells = ["-"] * 7
        if latency:
            values = [latency.mean, *(latency.percentiles[n] for n in names), latency.maximum]
            cells = [f"{value:.1f}" for value in values]
        counts = (str(one.num_requests), f"{one.requests_per_s:.1f}", str(sum(one.errors.values())))
        table.add_row(Text(one.name), *counts, *cells)
    console.print(table)
    for one, exact in zip(result.summaries, result.exactness, strict=False):
        if one.items and one.items.slate_size:
            illegal = one.items.illegal_share
            line = f"{one.name}: {one.items.slate_size.mean:.1f} items a slate"
            line += f", illegal share {illegal:.2%}" if illegal is not None else ""
            if exact:
                line += f", overlap with the exact slate {exact.mean_overlap:.3f}"
                line += f" (identical {exact.identical_share:.0%} of {exact.count})"
            console.print(Text(line))
    for one in result.summaries:
        if one.text:
            console.print(Text(f"{one.name}: {text_line(one.text)}"))
    for warning in result.warnings:
        Console(stderr=True).print(Text(f"warning: {warning}", style="yellow"))


def text_line(text: TextSummary) -> str:
    """Returns tokens per second, time to first token and per token, and what drafting did."""
    parts = [f"{text.tokens_per_s:.1f} tokens/s"]
    for name, spread in (("first token", text.ttft_ms), ("per token", text.tpot_ms)):
        if spread:
            p50, p99 = spread.percentiles["p50"], spread.percentiles["p99"]
            parts.append(f"{name} p50 {p50:.1f} p99 {p99:.1f} ms")
    drafting = text.drafting.get("all")
    if drafting:
        parts.append(f"{drafting.tokens_per_step:.2f} tokens per step")
    return ", ".join(parts)
