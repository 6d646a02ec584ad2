"""R13 and R15: answers do not depend on drafts, neighbours and caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.filter_oracle import (
    Record,
    count_misfits,
    draw_filter,
    fits,
    read_items,
)
from benchmarks.campaign.site import LLM_NAME, Site
from benchmarks.campaign.traffic import Body, history, item
from tests.support.tiny_bundle import NUM_ITEMS

DRAFTERS = ("ngram", "suffix", "lookahead")
RULES = ("rejection", "block")
# Without penalties the untrained model repeats its last token, and every draft is right.
VARIED: Body = {"repetition_penalty": 2.5, "frequency_penalty": 2}
Call = tuple[str, Body]
AskAll = Callable[[Sequence[Call]], list[Any]]
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


@dataclass
class Losses:
    """What drafts, filters and exclusions changed that they must not change.

    Attributes:
        slates: Number of pairs of slates.
        texts: Number of texts with a draft.
        items: Number of items in slates.
        slates_differ: Pairs that differ.
        texts_differ: Texts that differ from the one without a draft, by acceptance rule.
        illegal: Items that are excluded, in the history or unknown.
        misfits: Items that the filter of the request does not allow.
        short: Slates with fewer items than k, filter and exclusions allow.
    """

    slates: int = 0
    texts: int = 0
    items: int = 0
    slates_differ: int = 0
    texts_differ: Counter[str] = field(default_factory=Counter)
    illegal: int = 0
    misfits: int = 0
    short: int = 0

    def compare_slates(
        self, ask_all: AskAll, items: Mapping[str, Record], random: np.random.Generator, number: int
    ) -> None:
        """Asks for a slate with and without drafts; every second number has a filter."""
        few, tree = history(random, 20), draw_filter(items, random) if number % 2 == 0 else None
        excluded = {item(int(n)) for n in random.integers(0, NUM_ITEMS, 30)}
        k = int(random.integers(1, 30))
        body: Body = {
            "history": few,
            "k": k,
            "beam_width": int(random.integers(k, 60)),
            "exclude": {"item_ids": sorted(excluded)},
        }
        if tree is not None:
            body["filter"] = tree
        pair = ask_all(
            [("/v1/recommend", {**body, "strategy": name}) for name in ("beam", "speculative")]
        )
        hidden = excluded | set(few)
        possible = {n for n, row in items.items() if tree is None or fits(row, tree)} - hidden
        self.slates += 1
        self.slates_differ += not same(*pair)
        for slate in pair:
            shown = [name for name, _ in slate]
            known = [name for name in shown if name in items]
            self.items += len(shown)
            self.illegal += len(shown) - len(known) + sum(name in hidden for name in known)
            self.misfits += 0 if tree is None else count_misfits(items, known, tree)
            self.short += len(shown) < min(k, len(possible))

    def compare_texts(self, ask_all: AskAll, random: np.random.Generator, number: int) -> None:
        """Asks for texts with and without drafts.

        The rules of RULES draw other texts of the same distribution, which R14 measures. With
        `top_k` 1 one token has all the probability, so each rule must write the plain text.
        """
        sampled = {**text_body(random, "none", number), **VARIED, "temperature": (0, 2)[number % 2]}
        sure = {**sampled, "temperature": 1, "top_k": 1}
        tried = [("sample", drafter, sampled) for drafter in DRAFTERS]
        tried += [(rule, DRAFTERS[number % len(DRAFTERS)], sure) for rule in RULES]
        calls: list[Call] = [("/v1/completions", body) for body in (sampled, sure)]
        calls += [
            ("/v1/completions", {**body, "speculation": {"drafter": drafter, "verifier": rule}})
            for rule, drafter, body in tried
        ]
        plain, likeliest, *drafted = ask_all(calls)
        self.texts += len(drafted)
        for (rule, _, body), text in zip(tried, drafted, strict=True):
            self.texts_differ[rule] += text != (plain if body is sampled else likeliest)


@check(
    "R13",
    "losslessness",
    "speculative slates and drafted texts beside plain ones, with filters and three verifiers",
    cases=110_000,
    minimum_s=14,
    weight=2,
)
def lossless(site: Site, budget: Budget) -> Finding:
    """Compares answers with and without drafts, and counts items that must not be shown."""
    random, found, items = np.random.default_rng(site.seed), Losses(), read_items(site.bundle)
    with (
        # In the invariant mode only `beam` answers, so slates come from a server of their own.
        site.server(llm=site.llm, drafters=list(DRAFTERS), invariant=True) as writer,
        site.server() as recommender,
        writer.client() as text_client,
        recommender.client() as slate_client,
        ThreadPoolExecutor(8) as pool,
    ):
        for number in budget.cases(110_000, 0.95, 10):
            found.compare_slates(asker(slate_client, pool), items, random, number)
            found.compare_texts(asker(text_client, pool), random, number)
    differ = found.texts_differ
    return Finding(
        found.slates + found.texts,
        (
            Figure("slates that differ", found.slates_differ, 0),
            Figure("sampled texts that differ", differ["sample"], 0),
            Figure(
                "texts by rejection or block verification that differ",
                differ["rejection"] + differ["block"],
                0,
            ),
            Figure("items that are excluded, seen or do not exist", found.illegal, 0),
            Figure("items that a filter does not allow", found.misfits, 0),
            Figure("slates shorter than filter and exclusions allow", found.short, 0),
        ),
        f"{found.slates} users, {found.texts} texts with {', '.join(DRAFTERS)}, {found.items} "
        "items; scores to 1e-5; with `invariant`, tokens and log-probabilities to the bit; "
        "filters are evaluated again, item by item",
    )


def asker(client: httpx.Client, pool: ThreadPoolExecutor) -> AskAll:
    """Returns a function that sends requests together and returns the contents of the answers."""

    def ask_all(calls: Sequence[Call]) -> list[Any]:
        return list(pool.map(lambda call: content(client.post(call[0], json=call[1])), calls))

    return ask_all


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
