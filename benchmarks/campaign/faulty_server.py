"""`recserve serve` with faults of the engine.

    python -m benchmarks.campaign.faulty_server CONFIG.json

While the folder of CONFIG.json has a file `poisoned`, a step that includes a request for POISON
items raises an error. While it has a file `lost`, every forward pass fails and the device counts as
lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from torch import Tensor

from recserve.config import ServerConfig
from recserve.engine.items.scheduler import FinishedItem, ItemScheduler
from recserve.engine.runtime.runner import DeviceLost, ForwardPiece, Runner
from recserve.models.decoder import Taps
from recserve.server.run import serve

POISON = 13  # items that a poisoned request asks for; no other one asks for so many
POISONED, LOST = "poisoned", "lost"


def main() -> int:
    """Serves with faults."""
    config = Path(sys.argv[1])
    forward, check_device, step = Runner.forward, Runner.check_device, ItemScheduler.step

    def faulty(
        self: Runner, pieces: Sequence[ForwardPiece], taps: Taps | None = None
    ) -> Sequence[Tensor]:
        if (config.parent / LOST).exists():
            raise RuntimeError("the device is lost")
        return forward(self, pieces, taps)

    def stepped(self: ItemScheduler) -> Sequence[FinishedItem]:
        running = [one for one, _ in (*self.cold, *self.warm)]
        running += [one for cohort in self.cohorts for one in cohort.sequences]
        poisoned = any(getattr(one.request, "k", 0) == POISON for one in running)
        if poisoned and (config.parent / POISONED).exists():
            raise RuntimeError("a poisoned request")
        return step(self)

    def checked(self: Runner) -> None:
        if (config.parent / LOST).exists():
            raise DeviceLost("the device is lost")
        check_device(self)

    with (
        mock.patch.object(Runner, "forward", faulty),
        mock.patch.object(Runner, "check_device", checked),
        mock.patch.object(ItemScheduler, "step", stepped),
    ):
        return serve(ServerConfig.load({}, config))


if __name__ == "__main__":
    sys.exit(main())
