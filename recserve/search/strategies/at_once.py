"""What strategies share that answer from the root alone: there is no tree, and no round."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recserve.core.drafting import Draft


class AtOnce:
    """`start` does all of the work, so nothing is ever proposed or verified."""

    def tree_room(self, request: Any) -> int:
        """No nodes."""
        return 0

    def finished(self, state: Any) -> bool:
        """From the start."""
        return True

    def propose(self, state: Any) -> Draft:
        """Never asked for."""
        raise AssertionError(f"{type(self).__name__} has no tree")

    def verify(self, state: Any, draft: Any, slots: Tensor, hidden: Tensor) -> Any:
        """Never asked for."""
        raise AssertionError(f"{type(self).__name__} has no tree")
