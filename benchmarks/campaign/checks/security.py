"""R21 to R23: keys on every route, metric series, and what times tell other clients."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx
import numpy as np
from scipy import stats
from starlette.routing import BaseRoute

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import ADMIN_KEY, KEY, LLM_NAME, OTHER_KEY, Site
from benchmarks.campaign.traffic import Body, history, text_bodies
from recserve.config import ConfigError, ServerConfig
from recserve.server.app import create_app
from recserve.server.routing import OperationRoute

# The routes that need no key, as docs/reference/http.md promises. This list stands here because the
# code under test may be wrong.
OPEN_ROUTES = (
    *("/health", "/health/live", "/health/ready", "/ping"),
    *("/v2/health/live", "/v2/health/ready"),
)
PROMPT = 1500  # tokens; the model's tokens are bytes
LEARNED = 10  # texts that a drafter learns from
VARIED: Body = {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}
WRONG = (
    None,
    "Bearer",
    KEY,
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY}x",
    f"Basic {KEY}",
    f"Digest {KEY}",
)


@dataclass
class Refusals:
    """What requests with wrong keys were answered.

    Attributes:
        tried: Number of requests.
        passed: Those that were not refused.
    """

    tried: int = 0
    passed: list[str] = field(default_factory=list)


def try_wrong_keys(client: httpx.Client, routes: Iterable[BaseRoute]) -> Refusals:
    """Calls every method of every route with wrong keys, but for OPEN_ROUTES."""
    found = Refusals()
    for route in routes:
        path = getattr(route, "path", "")
        if path in OPEN_ROUTES:
            continue
        address = re.sub(r"\{[^}]*\}", "x", path)
        keys = (*WRONG, f"Bearer {KEY}") if path.startswith("/admin/") else WRONG
        for method in sorted(getattr(route, "methods", None) or ("GET",)):
            for key in keys:
                headers = {} if key is None else {"Authorization": key}
                status = client.request(method, address, headers=headers).status_code
                found.tried += 1
                if status != 401:
                    found.passed.append(f"{method} {path} {status}")
    return found


@check("R21", "auth", "every route of the application without a valid key", cases=300, minimum_s=6)
def auth(site: Site, budget: Budget) -> Finding:
    """Calls every method of every route with wrong keys, and checks the default address."""
    app = create_app(ServerConfig(bundle=site.bundle))
    with (
        site.server(api_keys=[KEY], admin_keys=[ADMIN_KEY]) as server,
        server.client() as client,
    ):
        found = try_wrong_keys(client, app.routes)
        accepted = client.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    try:
        ServerConfig.load({"bundle": site.bundle, "host": "0.0.0.0"})
        open_to_all = 1
    except ConfigError:
        open_to_all = 0
    routes = sum(isinstance(route, OperationRoute) for route in app.routes)
    return Finding(
        found.tried,
        (
            Figure("share refused", 1 - len(found.passed) / found.tried, 1, at_least=True),
            Figure("a valid key is refused", accepted.status_code != 200, 0),
            Figure("starts on 0.0.0.0 without a key", open_to_all, 0),
        ),
        f"{routes} routes of the route table, {len(OPEN_ROUTES)} of them open; "
        + "; ".join(found.passed[:3]),
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
        server.metrics()  # the scrape itself is a request, and counts from the next one on
        before = set(server.metrics())
        for _ in budget.cases(1_000_000 // 7, 0.9, 30):
            sent += 7
            broken += request().status_code >= 500
        grown = set(server.metrics()) - before
    return Finding(
        sent,
        (Figure("new series", len(grown), 0), Figure("5xx", broken, 0)),
        f"{len(before)} series" + "".join(f"; new: {name}" for name in sorted(grown)[:3]),
    )


@check(
    "R23",
    "timing channel",
    "cached or not, told from the time to the first token; and what drafters learn from outputs",
    cases=10_000,
    minimum_s=16,
)
def timing_channel(site: Site, budget: Budget) -> Finding:
    """Probes prompts that another key has sent or not, and prompts that the same key has sent."""
    random = np.random.default_rng(site.seed)
    times: dict[str, list[float]] = {"other key": [], "own key": [], "new": []}
    with (
        site.server(llm=site.llm, api_keys=[KEY, OTHER_KEY], kv_bytes=2**26) as server,
        server.client() as client,
    ):
        told, repeated = learned_drafts(client, random)

        def ask(key: str, prompt: str) -> float:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": LLM_NAME, "prompt": prompt, "max_tokens": 1}
            began = time.perf_counter()
            answer: httpx.Response = client.post("/v1/completions", json=body, headers=headers)
            seconds = time.perf_counter() - began
            answer.raise_for_status()
            return seconds

        for number in budget.cases(10_000, 0.95, 90):
            prompt = "".join(chr(97 + n) for n in random.integers(0, 26, PROMPT))
            kind = ("other key", "own key", "new")[number % 3]
            other = "".join(reversed(prompt))
            # Every probe follows one request of the other key or of the prober's own.
            ask(OTHER_KEY if kind == "own key" else KEY, other if kind == "new" else prompt)
            times[kind].append(ask(OTHER_KEY, prompt))
    across = auc(times["other key"], times["new"])
    within = auc(times["own key"], times["new"])
    probes = sum(len(one) for one in times.values())
    few = len(times["new"])
    # With few probes an AUC of 1/2 strays by this much (99 %); it counts beside the bound.
    noise = 2.6 * (1 / 6 / few) ** 0.5
    return Finding(
        probes,
        (
            Figure("AUC between keys, less chance's share", abs(across - 0.5) + 0.5 - noise, 0.55),
            Figure("AUC within a key: the probe works", within, 0.8, at_least=True),
            Figure("texts drafted differently after another key wrote them", told, 0),
            Figure("accepted drafts, own key again / at first", repeated, 1.1, at_least=True),
        ),
        f"AUC {across:.3f} between keys and {within:.3f} within one, chance ± {noise:.3f}; "
        f"medians {1e3 * np.median(times['other key']):.1f}, "
        f"{1e3 * np.median(times['own key']):.1f} and {1e3 * np.median(times['new']):.1f} ms",
    )


def learned_drafts(client: httpx.Client, random: np.random.Generator) -> tuple[int, float]:
    """Asks for texts with a drafter that learns from outputs.

    Both keys ask for the same texts in the same order, the second one right after the first. If a
    key learned from the other one, its drafts would differ from the first key's.

    Returns:
        Number of texts with other numbers of accepted tokens for the second key, and the ratio of
        accepted tokens when the first key asks again for all of them.
    """

    def accepted(key: str, number: int) -> int:
        body: Body = {**bodies[number], **VARIED, "speculation": {"drafter": "suffix"}}
        headers = {"Authorization": f"Bearer {key}"}
        answer = client.post("/v1/completions", json=body, headers=headers).raise_for_status()
        count: int = answer.json()["metrics"]["speculative_decoding"]["num_accepted_tokens"]
        return count

    bodies = text_bodies(random, LEARNED, 48)
    first = [(accepted(KEY, n), accepted(OTHER_KEY, n)) for n in range(LEARNED)]
    again = sum(accepted(KEY, n) for n in range(LEARNED))
    return sum(one != other for one, other in first), again / sum(one for one, _ in first)


def auc(cached: list[float], new: list[float]) -> float:
    """Returns the probability that a cached prompt is answered faster than a new one."""
    if not cached or not new:
        return float("nan")
    rank = stats.mannwhitneyu(new, cached).statistic
    return float(rank / (len(cached) * len(new)))
