"""R13 and R15: answers do not depend on drafts, neighbours and caches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import LLM_NAME, Site
from benchmarks.campaign.traffic import Body, history, item
from tests.support.tiny_bundle import NUM_ITEMS

DRAFTERS = ("ngram", "suffix", "lookahead")
Call = tuple[str, Body]
Slate = list[tuple[str, float]]
TOLERANCE = 1e-5
SIZES = (1, 8, 64, 256)


def text_body(random: np.random.Generator, drafter: str, number: int) -> Body:
    """Returns a completion that logs its probabilities; the prompt repeats, so drafts are used."""
    prompt = "".join(chr(97 + n) for n in random.integers(0, 4, random.integers(1, 30)))
    return {
        "model": LLM_NAME,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": (0, 0.8)[number % 2],
        "seed": number,
        "logprobs": 2,
        "speculation": {"drafter": drafter},
    }


def same(one: Slate, other: Slate) -> bool:
    """Returns whether scores agree to TOLERANCE, and items but for the order of ties."""
    if len(one) != len(other):
        return False
    near = all(abs(a - b) <= TOLERANCE for (_, a), (_, b) in zip(one, other, strict=True))
    scores = dict(one)
    tied = all(
        a == b or abs(scores.get(b, np.inf) - score) <= TOLERANCE
        for (a, score), (b, _) in zip(one, other, strict=True)
    )
    return near and tied


def content(answer: httpx.Response) -> Any:
    """Returns items with scores, or the text with its log-probabilities."""
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code}: {answer.text[:300]}")
    said = answer.json()
    if "items" in said:
        return [(one["item_id"], one["score"]) for one in said["items"]]
    (choice,) = said["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]


@check(
    "R13",
    "losslessness",
    "speculative slates and drafted texts beside plain ones",
    cases=110_000,
    minimum_s=14,
    weight=2,
)
def lossless(site: Site, budget: Budget) -> Finding:
    """Compares answers with and without drafts, and counts items that must not be shown."""
    random = np.random.default_rng(site.seed)
    users = texts = slates_differ = texts_differ = illegal = outputs = 0
    known = {item(n) for n in range(NUM_ITEMS)}
    with (
        # In the invariant mode only `beam` answers, so slates come from a server of their own.
        site.server(llm=site.llm, drafters=list(DRAFTERS), invariant=True) as writer,
        site.server() as recommender,
        writer.client() as text_client,
        recommender.client() as slate_client,
        ThreadPoolExecutor(8) as pool,
    ):

        def ask(call: Call) -> Any:
            client = slate_client if call[0] == "/v1/recommend" else text_client
            return content(client.post(call[0], json=call[1]))

        for number in budget.cases(110_000, 0.95, 10):
            hidden = {item(int(n)) for n in random.integers(0, NUM_ITEMS, 30)}
            k = int(random.integers(1, 30))
            slate: Body = {
                "history": history(random, 20),
                "k": k,
                "beam_width": int(random.integers(k, 60)),
                "exclude": {"item_ids": sorted(hidden)},
            }
            calls: list[Call] = [
                ("/v1/recommend", {**slate, "strategy": name}) for name in ("beam", "speculative")
            ]
            body = text_body(random, "none", number)
            calls += [
                ("/v1/completions", {**body, "speculation": {"drafter": name}})
                for name in ("none", *DRAFTERS)
            ]
            beam, speculative, plain, *drafted = pool.map(ask, calls)
            users += 1
            texts += len(drafted)
            slates_differ += not same(beam, speculative)
            texts_differ += sum(one != plain for one in drafted)
            shown = [name for name, _ in (*beam, *speculative)]
            outputs += len(shown)
            illegal += sum(name in hidden or name not in known for name in shown)
    return Finding(
        users + texts,
        (
            Figure("slates that differ", slates_differ, 0),
            Figure("texts that differ", texts_differ, 0),
            Figure("items that are excluded or do not exist", illegal, 0),
        ),
        f"{users} users, {texts} texts with {', '.join(DRAFTERS)}, {outputs} items; "
        "scores to 1e-5; with `invariant`, tokens and log-probabilities to the bit",
    )


@check(
    "R15",
    "batch invariance",
    "the same request beside 0 to 255 drawn ones, with `invariant`",
    cases=10_000,
    minimum_s=10,
)
def invariance(site: Site, budget: Budget) -> Finding:
    """Compares slates, rankings and texts bit by bit."""
    random = np.random.default_rng(site.seed)
    candidates = [{"item_id": item(n)} for n in range(40, 60)]
    few = history(random)
    fixed: Sequence[Call] = (
        ("/v1/recommend", {"history": few, "k": 10, "strategy": "beam"}),
        ("/v1/rank", {"history": few, "candidates": candidates}),
        ("/v1/completions", text_body(random, "none", 0)),
        ("/v1/completions", text_body(random, "ngram", 1)),
    )
    tried = different = 0
    with (
        site.server(llm=site.llm, drafters=["ngram"], invariant=True) as server,
        ThreadPoolExecutor(max(SIZES)) as pool,
    ):

        def ask(call: Call) -> Any:
            # With a connection of its own: httpx shares a pool badly among so many threads.
            return content(server.post(*call))

        expected = [ask(call) for call in fixed]
        for number in budget.cases(10_000, 0.9, 8):
            size = SIZES[number % len(SIZES)]
            others: list[Call] = [
                (
                    ("/v1/recommend", {"history": history(random), "k": 5})
                    if random.random() < 0.7
                    else ("/v1/completions", text_body(random, "ngram", n))
                )
                for n in range(size - 1)
            ]
            which, place = number % len(fixed), int(random.integers(size))
            found = list(pool.map(ask, [*others[:place], fixed[which], *others[place:]]))
            tried += 1
            different += found[place] != expected[which]
    return Finding(
        tried,
        (Figure("answers with another bit", different, 0),),
        f"{len(fixed)} kinds of requests in crowds of {', '.join(map(str, SIZES))}",
    )
