"""Tables by item row on the device that grow in place, with spare capacity."""

from __future__ import annotations

from torch import Tensor


def with_rows(table: Tensor, count: int, rows: Tensor) -> Tensor:
    """Writes rows [n, ...] after the first `count` of a table, which is copied and enlarged if
    full.

    Concurrent readers of the first `count` rows, of the old or the new table, are not affected.
    """
    needed = count + rows.shape[0]
    if needed > table.shape[0]:
        spare = table.new_zeros(max(needed + 1024, needed + needed // 8), *table.shape[1:])
        spare[:count] = table[:count]
        table = spare
    table[count:needed] = rows.to(table)
    return table
