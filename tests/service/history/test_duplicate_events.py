"""Events without an id are duplicates by item, time and type, however a request writes them."""

import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recserve.service import Service
from tests.support.tiny_bundle import shared_bundle

START_S, END_S = 1_577_836_800, 1_767_225_600  # 2020 to 2026
ZONES = ("UTC", "Asia/Kolkata", "America/New_York", "Pacific/Apia")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    store = f"lmdb:{tmp_path_factory.mktemp('store')}/users"
    with Service.open(shared_bundle(), store, "cpu") as service:
        yield service


def spellings(second: int) -> list:
    """Returns a whole second in all forms of an event's timestamp."""
    moment = datetime.datetime.fromtimestamp(second, datetime.UTC)
    zoned = [moment.astimezone(ZoneInfo(name)).isoformat() for name in ZONES]
    plain = moment.strftime("%Y-%m-%dT%H:%M:%S")
    texts = [f"{plain}Z", f"{plain}.000Z", f"{plain.lower()}z", f"{plain}-00:00", f"{plain}.0Z"]
    return [*zoned, *texts, *(second * unit for unit in (1, 10**3, 10**6, 10**9)), float(second)]


@given(second=st.integers(START_S, END_S), data=st.data())
@settings(max_examples=60, deadline=None)
def test_one_time_in_two_forms_is_one_time(service, second, data):
    forms = spellings(second)
    kinds = st.sampled_from([("event", None), (None, "event"), ("click", "click"), (None, None)])
    items = service.catalog.current.items
    ids = [items.item_id(0), items.item_id(1)]
    first, again = data.draw(st.sampled_from(forms)), data.draw(st.sampled_from(forms))
    one, two = data.draw(kinds)
    event = {"user_id": "u", "item_id": ids[0], "timestamp": first, "type": one}
    same = event | {"timestamp": again, "type": two}
    assert service.add_events({"events": [event, same]}).duplicates == 1
    assert service.add_events({"events": [same]}).duplicates == 1
    others = [
        same | {"item_id": ids[1]},
        same | {"type": "purchase"},
        same | {"timestamp": second + 1},
        same | {"timestamp": second + 0.000001},
    ]
    assert service.add_events({"events": others}).accepted == len(others)
    service.delete_user("u")
