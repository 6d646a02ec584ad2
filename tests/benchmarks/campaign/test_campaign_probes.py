"""Probes of the campaign find what they look for."""

from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

from benchmarks.campaign.checks.redis_faults import Loop, lost_events
from benchmarks.campaign.checks.security import learned_drafts
from benchmarks.campaign.site import KEY, LLM_NAME, OTHER_KEY
from recserve.engine import text_scheduler
from recserve.engine.engine_config import EngineConfig
from recserve.engine.text_sequence import context_of
from recserve.service import Service
from recserve.service.text.loader import TextSettings, load_text
from tests.support.grids import chosen
from tests.support.live_server import live
from tests.support.tiny_llm import tiny_llm


@pytest.mark.slow
@pytest.mark.parametrize("salted", chosen((True, False), "False"))
def test_r23_finds_drafts_that_one_key_learned_from_another(tmp_path, monkeypatch, salted):
    text = load_text(TextSettings(tiny_llm(tmp_path / LLM_NAME)), torch.device("cpu"))
    if not salted:

        def without_salt(request, number):
            return context_of(replace(request, salt=b""), number)

        monkeypatch.setattr(text_scheduler, "context_of", without_salt)
    with live(
        Service.of_text(text, EngineConfig(load_aware=False)), api_keys=(KEY, OTHER_KEY)
    ) as client:
        told, repeated = learned_drafts(client, np.random.default_rng(0))
    assert (told == 0) == salted and repeated > 1.1


def answering(degraded, status=200):
    items = [{"item_id": "a", "score": 1.0}] * 10
    body = {"items": items, "degraded": degraded}
    return httpx.Client(
        base_url="http://x",
        transport=httpx.MockTransport(lambda _: httpx.Response(status, json=body)),
    )


@pytest.mark.parametrize(
    "degraded, silent",
    [
        ([], 0),
        (["cold_start"], 1),
        (["history_unavailable", "cold_start"], 0),
        (["history_damaged", "cold_start"], 0),
    ],
)
def test_r9_counts_histories_that_are_missing_without_a_word(degraded, silent):
    loop = Loop()
    loop.ask(answering(degraded), np.random.default_rng(0))
    assert (loop.valid, loop.sent, loop.silent) == (1, 1, silent)


@pytest.mark.parametrize("stored, lost", [(["item000007"], 0), ([], 1), (["item000007"] * 2, 1)])
def test_r9_counts_acknowledged_events_that_are_not_stored_once(stored, lost):
    class Server:
        def client(self):
            events = [{"item_id": item} for item in stored]
            return httpx.Client(
                base_url="http://x",
                transport=httpx.MockTransport(
                    lambda _: httpx.Response(200, json={"events": events})
                ),
            )

    loop = Loop()
    loop.write(answering([], 503), 7)
    assert lost_events(Server(), [loop]) == 0
    loop.write(answering([]), 7)
    assert lost_events(Server(), [loop]) == lost
