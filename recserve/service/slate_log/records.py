"""Rows of the slate log, and their Parquet schemas."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import pyarrow as pa
from msgspec import UNSET

from recserve.features.tables.rfc3339 import parse_event_time
from recserve.files import FORMAT_KEY
from recserve.schemas.events import REMOVE, EventInput
from recserve.schemas.items import RecommendResponse, Rejection
from recserve.service.attribution import MAC_BYTES, MAX_TOKEN, Attribution, BadToken, Signer

Users = Literal["hash", "id", "none"]
TIME = pa.timestamp("us", "UTC")
SHOWN = pa.struct(
    [
        ("item_id", pa.string()),
        ("rank", pa.int32()),
        ("score", pa.float32()),
        ("source", pa.string()),
        ("team", pa.string()),
        ("log_prob", pa.float32()),
    ]
)
SLATES = pa.schema(
    [
        ("token_id", pa.string()),
        ("request_id", pa.string()),
        ("time", TIME),
        ("user", pa.string()),
        ("experiment", pa.string()),
        ("arm", pa.string()),
        ("strategy", pa.string()),
        ("exact", pa.bool_()),
        ("degraded", pa.string()),
        ("scoring", pa.string()),
        ("model_version", pa.string()),
        ("catalog_version", pa.string()),
        ("items", pa.list_(SHOWN)),
    ]
)
OUTCOMES = pa.schema(
    [
        ("token_id", pa.string()),
        ("request_id", pa.string()),
        ("time", TIME),
        ("user", pa.string()),
        ("item_id", pa.string()),
        ("type", pa.string()),
        ("value", pa.float64()),
        ("event", pa.string()),
    ]
)
FORMAT = "recserve-slate-log/1"
ADDED = frozenset({"scoring"})  # columns that the first files of this format lack: null
SCHEMAS = {
    kind: schema.with_metadata({FORMAT_KEY: FORMAT})
    for kind, schema in (("slates", SLATES), ("outcomes", OUTCOMES))
}


@dataclass(frozen=True)
class SlateRecord:
    """A slate that was returned.

    Attributes:
        time_us: Time of the response in microseconds since 1970.
        user: Keyed hash or id of the user, or None.
        answer: The response.
    """

    time_us: int
    user: str | None
    answer: RecommendResponse

    kind = "slates"

    @property
    def size(self) -> int:
        """Cost of the record in the buffer, in items."""
        return 1 + len(self.answer.items)

    def row(self) -> dict[str, object]:
        """Returns the row of the record."""
        answer = self.answer
        label = answer.experiment
        return {
            "token_id": token_id(answer.attribution_token),
            "request_id": answer.request_id,
            "time": self.time_us,
            "user": self.user,
            "experiment": getattr(label, "name", None),
            "arm": getattr(label, "arm", None),
            "strategy": answer.strategy,
            "exact": answer.exact,
            "degraded": ",".join(answer.degraded),
            "scoring": None
            if answer.scoring is UNSET
            else msgspec.json.encode(answer.scoring).decode(),
            "model_version": answer.model_version,
            "catalog_version": answer.catalog_version,
            "items": [
                {
                    "item_id": item.item_id,
                    "rank": item.rank,
                    "score": item.score,
                    "source": item.source,
                    "team": getattr(item, "team", None) or None,
                    "log_prob": getattr(item, "log_prob", None),
                }
                for item in answer.items
            ],
        }


@dataclass(frozen=True)
class OutcomeRecord:
    """An event that a slate led to.

    Attributes:
        token_id: Id of the slate's attribution token.
        time_us: Time of the event in microseconds since 1970.
        user: Keyed hash or id of the user, or None.
        event: The event.
        key: Keyed hash of the event's id; None without an id.
        attribution: Content of the slate's attribution token.
        team: Team of the item in an interleaved slate; 0 in others.
    """

    token_id: str
    time_us: int
    user: str | None
    event: EventInput
    key: str | None
    attribution: Attribution
    team: int

    kind = "outcomes"

    @property
    def size(self) -> int:
        """Cost of the record in the buffer, in items."""
        return 1

    def row(self) -> dict[str, object]:
        """Returns the row of the record."""
        event = self.event
        return {
            "token_id": self.token_id,
            "request_id": self.attribution.request_id,
            "time": self.time_us,
            "user": self.user,
            "item_id": event.item_id,
            "type": event.type,
            "value": event.value,
            "event": self.key,
        }


def token_id(token: str) -> str:
    """Returns a short id of an attribution token: its signature in hexadecimal digits."""
    raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    return raw[-MAC_BYTES:].hex()


def logged_user(users: Users, user_id: str | None, signer: Signer) -> str | None:
    """Returns the name of a user in the log: a keyed hash, the id, or None."""
    if user_id is None or users == "none":
        return None
    return user_id if users == "id" else signer.user(user_id)


def verify_tokens(
    events: Sequence[EventInput], refused: set[int], signer: Signer, users: Users
) -> tuple[list[OutcomeRecord], list[Rejection]]:
    """Verifies the attribution tokens of stored events, and that their answers showed the items.

    Args:
        events: The events of one request.
        refused: Positions of events that were not stored.
        signer: Verifies the tokens.
        users: How users are logged.

    Returns:
        The outcomes, and the events whose token is not valid, with the reason.
    """
    outcomes, wrong = [], []
    for index, event in enumerate(events):
        if event.attribution_token is None or index in refused:
            continue
        try:
            said = _read_token(event, signer)
            team = signer.team(said, event.item_id or "")
        except BadToken as error:
            wrong.append(Rejection(index=index, reason=f"attribution_token: {error}"))
            continue
        name = event.event_id
        outcomes.append(
            OutcomeRecord(
                token_id(event.attribution_token),
                _time_us(event),
                logged_user(users, event.user_id, signer),
                event,
                None if name is None else signer.user(f"{event.user_id}\0{name}"),
                said,
                team,
            )
        )
    return outcomes, wrong


def _read_token(event: EventInput, signer: Signer) -> Attribution:
    """Returns the content of an event's token. Raises BadToken if the token cannot be used."""
    token = event.attribution_token or ""
    if len(token) > MAX_TOKEN:
        raise BadToken(f"expected at most {MAX_TOKEN} characters, got {len(token)}")
    if event.correction == REMOVE:
        raise BadToken(f"correction {REMOVE} stores no event")
    said = signer.read(token)
    if said.user and said.user != signer.user(event.user_id):
        raise BadToken("it was issued to another user")
    return said


def _time_us(event: EventInput) -> int:
    if event.timestamp is None:
        return time.time_ns() // 1000
    return parse_event_time(event.timestamp)
