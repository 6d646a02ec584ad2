"""Filters as docs/reference/http.md describes them, item by item and without the code under test.

Checks that ask for filtered slates judge the items by `fits`, with the rows of the bundle's
catalogue. So a filter that lets items through is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

Filter = dict[str, Any]
Record = Mapping[str, Any]
MOST_DEPTH = 3


def read_items(bundle: Path) -> dict[str, Record]:
    """Returns the rows of a bundle's catalogue by item id."""
    columns = ["item_id", "categories", "brand", "price"]
    rows = pq.read_table(bundle / "catalog.parquet", columns=columns).to_pylist()
    return {row["item_id"]: row for row in rows}


def fits(row: Record, tree: Filter) -> bool:
    """Returns whether an item fulfils a filter."""
    ((operator, operand),) = tree.items()
    match operator:
        case "and":
            return all(fits(row, part) for part in operand)
        case "or":
            return any(fits(row, part) for part in operand)
        case "not":
            return not fits(row, operand)
    field, *bounds = operand
    values = _values(row, field)
    match operator:
        case "eq":
            return bounds[0] in values
        case "in":
            return any(value in bounds[0] for value in values)
        case "range":
            low, high = bounds
            return any(
                (low is None or value >= low) and (high is None or value <= high)
                for value in values
            )
    raise ValueError(f"the operator is {operator!r}; this oracle does not know it")


def draw_wide_filter(
    items: Mapping[str, Record], random: np.random.Generator, least: int
) -> Filter:
    """Returns a drawn filter that at least so many items fulfil, and not all of them."""
    while True:
        tree = draw_filter(items, random)
        if least <= sum(fits(row, tree) for row in items.values()) < len(items):
            return tree


def count_misfits(items: Mapping[str, Record], shown: Iterable[str], tree: Filter) -> int:
    """Counts the items of slates that a filter does not allow; items must be known."""
    return sum(not fits(items[name], tree) for name in shown)


def draw_filter(items: Mapping[str, Record], random: np.random.Generator, depth: int = 1) -> Filter:
    """Returns a filter of up to MOST_DEPTH levels with values that occur in the catalogue."""

    def some() -> Record:
        return items[names[int(random.integers(len(names)))]]

    names = list(items)
    if depth < MOST_DEPTH and random.random() < 0.4:
        parts = [draw_filter(items, random, depth + 1) for _ in range(2)]
        return [{"and": parts}, {"or": parts}, {"not": parts[0]}][int(random.integers(3))]
    match random.integers(5):
        case 0:
            return {"eq": ["brand", some()["brand"]]}
        case 1:
            return {"in": ["brand", [some()["brand"] for _ in range(3)]]}
        case 2:
            path = some()["categories"][0]
            first, last = path.split(" > ")
            return {"eq": ["category", [path, first, last][int(random.integers(3))]]}
        case 3:
            # Prices of items, so that ends meet values.
            low, high = sorted((some()["price"], some()["price"]))
            return {
                "range": ["price", *[(low, high), (None, low), (high, None)][random.integers(3)]]
            }
    return {"in": ["item_id", [some()["item_id"] for _ in range(60)]]}


def _values(row: Record, field: str) -> list[Any]:
    """Returns the values of a field; a missing one has none."""
    if field != "category":
        return [] if row[field] is None else [row[field]]
    found = []
    for path in row["categories"]:
        parts = path.split(" > ")
        found += [*parts, *(" > ".join(parts[:end]) for end in range(1, len(parts) + 1))]
    return found
