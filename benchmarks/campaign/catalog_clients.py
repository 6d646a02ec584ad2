"""Clients that change and read the catalogue of several replicas, and record what happens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.campaign.catalog_histories import HIDDEN, Operation, Result, Version
from benchmarks.campaign.traffic import Body, history, item
from tests.support.bundle_shelf import DROPPED

MIN_VERSION = "X-Recserve-Min-Catalog-Version"
LIVE = [f"live-{number}" for number in range(12)]  # items that the bundle does not have
VECTOR_SIZE = 16  # of the campaign's bundle
TIMEOUT_S, PAUSE_S = 6.0, 0.05
WORDS = ("blue kettle", "copper pan", "rose lipstick", "quiet lamp", "wool scarf")
LOST, BEHIND, NOT_READY = "catalog_version_lost", "catalog_behind", "not_ready"
# Part of all requests by kind.
KINDS = {
    "put": 0.24,
    "hide": 0.08,
    "rollback": 0.04,
    "read": 0.22,
    "recommend": 0.14,
    "rank": 0.2,
    "event": 0.08,
}


class Newest:
    """The newest version that any answer has named, for all clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version: Version | None = None
        self._blind = False

    def read(self) -> Version | None:
        """Returns the version; None if it is not known."""
        with self._lock:
            return None if self._blind else self._version

    def learn(self, version: Version, changes: bool) -> None:
        """Takes the version of an answer."""
        with self._lock:
            if self._version is None or version[1:] > self._version[1:]:
                # After a loss, only a later write is behind all that is left.
                self._blind = self._blind and not changes
                self._version = version

    def forget(self, version: Version) -> None:
        """Forgets a version that the log has lost."""
        with self._lock:
            if self._version is not None and self._version[1:] == version[1:]:
                self._blind = True


@dataclass
class Record:
    """What all clients of one fleet have seen.

    Attributes:
        urls: Addresses of the replicas.
        newest: The newest version.
        operations: What happened.
        events: Acknowledged events: user and item.
        codes: Number of refused requests by status and code.
        warned: Acknowledged changes whose answer warns that a failover can lose them.
        stale: Answers that said `catalog_stale`.
        wrong: Answers that no client expects.
    """

    urls: Sequence[str]
    newest: Newest = field(default_factory=Newest)
    operations: list[Operation] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    warned: int = 0
    stale: int = 0
    wrong: list[str] = field(default_factory=list)

    def count(self) -> int:
        """Number of recorded operations and acknowledged events."""
        return len(self.operations) + len(self.events)


