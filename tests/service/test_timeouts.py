"""A request's own `timeout_ms` counts through every door, also inside a batch."""

import itertools
import time

import msgspec
import pytest

from recserve.engine.engine import Engine
from recserve.schemas.items import RankBatchRequest
from recserve.service import Service
from tests.support.tiny_bundle import shared_bundle


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    store = f"lmdb:{tmp_path_factory.mktemp('store')}/users"
    with Service.open(shared_bundle(), store, "cpu") as service:
        yield service


@pytest.fixture
def deadlines(monkeypatch):
    """Deadlines of the queries that reach the engine."""
    found, submit = [], Engine.submit_all

    def watch(engine, queries, client):
        found.extend(query.deadline_s for query in queries)
        return submit(engine, queries, client)

    monkeypatch.setattr(Engine, "submit_all", watch)
    return found


def body(service, timeout_ms):
    ids = [service.catalog.current.items.item_id(row) for row in (0, 1)]
    return {"history": ids[:1], "candidates": [{"item_id": ids[1]}], "timeout_ms": timeout_ms}


TIMEOUTS = (None, 5_000, 60_000)


@pytest.mark.parametrize("timeout_ms", TIMEOUTS)
@pytest.mark.parametrize("call", ["recommend", "rank"])
def test_a_request_from_python_has_the_deadline_of_its_body(service, deadlines, call, timeout_ms):
    fields = body(service, timeout_ms)
    if call == "recommend":
        fields.pop("candidates")
    before = time.monotonic()
    getattr(service, call)(fields)
    after = time.monotonic()
    if timeout_ms is None:
        assert deadlines == [None]
    else:
        (deadline,) = deadlines
        assert before <= deadline - timeout_ms / 1e3 <= after


@pytest.mark.parametrize("of_batch_s", [None, 1, 30])
def test_each_ranking_of_a_batch_has_the_sooner_deadline(service, deadlines, of_batch_s):
    rows = [body(service, timeout_ms) for timeout_ms in TIMEOUTS]
    batch = msgspec.convert({"requests": rows}, RankBatchRequest)
    before = time.monotonic()
    limit = None if of_batch_s is None else before + of_batch_s
    pending = service.ranker.begin_each(batch, deadline_s=limit)
    after = time.monotonic()
    for one in pending:
        one.wait()
    for timeout_ms, deadline in itertools.zip_longest(TIMEOUTS, deadlines):
        own_s = None if timeout_ms is None else timeout_ms / 1e3
        if own_s is None or (limit is not None and of_batch_s < own_s):
            assert deadline == limit
        else:
            assert before <= deadline - own_s <= after
