"""The field `fields` of requests: columns of the catalogue that an answer shows for each item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from recserve.features.catalog.versions import CatalogVersion
from recserve.features.words import closest
from recserve.schemas.items import MAX_FIELD_VALUES, InvalidRequest

MAX_NAMED = 40  # columns that a message lists


def check_fields(names: Sequence[str], items: CatalogVersion) -> None:
    """Raises InvalidRequest if the catalogue lacks one of the columns, or one occurs twice."""
    known = items.field_names
    for place, name in enumerate(names):
        param = f"fields[{place}]"
        if name not in known:
            raise InvalidRequest(param, unknown_column(name, known))
        if name in names[:place]:
            raise InvalidRequest(param, f"expected each column once, got {name!r} again")


def unknown_column(name: str, known: Sequence[str]) -> str:
    """Returns a message that names the columns that the catalogue has."""
    listed = ", ".join(known[:MAX_NAMED])
    if len(known) > MAX_NAMED:
        listed += f" and {len(known) - MAX_NAMED} more"
    near = closest(name, known)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"the catalogue has {listed}; got {name[:60]!r}{hint}"


def check_num_values(sizes: Iterable[tuple[int, int]]) -> None:
    """Checks the number of values in the answers of one body.

    Args:
        sizes: Number of items and of fields of each answer.

    Raises:
        InvalidRequest: If the answers have more than MAX_FIELD_VALUES values in total.
    """
    total = sum(num_items * num_fields for num_items, num_fields in sizes)
    if total > MAX_FIELD_VALUES:
        raise InvalidRequest(
            "fields", f"expected at most {MAX_FIELD_VALUES} items times fields, got {total}"
        )
