"""R4: a server that is told to end, under load."""

from __future__ import annotations

import signal
import subprocess
import threading
import time

import httpx
import numpy as np

from benchmarks.campaign.check import Budget, Figure, Finding, check
from benchmarks.campaign.site import ServerProcess, Site
from benchmarks.campaign.traffic import Body, slate_bodies

DRAIN_S = 2.0
CLIENTS = 8


class DrainClient(threading.Thread):
    """A client that sends one request after the other until the server refuses connections.

    Attributes:
        answers: Statuses of the answers.
        lost: Requests that were sent and got no answer.
    """

    def __init__(self, url: str, bodies: list[Body]) -> None:
        super().__init__(daemon=True)
        self.url, self.bodies = url, bodies
        self.answers: list[int] = []
        self.lost: list[str] = []

    def run(self) -> None:
        """Sends until the port is closed."""
        with httpx.Client(timeout=30) as client:
            for body in self.bodies:
                try:
                    answer = client.post(f"{self.url}/v1/recommend", json=body)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    return
                except httpx.TransportError as error:
                    self.lost.append(repr(error))
                    continue
                self.answers.append(answer.status_code)
                if answer.status_code == 503:
                    time.sleep(0.05)


@check("R4", "drain", "SIGTERM under load", cases=200, minimum_s=10, weight=2)
def drain(site: Site, budget: Budget) -> Finding:
    """Sends SIGTERM to servers that answer requests, and counts what is lost."""
    bodies = slate_bodies(np.random.default_rng(site.seed), 5000, beam_width=50)
    rounds, lost, statuses, left, exits, broken = 0, [], [], 0, [], 0
    delay_s = 0.5
    for number in budget.cases(200):
        settings = {"drain_delay_s": delay_s, "drain_timeout_s": DRAIN_S}
        with site.server(**settings) as server:
            clients = [DrainClient(server.url, bodies[n::CLIENTS]) for n in range(CLIENTS)]
            for client in clients:
                client.start()
            time.sleep(0.3 + 0.01 * (number % 30))
            seconds, status = ended(server)
            exits.append(seconds)
            for client in clients:
                client.join(60)
                lost += client.lost
                broken += sum(one >= 500 and one != 503 for one in client.answers)
            left += server.num_children()
            statuses.append(status)
        rounds += 1
    return Finding(
        rounds,
        (
            Figure("requests without an answer", len(lost), 0),
            Figure("5xx but 503", broken, 0),
            Figure("slowest exit in s", max(exits), delay_s + DRAIN_S + 5),
            Figure("exit statuses but 0", sum(bool(one) for one in statuses), 0),
            Figure("processes left", left, 0),
        ),
        f"{CLIENTS} clients; " + (lost[0] if lost else "none lost"),
    )


def ended(server: ServerProcess) -> tuple[float, int]:
    """Sends SIGTERM; returns the seconds to the end, and the exit status, -9 if it did not end."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    try:
        status = server.process.wait(60)
    except subprocess.TimeoutExpired:
        status = -9
    return time.monotonic() - began, status
