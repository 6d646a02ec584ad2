"""R5: bundles that replace each other under load."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import httpx
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import ADMIN, ADMIN_KEY, Site
from benchmarks.campaign.traffic import Body, apart, percentile, slate_bodies
from tests.support.bundle_shelf import DROPPED

NAMES = ("two", "other", "one")
NUM_BODIES = 20_000  # so many that hardly a history comes twice: a cached prefix would be one
NUM_ROLLBACKS = 4
ROUNDS = 8


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
    """Loads three bundles in turn while a client asks for slates, then rolls back.

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
        client.start()
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
            back_s = [swapped(admin, "rollback", poll_s=0.005)[0] for _ in range(NUM_ROLLBACKS)]
        finally:
            client.stopped.set()
            client.join()
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
            Figure("models seen with two catalogues", mixed + max(0, foreign), 0),
            replace(p99, judged=noise <= p99.bound),
            Figure("resident memory grows by", resident[-1] / resident[0] - 1, 0.01),
            Figure("slowest rollback in ms", max(back_s) * 1e3, 100),
        ),
        f"{len(steady)} requests without a replacement, {len(during)} during them, medians "
        f"{percentile(steady, 50):.1f} and {percentile(during, 50):.1f} ms; the p99 of equal "
        f"phases differs by a factor of {noise:.2f}, and the ratio is judged if that is within the "
        "bound; " + "; ".join(client.failed[:2]),
    )
