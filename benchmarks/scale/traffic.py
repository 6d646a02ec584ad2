"""Requests that reach one replica of a large fleet: daily curve, users, sessions, routing.

A fleet gets far too many requests to draw them all. With consistent hashing a replica gets all
requests of its own users, who are a uniform sample of all users; so those users are drawn, and
nobody else. With random routing each request reaches the replica with probability 1 / replicas,
and a Poisson stream that is thinned is a Poisson stream again; so only those requests are drawn.

Each user (affinity) or request (random) has a `claim`, uniform in [0, 1 / fewest replicas). It
reaches the replica while claim < 1 / replicas. When replicas are added, a replica loses users, and
when some are removed, it gets the same users back, as with consistent hashing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

HOUR_S = 3600.0
# Percent of the peak at each hour of the day: quiet at 4, busy at 20.
HOURS = (
    *(35, 26, 20, 17, 16, 19, 28, 42, 54, 60, 63, 66),
    *(70, 68, 66, 66, 69, 75, 84, 94, 100, 96, 78, 52),
)


@dataclass(frozen=True)
class Traffic:
    """What users do.

    Attributes:
        peak_rate: Requests per second of all users at the busiest hour.
        num_users: Users who may come.
        exponent: Users are active in proportion to (rank + offset) ** -exponent; not 1.
        offset: Flattens the head: the most active user is not a tenth of the traffic.
        session_requests: Mean requests of a session; their number is geometric.
        session_gap_s: Mean time between two requests of a session; exponential.
        event_share: Share of requests before which the user has a new event.
    """

    peak_rate: float = 100_000.0
    num_users: int = 100_000_000
    exponent: float = 0.8
    offset: float = 10_000.0
    session_requests: float = 8.0
    session_gap_s: float = 30.0
    event_share: float = 0.3

    def rate(self, time_s: float) -> float:
        """Returns requests per second of all users, interpolated between the hours."""
        hour, part = divmod(time_s / HOUR_S, 1.0)
        first, second = HOURS[int(hour) % 24], HOURS[(int(hour) + 1) % 24]
        return self.peak_rate * (first + (second - first) * part) / 100

    def weight(self, users: np.ndarray) -> np.ndarray:
        """Returns each user's share of all requests; users are ranks from 0."""
        power = 1 - self.exponent
        total = ((self.num_users + self.offset) ** power - self.offset**power) / power
        return (users + self.offset) ** -self.exponent / total

    def draw_users(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Returns [count] users, each with the probability of its weight."""
        power = 1 - self.exponent
        low, high = self.offset**power, (self.num_users + self.offset) ** power
        return ((low + rng.random(count) * (high - low)) ** (1 / power) - self.offset).astype(
            np.int64
        )


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order of time.

    Attributes:
        times_s: [n] float64 seconds since midnight.
        users: [n] int64.
        claims: [n] float64; see the module.
        fresh: [n] bool, True if the user has a new event.
    """

    times_s: np.ndarray
    users: np.ndarray
    claims: np.ndarray
    fresh: np.ndarray

    def where(self, mask: np.ndarray | slice) -> Arrivals:
        """Returns the requests of a mask or of a range."""
        return Arrivals(self.times_s[mask], self.users[mask], self.claims[mask], self.fresh[mask])


class ReplicaTraffic:
    """Draws the requests of one replica, hour by hour.

    Attributes:
        traffic: What users do.
        fewest: Fewest replicas that the fleet ever has.
        affinity: True if a replica has users of its own, False for random routing.
    """

    def __init__(
        self, traffic: Traffic, fewest: int, affinity: bool, rng: np.random.Generator
    ) -> None:
        """Draws the users of the replica.

        Args:
            traffic: What users do.
            fewest: Fewest replicas that the fleet ever has.
            affinity: True if a replica has users of its own.
            rng: Source of all draws.
        """
        self.traffic = traffic
        self.fewest = fewest
        self.affinity = affinity
        self._rng = rng
        self._share = 1 / fewest
        if affinity:
            count = rng.binomial(traffic.num_users, 1 / fewest)
            own = rng.choice(traffic.num_users, count, replace=False)
            weights = traffic.weight(own)
            self._own, self._cumulated = own, np.cumsum(weights)
            self._share = float(self._cumulated[-1]) if own.size else 0.0
            self._claims = rng.random(own.size) / fewest

    def hours(self, hours: int) -> Iterator[Arrivals]:
        """Yields the requests of each hour. Sessions may go on into the next hour."""
        late: list[Arrivals] = []
        for hour in range(hours):
            drawn = _merged([*late, self._started_in(hour)])
            now = drawn.times_s < (hour + 1) * HOUR_S
            late = [drawn.where(~now)]
            yield drawn.where(now)

    def _started_in(self, hour: int) -> Arrivals:
        """Returns all requests of the sessions that start in an hour."""
        rng, traffic = self._rng, self.traffic
        steps = (hour + (np.arange(60) + 0.5) / 60) * HOUR_S
        expected = np.array([traffic.rate(t) for t in steps]) * 60 * self._share
        stop = 1 / traffic.session_requests
        if self.affinity:
            counts = rng.poisson(expected * stop)
            lengths = rng.geometric(stop, counts.sum())
        else:
            # A request that is drawn alone comes from a session of size-biased length. Each of its
            # other requests reaches the replica with the same small probability.
            others = 2 * (traffic.session_requests - 1)
            counts = rng.poisson(expected / (1 + others * self._share))
            biased = rng.negative_binomial(2, stop, counts.sum()) + 1
            lengths = 1 + rng.binomial(biased - 1, self._share)
        starts = np.repeat(steps, counts) + (rng.random(counts.sum()) - 0.5) * 60
        if self.affinity:
            at = np.searchsorted(self._cumulated, rng.random(starts.size) * self._cumulated[-1])
            users, claims = self._own[at], self._claims[at]
        else:
            users = traffic.draw_users(starts.size, rng)
            claims = np.zeros(starts.size)
        times = np.repeat(starts, lengths)
        gaps = rng.exponential(traffic.session_gap_s, times.size)
        first = np.cumsum(lengths) - lengths
        gaps[first] = 0.0
        total = np.cumsum(gaps)
        times = times + total - np.repeat(total[first], lengths)
        claims = np.repeat(claims, lengths)
        if not self.affinity:
            claims = rng.random(times.size) / self.fewest
        fresh = rng.random(times.size) < traffic.event_share
        return Arrivals(times, np.repeat(users, lengths), claims, fresh)


def _merged(parts: list[Arrivals]) -> Arrivals:
    """Returns the requests of all parts in the order of time."""
    columns = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("times_s", "users", "claims", "fresh")
    ]
    order = np.argsort(columns[0], kind="stable")
    return Arrivals(*(column[order] for column in columns))
