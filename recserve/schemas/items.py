"""Bodies and answers of every route, once: HTTP, the commands and the service speak these.

Decoding checks types and bounds in one pass (msgspec), which is what makes 500 candidates cheap.
Names are the contract's: see docs/reference/http.md.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

MAX_K = 1000
MAX_BEAM_WIDTH = 1000
MAX_HISTORY = 4096
MAX_CANDIDATES = 4096
MAX_EXCLUDED = 4096
MAX_ITEMS = 1000
MAX_BATCH = 256
MAX_ID_LENGTH = 256
MAX_TIMEOUT_MS = 60_000
MAX_OUTCOMES = 64
MAX_WINDOW_S = 10 * 365 * 86_400

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
Category = Annotated[str, Meta(min_length=1, max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
REQUEST_ID = Meta(
    pattern=r"^[A-Za-z0-9._:-]{1,128}\Z", description="1 to 128 of A-Z a-z 0-9 . _ : -"
)
RequestId = Annotated[str, REQUEST_ID]
TimeoutMs = Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)]
Cap = Annotated[int, Meta(ge=1, le=MAX_K)]
Level = Annotated[int, Meta(ge=0, le=63)]
Weight = Annotated[float, Meta(gt=0, le=1e6)]
Mix = Annotated[dict[Name, Weight], Meta(min_length=1, max_length=MAX_OUTCOMES)]
Moment = Annotated[datetime.datetime, Meta(tz=True)]


class InvalidRequest(ValueError):
    """A field is out of range. param: its place, `candidates[3].item_id`; None: the whole body."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param


class StrictStruct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a request body. A field that it does not define is an error."""


class UserRef(StrictStruct, frozen=True, kw_only=True):
    """Whose history to read."""

    id: Id


class Exclude(StrictStruct, frozen=True, kw_only=True):
    """Items that must not be answered. seen: leave out what is in the user's history; with
    seen_within_s only what the user did something with in so many seconds before now.
    """

    item_ids: Annotated[list[Id], Meta(max_length=MAX_EXCLUDED)] = []
    seen: bool = True
    seen_within_s: Annotated[float, Meta(gt=0, le=MAX_WINDOW_S)] | None = None


class Diversity(StrictStruct, frozen=True, kw_only=True):
    """Most items of one kind in a slate. category: that share a category path. prefix: `[level,
    n]`, at most n items whose codes are the same up to that level, the first of which is 0.
    """

    category: Cap | None = None
    prefix: tuple[Level, Cap] | None = None


class RecommendRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/recommend. `user` or `history` (oldest first, overrides the store) is required.

    beam_width: None: 50, or k where that is more. dense_weight: weight of the dense head's
    log-probability, whose own best items compete with the beams; None: the bundle's own. outcome:
    what the slate should lead to, with weights; read by `dense`. None: as the training events were.
    diversity: most items of one kind.
    """

    user: UserRef | None = None
    history: Annotated[list[Id], Meta(max_length=MAX_HISTORY)] | None = None
    k: Annotated[int, Meta(ge=1, le=MAX_K)] = 10
    strategy: Name = "auto"
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    dense_weight: Annotated[float, Meta(ge=0, le=100)] | None = None
    exclude: Exclude = msgspec.field(default_factory=Exclude)
    filter: dict[str, Any] | None = None
    outcome: Mix | None = None
    diversity: Diversity | None = None
    timeout_ms: TimeoutMs | None = None
    request_id: RequestId | None = None
    explain: bool = False


class Candidate(StrictStruct, frozen=True, kw_only=True, gc=False):
    """One item to rank. shown_at: when the user saw it; later events do not count for it."""

    item_id: Id
    features: Annotated[dict[Name, float], Meta(max_length=64)] | None = None
    shown_at: Moment | None = None


class RankRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/rank. sort_by: the task whose score sorts the answer, None: the model's first."""

    candidates: Annotated[list[Candidate], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    user: UserRef | None = None
    history: Annotated[list[Id], Meta(max_length=MAX_HISTORY)] | None = None
    scorer: Name = "auto"
    sort_by: Name | None = None
    timeout_ms: TimeoutMs | None = None
    request_id: RequestId | None = None


class RankBatchRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/rank:batch, one ranking per user."""

    requests: Annotated[list[RankRequest], Meta(min_length=1, max_length=MAX_BATCH)]
    timeout_ms: TimeoutMs | None = None
    request_id: RequestId | None = None


class ItemInput(StrictStruct, frozen=True, kw_only=True):
    """One item. What is not said stays as it was; an embedding gives the item a new place."""

    item_id: Id
    title: Annotated[str, Meta(max_length=4096)] | None = None
    categories: Annotated[list[Category], Meta(max_length=64)] | None = None
    embedding: Annotated[list[float], Meta(min_length=1, max_length=65_536)] | None = None
    attributes: dict[str, Any] = {}


class ItemsRequest(StrictStruct, frozen=True, kw_only=True):
    """PUT /v1/items. Each is an ItemInput, judged by itself; further fields are attributes."""

    items: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_ITEMS)]
    request_id: RequestId | None = None


class RollbackRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/items:rollback. catalog_version: one of those that are kept."""

    catalog_version: Annotated[str, Meta(min_length=1, max_length=128)]


class TimingMs(Struct, frozen=True, kw_only=True):
    """Milliseconds per stage; `features` is history, encoding and ids, `total` the whole of it."""

    queue: float = 0.0
    features: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0


class Envelope(Struct, frozen=True, kw_only=True):
    """What every answer of a model carries."""

    request_id: str
    strategy: str
    exact: bool
    rounds: int
    model_version: str
    catalog_version: str
    experiment: None = None
    degraded: list[str]
    attribution_token: str
    timing_ms: TimingMs


class RecommendedItem(Struct, frozen=True, kw_only=True, gc=False):
    """score: sum of log-probabilities over the levels (`rpg`: their mean), with `dense` a
    scaled cosine; None where `source` is not `model`.
    """

    item_id: str
    score: float | None
    rank: int
    source: str
    semantic_id: list[int] | UnsetType = UNSET


class Explanation(Struct, frozen=True, kw_only=True):
    """Work behind an answer: events read and used, root tokens cached and computed, tree nodes."""

    history_events: int
    history_used: int
    root_tokens_cached: int
    root_tokens_computed: int
    forwards: int
    nodes: int


class RecommendResponse(Envelope, frozen=True, kw_only=True):
    """A slate, best first."""

    items: list[RecommendedItem]
    explanation: Explanation | UnsetType = UNSET


class RankedItem(Struct, frozen=True, gc=False):
    """score: the sorting task's. scores: one per task."""

    item_id: str
    score: float
    rank: int
    scores: dict[str, float]


class RankResponse(Envelope, frozen=True, kw_only=True):
    """Candidates by score, best first; `missing_item_ids` are the unknown ones."""

    scorer: str
    items: list[RankedItem]
    missing_item_ids: list[str]


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """param: the field at fault; code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(Struct, frozen=True, kw_only=True):
    """The one shape of every error."""

    error: ErrorDetail


class RankOutcome(Struct, frozen=True, kw_only=True):
    """What became of one request of a batch: either of the two."""

    answer: RankResponse | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET


class RankBatchResponse(Struct, frozen=True, kw_only=True):
    """One outcome per request, in their order."""

    request_id: str
    results: list[RankOutcome]


class Rejection(Struct, frozen=True, kw_only=True):
    """Why the event or item at `index` was not taken."""

    index: int
    reason: str


class ItemResponse(Struct, frozen=True, kw_only=True):
    """One item of the catalogue."""

    item_id: str
    title: str | None
    categories: list[str]
    attributes: dict[str, Any]
    semantic_id: list[int]
    popularity: float
    catalog_version: str


class ItemsResponse(Struct, frozen=True, kw_only=True):
    """What became of each item, and the version that has them all.

    degraded: items that are in, but not as well placed as they could be.
    """

    catalog_version: str
    inserted: int
    updated: int
    rejected: list[Rejection]
    degraded: list[Rejection]


class HideItemResponse(Struct, frozen=True, kw_only=True):
    """The version that no longer answers the item."""

    item_id: str
    catalog_version: str


class RollbackResponse(Struct, frozen=True, kw_only=True):
    """catalog_version: the new version; restored: whose content it has."""

    catalog_version: str
    restored: str
