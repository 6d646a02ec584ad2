"""Clients that write batches of events, and what became of the events that were acknowledged."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import httpx

from benchmarks.campaign.traffic import item
from tests.support.tiny_bundle import NUM_ITEMS

Event = tuple[str, str]  # user and item; no two events of a writer have both in common
SIZES = (1, 4, 10, 50)
NUM_USERS = 4  # of a batch
ATTEMPT_S, PAUSE_S = 30.0, 0.05


class BatchWriter(threading.Thread):
    """A client that writes batches of several sizes and goes on while servers end and start.

    A batch counts once it has the status 200 and no event is rejected. A batch without an answer is
    not sent again.

    Attributes:
        url: Address of the server.
        hung: Batches without an answer or a closed connection within ATTEMPT_S.
        refused: Batches that were answered and do not count, by status and code. A server that
            loads may refuse them.
    """

    def __init__(self, name: str, url: str) -> None:
        super().__init__(daemon=True, name=name)
        self.url, self.hung, self.refused = url, 0, Counter[str]()
        self._sent = self._batches = 0
        self._acknowledged: list[list[Event]] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        """Writes until it is stopped."""
        with httpx.Client(base_url=self.url, timeout=ATTEMPT_S) as client:
            while not self._stopped.is_set():
                self._write(client, self._next_batch())

    def _write(self, client: httpx.Client, batch: list[Event]) -> None:
        events = [
            {"user_id": user, "item_id": name, "event_id": f"{user} {name}"} for user, name in batch
        ]
        try:
            answer = client.post("/v1/events", json={"events": events})
        except httpx.TimeoutException:
            self.hung += 1
        except httpx.TransportError:
            time.sleep(PAUSE_S)
        else:
            if answer.status_code == 200 and not answer.json()["rejected"]:
                self._acknowledged.append(batch)
            else:
                code = "rejected" if answer.status_code == 200 else _code(answer)
                if code not in ("not_ready", None):
                    self.refused[f"{answer.status_code} {code}"] += 1

    def stop(self) -> None:
        """Lets the writer end after its batch."""
        self._stopped.set()

    @property
    def num_acknowledged(self) -> int:
        """Number of acknowledged batches since the last `take`."""
        return len(self._acknowledged)

    def take(self) -> list[list[Event]]:
        """Returns the batches that were acknowledged since the last call."""
        taken, self._acknowledged = self._acknowledged, []
        return taken

    def _next_batch(self) -> list[Event]:
        size = SIZES[self._batches % len(SIZES)]
        numbers = range(self._sent, self._sent + size)
        self._batches, self._sent = self._batches + 1, self._sent + size
        # Each NUM_ITEMS events have users of their own, so that a user gets an item once.
        return [
            (f"{self.name}-{number // NUM_ITEMS}-{number % NUM_USERS}", item(number))
            for number in numbers
        ]


def _code(answer: httpx.Response) -> str | None:
    """Returns the code of an error; None for the bare text of a server that ends by force."""
    try:
        return str(answer.json()["error"]["code"])
    except ValueError:
        return None


def wait_for_batches(writers: Sequence[BatchWriter], most: int, seconds: float = 30.0) -> None:
    """Waits until writers have acknowledged so many batches, or for some seconds."""
    end = time.monotonic() + seconds
    while sum(one.num_acknowledged for one in writers) < most and time.monotonic() < end:
        time.sleep(0.01)


def count_lost(client: httpx.Client, events: Iterable[Event]) -> int:
    """Counts the events that are not stored exactly once."""
    wanted: dict[str, list[str]] = {}
    for user, name in events:
        wanted.setdefault(user, []).append(name)
    lost = 0
    for user, names in wanted.items():
        answer = client.get(f"/v1/users/{user}/history").raise_for_status().json()
        stored = Counter(one["item_id"] for one in answer["events"])
        lost += sum(stored[name] != 1 for name in names)
    return lost
