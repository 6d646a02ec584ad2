"""The service that was replaced last waits for a rollback, and not for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from recserve.engine.engine_config import EngineConfig
from recserve.service import Service, ServiceOptions, replacement
from recserve.service.replacement import Predecessor
from tests.support.tiny_bundle import shared_bundle
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def collections(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts full garbage collections, which take seconds in a process with thousands of tests."""
    collector = Mock()
    monkeypatch.setattr(replacement, "gc", collector)
    return collector.collect


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str], Service]:
    def open_one(name: str) -> Service:
        options = ServiceOptions(engine=EngineConfig(kv_bytes=2**20), journal=tmp_path / name)
        return Service.open(shared_bundle(), f"lmdb:{tmp_path / name}.store", "cpu", options)

    return open_one


def test_it_holds_one_service_and_gives_it_away_once(opened):
    held, first, second = Predecessor(), opened("first"), opened("second")
    assert held.take() is None
    held.keep(first)
    held.keep(second)
    assert not first.alive and second.alive
    assert held.take() is second and held.take() is None
    held.drop()
    assert second.alive
    second.close()


def test_it_closes_the_service_after_some_time(opened):
    held, service = Predecessor(kept_s=0.05), opened("only")
    held.keep(service)
    until(lambda: not service.alive)
    assert held.take() is None


def test_a_service_that_has_stopped_is_not_given_away(opened):
    held, service = Predecessor(), opened("only")
    held.keep(service)
    service.engine.close()
    assert held.take() is None and not service.alive


def test_a_collection_frees_only_what_references_have_not_freed(opened, collections):
    held = Predecessor()
    held.keep(opened("free"))
    held.drop()
    assert collections.call_count == 0
    service = opened("referenced")
    held.keep(service)
    held.drop()
    assert collections.call_count == 1 and not service.alive
