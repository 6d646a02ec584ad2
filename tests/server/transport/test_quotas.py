"""Each API key has its own requests per minute."""

import pytest

from recserve.server.errors import QuotaExceeded
from recserve.server.transport.quotas import Quotas
from tests.support.live_server import live
from tests.support.scripted_text import scripted

ONE, TWO = "the-first-key-of-two", "the-second-key-of-two"


def test_a_bucket_per_key():
    now = [50.0]
    quotas = Quotas(60, lambda: now[0])  # one a second, ten at once
    for _ in range(10):
        quotas.take(b"a")
    with pytest.raises(QuotaExceeded) as refused:
        quotas.take(b"a")
    assert refused.value.retry_after_s == pytest.approx(1.0)
    quotas.take(b"b")
    now[0] += 0.5
    with pytest.raises(QuotaExceeded) as refused:
        quotas.take(b"a")
    assert refused.value.retry_after_s == pytest.approx(0.5)
    now[0] += 0.5
    quotas.take(b"a")
    now[0] += 3600
    for _ in range(10):
        quotas.take(b"a")
    with pytest.raises(QuotaExceeded):
        quotas.take(b"a")


def test_a_rare_quota_still_lets_one_through():
    quotas = Quotas(1, lambda: 0.0)
    quotas.take(b"a")
    with pytest.raises(QuotaExceeded) as refused:
        quotas.take(b"a")
    assert refused.value.retry_after_s == pytest.approx(60)


def test_over_http(tmp_path):
    service = scripted(tmp_path, lambda prompt, seed: "yes")
    with live(service, api_keys=(ONE, TWO), key_quota=1) as client:
        first, second = ({"Authorization": f"Bearer {key}"} for key in (ONE, TWO))
        assert client.get("/v1/models", headers=first).status_code == 200
        refused = client.get("/v1/models", headers=first)
        assert refused.status_code == 429 and 55 <= int(refused.headers["Retry-After"]) <= 60
        error = refused.json()["error"]
        assert (error["code"], error["message"]) == (
            "quota_exceeded",
            "this key may send 1 requests per minute",
        )
        assert client.get("/v1/models", headers=second).status_code == 200
        for path in ("/health/ready", "/metrics"):
            assert client.get(path, headers=first).status_code == 200
        page = client.get("/metrics", headers=first).text
        assert 'recserve_requests_failed_total{reason="quota"} 1.0' in page
