"""R5: bundles that replace each other while clients ask for slates and change items."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import httpx
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import ADMIN, ADMIN_KEY, Site
from benchmarks.campaign.traffic import Body, apart, item, percentile, slate_bodies
from tests.support.bundle_shelf import DROPPED

NAMES = ("two", "other", "one")
NUM_BODIES = 20_000  # so many that hardly a history comes twice: a cached prefix would be one
NUM_ROLLBACKS = 4
ROUNDS = 8
# Items that change: half of them are new, half are items that all three bundles have.
CHANGING = tuple(f"live-{n}" for n in range(20)) + tuple(item(n) for n in range(100, 120))


class SwapClient(threading.Thread):
    """A client that asks for one slate after the other, at a steady rate.

    Attributes:
        latencies_ms: Latencies since `begin`.
        failed: Statuses but 200.
        seen: Model and catalogue version with the items of each answer.
    """

    def __init__(self, url: str, bodies: list[Body], pause_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.url, self.bodies, self.pause_s = url, bodies, pause_s
        self.latencies_ms: list[float] = []
        self.failed: list[str] = []
        self.seen: set[tuple[str, str, bool]] = set()
        self.stopped = threading.Event()

    def begin(self) -> list[float]:
        """Returns the latencies so far, and starts again."""
        found, self.latencies_ms = self.latencies_ms, []
        return found

    def run(self) -> None:
        """Sends until it is stopped."""
        with httpx.Client(timeout=60) as client:
            number = 0
            while not self.stopped.wait(self.pause_s):
                body = self.bodies[number % len(self.bodies)]
                number += 1
                began = time.perf_counter()
                try:
                    answer = client.post(f"{self.url}/v1/recommend", json=body)
                except httpx.TransportError as error:
                    self.failed.append(repr(error))
                    continue
                self.latencies_ms.append((time.perf_counter() - began) * 1e3)
                if answer.status_code != 200:
                    self.failed.append(str(answer.status_code))
                    continue
                said = answer.json()
                dropped = any(one["item_id"] in DROPPED for one in said["items"])
                catalogue = said["catalog_version"].partition(".")[0]
                self.seen.add((said["model_version"], catalogue, dropped))


class ItemWriter(threading.Thread):
    """A client that puts and deletes items, one after the other.

    Attributes:
        visible: For each changed item whether its last change put it. An item whose change
            failed is not in it, because it may have either state.
        failed: What was answered instead of 200.
        num_deleted: Number of items that were deleted.
    """

    def __init__(self, url: str, seed: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self.url, self.pause_s = url, pause_s
        self.visible: dict[str, bool] = {}
        self.failed: list[str] = []
        self.num_deleted = 0
        self.stopped = threading.Event()
        self._random = np.random.default_rng(seed)

    def run(self) -> None:
        """Changes items until it is stopped."""
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.stopped.wait(self.pause_s):
                item_id = CHANGING[int(self._random.integers(len(CHANGING)))]
                shown = self.visible.pop(item_id, False)
                try:
                    if shown:
                        answer = client.delete(f"/v1/items/{item_id}")
                    else:
                        put = {"items": [{"item_id": item_id, "title": "blue kettle"}]}
                        answer = client.put("/v1/items", json=put)
                except httpx.TransportError as error:
                    self.failed.append(repr(error))
                    continue
                if answer.status_code != 200 or answer.json().get("rejected"):
                    self.failed.append(f"{answer.status_code} {answer.text[:200]}")
                    continue
                self.visible[item_id] = not shown
                self.num_deleted += shown

    def wrong(self, client: httpx.Client) -> list[str]:
        """Returns the changed items that the server shows or hides against their last change."""
        return [
            item_id
            for item_id, shown in self.visible.items()
            if client.get(f"/v1/items/{item_id}").status_code != (200 if shown else 404)
        ]


def swapped(
    admin: httpx.Client, route: str, body: Body | None = None, poll_s: float = 0.05
) -> tuple[float, dict]:
    """Starts a replacement and waits for it; returns the seconds and the status."""
    began = time.monotonic()
    admin.post(f"/admin/bundle:{route}", json=body).raise_for_status()
    while (found := admin.get("/admin/bundle").json())["state"] == "loading":
        time.sleep(poll_s)
    return time.monotonic() - began, found


@check(
    "R5", "reload", "model and catalogue replaced under load", cases=1000, minimum_s=20, weight=2
)
def reload(site: Site, budget: Budget) -> Finding:
    """Loads three bundles in turn while clients ask for slates and change items, then rolls back.

    Phases with and without replacements alternate, so that both see the same machine. Histories do
    not recur: otherwise the phases without would be answered from the prefix cache, which is empty
    in a new bundle.
    """
    bundles = site.shelf()
    bodies = slate_bodies(np.random.default_rng(site.seed), NUM_BODIES, beam_width=50)
    settings = {"bundle": bundles / "one", "bundles_dir": bundles, "admin_keys": [ADMIN_KEY]}
    quiet: list[list[float]] = []
    during: list[float] = []
    with (
        site.server(**settings, kv_bytes=2**22) as server,
        server.client(headers=ADMIN) as admin,  # once: making a client takes processor time
    ):
        client = SwapClient(server.url, bodies, 0.005)
        writer = ItemWriter(server.url, site.seed, 0.02)
        client.start()
        writer.start()
        try:
            states, resident = [], []
            for name in NAMES:  # the first round fills caches and pools
                states.append(swapped(admin, "load", {"path": name})[1]["state"])
            resident.append(server.resident_bytes())
            part_s = budget.share(0.9) / ROUNDS
            for _ in range(ROUNDS):
                client.begin()
                time.sleep(0.3 * part_s)
                quiet.append(client.begin())
                for number in Budget(0.7 * part_s).cases(1000 // ROUNDS, least=len(NAMES)):
                    name = NAMES[number % len(NAMES)]
                    states.append(swapped(admin, "load", {"path": name})[1]["state"])
                    if name == NAMES[-1]:
                        resident.append(server.resident_bytes())
                during += client.begin()
            back_s = []
            for _ in range(NUM_ROLLBACKS):
                seconds, status = swapped(admin, "rollback", poll_s=0.005)
                back_s.append(seconds)
                states.append(status["state"])
        finally:
            for thread in (client, writer):
                thread.stopped.set()
                thread.join()
        wrong = writer.wrong(admin)
    catalogues: dict[str, set[str]] = {}
    for model, catalogue, _ in client.seen:
        catalogues.setdefault(model, set()).add(catalogue)
    mixed = sum(len(found) != 1 for found in catalogues.values())
    foreign = len({catalogue for _, catalogue, _ in client.seen}) - 2
    steady = [ms for part in quiet for ms in part]
    # Phases without a replacement are equal but for the noise of the machine.
    noise = apart([ms for part in quiet[::2] for ms in part], [ms for p in quiet[1::2] for ms in p])
    p99 = Figure("p99 / p99 without", percentile(during, 99) / percentile(steady, 99), 1.2)
    return Finding(
        len(states),
        (
            Figure("requests that failed", len(client.failed), 0),
            Figure("replacements that failed", sum(s != "ready" for s in states), 0),
            Figure("item changes that failed", len(writer.failed), 0),
            Figure("items put or deleted that are not so", len(wrong), 0),
            Figure("items deleted", writer.num_deleted, 1, at_least=True),
            Figure("models seen with two catalogues", mixed + max(0, foreign), 0),
            replace(p99, judged=noise <= p99.bound),
            Figure("resident memory grows by", resident[-1] / resident[0] - 1, 0.01),
            Figure("slowest rollback in ms", max(back_s) * 1e3, 100),
        ),
        f"{len(steady)} requests without a replacement, {len(during)} during them, medians "
        f"{percentile(steady, 50):.1f} and {percentile(during, 50):.1f} ms; the p99 of equal "
        f"phases differs by a factor of {noise:.2f}, and the ratio is judged if that is within the "
        "bound; " + "; ".join([*client.failed[:2], *writer.failed[:2], *wrong[:2]]),
    )
