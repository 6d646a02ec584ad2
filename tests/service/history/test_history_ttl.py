"""With `history_ttl_s`, old events are refused, not imported, and not read."""

import datetime
import time

import pytest

from recserve import Service, ServiceOptions
from recserve.bundle.bundle import Bundle
from recserve.config import ServerConfig
from recserve.features.history.stores import open_store
from recserve.server.loader import ServiceLoader
from tests.support.grids import chosen
from tests.support.tiny_bundle import shared_bundle

DAY_S = 86_400.0


def moment(age_s: float) -> str:
    return datetime.datetime.fromtimestamp(time.time() - age_s, datetime.UTC).isoformat()


@pytest.mark.parametrize("how", chosen(("option", "url", "setting"), "url", "setting"))
def test_old_events_are_refused_with_the_reason(tmp_path, how):
    url = f"lmdb:{tmp_path}/store"
    if how == "url":
        service = Service.open(shared_bundle(), f"{url}?ttl_s=86400", "cpu")
    elif how == "option":
        options = ServiceOptions(history_ttl_s=DAY_S, journal=tmp_path / "items")
        service = Service.open(shared_bundle(), url, "cpu", options)
    else:
        settings = {"bundle": shared_bundle(), "store": url, "journal": tmp_path / "items"}
        config = ServerConfig.load({**settings, "history_ttl_s": "86400", "device": "cpu"})
        service = ServiceLoader(config).first()
    with service:
        item = service.samples(1, 1)["items"][0]
        event = {"user_id": "ann", "item_id": item}
        events = [event | {"timestamp": moment(age * DAY_S)} for age in (0.5, 1.5)]
        answer = service.add_events({"events": [*events, event]})
        assert answer.accepted == 2 and [one.index for one in answer.rejected] == [1]
        assert "older than 86400 s" in answer.rejected[0].reason
        assert len(service.history("ann").events) == 2


def test_a_restart_does_not_bring_back_what_has_expired(tmp_path):
    """The bundle's events are years old, so none of them is imported, now or later."""
    url = f"lmdb:{tmp_path}/store"
    user = Bundle.open(shared_bundle()).events().user_ids[0]
    for _ in range(2):
        with Service.open(shared_bundle(), f"{url}?ttl_s=86400", "cpu") as service:
            assert service.history(user).events == []
            assert "cold_start" in service.recommend({"user": {"id": user}, "k": 3}).degraded
    store = open_store(url)
    assert store.get(user).size == 0
    store.close()


def test_a_store_opened_later_with_a_limit_deletes_what_is_there(tmp_path):
    url = f"lmdb:{tmp_path}/store"
    user = Bundle.open(shared_bundle()).events().user_ids[0]
    with Service.open(shared_bundle(), url, "cpu") as service:
        assert service.history(user).events
    with Service.open(shared_bundle(), f"{url}?ttl_s=86400", "cpu") as service:
        assert service.history(user).events == []
        store, until_s = service.histories.store.store, time.monotonic() + 20
        while store.get(user).size and time.monotonic() < until_s:
            time.sleep(0.01)
    store = open_store(url)
    assert store.get(user).size == 0
    store.close()
