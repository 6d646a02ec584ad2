"""The batch computation as a function on Arrow batches, for Spark's `mapInArrow` and the like.

The first call in a process opens the models, and later calls use them.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

from recserve.batch.generate import check_schema
from recserve.batch.part import Task
from recserve.batch.recipe import SlateRecipe, environment, from_json, to_json

MapBatches = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class RowsRejected(ValueError):
    """Rows of a batch are invalid, and the caller did not ask to drop them."""


def slates(recipe: SlateRecipe, on_error: str = "raise") -> MapBatches:
    """Returns a function from batches of users to batches of slates.

    Their schema is that of `answer_schema`.

    The function can be sent to another process. It divides each batch into groups of
    `recipe.in_flight` rows, like a batch job divides its parts.

    Args:
        recipe: Bundle, history store and defaults.
        on_error: `raise` fails on an invalid row, `drop` leaves it out.

    Raises:
        ValueError: If `on_error` is neither of the two.
    """
    if on_error not in ("raise", "drop"):
        raise ValueError(f"on_error is {on_error!r}; expected 'raise' or 'drop'")
    return functools.partial(_slates, to_json(recipe), on_error == "raise")


def _slates(
    recipe: str, strict: bool, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    task = _task(recipe)
    first = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        check_schema(batch.schema, Path("input"))
        task.begin_part()
        generated = task(pa.Table.from_batches([batch]), first)
        if strict and generated.errors.num_rows:
            raise RowsRejected(f"{generated.errors.num_rows} rows rejected: {generated.example}")
        yield from generated.answers.combine_chunks().to_batches()
        first += batch.num_rows


@functools.lru_cache(maxsize=1)
def _task(recipe: str) -> Task:
    """Opens the models of a recipe, once per process."""
    opened = from_json(recipe)
    # Kernels read these variables when they are first imported.
    for name, value in environment(opened).items():
        os.environ.setdefault(name, value)
    open_models = ExitStack()
    atexit.register(open_models.close)
    return open_models.enter_context(opened.open())
