"""The arm of a text request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from msgspec import UNSET, UnsetType

from recserve.experiments.serving.arm_tally import ArmResult
from recserve.experiments.serving.registry import Draw
from recserve.schemas.experiments import ExperimentLabel
from recserve.schemas.text import TextRequest
from recserve.server.arms.item_request import counts_as_failure, is_misfit
from recserve.server.exchange import Exchange
from recserve.server.transport.trace import Trace

T = TypeVar("T", bound=TextRequest)


@dataclass
class TextArm(Generic[T]):
    """A text request and its arm.

    Attributes:
        draw: The part of the request in an experiment; None outside experiments.
        body: The request, with the fields of the arm.
        began_s: time.monotonic() value at the draw.
    """

    draw: Draw | None
    body: T
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, exchange: Exchange, trace: Trace, body: T) -> TextArm[T]:
        """Draws the arm of a request by its field `user`."""
        draw = exchange.experiments.draw("text", body.user, trace.request_id, body)
        if draw is None:
            return cls(None, body)
        trace.experiment = draw.label
        return cls(draw, body if draw.arm is None else draw.arm.fields.applied(body))

    @property
    def label(self) -> ExperimentLabel | UnsetType:
        """What the response says; UNSET outside experiments."""
        return UNSET if self.draw is None else self.draw.label

    def answered(self, num_tokens: int) -> None:
        """Records a complete text."""
        self._record(ArmResult(time.monotonic() - self.began_s, empty=not num_tokens))

    def failed(self, error: BaseException) -> None:
        """Records an error, unless the client is at fault."""
        arm = None if self.draw is None else self.draw.arm
        if counts_as_failure(error) or (arm is not None and is_misfit(error, arm)):
            self._record(ArmResult(seconds=None, failed=True))

    def _record(self, result: ArmResult) -> None:
        if self.draw is not None and self.draw.arm is not None and self.draw.counted:
            self.draw.experiment.record(self.draw.arm, result)
