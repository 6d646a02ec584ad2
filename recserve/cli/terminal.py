"""Formats slates, rankings, histories, findings and job progress for a terminal."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from recserve.batch.job import Progress
from recserve.schemas.events import HistoryResponse
from recserve.schemas.items import (
    ItemResponse,
    RankedItem,
    RankResponse,
    RecommendedItem,
    RecommendResponse,
    TimingMs,
)

if TYPE_CHECKING:  # it would import torch, in every parent of batch workers too
    from recserve.doctor.finding import Finding

Title = Callable[[str], str | None]

STATE_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "ask": "cyan"}


def format_count(number: int, noun: str) -> str:
    """Returns number and noun with the right plural, such as `1 part` or `2 parts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def titles(item: Callable[[str], ItemResponse]) -> Title:
    """Returns a function from item id to title, which gives None for a missing item.

    Args:
        item: Looks up an item; raises LookupError if the catalogue does not have it.
    """

    def title(item_id: str) -> str | None:
        try:
            return item(item_id).title
        except LookupError:
            return None

    return title


def slate_table(answer: RecommendResponse, title: Title) -> Table:
    """Returns a table with one row per recommended item; `title` maps item ids to titles."""
    exact = "exact " if answer.exact else ""
    table = Table(title=f"recommend: {exact}{answer.strategy}", title_justify="left", expand=True)
    table.add_column("rank", justify="right")
    table.add_column("item", no_wrap=True)
    table.add_column("title", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("score", justify="right")
    explained = any(item.parts is not UNSET for item in answer.items)
    if explained:
        table.add_column("likely", justify="right")
    table.add_column("source")
    _add_fields(table, answer)
    for item in answer.items:
        score = "" if item.score is None else f"{item.score:.3f}"
        likely = [] if not explained else [_likelihood(item)]
        named, shown = _item_cells(item.item_id, title), _field_texts(item)
        table.add_row(str(item.rank), *named, score, *likely, item.source, *shown)
    return table


def ranking_table(answer: RankResponse, title: Title, limit: int | None = None) -> Table:
    """Returns a table with one row per candidate and one column per task.

    Args:
        answer: The ranking.
        title: Maps item ids to titles.
        limit: Upper bound on the number of rows; None shows all.
    """
    table = Table(title=f"rank: {answer.scorer}", title_justify="left", expand=True)
    table.add_column("rank", justify="right")
    table.add_column("item", no_wrap=True)
    table.add_column("title", ratio=1, no_wrap=True, overflow="ellipsis")
    tasks = list(answer.items[0].scores) if answer.items else []
    for task in tasks:
        table.add_column(task, justify="right")
    _add_fields(table, answer)
    for item in answer.items[:limit]:
        scores = [f"{item.scores[task]:.3f}" for task in tasks]
        named, shown = _item_cells(item.item_id, title), _field_texts(item)
        table.add_row(str(item.rank), *named, *scores, *shown)
    return table


def _likelihood(item: RecommendedItem) -> str:
    """Returns how likely the model finds an item, in percent with two digits."""
    return "" if item.parts is UNSET else f"{100 * math.exp(item.parts.log_prob):.2g} %"


def _add_fields(table: Table, answer: RecommendResponse | RankResponse) -> None:
    """Adds a column for each requested field but the title, which every table has."""
    for item in answer.items[:1]:
        for name in _shown_fields(item):
            table.add_column(Text(name), overflow="ellipsis")


def _field_texts(item: RecommendedItem | RankedItem) -> list[Text]:
    """Returns the values of the requested fields; a list is divided by commas."""
    values = _shown_fields(item).values()
    texts = [", ".join(map(str, value)) if isinstance(value, list) else value for value in values]
    return [Text("" if text is None else str(text)) for text in texts]


def _shown_fields(item: RecommendedItem | RankedItem) -> dict[str, Any]:
    fields = {} if item.fields is UNSET else item.fields
    return {name: value for name, value in fields.items() if name != "title"}


def history_table(answer: HistoryResponse, title: Title) -> Table:
    """Returns a table with one row per event, oldest first."""
    table = Table(title=f"history of {answer.user_id}", title_justify="left")
    table.add_column("item", no_wrap=True)
    table.add_column("title")
    table.add_column("type")
    table.add_column("time (UTC)", no_wrap=True)
    for event in answer.events:
        second = (event.timestamp or "")[: len("2026-01-31T23:59:59")].replace("T", " ")
        table.add_row(*_item_cells(event.item_id, title), Text(event.type), second)
    return table


def _item_cells(item_id: str, title: Title) -> tuple[Text, Text]:
    """Returns id and title without markup, so that square brackets print unchanged."""
    return Text(item_id), Text(title(item_id) or "")


def findings_table(findings: Iterable[Finding]) -> Table:
    """Returns a table with one row per finding, coloured by its state."""
    table = Table(show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        style = STATE_STYLES[finding.state]
        table.add_row(finding.name, Text(finding.state, style), Text(finding.detail))
    return table


def timing_line(timing: TimingMs, degraded: Iterable[str] = ()) -> str:
    """Returns one line with the time of each stage and the reasons for a degraded answer."""
    stages = ("queue", "features", "prefill", "draft", "verify")
    spent = ", ".join(f"{name} {getattr(timing, name):.1f}" for name in stages)
    less = ", ".join(degraded)
    return f"{timing.total:.1f} ms ({spent})" + (f"; degraded: {less}" if less else "")


@contextmanager
def job_progress(form: str) -> Iterator[Callable[[Progress], None]]:
    """Yields a function that prints the progress of a job to stderr.

    Args:
        form: "rich" draws a bar; "json" prints one line per group of rows.
    """
    if form == "json":
        yield _print_json
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Bar(
        *columns, TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task("rows", total=None, rate="")

        def tell(progress: Progress) -> None:
            rate = f"{progress.rows_per_s:.0f} rows/s"
            rate += f", {progress.errors} refused" if progress.errors else ""
            bar.update(task, completed=progress.done, total=progress.total, rate=rate)

        yield tell


def _print_json(progress: Progress) -> None:
    print(json.dumps(asdict(progress)), file=sys.stderr, flush=True)
