"""R21 and R22: keys on every route, and the number of metric series."""

from __future__ import annotations

import re
import uuid

import httpx
import numpy as np
from fastapi.routing import APIRoute

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import ADMIN_KEY, KEY, Site
from benchmarks.campaign.traffic import history
from recserve.config import ConfigError, ServerConfig
from recserve.server.app import create_app
from recserve.server.transport.gate import ADMIN as ADMIN_PATHS
from recserve.server.transport.gate import OPEN_PATHS

WRONG = (
    None,
    "Bearer",
    KEY,
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY}x",
    f"Basic {KEY}",
    f"Digest {KEY}",
)


@check("R21", "auth", "every route of the application without a valid key", cases=300, minimum_s=6)
def auth(site: Site, budget: Budget) -> Finding:
    """Calls every method of every route with wrong keys, and checks the default address."""
    app = create_app(ServerConfig(bundle=site.bundle))
    paths = [
        (method, route.path)
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or ("GET",))
    ]
    refused = tried = 0
    passed: list[str] = []
    with (
        site.server(api_keys=[KEY], admin_keys=[ADMIN_KEY]) as server,
        server.client() as client,
    ):
        for method, path in paths:
            if path in OPEN_PATHS:
                continue
            address = re.sub(r"\{[^}]*\}", "x", path)
            keys = (*WRONG, f"Bearer {KEY}") if path.startswith(ADMIN_PATHS) else WRONG
            for key in keys:
                headers = {} if key is None else {"Authorization": key}
                answer = client.request(method, address, headers=headers)
                tried += 1
                refused += answer.status_code == 401
                if answer.status_code != 401:
                    passed.append(f"{method} {path} {answer.status_code}")
        accepted = client.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    try:
        ServerConfig.load({"bundle": site.bundle, "host": "0.0.0.0"})
        open_to_all = 1
    except ConfigError:
        open_to_all = 0
    routes = sum(isinstance(route, APIRoute) for route in app.routes)
    return Finding(
        tried,
        (
            Figure("share refused", refused / tried, 1, at_least=True),
            Figure("a valid key is refused", accepted.status_code != 200, 0),
            Figure("starts on 0.0.0.0 without a key", open_to_all, 0),
        ),
        f"{routes} routes of the route table; " + "; ".join(passed[:3]),
    )


@check(
    "R22", "metric series", "drawn users, items, headers and paths", cases=1_000_000, minimum_s=8
)
def series(site: Site, budget: Budget) -> Finding:
    """Counts the series before and after requests that hold values never seen before."""
    random = np.random.default_rng(site.seed)
    sent = broken = 0
    with site.server() as server, server.client() as client:

        def request() -> httpx.Response:
            drawn = uuid.UUID(bytes=random.bytes(16)).hex
            body = {"user": {"id": drawn}, "history": history(random, 3), "k": 1}
            client.get(f"/v1/items/{drawn}")
            client.get(f"/{drawn}/{drawn}")
            client.request(drawn.upper()[:8], "/v1/recommend")
            client.post("/v1/chat/completions", json={"model": drawn, "messages": []})
            client.post("/v1/recommend", json={**body, "strategy": drawn})
            event = {"user_id": drawn, "item_id": drawn, "type": drawn}
            client.post("/v1/events", json={"events": [event]})
            headers = {"X-Request-Id": drawn, f"X-{drawn}": drawn, "X-Deadline-Ms": "9999"}
            return client.post("/v1/recommend", json=body, headers=headers)

        for _ in range(20):
            request()
        before = set(server.metrics())
        for _ in budget.cases(1_000_000 // 7, 0.9):
            sent += 7
            broken += request().status_code >= 500
        grown = set(server.metrics()) - before
    return Finding(
        sent,
        (Figure("new series", len(grown), 0), Figure("5xx", broken, 0)),
        f"{len(before)} series" + "".join(f"; new: {name}" for name in sorted(grown)[:3]),
    )