class CatalogClient(threading.Thread):
    """A client that sends one request after the other, each to a drawn replica.

    Attributes:
        number: Number of the client.
        stopped: Ends the client after its request.
    """

    def __init__(self, record: Record, number: int, random: np.random.Generator) -> None:
        super().__init__(daemon=True, name=f"catalog-client-{number}")
        self.record, self.number, self.random = record, number, random
        self.stopped = threading.Event()
        self._known: list[Version] = []  # newest last
        self._sent = 0
        self._clients = [httpx.Client(base_url=url, timeout=TIMEOUT_S) for url in record.urls]

    def run(self) -> None:
        """Sends until it is stopped."""
        while not self.stopped.is_set():
            self.send(str(self.random.choice([*KINDS], p=[*KINDS.values()])))

    def close(self) -> None:
        """Ends the thread and closes the connections."""
        self.stopped.set()
        if self.ident is not None:
            self.join()
        for client in self._clients:
            client.close()

    def send(self, kind: str, replica: int | None = None) -> Operation | None:
        """Sends a request of a kind and records it.

        Args:
            kind: One of KINDS.
            replica: The replica; None draws it.

        Returns:
            What was recorded; None if nothing was.
        """
        self._sent += 1
        chosen = int(self.random.integers(len(self._clients))) if replica is None else replica
        request = self._request(kind)
        if request is None:
            return None
        method, path, body, change = request
        began = time.monotonic()
        draw = self.random.random()
        at_least = self.record.newest.read() if draw < 0.5 else None
        newest = at_least is not None
        if at_least is None and draw < 0.75 and self._known:
            at_least = self._known[-1]
        common: dict[str, Any] = {"client": self.number, "replica": chosen, "kind": kind}
        common |= {"began": began, "at_least": at_least, "newest": newest, **change}
        headers = {}
        if at_least is not None and kind in ("recommend", "rank"):
            body = {**body, "min_catalog_version": str(at_least)}
        elif at_least is not None:
            headers[MIN_VERSION] = str(at_least)
        try:
            answer = self._clients[chosen].request(
                method, path, json=body if method != "GET" else None, headers=headers
            )
        except (httpx.ConnectError, httpx.ConnectTimeout):
            self.stopped.wait(PAUSE_S)
            return self._finish(common, Result.FAILED)
        except httpx.TransportError:
            return self._finish(common, Result.UNKNOWN)
        return self._read(kind, common, body, answer)

    def _request(self, kind: str) -> tuple[str, str, Body, dict[str, Any]] | None:
        """Returns method, path and body of a request, and what it writes."""
        random = self.random
        match kind:
            case "put":
                title = f"{random.choice(WORDS)} {self.number}-{self._sent}"
                names = random.choice(LIVE, random.integers(1, 3), replace=False).tolist()
                items: list[Body] = [{"item_id": name, "title": title} for name in names]
                for one in items:
                    if random.random() < 0.5:
                        one["embedding"] = random.normal(size=VECTOR_SIZE).tolist()
                return "PUT", "/v1/items", {"items": items}, {"writes": dict.fromkeys(names, title)}
            case "hide":
                name = str(random.choice(LIVE))
                return "DELETE", f"/v1/items/{name}", {}, {"writes": {name: HIDDEN}}
            case "rollback":
                if not self._known:
                    return None
                version = self._known[-1 - int(random.integers(min(20, len(self._known))))]
                body: Body = {"catalog_version": str(version)}
                return "POST", "/v1/items:rollback", body, {"restores": version}
            case "read":
                return "GET", "/v1/items?ids=" + ",".join(LIVE), {}, {}
            case "recommend":
                body = {"history": history(random), "k": len(LIVE), "fields": ["title"]}
                body |= {"filter": {"in": ["item_id", LIVE]}, "explain": True}
                return "POST", "/v1/recommend", body, {}
            case "rank":
                candidates = [{"item_id": name} for name in (*LIVE, item(1))]
                body = {"history": history(random), "candidates": candidates, "fields": ["title"]}
                return "POST", "/v1/rank", body, {}
            case _:
                user, name = f"user-{self.number}-{self._sent}", item(self._sent)
                if name in DROPPED:  # not in every bundle that is rolled out
                    name = item(1)
                event = {"user_id": user, "item_id": name, "event_id": user}
                return "POST", "/v1/events", {"events": [event]}, {}

    def _read(
        self, kind: str, common: dict[str, Any], body: Body, answer: httpx.Response
    ) -> Operation | None:
        """Records an answer."""
        record = self.record
        if answer.status_code != 200:
            return self._refused(kind, common, answer)
        said = answer.json()
        if said.get("rejected"):
            record.wrong.append(f"{kind}: {answer.text[:200]}")
        if kind == "event":
            record.events += [(e["user_id"], e["item_id"]) for e in body["events"]]  # type: ignore[attr-defined]
            return None
        record.warned += bool(said.get("warning"))
        record.stale += "catalog_stale" in (said.get("degraded") or ())
        if kind in ("read", "rank", "recommend"):
            found = [one for one in said["items"] if one["item_id"] in LIVE]
            common["seen"] = {
                one["item_id"]: one["title"] if kind == "read" else one["fields"]["title"]
                for one in found
            }
            common["seen"] |= dict.fromkeys(
                (name for name in said.get("missing_item_ids") or () if name in LIVE), HIDDEN
            )
            common["codes"] = {
                one["item_id"]: tuple(one["semantic_id"]) for one in found if "semantic_id" in one
            }
        return self._finish(common, Result.OK, Version.parse(said["catalog_version"]))

    def _refused(
        self, kind: str, common: dict[str, Any], answer: httpx.Response
    ) -> Operation | None:
        """Records a refusal."""
        code = ""
        with suppress(ValueError, KeyError, TypeError):
            code = answer.json()["error"]["code"]
        self.record.codes[f"{kind} {answer.status_code} {code}"] += 1
        if code == LOST and common["at_least"] is not None:
            self.record.newest.forget(common["at_least"])
            self._known = [one for one in self._known if one != common["at_least"]]
        if answer.status_code == 404 and kind == "hide":  # it has read that the item is hidden
            name = next(iter(common.pop("writes")))
            return self._finish(common | {"seen": {name: HIDDEN}}, Result.OK)
        certain = answer.status_code < 500 or code in (BEHIND, NOT_READY)
        if certain and code not in (LOST, BEHIND, NOT_READY, "unknown_catalog_version"):
            self.record.wrong.append(f"{kind} {answer.status_code}: {answer.text[:200]}")
        if answer.status_code >= 500:
            self.stopped.wait(PAUSE_S)
        return self._finish(common, Result.FAILED if certain else Result.UNKNOWN)

    def _finish(
        self, common: dict[str, Any], result: Result, version: Version | None = None
    ) -> Operation | None:
        if common["kind"] == "event":
            return None
        changes = bool(common.get("writes")) or common.get("restores") is not None
        if version is not None:
            self.record.newest.learn(version, changes)
            if version not in self._known:
                self._known = sorted([*self._known[-40:], version], key=lambda one: one[1:])
        # The newest version is told before the operation ends, as `Operation.newest` needs.
        made = Operation(ended=time.monotonic(), result=result, version=version, **common)
        self.record.operations.append(made)
        return made
