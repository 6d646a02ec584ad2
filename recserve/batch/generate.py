"""Turns a table of users into a table of slates and a table of rejected rows.

The generator reads and writes no files, so any runner that maps tables can call it, local or
distributed. Every input row has a `user_id`. The columns `history`, `k`, `strategy`,
`exclude_seen`, `filter`, `diversity`, `exclude_shown`, `discount_shown` and `scoring` are optional,
and so is each of their values.

A job with `fields` writes one more column, `fields`: a struct of columns of the catalogue. A job
with a `scoring`, or of an imported recommender, writes the column `scoring`: how each slate was
scored, as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec import UNSET

from recserve.batch.part import Generated
from recserve.batch.rows import (
    Accepts,
    id_text,
    is_any_text,
    is_id,
    is_list_of,
    is_number,
    optional,
    read_rows,
)
from recserve.features.history.history import StoreUnavailable
from recserve.features.tables.attribute_values import plain_type, record_column
from recserve.features.tables.parquet import column
from recserve.features.tables.plain_columns import plain_schema
from recserve.schemas.items import (
    MAX_FIELDS,
    MAX_K,
    RecommendRequest,
    RecommendResponse,
    ScoringChoice,
)
from recserve.schemas.numbers import ENCODER
from recserve.schemas.validation import json_text, to_message

ANSWERS = pa.schema(
    [
        pa.field("user_id", pa.string(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("item_id", pa.string(), nullable=False),
        pa.field("score", pa.float32()),
        pa.field("strategy", pa.string(), nullable=False),
        pa.field("model_version", pa.string(), nullable=False),
        pa.field("catalog_version", pa.string(), nullable=False),
    ]
)
ERRORS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("user_id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
    ]
)


def answer_schema(columns: pa.Schema, scoring: bool = False) -> pa.Schema:
    """Returns the schema of slates with these columns of the catalogue; ANSWERS without any.

    Args:
        columns: Columns of the catalogue.
        scoring: Whether the slates say how they were scored.
    """
    schema = ANSWERS.append(pa.field("scoring", pa.string())) if scoring else ANSWERS
    if not columns.names:
        return schema
    parts = [pa.field(column.name, plain_type(column.type)) for column in columns]
    return schema.append(pa.field("fields", pa.struct(parts)))


COLUMNS: dict[str, tuple[Accepts, str]] = {
    "user_id": (is_id, "string or integer"),
    "history": (optional(is_list_of(is_id)), "list<string> or list<integer>"),
    "k": (optional(is_number), "an integer"),
    "strategy": (optional(is_any_text), "string"),
    "exclude_seen": (optional(pa.types.is_boolean), "bool"),
    "filter": (optional(is_any_text), "string"),
    "diversity": (optional(is_any_text), "string"),
    "exclude_shown": (optional(is_any_text), "string"),
    "discount_shown": (optional(is_any_text), "string"),
    "scoring": (optional(is_any_text), "string"),
}

Recommend = Callable[[Sequence[RecommendRequest]], Sequence[RecommendResponse | Exception]]


@dataclass(frozen=True)
class Defaults:
    """Request settings for rows that do not set them.

    Attributes:
        k: Number of items in a slate, from 1 to MAX_K.
        strategy: Decoding strategy.
        exclude_seen: True leaves out items that are in the user's history.
        beam_width: Beam width of every request. None uses the service's default.
        fields: Columns of the catalogue that the output has for each item.
        scoring: Scoring of rows that name none, as JSON. None: that of the model.

    Raises:
        ValueError: If `k` or the number of fields is out of range, or `scoring` is none.
    """

    k: int = 50
    strategy: str = "auto"
    exclude_seen: bool = True
    beam_width: int | None = None
    fields: tuple[str, ...] = ()
    scoring: str | None = None

    def __post_init__(self) -> None:
        if len(self.fields) > MAX_FIELDS:
            raise ValueError(f"fields has {len(self.fields)} columns; expected 0..{MAX_FIELDS}")
        if not 1 <= self.k <= MAX_K:
            raise ValueError(f"k is {self.k}; expected 1..{MAX_K}")
        if self.scoring is not None:
            to_message(json_text("scoring", self.scoring), ScoringChoice)


def check_schema(schema: Any, path: Path) -> tuple[str, ...]:
    """Checks the columns of an input file.

    Args:
        schema: Arrow schema of the input.
        path: Path of the input, for error messages.

    Returns:
        Names of the input columns that are ignored.

    Raises:
        SchemaError: If `user_id` is missing or a known column has the wrong type. The message names
            file and column.
    """
    empty = plain_schema(schema).empty_table()
    for name, (accepts, expected) in COLUMNS.items():
        if name == "user_id" or name in schema.names:
            column(empty, path, name, accepts, expected)
    return tuple(name for name in schema.names if name not in COLUMNS)


@dataclass(frozen=True)
class Generator:
    """Computes slates for a table of users.

    Attributes:
        recommend: Maps requests to responses in the same order. A ValueError in place of a response
            rejects that row. Any other exception ends the job.
        defaults: Settings for rows that do not set them.
        in_flight: Number of requests passed to `recommend` at once, at least 1.
        reset: Called at the start of each part; forgets what `recommend` has cached.
        versions: What `recommend` is: versions of models and catalogue, for the job's record.
        schema: Schema of the slates, see `answer_schema`.

    Raises:
        ValueError: If `in_flight` is below 1.
    """

    recommend: Recommend
    defaults: Defaults
    in_flight: int = 64
    reset: Callable[[], None] = lambda: None
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: pa.Schema = ANSWERS
    columns = tuple(COLUMNS)
    suffix = ".parquet"

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise ValueError(f"in_flight is {self.in_flight}; expected at least 1")

    @property
    def group_rows(self) -> int:
        """Number of rows that are computed together."""
        return self.in_flight

    @property
    def facts(self) -> dict[str, object]:
        """What determines the slates besides the input."""
        defaults = asdict(self.defaults)
        if self.defaults.scoring is None:
            del defaults["scoring"]
        return {**defaults, "in_flight": self.in_flight, **self.versions}

    def begin_part(self) -> None:
        """Forgets what earlier rows left behind."""
        self.reset()

    def __call__(
        self, users: pa.Table, first_row: int = 0, done: Callable[[int], None] | None = None
    ) -> Generated:
        """Returns slates and rejected rows of a table.

        Args:
            users: Table whose schema passed `check_schema`.
            first_row: Input row number of the table's first row, used in ERRORS.
            done: Called with the number of rows after each group of requests.

        Raises:
            Exception: Whatever `recommend` returned in place of a response, other than ValueError.
        """
        answers: list[tuple[str, RecommendResponse]] = []
        errors: list[dict[str, Any]] = []
        for start, rows, wrong in self._groups(users):
            bodies: list[RecommendRequest] = []
            numbers: list[int] = []
            for i, row in enumerate(rows):
                try:
                    if i in wrong:
                        raise ValueError(wrong[i])
                    bodies.append(self._body(row))
                    numbers.append(i)
                except ValueError as error:
                    errors.append(_reject(first_row + start + i, row, error))
            # `numbers` maps each request to its row, because invalid rows made no request.
            for i, result in zip(numbers, self.recommend(bodies), strict=True):
                result = _require_history(result)
                if isinstance(result, ValueError):
                    errors.append(_reject(first_row + start + i, rows[i], result))
                elif isinstance(result, Exception):
                    raise result
                else:
                    answers.append((rows[i]["user_id"], result))
            if done is not None:
                done(len(rows))
        errors.sort(key=lambda error: error["row"])
        return Generated(
            answers=_answer_table(answers, self.schema),
            errors=pa.Table.from_pylist(errors, schema=ERRORS),
            example=f"row {errors[0]['row']}: {errors[0]['reason']}" if errors else "",
        )

    def _groups(
        self, users: pa.Table
    ) -> Iterator[tuple[int, list[dict[str, Any]], dict[int, str]]]:
        """Yields the first row and the rows of each group, and why rows cannot be read."""
        for start in range(0, users.num_rows, self.in_flight):
            rows, wrong = read_rows(users.slice(start, self.in_flight), COLUMNS)
            for row in rows:
                row["user_id"] = id_text(row["user_id"])
            yield start, rows, wrong

    def _body(self, row: dict[str, Any]) -> RecommendRequest:
        """Returns the request of one row. Raises ValueError for an invalid row."""
        if row["user_id"] is None:
            raise ValueError("user_id: is null")

        def given(name: str, default: Any) -> Any:
            value = row.get(name)
            return default if value is None else value

        return to_message(
            {
                "user": {"id": row["user_id"]},
                "history": row.get("history"),
                "k": given("k", self.defaults.k),
                "strategy": given("strategy", self.defaults.strategy),
                "beam_width": self.defaults.beam_width,
                "exclude": {"seen": given("exclude_seen", self.defaults.exclude_seen)},
                "filter": json_text("filter", row.get("filter")),
                "diversity": json_text("diversity", row.get("diversity")),
                "exclude_shown": json_text("exclude_shown", row.get("exclude_shown")),
                "discount_shown": json_text("discount_shown", row.get("discount_shown")),
                "scoring": json_text("scoring", given("scoring", self.defaults.scoring)),
                "fields": list(self.defaults.fields),
            },
            RecommendRequest,
        )


def _require_history(result: RecommendResponse | Exception) -> RecommendResponse | Exception:
    """Turns a slate that was computed without the user's history into an error."""
    if isinstance(result, RecommendResponse):
        if {"history_unavailable", "shown_unavailable"} & {*result.degraded}:
            return StoreUnavailable("the history store does not answer")
        if "history_damaged" in result.degraded:
            return ValueError("the stored history is damaged")
    return result


