"""`recserve serve` with faults of the engine.

    python -m benchmarks.campaign.faulty_server CONFIG.json

While the folder of CONFIG.json has a file `poisoned`, a forward pass that computes a root of POISON
rows raises an error. While it has a file `lost`, every forward pass fails and the device counts as
lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from torch import Tensor

from recserve.config import ServerConfig
from recserve.engine.runtime.runner import DeviceLost, ForwardPiece, Runner
from recserve.models.decoder import Taps
from recserve.server.run import serve

POISON = 14  # rows of a root: the begin token and 13 items; the campaign's histories are shorter
POISONED, LOST = "poisoned", "lost"


def main() -> int:
    """Serves with faults."""
    config = Path(sys.argv[1])
    forward, check_device = Runner.forward, Runner.check_device

    def faulty(
        self: Runner, pieces: Sequence[ForwardPiece], taps: Taps | None = None
    ) -> Sequence[Tensor]:
        if (config.parent / LOST).exists():
            raise RuntimeError("the device is lost")
        poisoned = POISON in [len(piece.inputs) for piece in pieces]
        if poisoned and (config.parent / POISONED).exists():
            raise RuntimeError("a poisoned root")
        return forward(self, pieces, taps)

    def checked(self: Runner) -> None:
        if (config.parent / LOST).exists():
            raise DeviceLost("the device is lost")
        check_device(self)

    with (
        mock.patch.object(Runner, "forward", faulty),
        mock.patch.object(Runner, "check_device", checked),
    ):
        return serve(ServerConfig.load({}, config))


if __name__ == "__main__":
    sys.exit(main())
