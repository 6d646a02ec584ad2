"""Comparison of a run with the saved requests of an earlier one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.experiments.load.exchanges import HttpExchange
from recserve.experiments.load.session import Session
from recserve.experiments.report.measurements import TIMEOUT, SampleColumns
from recserve.experiments.statistics.comparison import Comparison, compare_arms
from recserve.experiments.statistics.criteria import Criteria

SAVED, THIS = "saved run", "this run"
READ = ("shot", "place", "arm", "scheduled_s", "latency_ms", "status", "error")
NOTE = (
    "The two runs were made one after the other. A difference may come from the machine or from "
    "other load, which no interval covers."
)


def read_records(path: Path) -> tuple[HttpExchange, ...]:
    """Returns the requests of a run that `--records` has saved, without their answers.

    Raises:
        ValueError: If the file is no such file, or holds several arms.
    """
    try:
        table = pq.read_table(path, columns=list(READ))
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: expected a Parquet file of --records ({error})") from None
    missing = sorted(set(READ) - set(table.column_names))
    if missing:
        raise ValueError(f"{path}: expected the columns of --records, {missing[0]} is missing")
    rows = table.to_pylist()
    arms = sorted({row["arm"] for row in rows})
    if len(arms) != 1:
        raise ValueError(f"{path}: expected the requests of one arm, got {len(arms)} arms")
    return tuple(
        HttpExchange(
            shot=row["shot"],
            place=row["place"],
            arm=0,
            sample=0,
            scheduled=row["scheduled_s"],
            sent=row["scheduled_s"],
            done=row["scheduled_s"] + row["latency_ms"] / 1e3,
            status=row["status"],
            error=row["error"],
        )
        for row in rows
    )


def compare_with_saved(session: Session, path: Path, criteria: Criteria) -> Comparison:
    """Returns the comparison of a run with a saved one; the saved run is the control.

    The n-th requests of both runs share a time block, and the longer run is cut.

    Args:
        session: The new run, with one arm.
        path: File of `--records`.
        criteria: What decides.

    Raises:
        ValueError: If the file does not fit.
    """
    saved = read_records(path)
    new = session.columns.exchanges
    size = min(len(saved), len(new))
    if not size:
        raise ValueError(f"{path}: no requests to compare with")
    both = (*saved[:size], *new[:size])
    count = np.arange(size)
    columns = SampleColumns(
        exchanges=both,
        shot=np.concatenate([count, count]).astype(np.int64),
        place=np.zeros(2 * size, dtype=np.int64),
        arm=np.repeat([0, 1], size).astype(np.int64),
        unit=np.zeros(2 * size, dtype=np.int64),
        sent_s=np.array([one.scheduled for one in both], dtype=np.float64),
        latency_ms=np.array([one.latency_ms for one in both], dtype=np.float64),
        timed=np.array([one.error in (None, TIMEOUT) for one in both], dtype=np.bool_),
        failed=np.array([one.error is not None for one in both], dtype=np.bool_),
    )
    found = compare_arms(
        columns=columns,
        samples=session.samples,
        names=(SAVED, THIS),
        treatment=1,
        mode="blocks",
        criteria=criteria,
    )
    found.notes.append(NOTE)
    return found
