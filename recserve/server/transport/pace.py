"""Spreads a burst of requests over turns of the event loop, so that probes go between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

PER_TURN = 4


class TurnLimiter:
    """Makes a few calls in each turn of the event loop, in the order in which they were given.

    Between two turns the loop reads its connections. So what a call starts, a millisecond or two
    each, delays other connections by at most a few calls.

    Attributes:
        per_turn: Calls in one turn.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self.per_turn = per_turn
        self._waiting: deque[Callable[[], object]] = deque()
        self._called = 0  # in this turn
        self._counting = False

    def __len__(self) -> int:
        """Number of calls that wait."""
        return len(self._waiting)

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function in a turn that has room: at once if this one has and nothing waits."""
        if not self._waiting and self._called < self.per_turn:
            self._call(function)
        else:
            self._waiting.append(function)

    def _call(self, function: Callable[[], object]) -> None:
        self._called += 1
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        function()

    def _next_turn(self) -> None:
        self._called, self._counting = 0, False
        while self._waiting and self._called < self.per_turn:
            self._call(self._waiting.popleft())


class Arrivals:
    """Connections whose bytes wait for the parser.

    A burst that is longer than the engine's queue is refused in part. The requests beyond the queue
    have a pace of their own, so that their clients need not wait for those before them.

    Attributes:
        most: Length of the engine's queue.
        first: Connections for which the queue has room.
        beyond: Connections that came when as many waited as the queue has room for.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.first, self.beyond = TurnLimiter(), TurnLimiter()

    def call(self, read: Callable[[int], object]) -> None:
        """Calls a function when it is the turn of its connection.

        Args:
            read: Called with the number of connections that came earlier and still wait. It is 0
                unless they alone could fill the queue.
        """
        ahead = len(self.first)
        if ahead < self.most:
            self.first.call(partial(read, 0))
        else:
            self.beyond.call(partial(read, ahead))
