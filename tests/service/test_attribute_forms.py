"""Attributes of every type keep their value in JSON, after a change and after a restart."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.features.tables.attribute_values import parse_value
from recserve.schemas.numbers import ENCODER
from recserve.service import Service, ServiceOptions

NUM_ITEMS = 8
DAY = datetime.date(2026, 1, 31)
NOON = datetime.datetime(2026, 1, 31, 12, 0, 0, 5, datetime.UTC)
SPAN = datetime.timedelta(days=1, seconds=5, microseconds=3)
# Types whose values JSON writes in another form, with a value each.
PLAIN = {
    pa.binary(): b"\xff\x00",
    pa.large_binary(): b"aGk=",
    pa.binary(2): b"ab",
    pa.duration("us"): SPAN,
    pa.duration("s"): datetime.timedelta(0),
    pa.decimal128(9, 2): Decimal("1.10"),
    pa.date32(): DAY,
    pa.timestamp("us", "UTC"): NOON,
    pa.time64("us"): datetime.time(1, 2, 3),
    pa.string(): "aGk=",
    pa.int64(): 2**60 + 1,
    pa.bool_(): True,
}


def nested(inner):
    """Draws a type that holds others, with a value."""
    one = inner.map(lambda pair: (pa.list_(pair[0]), [pair[1], None, pair[1]]))
    both = st.tuples(inner, inner).map(
        lambda pairs: (
            pa.struct([("a", pairs[0][0]), ("b", pairs[1][0])]),
            {"a": pairs[0][1], "b": pairs[1][1]},
        )
    )
    keyed = inner.map(lambda pair: (pa.map_(pa.string(), pair[0]), [("k", pair[1])]))
    return one | both | keyed


TYPES = st.recursive(st.sampled_from(list(PLAIN.items())), nested, max_leaves=4)


def build(folder, columns):
    """Builds a bundle whose items have these columns."""
    ids = [f"i{number}" for number in range(NUM_ITEMS)]
    arrays = {
        f"c{n}": pa.array([value] * NUM_ITEMS, kind) for n, (kind, value) in enumerate(columns)
    }
    pq.write_table(
        pa.table({"item_id": ids, "price": [1.5] * NUM_ITEMS, **arrays}), folder / "i.parquet"
    )
    rows = np.arange(4 * NUM_ITEMS)
    events = {
        "user_id": (rows % 4).tolist(),
        "item_id": [ids[row % NUM_ITEMS] for row in rows],
        "timestamp": rows + 1_700_000_000,
    }
    pq.write_table(pa.table(events), folder / "e.parquet")
    vectors = np.random.default_rng(0).standard_normal((NUM_ITEMS, 8)).astype(np.float32)
    np.save(folder / "v.npy", vectors)
    options = BuildOptions(
        folder / "i.parquet",
        folder / "e.parquet",
        folder / "bundle",
        embeddings=folder / "v.npy",
        levels=2,
        codes=4,
        collaborative_dim=0,
    )
    build_bundle(options, lambda line: None)


def attributes(service, item_id):
    """Returns an item's attributes as a client reads them."""
    return json.loads(ENCODER.encode(service.item(item_id)))["attributes"]


@given(columns=st.lists(TYPES, min_size=4, max_size=8))
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_attributes_of_any_type_survive_changes_and_a_restart(tmp_path_factory, columns):
    folder = tmp_path_factory.mktemp("attributes")
    build(folder, columns)

    def opened():
        options = ServiceOptions(journal=folder / "items")
        return Service.open(folder / "bundle", f"lmdb:{folder}/store", "cpu", options)

    with opened() as service:
        expected = attributes(service, "i0")
        service.put_items({"items": [{"item_id": "i0", "price": 2.5}]})  # another column
        assert attributes(service, "i0") == {**expected, "price": 2.5}
        answer = service.put_items({"items": [{"item_id": "i1", **expected}]})  # what a read gave
        assert answer.rejected == []
        assert attributes(service, "i1") == expected
    with opened() as service:
        assert attributes(service, "i0") == {**expected, "price": 2.5}
        assert attributes(service, "i1") == expected


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (pa.binary(), "no base64!"),
        (pa.list_(pa.binary()), ["a"]),
        (pa.duration("s"), "5 seconds"),
        (pa.struct([("a", pa.int64())]), {"a": 1, "b": 2}),
        (pa.struct([("a", pa.binary())]), {"a": "?"}),
        (pa.map_(pa.string(), pa.date32()), [["a", "soon"]]),
    ],
    ids=str,
)
def test_a_value_of_another_form_is_refused(kind, wrong):
    with pytest.raises((ValueError, TypeError)):
        parse_value(wrong, kind)
