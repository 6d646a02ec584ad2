"""Checks of the numbers in a query that comes from Python, in the words of the HTTP schemas."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

MAX_INT = 2**31 - 1


def check_int(name: str, value: Any, low: int, high: int = MAX_INT) -> None:
    """Raises ValueError unless a value is an integer from `low` to `high`. A bool is none."""
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer:
        raise ValueError(f"{name}: expected int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name}: expected int >= {low}, got {value}")
    if value > high:
        raise ValueError(f"{name}: expected int <= {high}, got {value}")


def check_float(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises ValueError unless a value is a finite number from `low` to `high`."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number:
        raise ValueError(f"{name}: expected float, got {type(value).__name__}")
    if not value >= low:  # NaN is not either
        raise ValueError(f"{name}: expected float >= {low}, got {value}")
    if value > high:
        raise ValueError(f"{name}: expected float <= {high}, got {value}")
    if math.isinf(value):
        raise ValueError(f"{name}: expected a finite float, got {value}")


def check_array(name: str, values: Any) -> None:
    """Raises ValueError unless a value is an array [n] of integers."""
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{name}: expected an array of int, got {type(values).__name__}")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected int [n], got {values.dtype} {values.shape}")


def check_ints(name: str, values: Any, low: int, high: int) -> None:
    """Raises ValueError unless an array [n] holds integers from `low` to `high` only."""
    check_array(name, values)
    if values.size and (values.min() < low or values.max() > high):
        bad = values[(values < low) | (values > high)][0]
        raise ValueError(f"{name}: expected int >= {low} and <= {high}, got {bad}")
