"""Tables by item row on the device that grow in place, with spare capacity."""

from __future__ import annotations

from torch import Tensor


def with_rows(table: Tensor, count: int, rows: Tensor) -> Tensor:
    """The table with rows [n, ...] written after its first `count`; a larger copy where it is full.

    Whoever reads the first `count` rows, of the old table or the new, is not disturbed.
    """
    needed = count + rows.shape[0]
    if needed > table.shape[0]:
        spare = table.new_zeros(max(needed + 1024, needed + needed // 8), *table.shape[1:])
        spare[:count] = table[:count]
        table = spare
    table[count:needed] = rows.to(table)
    return table
