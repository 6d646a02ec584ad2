"""Times of events in all forms of RFC 3339."""

import pytest

from recserve.schemas.events import EventInput, EventsRequest
from tests.support.live_catalogues import base_of


@pytest.mark.parametrize(
    "given, stored",
    [
        ("2016-12-31t23:59:58z", "2016-12-31T23:59:58Z"),
        ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59Z"),
        ("2017-01-01t01:59:60.25+02:00", "2016-12-31T23:59:59.250000Z"),
        ("2016-12-31T23:59:58.1234569Z", "2016-12-31T23:59:58.123456Z"),
    ],
)
def test_an_event_has_the_time_of_its_text(service, given, stored):
    event = EventInput(user_id="u", item_id=base_of(service).items.ids[0], timestamp=given)
    assert service.add_events(EventsRequest(events=[event])).accepted == 1
    assert [event.timestamp for event in service.history("u").events] == [stored]
