"""When requests are sent: Poisson arrivals, a trace, or as soon as a worker is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

Times = NDArray[np.float64]

TIME_COLUMNS = ("timestamp", "arrival_time", "arrived_at", "time", "scheduled_s")


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> Times:
    """Returns sorted arrival times in seconds from 0, exponential gaps at `rate` per second.

    Raises:
        ValueError: If the rate or the duration is not positive.
    """
    if rate <= 0 or duration_s <= 0:
        raise ValueError(f"rate {rate}/s for {duration_s} s: expected both above 0")
    drawn = np.random.default_rng(seed)
    gaps: Times = np.empty(0)
    while gaps.sum() < duration_s:
        more = drawn.exponential(1 / rate, max(64, int(rate * duration_s / 4)))
        gaps = np.concatenate([gaps, more])
    times = np.cumsum(gaps)
    return times[times < duration_s]


def trace_arrivals(path: Path, rate: float | None = None, duration_s: float | None = None) -> Times:
    """Returns the arrival times of a recorded trace, from 0.

    Args:
        path: JSON lines or Parquet with a column of TIME_COLUMNS, or a text file with one number
            of seconds per line. AIPerf's and Mooncake's `timestamp` is in milliseconds.
        rate: Mean rate to which the trace is stretched or squeezed; None keeps its own.
        duration_s: Times after this are left out; None for all.

    Raises:
        ValueError: If there is no such column, or fewer than two times.
    """
    times: Times = np.sort(_trace_times(path))
    if len(times) < 2:
        raise ValueError(f"{path}: expected at least two arrival times, found {len(times)}")
    times = times - times[0]
    if rate is not None and times[-1] > 0:
        times = times * ((len(times) - 1) / rate / times[-1])
    return times if duration_s is None else times[times < duration_s]


def _trace_times(path: Path) -> Times:
    if path.suffix == ".parquet":
        names = pq.read_schema(path).names
        column = _time_column(names, path)
        values = pq.read_table(path, columns=[column])[column].to_pylist()
        return _seconds(values, column)
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    if lines and not lines[0].lstrip().startswith(b"{"):
        return np.array([float(line) for line in lines])
    rows = [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]
    column = _time_column(list(rows[0]) if rows else [], path)
    return _seconds([row[column] for row in rows], column)


def _time_column(names: list[str], path: Path) -> str:
    column = next((name for name in TIME_COLUMNS if name in names), None)
    if column is None:
        raise ValueError(f"{path}: expected one of the columns {', '.join(TIME_COLUMNS)}")
    return column


def _seconds(values: list[Any], column: str) -> Times:
    """Datetimes become seconds; `timestamp` numbers are milliseconds, as in AIPerf's traces."""
    if values and hasattr(values[0], "timestamp"):
        return np.array([value.timestamp() for value in values])
    return np.array(values, dtype=float) * (1e-3 if column == "timestamp" else 1.0)
