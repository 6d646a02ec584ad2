"""The arm of a text request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from recserve.experiments.serving.arm_tally import ArmResult
from recserve.experiments.serving.registry import Draw
from recserve.schemas.experiments import ExperimentLabel
from recserve.schemas.text import TextRequest
from recserve.server.arms.item_request import counts_as_failure, is_misfit
from recserve.server.context import RequestContext
from recserve.server.trace import Trace

T = TypeVar("T", bound=TextRequest)


@dataclass
class TextArm(Generic[T]):
    """A text request and its arm.

    Attributes:
        draw: The part of the request in an experiment; None outside experiments.
        body: The request, with the fields of the arm.
        label: What the response says; UNSET outside experiments.
        began_s: time.monotonic() value at the draw.
    """

    draw: Draw | None
    body: T
    label: ExperimentLabel | UnsetType = UNSET
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, context: RequestContext, body: T) -> TextArm[T]:
        """Draws the arm of a request by its field `user`."""
        trace = context.trace
        draw = context.state.experiments.draw("text", body.user, trace.request_id, body)
        if draw is None:
            return cls(None, body)
        trace.experiment = draw.label
        own = body if draw.arm is None else draw.arm.fields.applied(body)
        return cls(draw, own, draw.label)

    def without_misfit(self, error: Exception, trace: Trace, body: T) -> TextArm[T] | None:
        """Returns the request without its arm if a field of the arm does not fit it.

        Args:
            error: What the request was refused with; a misfit counts as an error of the arm.
            trace: Gets the new label.
            body: The request as the client sent it.

        Returns:
            None if the error has another reason.
        """
        if self.draw is None or self.draw.arm is None or not is_misfit(error, self.draw.arm):
            return None
        self.record_failure(error)
        reason = f"the arm does not fit: {error}"
        trace.experiment = msgspec.structs.replace(self.draw.label, arm=None, reason=reason)
        return TextArm(None, body, trace.experiment)

    def record_answer(self, num_tokens: int) -> None:
        """Records a complete text."""
        self._record(ArmResult(time.monotonic() - self.began_s, empty=not num_tokens))

    def record_failure(self, error: BaseException) -> None:
        """Records an error, unless the client is at fault."""
        arm = None if self.draw is None else self.draw.arm
        if counts_as_failure(error) or (arm is not None and is_misfit(error, arm)):
            self._record(ArmResult(seconds=None, failed=True))

    def _record(self, result: ArmResult) -> None:
        if self.draw is not None and self.draw.arm is not None and self.draw.counted:
            self.draw.experiment.record(self.draw.arm, result)
