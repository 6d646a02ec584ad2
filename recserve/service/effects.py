"""What a slate, an event or a deletion changes beside its answer, and from which door.

Slates leave the service through `Effects.show`, attributed events come back through
`Effects.attribute`, and users leave through `Effects.forget`. No other place has these effects, but
`Histories.add`, which logs what the store has taken. A door has an effect if it calls that method:

    effect                            /v1   /v2   Python   batch, evaluation
    rounds are counted                yes   yes   yes      no
    slates are logged                 yes   yes   yes      no
    outcomes are logged and counted   yes   -     yes      -
    events are logged                 yes   -     yes      -
    a deletion reaches the logs       yes   -     yes      -
    an experiment draws the arm       yes   yes   no       no
    the clock may choose for `auto`   yes   yes   yes      no

`-`: the door has no such call. Of requests of load tests and of other servers ("untracked") only
the rounds are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from recserve.schemas.events import EventsRequest, EventsResponse
from recserve.schemas.items import RecommendResponse, UserRef, without_log_probs
from recserve.service.attribution import Signer
from recserve.service.event_log import EventLogWriter
from recserve.service.slate_log.records import OutcomeRecord, verify_tokens
from recserve.service.slate_log.slate_log import SlateLog


class ArmCounts(Protocol):
    """The experiments of a server, as far as events count for them."""

    def count_events(self, events: Iterable[tuple[str, str, str, str, str]]) -> None:
        """Counts events that answers of arms led to.

        Of each event: experiment, arm, unit, type, and a key of answer and item.
        """

    def team(self, experiment: str, number: int) -> str:
        """Returns the arm of a team of an interleaved slate; empty if there is none."""


def _ignore(rounds: int) -> None:
    """Counts nothing."""


@dataclass(frozen=True)
class Effects:
    """The effects of a service. Its owner opens and closes what they write to.

    Attributes:
        slate_log: Log of slates and outcomes; None without one.
        event_log: Log of accepted events and corrections; None without one.
        arms: The experiments of the server; None without any.
        count_rounds: Called with the rounds of each slate.
    """

    slate_log: SlateLog | None = None
    event_log: EventLogWriter | None = None
    arms: ArmCounts | None = None
    count_rounds: Callable[[int], None] = _ignore

    def show(
        self, user: UserRef | None, answer: RecommendResponse, signer: Signer, tracked: bool = True
    ) -> RecommendResponse:
        """Records that a user sees a slate, and returns the slate without what only the log needs.

        Args:
            user: The user; None for an anonymous history.
            answer: The slate.
            signer: Signs the tokens of the service.
            tracked: Whether a user sees it.
        """
        self.count_rounds(answer.rounds)
        if self.slate_log is None:
            return answer
        if tracked:
            self.slate_log.slate(None if user is None else user.id, answer, signer)
        return without_log_probs(answer)

    def attribute(
        self, body: EventsRequest, stored: EventsResponse, signer: Signer, tracked: bool = True
    ) -> EventsResponse:
        """Logs and counts the events that slates led to.

        Args:
            body: The events.
            stored: What has been stored of them.
            signer: Verifies the tokens of the events.
            tracked: Whether the events are of users.

        Returns:
            `stored`, with the events whose token is not valid.

        Raises:
            ExperimentNotSaved: If several servers share an experiment, and Redis does not answer.
        """
        if all(event.attribution_token is None for event in body.events):
            return stored
        refused = {rejection.index for rejection in stored.rejected}
        users = "none" if self.slate_log is None else self.slate_log.settings.users
        outcomes, wrong = verify_tokens(body.events, refused, signer, users)
        if tracked and self.arms is not None:
            self.arms.count_events([_describe(self.arms, outcome) for outcome in outcomes])
        if tracked and self.slate_log is not None:
            for outcome in outcomes:
                self.slate_log.outcome(outcome)
        return structs.replace(stored, unattributed=wrong) if wrong else stored

    def forget(self, user_id: str, signer: Signer) -> None:
        """Removes a user's rows of the logs. Raises OSError if a row may be left."""
        if self.slate_log is not None:
            self.slate_log.forget(user_id, signer)
        if self.event_log is not None:
            self.event_log.remove([user_id])


def _describe(arms: ArmCounts, outcome: OutcomeRecord) -> tuple[str, str, str, str, str]:
    """Returns what an event counts for."""
    said, event = outcome.attribution, outcome.event
    arm = arms.team(said.experiment, outcome.team) if said.interleaved else said.arm
    unit = event.user_id if said.user else said.request_id
    key = f"{outcome.token_id} {event.item_id}"
    return said.experiment, arm, unit, event.type or "event", key
