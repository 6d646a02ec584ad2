"""Benchmark data sets, read from local files in the form in which they are published.

| data set | file | prompt field |
|---|---|---|
| Spec-Bench | `question.jsonl` | `turns` |
| SPEED-Bench, as on the hub | Parquet | `turns` |
| SPEED-Bench, prepared for AIPerf | JSONL | `messages` |
| `spec_al_gsm8k` | JSONL or Parquet | `question` |
| `spec_al_math500` | JSONL or Parquet | `problem` |
| `spec_al_humaneval` | JSONL or Parquet | `prompt` |
| `spec_al_mbpp` | JSONL or Parquet | `text` |
| `spec_al_mtbench` | JSONL or Parquet | `prompt`, a list |
| ShareGPT | JSON | `conversations` |
| users | Parquet with `user_id`, or the folder of a bundle | |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq

USERS_FILE = "events.parquet"
ITEM_COLUMNS = ("item_id",)
PROMPT_FIELDS = ("turns", "messages", "conversations", "question", "problem", "prompt", "text")
ID_FIELDS = ("question_id", "prompt_id", "unique_id", "task_id", "id", "src_id")
CATEGORY_FIELDS = ("category", "subject", "type")
HUMAN = ("user", "human")
# Text of SPEED-Bench rows whose source was not fetched.
UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Sample:
    """One thing to ask a server about.

    Attributes:
        unit: Unit of assignment: the user, or the prompt's id.
        category: Class of the data set; empty if it has none.
        turns: The user's messages in order; empty for users.
        history: Item ids, oldest first; empty if the server's store is to be read.
        next_item: The item that the user chose next; None if unknown.
        candidates: Items to rank; empty unless ranking.
    """

    unit: str
    category: str = ""
    turns: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    next_item: str | None = None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class UserOptions:
    """What is read of the users of an events table.

    Attributes:
        max_history: Events per user at most, the newest; 0 sends only the user's id.
        hold_out: Whether the last event is left out of the history and becomes `next_item`.
        num_candidates: Items to rank per user, drawn from the table; 0 for none.
        seed: Seed of the candidates.
    """

    max_history: int = 50
    hold_out: bool = True
    num_candidates: int = 0
    seed: int = 0


def read_samples(path: Path, options: UserOptions | None = None) -> list[Sample]:
    """Returns the samples of a file, or of the folder of a bundle.

    Args:
        path: A file in one of the module's forms, or a folder that holds `events.parquet`.
        options: How users are read; None for the defaults.

    Raises:
        ValueError: If the form is unknown, a prompt is missing, or there are no rows.
        OSError: If the file cannot be read.
    """
    if path.is_dir():
        path = path / USERS_FILE
    if path.suffix == ".parquet":
        names = pq.read_schema(path).names
        if "user_id" in names and not set(names) & set(PROMPT_FIELDS):
            samples = read_users(path, options or UserOptions())
        else:
            samples = [_prompt(row, path, n) for n, row in enumerate(_parquet_rows(path))]
    else:
        samples = [_prompt(row, path, n) for n, row in enumerate(_json_rows(path))]
    if not samples:
        raise ValueError(f"{path}: no rows")
    return samples


def read_users(path: Path, options: UserOptions) -> list[Sample]:
    """Returns one sample per user of an events table, in the order of their ids.

    Users with no event left after the hold-out are skipped.
    """
    schema = pq.read_schema(path)
    if "item_id" not in schema.names:
        ids = set(pq.read_table(path, columns=["user_id"])["user_id"].to_pylist())
        return [Sample(unit=str(user)) for user in sorted(ids)]
    order = next((name for name in ("timestamp", "position") if name in schema.names), None)
    columns = ["user_id", "item_id", *([order] if order else [])]
    table = pq.read_table(path, columns=columns)
    if order:
        table = table.sort_by([("user_id", "ascending"), (order, "ascending")])
    unsorted = np.array([str(user) for user in table["user_id"].to_pylist()])
    by_user = np.argsort(unsorted, kind="stable")
    users = unsorted[by_user]
    items = np.array([str(item) for item in table["item_id"].to_pylist()])[by_user]
    changes = np.flatnonzero(users[1:] != users[:-1]) + 1
    bounds = [0, *changes.tolist(), len(users)]
    catalogue = np.unique(items)
    drawn = np.random.default_rng(options.seed)
    samples = []
    for start, end in itertools.pairwise(bounds):
        events = [str(item) for item in items[start:end]]
        held = events.pop() if options.hold_out else None
        if not events:
            continue
        candidates: tuple[str, ...] = ()
        if options.num_candidates:
            size = min(options.num_candidates, len(catalogue))
            candidates = tuple(str(i) for i in drawn.choice(catalogue, size, replace=False))
        samples.append(
            Sample(
                unit=str(users[start]),
                history=tuple(events[-options.max_history :]) if options.max_history else (),
                next_item=held,
                candidates=candidates,
            )
        )
    return samples


def read_item_ids(path: Path) -> frozenset[str]:
    """Returns the item ids of a Parquet table, for the illegal share of slates."""
    return frozenset(
        str(i) for i in pq.read_table(path, columns=list(ITEM_COLUMNS))["item_id"].to_pylist()
    )


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    for batch in pq.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _json_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    raw = path.read_bytes()
    place = ""
    try:
        if raw.lstrip()[:1] == b"[":
            return msgspec.json.decode(raw, type=list[dict[str, Any]])
        rows = []
        for number, line in enumerate(raw.split(b"\n"), 1):
            if line.strip():
                place = f", line {number}"
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        return rows
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path}{place}: neither JSON lines nor a list of objects ({error})"
        ) from None


def _prompt(row: Mapping[str, Any], path: Path, number: int) -> Sample:
    field = next((name for name in PROMPT_FIELDS if row.get(name)), None)
    if field is None:
        wanted = ", ".join(PROMPT_FIELDS)
        raise ValueError(f"{path}, row {number}: none of {wanted} is set")
    turns = _turns(row[field])
    if not turns or any(UNRESOLVED in turn for turn in turns):
        raise ValueError(f"{path}, row {number}: {field} holds no prompt")
    return Sample(
        unit=str(_first(row, ID_FIELDS, number)),
        category=str(_first(row, CATEGORY_FIELDS, "")),
        turns=turns,
    )


def _first(row: Mapping[str, Any], names: tuple[str, ...], default: object) -> object:
    return next((row[name] for name in names if row.get(name) is not None), default)


def _turns(value: object) -> tuple[str, ...]:
    """The user's messages of a text, a list of texts, or a list of messages of either kind."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        return ()
    turns = []
    for part in value:
        if isinstance(part, str):
            turns.append(part)
        elif isinstance(part, dict):
            author = part.get("role", part.get("from", "user"))
            text = part.get("content", part.get("value"))
            if author in HUMAN and isinstance(text, str):
                turns.append(text)
    return tuple(turns)
