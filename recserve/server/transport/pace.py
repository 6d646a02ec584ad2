"""Spreads a burst of requests over turns of the event loop, so that probes go between."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 4


class Pace:
    """Lets a few callers go on in each turn of the event loop, in the order in which they came.

    Between two turns the loop reads its connections. So what a caller does next, a millisecond or
    two each, holds up the others by a few callers' work at most.

    Attributes:
        per_turn: Callers that go on in one turn.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self.per_turn = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._gone_on = 0  # in this turn
        self._counting = False

    def __len__(self) -> int:
        """Number of callers that wait."""
        return len(self._waiting)

    async def turn(self) -> None:
        """Returns in a turn that has room; at once if this one has and nobody waits."""
        loop = asyncio.get_running_loop()
        if not self._waiting and self._gone_on < self.per_turn:
            self._go_on(loop)
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._gone_on += 1
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_turn, loop)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._gone_on, self._counting = 0, False
        while self._waiting and self._gone_on < self.per_turn:
            caller = self._waiting.popleft()
            if not caller.done():
                caller.set_result(None)
                self._go_on(loop)
