"""Bounds of ids, times and texts, and numbers in their place, for every door.

The doors are files, HTTP, Python, the store and batch jobs.

What `recserve build` accepts, every later command accepts. What one door accepts, the others can
read and delete. HTTP is stricter for new events only: it refuses times in the future and times that
the store would delete for their age.
"""

from __future__ import annotations

import datetime
import re
from decimal import Decimal

# Ids of users, items and events, in characters (Unicode code points).
MAX_ID_LENGTH = 256
# A user id is the key of a store, and LMDB holds keys of up to 511 bytes.
MAX_USER_ID_BYTES = 480
MAX_TITLE_LENGTH = 4096
MAX_CATEGORIES = 64  # paths of one item
MAX_CATEGORY_LENGTH = 1024
MAX_CHOICES = 100_000  # of which a text is one
MAX_BLANKS = 64  # in a row, in JSON of a constrained text
# Times of events in microseconds since 1970: from the first bound, below the second.
# An event without a timestamp is stored with its position as time. A time below the first bound,
# eleven days after 1970, is such a position: no history is that long and no real event is that old.
MIN_TIME_US, MAX_TIME_US = 10**12, 2**53
MAX_POSITION = MIN_TIME_US - 1
MAX_VALUE = float(2**128 - 2**104)  # the largest finite 32-bit float

# A number in the place of a time counts from 1970 in one of these units, told by its size: from
# 100 million of the unit up to MAX_TIME_US, which is 1973 to 2255. The ranges do not meet.
UNITS_PER_S = {
    "seconds": 1,
    "milliseconds": 10**3,
    "microseconds": 10**6,
    "nanoseconds": 10**9,
}
NUMBER_OF_TIME = f"a number since 1970 in {', '.join(UNITS_PER_S)} of the years 1973 to 2255"
FIRST_S, END_S = 10**8, MAX_TIME_US // 10**6
NUMBER = re.compile(r"-?\d+(\.\d+)?", re.ASCII)
MAX_WHOLE = 2**53  # up to here, a float stands for one whole number only


def format_time(time_us: int) -> str:
    """Returns a time in RFC 3339."""
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=time_us)
    return moment.isoformat() + "Z"


TIMES = f"{format_time(MIN_TIME_US)} to {format_time(MAX_TIME_US - 1)}"


def id_of_number(value: object) -> str | None:
    """Returns the id that a number stands for, which is its digits; None if there is none.

    Integers and decimals stand for their digits. A float does if it is a whole number up to 2**53,
    as tables turn integers into floats where a value is missing. A boolean is no number.
    """
    if isinstance(value, Decimal):
        exponent = value.as_tuple().exponent  # a letter for infinity and NaN
        if isinstance(exponent, str) or exponent > 0:
            value = float(value)
    if isinstance(value, float) and not abs(value) <= MAX_WHOLE:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    whole = int(value)
    return str(whole) if whole == value and abs(whole) < 10**MAX_ID_LENGTH else None


def time_of_number(value: object) -> int | None:
    """Returns the microseconds since 1970 of a number; None if it is in no range of a unit.

    A text of digits is a number, too. Of nanoseconds as an integer, parts of a microsecond are left
    out; a fraction is rounded.
    """
    if isinstance(value, str) and len(value) <= 100 and NUMBER.fullmatch(value):
        value = float(value) if "." in value else int(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    number = value if isinstance(value, int) else float(value)
    for per_s in UNITS_PER_S.values():
        if FIRST_S * per_s <= number < END_S * per_s:
            if isinstance(number, int):
                return number * 10**6 // per_s
            return round(number * (10**6 / per_s))
    return None
