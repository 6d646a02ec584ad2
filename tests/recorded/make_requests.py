"""Draws the requests of each world from a seed; `record.py` stores them with their answers.

Requests leave out what is known to change: drafts and settings that the redesign deletes, names
that later issues have reserved, and answers that depend on a clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.recorded.cases import Case, file_name
from tests.recorded.make_models import NUM_ITEMS, NUM_USERS, PARTS, STYLES, TOPICS, TYPES
from tests.recorded.worlds import ADMIN_KEY, API_KEY, OTHER_KEY

Body = dict[str, Any]
STRATEGIES = ("auto", "beam", "speculative", "nezha", "rpg", "dense", "specgr")
LOSSLESS = ("sample", "rejection", "multi_step", "block")
BROKEN_BODIES = ("", "{", "[]", "null", '"text"', "{'k': 1}", '{"k": 1e999}', "[" * 3000, "nan")
LONG_ID = "x" * 257


@dataclass
class Writer:
    """Collects the requests of one world, in the order in which they are sent."""

    draw: random.Random
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        method: str,
        path: str,
        body: Any = None,
        raw: str | None = None,
        headers: dict[str, str] | None = None,
        route: str | None = None,
    ) -> None:
        """Adds a request; `route` is its path template where the path has an id."""
        name = file_name(method, route or path.partition("?")[0])
        at = len(self.cases)
        self.cases.append(Case(at, name, method, path, body, raw, headers or {}))

    def post(self, path: str, body: Any, **more: Any) -> None:
        """Adds a POST request."""
        self.add("POST", path, body, **more)

    def broken(
        self, path: str, base: Body, wrong: dict[str, Iterable[Any]], method: str = "POST"
    ) -> None:
        """Adds requests with one wrong field each, and bodies that are no JSON objects.

        Args:
            path: Path of the route.
            base: A valid body.
            wrong: Wrong values by field; dots in names nest. `...` leaves the field out.
            method: HTTP method.
        """
        for name, values in wrong.items():
            for value in values:
                self.add(method, path, changed(base, name.split("."), value))
        for raw in BROKEN_BODIES:
            self.add(method, path, raw=raw)


def changed(base: Any, steps: list[str], value: Any) -> Any:
    """Returns a copy of a body with one field replaced, or left out for `...`."""
    if not steps:
        return value
    if isinstance(base, list):
        index = int(steps[0])
        return [*base[:index], changed(base[index], steps[1:], value), *base[index + 1 :]]
    if value is ... and len(steps) == 1:
        return {name: inner for name, inner in base.items() if name != steps[0]}
    return {**base, steps[0]: changed(base.get(steps[0], {}), steps[1:], value)}


# Items and users.


def item(draw: random.Random) -> str:
    """Returns the id of an item of the bundles."""
    return f"item{draw.randrange(NUM_ITEMS):03d}"


def user(draw: random.Random) -> str:
    """Returns the id of a user of the bundles."""
    return f"user{draw.randrange(NUM_USERS):03d}"


def history(draw: random.Random, most: int = 12) -> list[str]:
    """Returns items, rarely with an unknown one or a repeated one."""
    items = [item(draw) for _ in range(draw.randint(1, most))]
    if draw.random() < 0.1:
        items.insert(draw.randrange(len(items)), "unknown-item")
    return items + items[:1] if draw.random() < 0.1 else items


def whose(draw: random.Random) -> Body:
    """Returns whom a request is for."""
    kind = draw.random()
    if kind < 0.55:
        return {"user": {"id": user(draw)}}
    if kind < 0.6:
        return {"user": {"id": "a new user"}}
    if kind < 0.7:
        return {"user": {"id": user(draw)}, "history": history(draw)}
    return {"history": history(draw)}


def condition(draw: random.Random, depth: int = 2) -> Body:
    """Returns a filter."""
    kind = draw.random()
    if depth and kind < 0.4:
        parts = [condition(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return {draw.choice(["and", "or"]): parts}
    if depth and kind < 0.5:
        return {"not": condition(draw, depth - 1)}
    topic = draw.choice(list(TOPICS))
    low, high = sorted((round(draw.uniform(4, 20), 1), round(draw.uniform(8, 40), 1)))
    return draw.choice(
        [
            {"eq": ["category", f"{topic} > {draw.choice(PARTS)}"]},
            {"in": ["category", [topic, "Gifts"]]},
            {"in": ["category", [draw.choice(["Tools", "Care", "Daily"])]]},
            {"eq": ["brand", f"{topic} house {draw.randrange(5)}"]},
            {"eq": ["fresh", draw.random() < 0.5]},
            {"eq": ["tags", draw.choice(["eco", "sale"])]},
            {"in": ["tags", ["new", "b-ware"]]},
            {"in": ["item_id", [item(draw) for _ in range(30)]]},
            {"range": ["price", low, None]},
            {"range": ["price", low, high + 5]},
            {"range": ["stock", None, draw.randint(5, 30)]},
            {"range": ["stock", 10, 30]},
            {"in": ["stock", list(range(draw.randrange(5), 40, 3))]},
        ]
    )


def recommendation(draw: random.Random, strategies: tuple[str, ...] = STRATEGIES) -> Body:
    """Returns a valid body of /v1/recommend."""
    body = {**whose(draw), "k": draw.choice([1, 2, 3, 4, 5, 6, 8])}
    strategy = draw.choice(strategies)
    if strategy != "auto" or draw.random() < 0.5:
        body["strategy"] = strategy
    if draw.random() < 0.3:
        body["beam_width"] = draw.choice([8, 10, 16, 40])
    if strategy not in ("rpg", "dense", "specgr") and draw.random() < 0.15:
        body["dense_weight"] = draw.choice([0, 0.5, 1, 3.5])
    if strategy == "dense" and draw.random() < 0.6:
        body["outcome"] = {kind: draw.choice([0.5, 1, 2]) for kind in draw.sample(TYPES, 2)}
    if draw.random() < 0.3:
        body["filter"] = condition(draw)
    if draw.random() < 0.25:
        body["exclude"] = {"seen": draw.random() < 0.5}
        if draw.random() < 0.6:
            body["exclude"]["item_ids"] = [item(draw) for _ in range(draw.choice([1, 3, 40]))]
        if draw.random() < 0.2:
            body["exclude"] = {"seen_within_s": 3600}
    if draw.random() < 0.15:
        body["diversity"] = draw.choice(
            [
                {"category": 1},
                {"category": 2},
                {"prefix": [0, 2]},
                {"category": 2, "prefix": [1, 1]},
            ]
        )
    if draw.random() < 0.05:
        body["request_id"] = f"given-{draw.randrange(1000)}"
    if draw.random() < 0.05:
        body["timeout_ms"] = 60_000
    return body


BAD_USERS = ([], {}, {"id": ""}, {"id": LONG_ID}, {"id": None}, {"name": "x"})
BAD_HISTORIES = ("item001", [""], [None], {}, [["item001"]], ["x"] * 4097)
BAD_TIMEOUTS = (0, -1, 60_001, 1.5, "100", "soon")
BAD_REQUEST_IDS = ("", "a b", "x" * 129, 7, "ä")
BAD_FILTERS = (
    *([], "price", 3, {}, {"eq": []}, {"eq": ["price"]}, {"eq": ["prize", 3]}),
    *({"in": ["brand", []]}, {"in": ["brand", "x"]}, {"range": ["price", 1]}),
    *({"range": ["brand", 1, 2]}, {"range": ["price", None, None]}, {"range": ["price", "a", 3]}),
    *({"and": []}, {"and": {}}, {"not": []}, {"xor": []}, {"eq": ["price", 1], "not": {}}),
    {"not": {"not": {"not": {"not": {"not": {"not": {"not": {"not": {"eq": ["stock", 1]}}}}}}}}},
    {"or": [{"eq": ["stock", n]} for n in range(65)]},
)


def recommend_cases(to: Writer, count: int, strategies: tuple[str, ...] = STRATEGIES) -> None:
    """Adds valid recommendations, and some with the search explained."""
    for _ in range(count):
        to.post("/v1/recommend", recommendation(to.draw, strategies))
    for strategy in strategies * 2:
        body = {**whose(to.draw), "k": 2, "strategy": strategy, "explain": True}
        to.post("/v1/recommend", body | ({} if strategy == "rpg" else {"beam_width": 2}))


def recommend_errors(to: Writer) -> None:
    """Adds recommendations that are refused."""
    base: Body = {"user": {"id": "user003"}, "k": 3}
    wrong = {
        "user": (*BAD_USERS, None, ...),
        "history": BAD_HISTORIES,
        "k": (0, -1, 1001, 2.5, "3", None, [], 10**30, True),
        "strategy": ("", "best", None, 3, "x" * 65),
        "beam_width": (0, 1, 2, -5, 7.5, "9"),
        "dense_weight": (-0.1, 100.5, "1", []),
        "exclude": ([], {"item_ids": [""]}, {"item_ids": "x"}, {"seen": 1}, {"seen": None}),
        "exclude.seen_within_s": (0, -5, 315_360_001, "60"),
        "exclude.items": (["item001"],),
        "filter": BAD_FILTERS,
        "outcome": ({}, [], {"click": 0}, {"click": -1}, {"clicks": 1}, {"click": 1}),
        "diversity": ([], {"category": 0}, {"category": 1001}, {"prefix": [0]}, {"size": 1}),
        "diversity.prefix": ([-1, 1], [0, 0], [64, 1], [30, 1], [0, 1, 2], "01"),
        "timeout_ms": BAD_TIMEOUTS,
        "request_id": BAD_REQUEST_IDS,
        "explain": (1, "yes", None),
        "kk": (3,),
        "histroy": ([],),
        "Filter": ({},),
    }
    to.broken("/v1/recommend", base, wrong)
    for name, value in (
        *(("X-Deadline-Ms", v) for v in ("0", "-3", "abc", "1.5", "99999", "60000")),
        *(("X-Request-Id", v) for v in ("with space", "x" * 129, "fine-1:2.3_4")),
        ("Origin", "http://elsewhere.example"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Host", "elsewhere.example"),
        ("Host", "app.localhost"),
    ):
        to.post("/v1/recommend", base, headers={name: value})
    dense = {**base, "strategy": "dense"}
    for mix in ({"click": 1}, {"save": 1, "purchase": 3}, {"view": 1}, {"click": 1, "view": 1}):
        to.post("/v1/recommend", {**dense, "outcome": mix})
    for strategy in ("rpg", "dense", "specgr"):
        to.post("/v1/recommend", {**base, "strategy": strategy, "dense_weight": 1})
    nothing = {"eq": ["brand", "no such brand"]}
    for strategy in STRATEGIES:
        to.post("/v1/recommend", {**base, "strategy": strategy, "filter": nothing})
        to.post("/v1/recommend", {"history": [], "strategy": strategy, "k": 4})
        to.post("/v1/recommend", {"history": ["gone", "unknown"], "strategy": strategy, "k": 2})


def ranking(draw: random.Random) -> Body:
    """Returns a valid body of /v1/rank."""
    candidates: list[Body] = []
    for _ in range(draw.choice([1, 2, 4, 6, 9])):
        one: Body = {"item_id": item(draw)}
        if draw.random() < 0.15:
            one["features"] = {draw.choice(["price", "stock"]): round(draw.uniform(1, 30), 2)}
        candidates.append(one)
    if draw.random() < 0.2:
        candidates.append({"item_id": "unknown-item"})
    if draw.random() < 0.25:  # all of them: beside one with a time, the others are shown now
        for one in candidates:
            one["shown_at"] = f"2023-11-{draw.randint(15, 28)}T10:{draw.randint(10, 59)}:00Z"
    if draw.random() < 0.15:
        candidates.append(candidates[0])
    body = {**whose(draw), "candidates": candidates}
    if draw.random() < 0.7:
        body["scorer"] = draw.choice(["ranker", "likelihood", "auto"])
    if body.get("scorer") == "ranker" and draw.random() < 0.4:
        body["sort_by"] = draw.choice(["click", "conversion"])
    return body


def rank_cases(to: Writer, count: int) -> None:
    """Adds valid rankings."""
    for _ in range(count):
        to.post("/v1/rank", ranking(to.draw))


def rank_errors(to: Writer) -> None:
    """Adds rankings that are refused."""
    base = {"user": {"id": "user004"}, "candidates": [{"item_id": "item001"}]}
    wrong = {
        "user": (*BAD_USERS, ...),
        "history": BAD_HISTORIES,
        "candidates": (..., [], {}, "item001", [None], ["item001"], [{}], [{"item_id": ""}]),
        "candidates.0.item_id": (LONG_ID, None, []),
        "candidates.0.features": ({"price": "a"}, [], {"prize": 1}, {"price": 1e9}, {"": 1}),
        "candidates.0.shown_at": ("yesterday", "2026-01-01", "2026-01-01T10:00:00", ""),
        "candidates.0.position": (1,),
        "scorer": ("", "best", None, 5),
        "sort_by": ("", "clicks", 5),
        "timeout_ms": BAD_TIMEOUTS,
        "request_id": BAD_REQUEST_IDS,
        "k": (3,),
    }
    to.broken("/v1/rank", base, wrong)
    to.post("/v1/rank", {**base, "scorer": "likelihood", "sort_by": "click"})
    to.post("/v1/rank", {**base, "scorer": "likelihood", "sort_by": "likelihood"})
    to.post("/v1/rank", {"history": [], "candidates": [{"item_id": "gone"}]})


def rank_batch_cases(to: Writer, count: int) -> None:
    """Adds batches of rankings, some of which hold an invalid one."""
    draw = to.draw
    for _ in range(count):
        requests = [ranking(draw) for _ in range(draw.choice([1, 1, 2, 3]))]
        if draw.random() < 0.3:
            bad: Body = {"user": {"id": user(draw)}, "candidates": [{"item_id": item(draw)}]}
            bad |= draw.choice([{"scorer": "best"}, {"sort_by": "clicks"}, {"user": None}])
            requests.insert(draw.randint(0, len(requests)), bad)
        body: Body = {"requests": requests}
        if draw.random() < 0.2:
            body["request_id"] = f"batch-{draw.randrange(99)}"
        to.post("/v1/rank:batch", body)
    base = {"requests": [{"user": {"id": "user004"}, "candidates": [{"item_id": "item001"}]}]}
    wrong = {
        "requests": (..., [], {}, [None], [{}], base["requests"] * 257),
        "requests.0.candidates": ([], "x"),
        "requests.0.cand": ([],),
        "timeout_ms": BAD_TIMEOUTS,
        "request_id": BAD_REQUEST_IDS,
        "request": ([],),
    }
    to.broken("/v1/rank:batch", base, wrong)


def tensor(name: str, kind: str, shape: list[int], data: list[Any]) -> Body:
    """Returns an input of the Open Inference Protocol."""
    return {"name": name, "datatype": kind, "shape": shape, "data": data}


def inference(draw: random.Random, model: str) -> Body:
    """Returns a valid body of /v2/models/{name}/infer."""
    rows = draw.choice([1, 1, 2, 3])
    if draw.random() < 0.6:
        users = [user(draw) for _ in range(rows)]
        inputs = [tensor("user_id", "BYTES", [rows], users)]
    else:
        lists = [[item(draw) for _ in range(3)] for _ in range(rows)]
        lists[-1][2] = ""
        flat = [one for row in lists for one in row]
        data: list[Any] = flat if draw.random() < 0.5 else lists
        inputs = [tensor("history", "BYTES", [rows, 3], data)]
    parameters: Body = {}
    if model == "recommend":
        inputs.append(tensor("k", "INT64", [1], [draw.choice([1, 2, 4])]))
        if draw.random() < 0.8:
            parameters["strategy"] = draw.choice(STRATEGIES)
        if draw.random() < 0.2:
            parameters["exclude_seen"] = False
        if draw.random() < 0.2:
            parameters["beam_width"] = 12
    else:
        columns = draw.choice([1, 2, 4])
        data = [item(draw) for _ in range(rows * columns)]
        if draw.random() < 0.2:
            data[-1] = "unknown-item"
        inputs.append(tensor("candidates", "BYTES", [rows, columns], data))
        if draw.random() < 0.7:
            parameters["scorer"] = draw.choice(["ranker", "likelihood"])
    body: Body = {"inputs": inputs}
    if parameters:
        body["parameters"] = parameters
    if draw.random() < 0.2:
        body["id"] = f"infer-{draw.randrange(99)}"
    if draw.random() < 0.2:
        body["outputs"] = [{"name": draw.choice(["strategy", "degraded"])}]
    return body


def inference_cases(to: Writer, count: int) -> None:
    """Adds requests of the Open Inference Protocol; none has rows of different lengths."""
    for path in ("/v2", "/v2/", "/v2/models/recommend", "/v2/models/rank", "/v2/models/other"):
        to.add("GET", path, route="/v2")
    for name in ("recommend", "rank", "other"):
        to.add("GET", f"/v2/models/{name}/ready", route="/v2")
        to.post(f"/v2/models/{name}", {}, route="/v2")
    for model in ("recommend", "rank"):
        path = f"/v2/models/{model}/infer"
        for _ in range(count):
            to.post(path, inference(to.draw, model))
        base: Body = {"inputs": [tensor("user_id", "BYTES", [1], ["user001"])]}
        if model == "rank":
            base["inputs"].append(tensor("candidates", "BYTES", [1, 1], ["item001"]))
        one = base["inputs"][0]
        wrong = {
            "inputs": (..., [], {}, [one] * 2, [one] * 9, [{}]),
            "inputs.0.name": ("users", "", None),
            "inputs.0.datatype": ("INT64", "FP32", "BYTE", None),
            "inputs.0.shape": ([], [2], [1, 1, 1], "1", [0], [-1]),
            "inputs.0.data": (["user001", "user002"], [], [5], [None], "user001"),
            "parameters": ([], {"k": 1}, {"strategy": "best"}, {"scorer": "best"}),
            "parameters.timeout_ms": (0, 60_001),
            "parameters.exclude_seen": (1, "no"),
            "outputs": ([{"name": "nothing"}], [{}], "all"),
            "id": BAD_REQUEST_IDS,
        }
        to.broken(path, base, wrong)
    to.post("/v2/models/other/infer", {"inputs": []}, route="/v2")


# Lists, events and items.


def list_cases(to: Writer, count: int) -> None:
    """Adds pages of items and users."""
    draw = to.draw
    words = [*STYLES, *(word for words in TOPICS.values() for word in words), "ITEM00", "item042"]
    for _ in range(count):
        query = draw.choice(["", f"query={draw.choice(words).replace('é', '%C3%A9')}&"])
        after = draw.choice(["", f"&after={draw.randrange(0, 200, 7)}"])
        to.add("GET", f"/v1/items?{query}limit={draw.choice([1, 2, 3])}{after}")
        prefix = draw.choice(["", f"prefix=user{draw.randrange(25):02d}&", "prefix=%C3%A9&"])
        after = draw.choice(["", f"&after={user(draw)}"])
        to.add("GET", f"/v1/users?{prefix}limit={draw.choice([1, 3, 7])}{after}")
    for path, more in (("/v1/items", "query"), ("/v1/users", "prefix")):
        for query in (
            *("limit=0", "limit=101", "limit=x", "limit=", "limit=1&limit=2", "limit=1.5"),
            *(f"{more}={'a' * 201}", "page=2", "Limit=3", f"{more}=zzz", "after=-1"),
        ):
            if (path, query) != ("/v1/users", "after=-1"):
                to.add("GET", f"{path}?{query}")
    to.add("GET", "/v1/items?after=abc")
    to.add("GET", "/v1/items?after=99999")


def event_cases(to: Writer, count: int) -> None:
    """Adds events and corrections, and reads histories and slates after them."""
    draw = to.draw
    sent: list[tuple[str, str]] = []
    for number in range(count):
        events: list[Body] = []
        for place in range(draw.choice([1, 1, 2, 3])):
            who = draw.choice([user(draw), f"new-{draw.randrange(12)}", "a/b", "ünï %/history"])
            event: Body = {"user_id": who, "item_id": item(draw), "type": draw.choice(TYPES)}
            moment = f"2024-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"
            event["timestamp"] = f"{moment}T{draw.randrange(24):02d}:00:00.{place}Z"
            if draw.random() < 0.6:
                event["event_id"] = f"e-{number}-{place}"
                sent.append((who, event["event_id"]))
            if draw.random() < 0.2:
                event["value"] = round(draw.uniform(1, 99), 2)
            if sent and draw.random() < 0.25:
                who, name = draw.choice(sent)
                event = {"user_id": who, "event_id": name, "correction": "remove"}
                if draw.random() < 0.6:
                    event |= {"correction": "replace", "item_id": item(draw), "type": "save"}
            if draw.random() < 0.12:
                event |= draw.choice(
                    [
                        {"item_id": "unknown-item"},
                        {"type": "view"},
                        {"timestamp": "2024-01-01T00:00:00"},
                        {"timestamp": "soon"},
                        {"user_id": ""},
                        {"user_id": LONG_ID},
                        {"event_id": ""},
                        {"correction": "undo"},
                    ]
                )
            events.append(event)
        to.post("/v1/events", {"events": events})
        about = events[0]["user_id"] or "nobody"
        if draw.random() < 0.8:
            history_case(to, about)
        if draw.random() < 0.4:
            to.post("/v1/recommend", {"user": {"id": about}, "k": 3, "strategy": "beam"})
    base = {"events": [{"user_id": "user001", "item_id": "item001"}]}
    wrong = {
        "events": (..., [], {}, [None], [{}], base["events"] * 1001, "x"),
        "events.0.user_id": (..., None, []),
        "events.0.item_id": (..., None, []),
        "events.0.value": ("3", [], True),
        "events.0.type": (5, []),
        "events.0.kind": ("click",),
        "events.0.correction": (5, []),
        "warm": (1, "yes"),
        "request_id": BAD_REQUEST_IDS,
        "event": ([],),
    }
    to.broken("/v1/events", base, wrong)
    to.post("/v1/events", {"events": [{"user_id": "now", "item_id": "item001", "type": "click"}]})


def history_case(to: Writer, who: str) -> None:
    """Adds a request for a history."""
    to.add("GET", f"/v1/users/{quoted(who)}/history", route="/v1/users/history")


def quoted(text: str) -> str:
    """Returns a text as a part of a path, with every byte but letters and digits escaped."""
    plain = "-_."
    return "".join(
        c
        if c.isascii() and (c.isalnum() or c in plain)
        else "".join(f"%{b:02X}" for b in c.encode())
        for c in text
    )


def user_cases(to: Writer, count: int) -> None:
    """Deletes users, and reads what is left of them."""
    draw = to.draw
    for _ in range(count):
        who = draw.choice([user(draw), user(draw), f"new-{draw.randrange(12)}", "nobody"])
        to.add("DELETE", f"/v1/users/{quoted(who)}", route="/v1/users")
        if draw.random() < 0.5:
            history_case(to, who)
        if draw.random() < 0.2:
            to.post("/v1/recommend", {"user": {"id": who}, "k": 3})
    for path in (LONG_ID, "a/b", "%C3%BCn%C3%AF%20%25%2Fhistory", "x%2Fhistory", "%00", "a%0Ab"):
        to.add("DELETE", f"/v1/users/{path}", route="/v1/users")
        to.add("GET", f"/v1/users/{path}/history", route="/v1/users/history")
    for method, path in (("GET", "/v1/users/user001"), ("POST", "/v1/users/user001/history")):
        to.add(method, path, route="/v1/users")
    to.add("DELETE", "/v1/users/", route="/v1/users")


def live_item(draw: random.Random, number: int) -> Body:
    """Returns an item to insert or to change."""
    fresh = draw.random() < 0.6
    topic = draw.choice(list(TOPICS))
    one: Body = {"item_id": f"live-{number}" if fresh else item(draw)}
    if fresh or draw.random() < 0.5:
        one["title"] = f"{draw.choice(STYLES)} {draw.choice(TOPICS[topic])} no {number}"
        one["categories"] = [f"{topic} > {draw.choice(PARTS)}"]
    if draw.random() < 0.5:
        one["price"] = round(draw.uniform(2, 30), 2)
    if draw.random() < 0.3:
        one["attributes"] = {"stock": draw.randrange(40), "fresh": draw.random() < 0.5}
    if draw.random() < 0.2:
        one |= draw.choice([{"price": None}, {"tags": ["eco", "live"]}, {"brand": "live house"}])
    if draw.random() < 0.15:
        one["embedding"] = [round(draw.uniform(-1, 1), 3) for _ in range(draw.choice([16, 32]))]
    return one


BAD_ITEMS: tuple[Body, ...] = (
    {},
    {"item_id": ""},
    {"item_id": LONG_ID},
    {"title": "without an id"},
    {"item_id": "bad", "title": 5},
    {"item_id": "bad", "categories": "Kitchen"},
    {"item_id": "bad", "categories": [""]},
    {"item_id": "bad", "price": "cheap"},
    {"item_id": "bad", "stock": 1.5},
    {"item_id": "bad", "fresh": "yes"},
    {"item_id": "bad", "tags": "eco"},
    {"item_id": "bad", "colour": "red"},
    {"item_id": "bad", "embedding": [1.0, 2.0]},
    {"item_id": "bad", "embedding": []},
    {"item_id": "bad", "embedding": [0.0] * 32},
    {"item_id": "bad", "attributes": {"colour": 1}},
    {"item_id": "bad", "attributes": [], "title": "x"},
)


def rollback_cases(to: Writer, count: int) -> None:
    """Restores versions. Beyond 32 versions a clock decides which of them are kept."""
    for number in range(4):
        to.add("PUT", "/v1/items", {"items": [{"item_id": f"back-{number}", "price": number}]})
    to.broken(
        "/v1/items:rollback",
        {"catalog_version": "$catalog"},
        {
            "catalog_version": (..., None, "", 5, "x" * 129, "$catalog.9999", "$catalog.-1", "no"),
            "version": ("x",),
        },
    )
    for number in range(count):
        if number % 10 == 0:
            version = "$catalog" if number % 3 == 0 else f"$catalog.{number // 10 + 1}"
            to.post("/v1/items:rollback", {"catalog_version": version})
            to.post("/v1/recommend", {"user": {"id": user(to.draw)}, "k": 3, "strategy": "beam"})
            to.add("GET", "/v1/items/back-1", route="/v1/items/id")
        else:
            version = (f"$catalog.{number}x", f"old.{number}", f"$catalog.{500 + number}")
            to.post("/v1/items:rollback", {"catalog_version": version[number % 3]})


def item_cases(to: Writer, count: int) -> None:
    """Changes items, and reads, ranks and recommends what changed."""
    draw = to.draw
    for number in range(count):
        items = [live_item(draw, 3 * number + n) for n in range(draw.choice([1, 1, 2, 3]))]
        if draw.random() < 0.3:
            items.append(draw.choice(BAD_ITEMS))
        to.add("PUT", "/v1/items", {"items": items})
        names = [one["item_id"] for one in items if one.get("item_id", "bad") != "bad"]
        name = draw.choice(names) if names[0] else items[0]["item_id"]
        to.add("GET", f"/v1/items/{quoted(name)}", route="/v1/items/id")
        if draw.random() < 0.5:
            candidates = [{"item_id": n} for n in (name, item(draw), item(draw))]
            scorer = draw.choice(["ranker", "likelihood"])
            body = {"user": {"id": user(draw)}, "candidates": candidates, "scorer": scorer}
            to.post("/v1/rank", body)
        if draw.random() < 0.6:
            body = {"history": [name, item(draw)], "k": 4, "strategy": draw.choice(STRATEGIES)}
            if draw.random() < 0.5:
                body["filter"] = {"in": ["item_id", [f"live-{n}" for n in range(60)]]}
            to.post("/v1/recommend", body)
        if draw.random() < 0.5:
            gone = draw.choice([name, item(draw), "unknown-item"])
            to.add("DELETE", f"/v1/items/{quoted(gone)}", route="/v1/items/id")
            to.add("GET", f"/v1/items/{quoted(gone)}", route="/v1/items/id")
        if draw.random() < 0.1:
            to.post("/v1/items:rollback", {"catalog_version": "$catalog"})
            to.post("/v1/recommend", {"user": {"id": user(draw)}, "k": 3, "strategy": "beam"})
    for one in BAD_ITEMS:
        to.add("PUT", "/v1/items", {"items": [one, {"item_id": "live-0", "price": 3.5}]})
    base = {"items": [{"item_id": "live-1", "price": 2.5}]}
    wrong = {
        "items": (..., [], {}, [None], ["x"], base["items"] * 1001),
        "request_id": BAD_REQUEST_IDS,
        "item": ([],),
    }
    to.broken("/v1/items", base, wrong, "PUT")
    for number in range(60):
        names = (f"live-{number}", f"item{number:03d}", "unknown", LONG_ID, "a%2Fb", "%20", "")
        name = names[number % 7]
        to.add("GET", f"/v1/items/{name}", route="/v1/items/id")
        to.add("DELETE", f"/v1/items/{name}", route="/v1/items/id")


# Texts.


def prompt(draw: random.Random) -> str:
    """Returns the beginning of a sentence that the model knows, or another text."""
    topic = draw.choice(list(TOPICS))
    thing, style = draw.choice(TOPICS[topic]), draw.choice(STYLES)
    return draw.choice(
        [
            f"The {style} {thing}",
            f"A {thing} and a",
            f"user: Is the {thing} {style}?\nassistant:",
            f"Which {thing} is {style}? The {thing} of",
            f"The {style} {thing} costs {draw.randint(2, 29)} euros.\nThe {style}",
            f"The {thing}",
            draw.choice(["Ünïcödé 🙂", "1 2 3", "  ", "THE", "\n\n", "Once upon a time, there"]),
        ]
    )


def sampling(draw: random.Random) -> Body:
    """Returns sampling parameters; a text that is drawn has a seed."""
    body: Body = {"max_tokens": draw.choice([1, 3, 6, 10, 14, 20])}
    if draw.random() < 0.4:
        body["temperature"] = 0
    else:
        body |= {"seed": draw.choice([0, 7, -5, draw.getrandbits(62)])}
        if draw.random() < 0.7:
            body["temperature"] = draw.choice([0.3, 0.7, 1, 1.4])
        for name, values in (
            ("top_p", [0.3, 0.8, 0.95]),
            ("top_k", [-1, 0, 1, 5, 40]),
            ("min_p", [0.05, 0.3]),
        ):
            if draw.random() < 0.2:
                body[name] = draw.choice(values)
    for name, values in (
        ("repetition_penalty", [0.9, 1.3]),
        ("presence_penalty", [-0.5, 1]),
        ("frequency_penalty", [0.5, 2]),
        ("min_tokens", [0, 1]),
        ("ignore_eos", [True]),
        ("priority", [0, 5]),
        ("user", ["somebody"]),
    ):
        if draw.random() < 0.07:
            body[name] = draw.choice(values)
    if draw.random() < 0.1:
        body["logit_bias"] = {str(draw.randrange(352)): draw.choice([-100, -2.5, 3, 100])}
    if draw.random() < 0.08:
        body["bad_words"] = draw.sample(["euros", "The", "is", "house", "."], 2)
    if draw.random() < 0.3:
        stops = [" euros", ".", "s", "and a", "\n", " house", "no such text", "ts"]
        body["stop"] = draw.choice([draw.choice(stops), draw.sample(stops, 2)])
    if draw.random() < 0.1:
        body["stop_token_ids"] = [draw.randrange(352) for _ in range(3)]
    return body


def streamed(draw: random.Random) -> Body:
    """Returns the fields of a stream, or none."""
    if draw.random() < 0.65:
        return {}
    options: Body = {}
    if draw.random() < 0.4:
        options["include_usage"] = True
    if draw.random() < 0.3:
        options["continuous_usage_stats"] = True
    if draw.random() < 0.3:
        options["include_token_sources"] = True
    return {"stream": True} | ({"stream_options": options} if options else {})


def drafting(draw: random.Random, drafters: tuple[str, ...], body: Body) -> Body:
    """Returns the field `speculation`, or none."""
    if not drafters or draw.random() < 0.15:
        return {}
    chosen: Body = {"drafter": draw.choice(drafters)}
    if draw.random() < 0.25:
        chosen["num_tokens"] = draw.choice([1, 3, 6])
    if draw.random() < 0.4:
        chosen["verifier"] = draw.choice(LOSSLESS)
    elif body.get("temperature") == 0 and draw.random() < 0.3:
        chosen["verifier"] = draw.choice(["greedy", "typical"])
    if chosen["drafter"] in ("medusa", "eagle", "mtp", "specformer") and draw.random() < 0.3:
        chosen["tree"] = draw.choice([[[0], [0, 0], [1]], [[0], [1], [2], [0, 1]], [[0]]])
        chosen.pop("num_tokens", None)
        chosen.pop("verifier", None)
    return {"speculation": chosen}


def completion_cases(to: Writer, count: int, drafters: tuple[str, ...]) -> None:
    """Adds valid completions."""
    draw = to.draw
    for _ in range(count):
        body: Body = {"prompt": prompt(draw), **sampling(draw)}
        kind = draw.random()
        if kind < 0.1:
            body["prompt"] = [draw.randrange(1, 352) for _ in range(draw.randint(1, 9))]
        elif kind < 0.17:
            body["prompt"] = [prompt(draw), prompt(draw)]
        if draw.random() < 0.12:
            body["n"] = draw.choice([2, 3])
        if draw.random() < 0.25:
            body["logprobs"] = draw.choice([0, 1, 3])
        body |= streamed(draw)
        if draw.random() < 0.12:
            body["echo"] = True
            if not body.get("stream") and draw.random() < 0.5:
                body["max_tokens"] = 0
                body.pop("min_tokens", None)
        if body.get("echo") and body.get("stream"):
            body.pop("logprobs", None)
        if not body.get("stream") and draw.random() < 0.08:
            body["prompt_logprobs"] = draw.choice([0, 2])
        if draw.random() < 0.1:
            body["add_special_tokens"] = draw.random() < 0.5
        if draw.random() < 0.1:
            body["model"] = "tiny" if draw.random() < 0.7 else "gpt-tiny"
        to.post("/v1/completions", body | drafting(draw, drafters, body))


BAD_SAMPLING: dict[str, tuple[Any, ...]] = {
    "model": ("other", "", 5),
    "max_tokens": (-1, 1.5, "9", 513, 2**31 + 1),
    "min_tokens": (-1, 99, "2"),
    "n": (0, 17, 1.5, "2"),
    "temperature": (-0.1, 2.1, "1", []),
    "top_p": (-0.1, 1.1, "1"),
    "top_k": (-2, 1.5, "5"),
    "min_p": (-1, 1.5),
    "presence_penalty": (-2.1, 2.1, "0"),
    "frequency_penalty": (-2.1, 2.1),
    "repetition_penalty": (0, 101, -1),
    "logit_bias": ([], {"352": 1}, {"x": 1}, {"5": 101}, {"-1": 1}),
    "bad_words": ([""], "x", ["x"] * 65),
    "seed": ("7", 1.5, 2**63),
    "stop": ("", [""], 5, ["x"] * 17, "x" * 257),
    "stop_token_ids": ([352], [-1], "5", [1.5], [1] * 65),
    "ignore_eos": (1, "yes"),
    "stream": (1, "yes"),
    "stream_options": ({"include_usage": True}, {"usage": True}, []),
    "speculation": ({"drafter": "other"}, {"drafter": ""}, {"verifier": "other"}, [], {"k": 1}),
    "speculation.num_tokens": (0, 257, "3"),
    "speculation.tree": ([], [[]], [[256]], [[0], [0]], [[1, 0]]),
    "priority": (-1, 101, 1.5),
    "timeout_ms": (0, 3_600_001, "10"),
    "request_id": BAD_REQUEST_IDS,
    "suffix": ("end",),
    "skip_special_tokens": (False,),
    "include_stop_str_in_output": (True,),
    "store": (True,),
    "temprature": (1,),
    "max_token": (5,),
}


def completion_errors(to: Writer) -> None:
    """Adds completions that are refused, and fields that are read and ignored."""
    base = {"prompt": "The plain", "max_tokens": 3, "temperature": 0}
    wrong = {
        **{name: values for name, values in BAD_SAMPLING.items() if name != "seed"},
        "seed": BAD_SAMPLING["seed"],
        "prompt": (..., None, 5, [], [[]], {}, [352], ["a", 3], [[1], "b"], ["x"] * 129, [-1]),
        "logprobs": (-1, 21, "3", True),
        "prompt_logprobs": (-1, 21),
        "echo": (1, "yes"),
        "messages": ([],),
    }
    to.broken("/v1/completions", base, wrong)
    to.post("/v1/completions", {**base, "prompt": "the pan " * 300})
    to.post("/v1/completions", {**base, "max_tokens": 512})
    to.post("/v1/completions", {**base, "stream": True, "prompt_logprobs": 2})
    to.post("/v1/completions", {**base, "stream": True, "echo": True, "logprobs": 1})
    to.post("/v1/completions", {**base, "speculation": {"verifier": "greedy"}, "temperature": 1})
    for name, value in (
        *(("suffix", ""), ("suffix", None), ("store", False), ("metadata", {"a": "b"})),
        *(("service_tier", "auto"), ("prompt_cache_key", "x"), ("safety_identifier", "x")),
        *(("max_completion_tokens", 2), ("length_penalty", 1), ("skip_special_tokens", True)),
    ):
        to.post("/v1/completions", {**base, name: value})


def turns(draw: random.Random) -> list[Body]:
    """Returns a conversation."""
    thing, style = draw.choice(TOPICS[draw.choice(list(TOPICS))]), draw.choice(STYLES)
    question: Body = {"role": "user", "content": f"Is the {thing} {style}?"}
    kind = draw.random()
    if kind < 0.3:
        system = draw.choice(["system", "developer"])
        return [{"role": system, "content": "Answer briefly."}, question]
    if kind < 0.5:
        said = {"role": "assistant", "content": f"Yes, the {thing} is {style}."}
        return [question, said, {"role": "user", "content": "Which one?"}]
    if kind < 0.6:
        parts = [{"type": "text", "text": "Is the "}, {"type": "text", "text": f"{thing} new?"}]
        return [{"role": "user", "content": parts, "name": "ann"}]
    return [question]


def chat_cases(to: Writer, count: int, drafters: tuple[str, ...]) -> None:
    """Adds valid chats."""
    draw = to.draw
    for _ in range(count):
        body: Body = {"messages": turns(draw), **sampling(draw)}
        if draw.random() < 0.3:
            body["max_completion_tokens"] = body.pop("max_tokens")
        if draw.random() < 0.12:
            body["n"] = 2
        if draw.random() < 0.25:
            body["logprobs"] = True
            if draw.random() < 0.7:
                body["top_logprobs"] = draw.choice([0, 1, 3])
        if draw.random() < 0.15:
            body["chat_template_kwargs"] = {"loud": True}
        body |= streamed(draw)
        to.post("/v1/chat/completions", body | drafting(draw, drafters, body))


def chat_errors(to: Writer) -> None:
    """Adds chats that are refused."""
    hello = {"role": "user", "content": "Is it new?"}
    base = {"messages": [hello], "max_tokens": 3, "temperature": 0}
    wrong = {
        **BAD_SAMPLING,
        "max_tokens": (0, -1, "9"),
        "messages": (..., [], None, "hi", [{}], [[]], [{"role": "user"}]),
        "messages.0.role": ("bot", "", None, "tool"),
        "messages.0.content": (None, 5, [], [{"type": "image_url"}], [{"type": "text"}]),
        "messages.0.tool_calls": ([{"function": {"name": "f"}}],),
        "messages.0.refusal": ("no",),
        "messages.0.text": ("hi",),
        "logprobs": (5, "yes"),
        "top_logprobs": (-1, 21, 3),
        "chat_template_kwargs": ([], {"": 1}, {"a": []}),
        "modalities": (["audio"],),
        "verbosity": ("high",),
        "prompt": ("x",),
    }
    to.broken("/v1/chat/completions", base, wrong)
    call = {"function": {"name": "find", "arguments": '{"a": 1}'}, "id": "c1"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    to.post("/v1/chat/completions", {**base, "messages": [hello, asked, hello]})
    to.post("/v1/chat/completions", {**base, "max_tokens": None, "stop": "."})


DOCUMENTS = [f"The {style} {thing}." for style in STYLES for thing in ("pan", "tent", "drum")]


def score_cases(to: Writer, count: int) -> None:
    """Adds rerankings and generative scorings."""
    draw = to.draw
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        for _ in range(count if path != "/rerank" else 10):
            documents: list[Any] = draw.sample(DOCUMENTS, draw.choice([1, 2, 4]))
            if draw.random() < 0.3:
                documents[0] = {"text": documents[0]}
            body: Body = {"query": prompt(draw).strip() or "pan", "documents": documents}
            for name, values in (
                ("top_n", [1, 2, 9]),
                ("return_documents", [True]),
                ("instruction", ["Is it made for cooking?"]),
                ("max_tokens_per_doc", [1, 3, 50]),
            ):
                if draw.random() < 0.25:
                    body[name] = draw.choice(values)
            to.post(path, body)
    base: Body = {"query": "pan", "documents": ["a pan", "a tent"]}
    wrong = {
        "query": (..., "", None, 5, []),
        "documents": (..., [], [5], "x", [{}], [{"txt": "a"}], ["pan " * 600]),
        "top_n": (0, 1.5, "1"),
        "return_documents": (1,),
        "instruction": (5, "x" * 4097),
        "max_tokens_per_doc": (0, "3"),
        "rank_fields": (["text"],),
        "max_chunks_per_doc": (3,),
        "model": ("other",),
        "timeout_ms": (0,),
        "request_id": BAD_REQUEST_IDS,
        "docs": ([],),
    }
    for path in ("/v1/rerank", "/v2/rerank"):
        to.broken(path, base, wrong)
    for _ in range(count):
        items: list[Any] = draw.sample(DOCUMENTS, draw.choice([1, 2, 3]))
        if draw.random() < 0.3:
            items = [[draw.randrange(352) for _ in range(3)] for _ in range(2)]
        body = {"query": prompt(draw), "items": items}
        if draw.random() < 0.2:
            body["query"] = [draw.randrange(352) for _ in range(4)]
        body["label_token_ids"] = draw.sample(range(352), draw.choice([1, 2, 4]))
        if draw.random() < 0.4:
            body["apply_softmax"] = False
        if draw.random() < 0.2:
            body["add_special_tokens"] = False
        to.post("/generative_scoring", body)
    scoring: Body = {"query": "Is it new? ", "items": ["pan", "tent"], "label_token_ids": [9, 11]}
    wrong = {
        "query": (..., None, 5, [352], [-1]),
        "items": (..., [], "x", [[]], [5], [[352]], ["pan " * 600]),
        "label_token_ids": (..., [], [352], [-1], ["9"], [1] * 65, [9, 9]),
        "apply_softmax": (1, "no"),
        "item_first": (True,),
        "model": ("other",),
        "labels": ([],),
    }
    to.broken("/generative_scoring", scoring, wrong)


def encoding_cases(to: Writer, count: int) -> None:
    """Adds embeddings and tokens."""
    draw = to.draw
    for _ in range(count):
        given = draw.choice(
            [prompt(draw), [prompt(draw), "pan"], [5, 9, 40], [[1, 2], [300]], "the tent"]
        )
        body: Body = {"input": given}
        if draw.random() < 0.4:
            body["encoding_format"] = draw.choice(["float", "base64"])
        to.post("/v1/embeddings", body)
        body = {"prompt": prompt(draw)} if draw.random() < 0.6 else {"messages": turns(draw)}
        for name in ("add_special_tokens", "return_token_strs", "add_generation_prompt"):
            if draw.random() < 0.3:
                body[name] = draw.random() < 0.5
        to.post("/tokenize", body)
        tokens = [draw.randrange(352) for _ in range(draw.randrange(12))]
        to.post("/detokenize", {"tokens": tokens})
    wrong: dict[str, Iterable[Any]] = {
        "input": (..., None, 5, [], "", [[]], [352], ["a", 3], ["x"] * 257, "pan " * 600),
        "encoding_format": ("hex", 5),
        "dimensions": (8,),
        "model": ("other",),
        "inputs": (["x"],),
    }
    to.broken("/v1/embeddings", {"input": "pan"}, wrong)
    wrong = {
        "prompt": (..., None, 5, []),
        "messages": ([], [{"role": "user", "content": "x"}], "x"),
        "add_special_tokens": (1,),
        "model": ("other",),
        "text": ("x",),
    }
    to.broken("/tokenize", {"prompt": "pan"}, wrong)
    wrong = {"tokens": (..., None, "x", [352], [-1], [1.5], ["5"]), "model": ("other",)}
    to.broken("/detokenize", {"tokens": [5, 6]}, wrong)


# The server itself.


def server_cases(to: Writer) -> None:
    """Adds the routes of operators, wrong routes and wrong methods."""
    for path in (
        *("/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"),
        *("/ping", "/version", "/v1/models", "/v1/models/tiny", "/v1/models/other", "/"),
        *("/openapi.json", "/tokenizer_info", "/v1/experiments", "/v1/models/recommend", "/docs"),
        *("/playground/style.css", "/playground/nothing.js", "/v1", "/v1/nothing", "/V1/items"),
        *("/v1/recommend/", "//v1/recommend", "/admin/bundle", "/v1/models/gpt-tiny"),
    ):
        for method in ("GET", "HEAD", "POST", "DELETE", "PATCH", "OPTIONS"):
            if (method, path) in (("POST", "/admin/bundle"), ("DELETE", "/v1/models/tiny")):
                continue
            to.add(method, path, route="operators")
    for path in ("/v1/recommend", "/v1/rank", "/v1/completions", "/tokenize", "/v1/events"):
        for method in ("GET", "PUT", "DELETE"):
            to.add(method, path, route="operators")


def admin_cases(to: Writer) -> None:
    """Loads bundles and restores them, with slates between."""
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    load, rollback = "/admin/bundle:load", "/admin/bundle:rollback"
    wrong = {
        "path": (..., None, "", 5, "../next", ".history", "a/b", "nothing", "-x", "x" * 129),
        "force": (1, "yes", None),
        "request_id": BAD_REQUEST_IDS,
        "bundle": ("next",),
    }
    to.post(rollback, None, headers=key)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": ADMIN_KEY}):
        for path in (load, rollback):
            to.post(path, {"path": "next"}, headers=headers)
        to.add("GET", "/admin/bundle", headers=headers)
    for name, values in wrong.items():
        for value in values:
            to.post(load, changed({"path": "nothing"}, [name], value), headers=key)
    for raw in BROKEN_BODIES:
        to.add("POST", load, raw=raw, headers=key)

    def slates() -> None:
        for strategy in STRATEGIES:
            body = {"user": {"id": user(to.draw)}, "k": 3, "strategy": strategy}
            to.post("/v1/recommend", body)
        to.add("GET", "/admin/bundle", headers=key)
        to.add("GET", "/v1/items/live-1", route="/v1/items/id")

    to.add("GET", "/admin/bundle", headers=key)
    for name in ("product", "next"):
        to.post(load, {"path": name}, headers=key)
        slates()
    to.post(rollback, None, headers=key)
    slates()
    to.post(rollback, None, headers=key)
    to.post(load, {"path": "codes", "force": True}, headers=key)
    slates()


def attribution_cases(to: Writer) -> None:
    """Adds events that name the slate before them; each has an id."""
    for number in range(12):
        who = user(to.draw)
        to.post("/v1/recommend", {"user": {"id": who}, "k": 2, "strategy": "beam"})
        event = {"user_id": who, "item_id": item(to.draw), "type": "click"}
        event |= {"timestamp": f"2024-02-03T04:05:{number:02d}Z", "event_id": f"slate-{number}"}
        token = ["$token", "$token", "no token", "x" * 5000][number % 4]
        to.post("/v1/events", {"events": [event | {"attribution_token": token}]})


def key_cases(to: Writer) -> None:
    """Adds requests with and without keys."""
    key = {"authorization": f"Bearer {API_KEY}"}
    body = {"prompt": "The plain", "max_tokens": 2, "temperature": 0}
    values = (
        *(f"Bearer {API_KEY}", f"bearer {OTHER_KEY}", f"Bearer  {API_KEY} ", "Bearer", ""),
        *("Bearer wrong", f"Bearer {API_KEY}x", f"Bearer {ADMIN_KEY}", API_KEY, "Basic !!"),
        *(f"Token {API_KEY}", "Basic dXNlcjp3cm9uZw==", "Basic dXNlcg==", f"Bearer {API_KEY[:-1]}"),
        "Basic dXNlcjpyZWNvcmRlZC1rZXktb25lLTE=",
    )
    for value in values:
        headers = {"authorization": value}
        to.post("/v1/completions", body, headers=headers)
        for path in ("/v1/models", "/version", "/metrics", "/health/ready", "/", "/nothing"):
            if not (path == "/metrics" and API_KEY in value):
                to.add("GET", path, headers=headers, route="keys")
    for path in ("/v1/recommend", "/v1/rank", "/v1/events", "/v1/rank:batch", "/v1/items:rollback"):
        to.post(path, {"user": {"id": "x"}}, route="keys")
        to.post(path, {"user": {"id": "x"}}, headers=key, route="keys")
    valid: dict[str, Body] = {
        "/v1/recommend": {"history": ["a"]},
        "/v1/rank": {"history": ["a"], "candidates": [{"item_id": "a"}]},
        "/v1/events": {"events": [{"user_id": "u", "item_id": "i"}]},
    }
    for path, item_body in valid.items():
        to.post(path, item_body, headers=key, route="keys")
    for path in ("/v1/items", "/v1/users", "/v1/items/x", "/v1/users/x/history", "/v2"):
        to.add("GET", path, headers=key, route="keys")
    to.add("PUT", "/v1/items", {"items": [{"item_id": "x"}]}, headers=key, route="keys")
    to.add("DELETE", "/v1/users/x", headers=key, route="keys")
    to.add("GET", "/admin/bundle", headers=key, route="keys")
    for origin in ("http://elsewhere.example", "null"):
        to.post("/v1/completions", body, headers=key | {"origin": origin})
    to.post("/v1/completions", body, headers=key | {"sec-fetch-site": "cross-site"})
    to.post("/tokenize", {"prompt": "x" * 3000}, headers=key, route="keys")


def with_key(to: Writer, add: Callable[[], None]) -> None:
    """Adds cases that all send a valid key."""
    start = len(to.cases)
    add()
    key = {"authorization": f"Bearer {API_KEY}"}
    to.cases[start:] = [
        Case(c.at, c.route, c.method, c.path, c.body, c.raw, key | c.headers)
        for c in to.cases[start:]
    ]


WEIGHTLESS = ("none", "ngram", "suffix", "lookahead")


def items_world(to: Writer) -> None:
    """Draws the requests of the world `items`."""
    server_cases(to)
    recommend_cases(to, 200)
    recommend_errors(to)
    rank_cases(to, 110)
    rank_errors(to)
    rank_batch_cases(to, 70)
    inference_cases(to, 60)
    drafters = (
        *("eagle", "block", "medusa", "mtp", "specformer", "mask_tokens", "draft_model"),
        *("ngram+suffix", *WEIGHTLESS),
    )
    completion_cases(to, 170, drafters)
    completion_errors(to)
    chat_cases(to, 105, drafters)
    chat_errors(to)
    score_cases(to, 75)
    encoding_cases(to, 90)
    list_cases(to, 85)
    attribution_cases(to)
    event_cases(to, 90)
    rollback_cases(to, 90)
    item_cases(to, 70)
    user_cases(to, 100)
    admin_cases(to)
    to.add("GET", "/metrics")


def codes_world(to: Writer) -> None:
    """Draws the requests of the world `codes`."""
    recommend_cases(to, 120, ("auto", "beam", "speculative", "nezha", "rpg"))
    for case in to.cases:  # without a user, the id of the request chooses the arm
        case.body.setdefault("request_id", f"codes-{case.at}")
    rank_cases(to, 50)
    inference_cases(to, 5)
    drafters = ("eagle", "block", "specinfer", "mask_tokens_linear", "none")
    completion_cases(to, 90, drafters)
    chat_cases(to, 20, drafters)
    event_cases(to, 15)
    rollback_cases(to, 20)
    item_cases(to, 12)
    to.add("GET", "/v1/models")
    to.add("GET", "/metrics")


def product_world(to: Writer) -> None:
    """Draws the requests of the world `product`."""
    recommend_cases(to, 110, ("auto", "rpg"))
    for strategy in STRATEGIES:
        to.post("/v1/recommend", {"user": {"id": "user001"}, "k": 3, "strategy": strategy})
    rank_cases(to, 50)
    completion_cases(to, 50, ("block", "none"))
    event_cases(to, 15)
    rollback_cases(to, 20)
    item_cases(to, 12)
    to.add("GET", "/v1/models")


def text_world(to: Writer) -> None:
    """Draws the requests of the world `text`, which has keys and no bundle."""
    key_cases(to)
    with_key(to, lambda: completion_cases(to, 60, ("block", "ngram", "none")))
    with_key(to, lambda: chat_cases(to, 20, ("block", "none")))
    with_key(to, lambda: to.add("GET", "/v1/models"))


DRAWN = {"items": items_world, "codes": codes_world, "product": product_world, "text": text_world}


def draw_cases(world: str) -> list[Case]:
    """Returns the requests of a world; equal for equal code."""
    writer = Writer(random.Random(f"recorded {world}"))
    DRAWN[world](writer)
    return writer.cases
