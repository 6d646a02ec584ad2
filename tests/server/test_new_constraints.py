"""Constraints that nobody has asked for before: they are compiled one at a time, beside others."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.chat_templates import TEMPLATES
from tests.support.live_server import live
from tests.support.scripted_text import scripted

pytest.importorskip("llguidance")

CROWD = 12  # more than the threads that prepare texts


def fields_of(kind: str, number: int) -> dict:
    """Fields of a chat or a completion that need a constraint, another one for each number."""
    schema = {"type": "object", "properties": {f"k{number}": {"type": "integer"}}}
    return {
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "regex": {"guided_regex": f"(a|b){{{number + 1}}}"},
        "choice": {"structured_outputs": {"choice": [f"a{number}", "b"]}},
        "tool": {"tools": [{"function": {"name": f"f{number}", "parameters": schema}}]},
    }[kind]


def test_requests_without_a_new_constraint_do_not_wait_for_others(tmp_path, monkeypatch):
    from recserve.service.text.constraints.compiler import ConstraintCompiler

    draw = random.Random(0)
    held, begun, running, most = threading.Event(), threading.Event(), [0], [0]
    compiles = ConstraintCompiler._compile

    def slow(self, wanted):
        running[0] += 1
        most[0] = max(most[0], running[0])
        begun.set()
        held.wait(60)
        running[0] -= 1
        return compiles(self, wanted)

    service = scripted(tmp_path, lambda prompt, seed: "x", source=TEMPLATES["hermes"], context=4000)
    with live(service) as server, ThreadPoolExecutor(CROWD + 1) as pool:

        def ask(**fields) -> httpx.Response:
            turns = {"messages": [{"role": "user", "content": "hi"}]}
            if draw.random() < 0.5 and "tools" not in fields:
                return server.post("/v1/completions", json={"prompt": "hi", **fields}, timeout=60)
            return server.post("/v1/chat/completions", json=turns | fields, timeout=60)

        known = [fields_of(kind, 99) for kind in ("schema", "regex", "choice", "tool")]
        assert [ask(**fields).status_code for fields in known] == [200] * 4
        monkeypatch.setattr(ConstraintCompiler, "_compile", slow)
        kinds = ("schema", "regex", "choice", "tool")
        crowd = [
            pool.submit(ask, **fields_of(draw.choice(kinds), number)) for number in range(CROWD)
        ]
        assert begun.wait(30)
        for fields in ({}, *known, {"stream": True}):
            for _ in range(3):
                assert ask(**fields).status_code == 200, fields
        assert not any(one.done() for one in crowd)
        late = pool.submit(ask, **fields_of("regex", 50))
        held.set()
        assert [one.result().status_code for one in (*crowd, late)] == [200] * (CROWD + 1)
        assert most == [1]
