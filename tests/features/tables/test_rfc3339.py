"""Times of RFC 3339: small letters, leap seconds, fractions of any length, and drawn times."""

import datetime
import random
from decimal import Decimal
from fractions import Fraction

import pytest

from recserve.features.tables.rfc3339 import (
    format_clock,
    format_date,
    format_timestamp,
    parse_clock,
    parse_date,
    parse_timestamp,
)

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_times_are_read_exactly(seed):
    draw = random.Random(seed)
    zone = datetime.timezone(datetime.timedelta(minutes=draw.randrange(-720, 720)))
    moment = datetime.datetime(
        draw.randrange(1600, 2400), draw.randrange(1, 13), draw.randrange(1, 29), tzinfo=zone
    ) + datetime.timedelta(seconds=draw.randrange(86_400))
    digits = str(draw.randrange(10**12)) if draw.random() < 0.7 else ""
    text = moment.isoformat()
    text = text[:19] + (f".{digits}" if digits else "") + text[19:]
    wanted = (moment - EPOCH) // datetime.timedelta(seconds=1) + Fraction(f"0.{digits or 0}")
    for form in (text, text.lower(), text.replace("+00:00", "z")):
        assert Fraction(parse_timestamp(form)) == wanted
    assert parse_timestamp(format_timestamp(int(wanted * 10**9 // 1), 9)) == Decimal(
        int(wanted * 10**9 // 1)
    ).scaleb(-9)


@pytest.mark.parametrize(
    "text, same",
    [
        ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59Z"),
        ("2016-12-31t23:59:60.5z", "2016-12-31T23:59:59.5Z"),
        ("2017-01-01T00:59:60+01:00", "2016-12-31T23:59:59Z"),
        ("2016-12-31T15:59:60-08:00", "2016-12-31T23:59:59Z"),
    ],
)
def test_a_leap_second_is_the_second_before(text, same):
    assert parse_timestamp(text) == parse_timestamp(same)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "z",
        "2026-11-26",
        "2026-11-26T10:00:00",
        "2026-02-30T10:00:00Z",
        "2026-11-26T25:00:00Z",
        "2026-11-26T10:00:61Z",
        "2026-11-26T10:00:60Z",
        "٢٠٢٦-11-26T10:00:00Z",
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"expected RFC 3339|no time zone"):
        parse_timestamp(text)


def test_dates_and_times_of_day():
    assert format_date(parse_date("2026-11-26")) == "2026-11-26"
    assert format_clock(int(parse_clock("23:00:05.25") * 1000), 3) == "23:00:05.25"
    for text in ("2026-2-3", "20260203", "2026-02-30", "2026-W01-1"):
        with pytest.raises(ValueError, match="expected a date"):
            parse_date(text)
    for text in ("24:00:00", "1:00:00", "10:00", "10:00:00Z"):
        with pytest.raises(ValueError, match="expected a time"):
            parse_clock(text)
