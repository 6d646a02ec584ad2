"""Bounds of ids, times and texts, for every door: files, HTTP, the store and batch jobs.

What `recserve build` accepts, every later command accepts. What one door accepts, the others can
read and delete. HTTP is stricter for new events only: it refuses times in the future and times that
the store would delete for their age.
"""

from __future__ import annotations

import datetime

# Ids of users, items and events, in characters (Unicode code points).
MAX_ID_LENGTH = 256
# A user id is the key of a store, and LMDB holds keys of up to 511 bytes.
MAX_USER_ID_BYTES = 480
MAX_TITLE_LENGTH = 4096
MAX_CATEGORIES = 64  # paths of one item
MAX_CATEGORY_LENGTH = 1024
# Times of events in microseconds since 1970: from the first bound, below the second.
# An event without a timestamp is stored with its position as time. A time below the first bound,
# eleven days after 1970, is such a position: no history is that long and no real event is that old.
MIN_TIME_US, MAX_TIME_US = 10**12, 2**53
MAX_POSITION = MIN_TIME_US - 1
MAX_VALUE = float(2**128 - 2**104)  # the largest finite 32-bit float


def format_time(time_us: int) -> str:
    """Returns a time in RFC 3339."""
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=time_us)
    return moment.isoformat() + "Z"


TIMES = f"{format_time(MIN_TIME_US)} to {format_time(MAX_TIME_US - 1)}"
