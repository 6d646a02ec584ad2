"""Samples of the last ten minutes: what they count, how many there are, what they cost others."""

import math
import random
import statistics
import threading
from collections import Counter

import pytest

from recserve.metrics import SECONDS, Gauges, Metrics, RecentMetrics
from recserve.metrics.recent import EVERY_S, KEPT_S
from recserve.server.errors import CODES, REASONS
from tests.support.waiting import until

ROUTES = ("/v1/recommend", "/v1/rank", "/v1/completions", "/v1/items", "/metrics")


def served():
    metrics = Metrics(("beam",), REASONS, lambda: None, None, CODES)
    metrics.routes = frozenset(ROUTES)
    return metrics


@pytest.mark.parametrize("seed", range(20))
def test_samples_add_up_to_what_was_counted(seed):
    """Each sample has its own requests, errors and tokens, and quantiles within a bucket."""
    rng, metrics = random.Random(seed), served()
    figures = Gauges()
    recent = RecentMetrics(metrics, lambda: figures)
    hits = misses = 0
    for index in range(rng.randrange(1, 6)):
        seconds, errors, tokens = [], Counter(), rng.randrange(50)
        cached, computed = rng.randrange(9), rng.randrange(9)
        for _ in range(rng.choice((0, 1, 2, 50))):
            route, took = rng.choice(ROUTES), rng.choice((0.0002, 0.004, 0.3, 3.0, 100.0))
            metrics.request(route, "beam", took)
            if route not in ("/v1/items", "/metrics"):
                seconds.append(took)
            if rng.random() < 0.3:
                code = rng.choice(CODES)
                metrics.failure("invalid", code)
                errors[code] += 1
        metrics.text_tokens(5, tokens)
        hits, misses = hits + cached, misses + computed
        figures = Gauges(
            queue_depth=index, running=index + 1, prefix_tokens={"hit": hits, "miss": misses}
        )
        recent.take()
        sample = recent.samples[-1]
        assert (sample.requests, sample.errors, sample.tokens) == (len(seconds), errors, tokens)
        assert (sample.cached_tokens, sample.prefix_tokens) == (cached, cached + computed)
        assert (sample.queue_depth, sample.running) == (index, index + 1)
        for found, share in ((sample.p50_ms, 0.5), (sample.p99_ms, 0.99)):
            if not seconds:
                assert found is None
                continue
            exact = sorted(seconds)[math.ceil(len(seconds) * share) - 1]
            upper = min((bound for bound in SECONDS if bound >= exact), default=SECONDS[-1])
            lower = max((bound for bound in SECONDS if bound < exact), default=0.0)
            assert 1e3 * lower <= found <= 1e3 * upper
    assert len(recent.samples) == index + 1


def test_there_are_samples_of_ten_minutes_at_most():
    recent = RecentMetrics(served(), lambda: None)
    for _ in range(200):
        recent.take()
    samples = recent.samples
    assert len(samples) == KEPT_S / EVERY_S
    times = [sample.at_s for sample in samples]
    assert times == sorted(times)
    assert statistics.fsum(sample.seconds for sample in samples[1:]) == pytest.approx(
        times[-1] - times[0], abs=1e-3
    )


def test_counters_that_begin_again_are_no_negative_sample():
    """A new bundle has an engine of its own, whose counters begin at zero."""
    figures = Gauges(prefix_tokens={"hit": 70, "miss": 30})
    recent = RecentMetrics(served(), lambda: figures)
    recent.take()
    figures = Gauges(prefix_tokens={"hit": 3, "miss": 2})
    recent.take()
    assert (recent.samples[1].cached_tokens, recent.samples[1].prefix_tokens) == (0, 0)


def test_the_thread_ends_with_the_server_and_survives_an_error(monkeypatch, caplog):
    taken = threading.Event()

    def gauges():
        if taken.is_set():
            return Gauges()
        taken.set()
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("recserve.metrics.recent.EVERY_S", 0.01)
    recent = RecentMetrics(served(), gauges)
    recent.start()
    assert taken.wait(30)
    until(lambda: recent.samples)
    recent.close()
    assert "broken on purpose" in caplog.text
    until(lambda: "recent-metrics" not in {thread.name for thread in threading.enumerate()})
