"""Each API key has its own requests per minute."""

import pytest

from recserve.server.errors import QuotaExceeded
from recserve.server.transport.quotas import Quotas
from tests.support.live_server import live
from tests.support.scripted_text import scripted

ONE, TWO = "the-first-key-of-two", "the-second-key-of-two"


@pytest.mark.parametrize("per_minute", [1, 7, 10, 60, 1000])
def test_a_bucket_per_key(per_minute):
    """A minute's requests may come at once; each further one comes at the rate."""
    now, every_s = [50.0], 60 / per_minute
    quotas = Quotas(per_minute, lambda: now[0])
    for waited_s, granted in ((0, per_minute), (every_s, 1), (3600, per_minute)):
        now[0] += waited_s
        for _ in range(granted):
            quotas.take(b"a")
        with pytest.raises(
            QuotaExceeded, match=f"may send {per_minute} requests at once"
        ) as refused:
            quotas.take(b"a")
        assert refused.value.retry_after_s == pytest.approx(every_s)
    now[0] += every_s / 2
    with pytest.raises(QuotaExceeded) as refused:
        quotas.take(b"a")
    assert refused.value.retry_after_s == pytest.approx(every_s / 2)
    quotas.take(b"b")


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
            "key_quota is 1: this key may send 1 requests at once, and then one every 60 s",
        )
        assert client.get("/v1/models", headers=second).status_code == 200
        for path in ("/health/ready", "/metrics"):
            assert client.get(path, headers=first).status_code == 200
        page = client.get("/metrics", headers=first).text
        assert 'recserve_requests_failed_total{reason="quota"} 1.0' in page