def _reject(number: int, row: dict[str, Any], error: Exception) -> dict[str, Any]:
    user = row["user_id"]
    return {"row": number, "user_id": None if user is None else str(user), "reason": str(error)}


def _answer_table(answers: list[tuple[str, RecommendResponse]], schema: pa.Schema) -> pa.Table:
    rows = [
        (user, item.rank, item.item_id, item.score, a.strategy, a.model_version, a.catalog_version)
        for user, a in answers
        for item in a.items
    ]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(ANSWERS)
    arrays = [pa.array(values, kind) for values, kind in zip(columns, ANSWERS.types, strict=True)]
    if "scoring" in schema.names:
        texts = [
            None if a.scoring is UNSET else ENCODER.encode(a.scoring).decode() for _, a in answers
        ]
        own = [text for text, (_, a) in zip(texts, answers, strict=True) for _ in a.items]
        arrays.append(pa.array(own, pa.string()))
    if "fields" in schema.names:
        parts = list(schema.field("fields").type)
        shown = [item.fields or {} for _, a in answers for item in a.items]
        values = [record_column([one[part.name] for one in shown], part.type) for part in parts]
        arrays.append(pa.StructArray.from_arrays(values, fields=parts))
    return pa.Table.from_arrays(arrays, schema=schema)
