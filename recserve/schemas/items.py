"""Requests and responses of the item routes, shared by HTTP, the commands and the service.

msgspec checks types and bounds in one decoding pass, which is cheap even for 500 candidates. Field
names are part of the HTTP contract, see docs/reference/http.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from recserve.bounds import (
    MAX_CATEGORIES,
    MAX_CATEGORY_LENGTH,
    MAX_ID_LENGTH,
    MAX_TITLE_LENGTH,
)
from recserve.schemas.experiments import ExperimentLabel
from recserve.schemas.explanation import Explanation

MAX_K = 1000
MAX_BEAM_WIDTH = 1000
MAX_HISTORY = 4096
MAX_CANDIDATES = 4096
MAX_EXCLUDED = 4096
MAX_ITEMS = 1000
MAX_BATCH = 256
MAX_TIMEOUT_MS = 60_000
MAX_OUTCOMES = 64
MAX_WINDOW_S = 10 * 365 * 86_400
MAX_FIELDS = 32
MAX_SIMILAR = 64
MAX_SHOWN = 1000
MAX_TIMES = 1000
MAX_CAPS = 8
MAX_QUOTAS = 8
# Values of fields in one answer: items times fields.
MAX_FIELD_VALUES = MAX_CANDIDATES * MAX_FIELDS

# The key marks token ids in schemas.
TOKEN_ID = "x-token-id"

# An integer may stand in the place of an id and a number in the place of a time, see
# `validation.number_texts`. The key marks such texts, also in schemas, where it names the type.
OR_TYPE = "x-or-type"
ID, TIME = "integer", "number"
Id = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_ID_LENGTH,
        extra_json_schema={OR_TYPE: ID},
    ),
]
Category = Annotated[str, Meta(min_length=1, max_length=MAX_CATEGORY_LENGTH)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
REQUEST_ID = Meta(
    pattern=r"^[A-Za-z0-9._:-]{1,128}\Z", description="1 to 128 of A-Z a-z 0-9 . _ : -"
)
RequestId = Annotated[str, REQUEST_ID]
# Name of a catalogue version in a request.
VersionText = Annotated[str, Meta(min_length=1, max_length=128)]
TimeoutMs = Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)]
Cap = Annotated[int, Meta(ge=1, le=MAX_K)]
Level = Annotated[int, Meta(ge=0, le=63)]
OnDeadline = Literal["error", "popular", "latest"]
# A length of time. The digits bound each unit, to 11 to 31 years.
WINDOW = Meta(
    pattern=r"^([1-9][0-9]{0,8}s|[1-9][0-9]{0,6}m|[1-9][0-9]{0,4}h|[1-9][0-9]{0,3}d)\Z",
    description="a whole number of s, m, h or d, such as 90s, 30m, 6h or 7d, up to 9999d",
)
WINDOW_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
Window = Annotated[str, WINDOW]
CategoryLevel = Annotated[int, Meta(ge=0, le=15)]
Weight = Annotated[float, Meta(gt=0, le=1e6)]
# Columns of the catalogue that an answer shows for each item.
FieldNames = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=MAX_FIELDS)
]
Mix = Annotated[dict[Name, Weight], Meta(min_length=1, max_length=MAX_OUTCOMES)]
Moment = Annotated[
    datetime.datetime,
    Meta(tz=True, extra_json_schema={OR_TYPE: TIME}),
]


class InvalidRequest(ValueError):
    """A request field is out of range.

    Attributes:
        param: Path of the field, such as `candidates[3].item_id`; None for the whole body.
    """

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param


def not_offered_error(
    param: str, value: str, offered: Iterable[str], lacking: Mapping[str, str]
) -> InvalidRequest:
    """Returns the error of a name that the server does not offer.

    Args:
        param: Field with the name.
        value: The name.
        offered: Names that the server offers.
        lacking: Advice by name, for names that it would offer with other models.
    """
    advice = f": {lacking[value]}" if value in lacking else ""
    return InvalidRequest(param, f"expected one of {', '.join(offered)}, got {value!r}{advice}")


class UnknownField(InvalidRequest):
    """The request has a field that its route does not know."""


class MissingField(InvalidRequest):
    """The request lacks a required field."""


class UnsupportedField(InvalidRequest):
    """The request asks for a feature that this server does not have."""


class StrictStruct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a request body; an unknown field is an error."""


class UserRef(StrictStruct, frozen=True, kw_only=True):
    """The user whose stored history is read."""

    id: Id


class Exclusions(StrictStruct, frozen=True, kw_only=True):
    """Items that the response must not contain.

    Attributes:
        seen: Leave out the items of the user's history.
        seen_within_s: With `seen`, leave out only items with an event in the last so many seconds.
    """

    item_ids: Annotated[list[Id], Meta(max_length=MAX_EXCLUDED)] = []
    seen: bool = True
    seen_within_s: Annotated[float, Meta(gt=0, le=MAX_WINDOW_S)] | None = None


class ShownLimit(StrictStruct, frozen=True, kw_only=True):
    """Leaves out items that the user was shown, without a positive event of them since.

    Attributes:
        within: Count what was shown in this time, such as `6h`. None counts all that is recorded.
        times: Leave out items that were shown at least so often.
    """

    within: Window | None = None
    times: Annotated[int, Meta(ge=1, le=MAX_TIMES)] = 1

    @property
    def window_s(self) -> int | None:
        """`within` in seconds."""
        return _window_s(self.within)


class ShownDiscount(StrictStruct, frozen=True, kw_only=True):
    """Lowers items that the user was shown, without a positive event of them since.

    Attributes:
        within: As in ShownLimit.
        by: By how much each showing lowers the score.
    """

    by: Annotated[float, Meta(gt=0, le=1000)]
    within: Window | None = None

    @property
    def window_s(self) -> int | None:
        """`within` in seconds."""
        return _window_s(self.within)


def _window_s(within: str | None) -> int | None:
    return None if within is None else int(within[:-1]) * WINDOW_S[within[-1]]


class Quota(StrictStruct, frozen=True, kw_only=True):
    """Least number of items of one kind in a slate. `new_within_s`, `filter` or both are required.

    Attributes:
        count: Least number of these items, at most k.
        new_within_s: The items that began in the last so many seconds: by their `available_from`,
            or else by the time at which the live catalogue got them.
        filter: The items that satisfy this filter.
    """

    count: Cap
    new_within_s: Annotated[float, Meta(gt=0, le=MAX_WINDOW_S)] | None = None
    filter: dict[str, Any] | None = None


class ColumnCap(StrictStruct, frozen=True, kw_only=True):
    """Most items of a slate that share a value of a column.

    Attributes:
        field: A column that filters can read. Items without a value are not limited.
        most: Most items with the same value. Of a list, each value counts.
        level: Only of `categories`: items share the beginning of a path up to this level; the
            first level is 0. None compares whole paths.
    """

    field: Annotated[str, Meta(min_length=1, max_length=256)]
    most: Cap
    level: CategoryLevel | None = None


class Diversity(StrictStruct, frozen=True, kw_only=True):
    """Caps on similar items in a slate, and quotas of items of some kinds.

    Attributes:
        category: Most items that share a category path.
        caps: Most items that share a value of a column, for several columns.
        prefix: `[level, n]` allows at most n items whose codes agree up to that level; the first
            level is 0.
        at_least: Least number of items of one kind, or a list of such quotas, whose counts add up
            to at most k. Where no more of them are allowed, the slate has fewer and `degraded`
            says so.
    """

    category: Cap | None = None
    caps: Annotated[list[ColumnCap], Meta(max_length=MAX_CAPS)] = []
    prefix: tuple[Level, Cap] | None = None
    at_least: Quota | Annotated[list[Quota], Meta(max_length=MAX_QUOTAS)] | None = None

    @property
    def quotas(self) -> list[Quota]:
        """The quotas of `at_least`, one or several."""
        if isinstance(self.at_least, Quota):
            return [self.at_least]
        return self.at_least or []


class ScoringChoice(StrictStruct, frozen=True, kw_only=True):
    """How the score of an item follows from the model. What is absent is as in the checkpoint.

    Attributes:
        rule: What the softmax of a code runs over: the valid `children`, all codes of the `level`,
            or all tokens of the `vocabulary`.
        temperature: Divides the logits before the softmax.
        end_tokens: Whether the tokens after an id count, under `vocabulary`.
        length_penalty: Power of the number of scored tokens that divides the sum; 0 divides by 1.
    """

    rule: Literal["children", "level", "vocabulary"] | None = None
    temperature: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    end_tokens: bool | None = None
    length_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None


class RecommendRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/recommend. Either `user` or `history` is required.

    Attributes:
        history: Item ids, oldest first; overrides the stored history.
        beam_width: Number of beams; None means 50, or k if that is larger.
        dense_weight: Weight of the dense head's log-probability. The head's best items compete with
            the beams. None means the bundle's weight.
        outcome: Weights of event types that the slate should lead to; only `dense` uses it. None
            means the distribution of the training events.
        diversity: Caps on similar items, and quotas.
        on_deadline: What answers if the model is not ready at the deadline: an `error`, or the
            list `popular` or `latest`.
        fields: Columns that the response has for each item: `title`, `categories`,
            `available_from`, `expires_at` and other columns of the items file.
        exclude_shown: Leaves out what the user was shown without a click. Like the next two, it
            needs `user`. With it or `discount_shown`, `exclude.seen` reads positive events only.
        discount_shown: Lowers the scores of what the user was shown without a click.
        shown_ids: Items that the client has shown to the user since its last request. They are
            recorded, and count for this request.
        scoring: Another scoring rule than that of the model, for strategy `beam`.
        min_catalog_version: Version of the catalogue that the answer must contain, such as that of
            the answer to a change. A server behind waits for it until the deadline.
    """

    user: UserRef | None = None
    history: Annotated[list[Id], Meta(max_length=MAX_HISTORY)] | None = None
    k: Annotated[int, Meta(ge=1, le=MAX_K)] = 10
    strategy: Name = "auto"
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    dense_weight: Annotated[float, Meta(ge=0, le=100)] | None = None
    exclude: Exclusions = msgspec.field(default_factory=Exclusions)
    filter: dict[str, Any] | None = None
    outcome: Mix | None = None
    diversity: Diversity | None = None
    on_deadline: OnDeadline = "error"
    fields: FieldNames = []
    exclude_shown: ShownLimit | None = None
    discount_shown: ShownDiscount | None = None
    shown_ids: Annotated[list[Id], Meta(max_length=MAX_SHOWN)] = []
    timeout_ms: TimeoutMs | None = None
    request_id: RequestId | None = None
    explain: bool = False
    scoring: ScoringChoice | None = None
    min_catalog_version: VersionText | None = None


class ExcludedItems(StrictStruct, frozen=True, kw_only=True):
    """Items that the response must not contain."""

    item_ids: Annotated[list[Id], Meta(max_length=MAX_EXCLUDED)] = []


class SimilarRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/similar: the items that are most similar to one item, or to several.

    Attributes:
        item_ids: The items. They are not in the response.
        by: `vectors` compares item vectors, `links` counts which items followed in training, and
            `both` adds the links with the weight that validation chose.
        diversity: Caps on similar items, and quotas.
        fields: Columns that the response has for each item, as in RecommendRequest.
    """

    item_ids: Annotated[list[Id], Meta(min_length=1, max_length=MAX_SIMILAR)]
    k: Annotated[int, Meta(ge=1, le=MAX_K)] = 10
    by: Literal["both", "vectors", "links"] = "both"
    exclude: ExcludedItems = msgspec.field(default_factory=ExcludedItems)
    filter: dict[str, Any] | None = None
    diversity: Diversity | None = None
    fields: FieldNames = []
    timeout_ms: TimeoutMs | None = None
    request_id: RequestId | None = None

    def as_recommend(self) -> RecommendRequest:
        """Returns the same request to POST /v1/recommend."""
        return RecommendRequest(
            history=self.item_ids,
            k=self.k,
            strategy="similar" if self.by == "both" else f"similar_{self.by}",
            exclude=Exclusions(item_ids=self.exclude.item_ids),
            filter=self.filter,
            diversity=self.diversity,
            fields=self.fields,
            timeout_ms=self.timeout_ms,
            request_id=self.request_id,
        )


class Candidate(StrictStruct, frozen=True, kw_only=True, gc=False):
    """One item to rank.

    Attributes:
        features: Numbers that replace the catalogue's.
        shown_at: Time at which the user saw the item; later events do not count for it.
    """

    item_id: Id
    features: Annotated[dict[Name, float], Meta(max_length=64)] | None = None
    shown_at: Moment | None = None


class RankRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/rank. Either `user` or `history` is required.

    Attributes:
        sort_by: Task whose score sorts the response; None means the model's first task.
        fields: Columns that the response has for each item, as in RecommendRequest.
        min_catalog_version: As in RecommendRequest. In a batch, all rankings wait for the latest.
    """

    candidates: Annotated[list[Candidate], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    user: UserRef | None = None
    history: Annotated[list[Id], Meta(max_length=MAX_HISTORY)] | None = None
    scorer: Name = "auto"
    sort_by: Name | None = None
    fields: FieldNames = []
    timeout_ms: TimeoutMs | None = None
    request_id: RequestId | None = None
    min_catalog_version: VersionText | None = None


class RankBatchRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/rank:batch, with one ranking per user."""

    requests: Annotated[list[RankRequest], Meta(min_length=1, max_length=MAX_BATCH)]
    timeout_ms: TimeoutMs | None = None
    request_id: RequestId | None = None


class ItemInput(StrictStruct, frozen=True, kw_only=True):
    """One item to insert or change. Omitted fields stay unchanged.

    Attributes:
        title: Null removes it.
        categories: Null removes them.
        embedding: The item's vector. It assigns the item a new semantic id. Null counts as omitted,
            since every item has a vector.
        available_from: Time from which the item is recommended; null removes it.
        expires_at: Time from which the item is not recommended any more; null removes it.
        attributes: Values by column of the items file; null removes a value.
    """

    item_id: Id
    title: Annotated[str, Meta(max_length=MAX_TITLE_LENGTH)] | None | UnsetType = UNSET
    categories: Annotated[list[Category], Meta(max_length=MAX_CATEGORIES)] | None | UnsetType = (
        UNSET
    )
    embedding: Annotated[list[float], Meta(min_length=1, max_length=65_536)] | None = None
    available_from: Moment | None | UnsetType = UNSET
    expires_at: Moment | None | UnsetType = UNSET
    attributes: dict[str, Any] = {}


class ItemsRequest(StrictStruct, frozen=True, kw_only=True):
    """PUT /v1/items. Each item has the fields of ItemInput; other fields are attributes.

    Items are validated one by one.
    """

    items: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_ITEMS)]
    request_id: RequestId | None = None


class RollbackRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/items:rollback, to a stored version of the catalogue."""

    catalog_version: VersionText


class TimingMs(Struct, frozen=True, kw_only=True):
    """Milliseconds per stage. `features` covers history, encoding and ids; `total` is the whole
    request.
    """

    queue: float = 0.0
    features: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0


class Envelope(Struct, frozen=True, kw_only=True):
    """Fields that every model response has."""

    request_id: str
    strategy: str
    exact: bool
    rounds: int
    model_version: str
    catalog_version: str
    experiment: ExperimentLabel | None = None
    degraded: list[str]
    attribution_token: str
    timing_ms: TimingMs


class ScoreParts(Struct, frozen=True, kw_only=True, gc=False):
    """The parts of an item's score, which is their sum.

    Attributes:
        log_prob: Log-probability of the semantic id under the model. Its exponential is how likely
            the model finds it that this item is the user's next one.
        dense: Log-probability under the dense head, times its weight.
        bonus: The history bonus, times the weight of the dense head.
        shown: What `discount_shown` takes away; 0 or less.
    """

    log_prob: float
    dense: float
    bonus: float
    shown: float


class RecommendedItem(Struct, frozen=True, kw_only=True, gc=False):
    """One item of a slate.

    Attributes:
        score: A number for ordering, comparable within one answer. Without a dense head it is the
            sum of log-probabilities over the levels; `rpg` gives their mean, and `dense` a scaled
            cosine. None if `source` is not `model`.
        team: Arm that chose the item, in an interleaved slate only.
        fields: Values of the requested fields; null where the item has none.
        parts: Parts of the score, with `explain`; only of strategies that score semantic ids
            with the model: `beam` and `speculative`.
    """

    item_id: str
    score: float | None
    rank: int
    source: str
    semantic_id: list[int] | UnsetType = UNSET
    parts: ScoreParts | UnsetType = UNSET
    team: str | UnsetType = UNSET
    fields: dict[str, Any] | UnsetType = UNSET


class LoggedItem(RecommendedItem, frozen=True, kw_only=True, gc=False):
    """An item on its way to the slate log.

    Attributes:
        log_prob: Log-probability of the item's semantic id under the target model, without the
            dense head and its bonus. None where the strategy did not compute it.
    """

    log_prob: float | None


class UsedScoring(Struct, frozen=True, kw_only=True):
    """How the scores of an answer follow from the model. See ScoringChoice."""

    rule: Literal["children", "level", "vocabulary"]
    temperature: float
    end_tokens: bool
    length_penalty: float


class RecommendResponse(Envelope, frozen=True, kw_only=True):
    """A slate of items, best first.

    Attributes:
        dense_weight: Weight of the dense head in the scores; only of strategies that use it, and
            of recommenders that have one.
        scoring: How the scores follow from the model; of imported recommenders, and of requests
            that name a scoring.
        filter_hints: Values of the filters that no item has, at most five, each with its field and
            a similar value. Only with `unknown_filter_values` in `degraded`.
    """

    items: list[RecommendedItem]
    dense_weight: float | UnsetType = UNSET
    scoring: UsedScoring | UnsetType = UNSET
    filter_hints: list[str] | UnsetType = UNSET
    explanation: Explanation | UnsetType = UNSET


def without_log_probs(answer: RecommendResponse) -> RecommendResponse:
    """Returns an answer with plain items."""
    if not any(isinstance(item, LoggedItem) for item in answer.items):
        return answer
    names = RecommendedItem.__struct_fields__
    plain = [RecommendedItem(**{n: getattr(item, n) for n in names}) for item in answer.items]
    return structs.replace(answer, items=plain)


class RankedItem(Struct, frozen=True, gc=False):
    """One ranked candidate.

    Attributes:
        score: Score of the sorting task.
        scores: One score per task.
        fields: Values of the requested fields; null where the item has none.
    """

    item_id: str
    score: float
    rank: int
    scores: dict[str, float]
    fields: dict[str, Any] | UnsetType = UNSET


class RankResponse(Envelope, frozen=True, kw_only=True):
    """Ranked candidates, best first. `missing_item_ids` lists the unknown items."""

    scorer: str
    items: list[RankedItem]
    missing_item_ids: list[str]


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """Description of an error. `param` is the invalid field, `code` is machine-readable."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(Struct, frozen=True, kw_only=True):
    """The body of every error response."""

    error: ErrorDetail


class RankOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of one ranking in a batch: either `answer` or `error`."""

    answer: RankResponse | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET


class RankBatchResponse(Struct, frozen=True, kw_only=True):
    """One outcome per ranking, in request order."""

    request_id: str
    results: list[RankOutcome]


class Rejection(Struct, frozen=True, kw_only=True):
    """Reason for refusing the event or item at `index`."""

    index: int
    reason: str


class ItemResponse(Struct, frozen=True, kw_only=True):
    """One item of the catalogue.

    Attributes:
        popularity: Decayed number of events, to a tenth; at first that of training events.
        available_from: Time from which the item is recommended, if it has one.
        expires_at: Time from which the item is not recommended any more, if it has one.
    """

    item_id: str
    title: str | None
    categories: list[str]
    attributes: dict[str, Any]
    semantic_id: list[int]
    popularity: float
    catalog_version: str
    available_from: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET


class ItemsResponse(Struct, frozen=True, kw_only=True):
    """The outcome of an items call. `catalog_version` contains all its changes.

    `degraded` lists items that were stored with a semantic id of lower quality, with reasons.

    Attributes:
        warning: Why a failover of Redis can lose the change, if too few replicas have it.
    """

    catalog_version: str
    inserted: int
    updated: int
    rejected: list[Rejection]
    degraded: list[Rejection]
    warning: str | UnsetType = UNSET


class HideItemResponse(Struct, frozen=True, kw_only=True):
    """The catalogue version that no longer returns the item. `warning` is as in ItemsResponse."""

    item_id: str
    catalog_version: str
    warning: str | UnsetType = UNSET


class RollbackResponse(Struct, frozen=True, kw_only=True):
    """The new version, and the version that it restores. `warning` is as in ItemsResponse."""

    catalog_version: str
    restored: str
    warning: str | UnsetType = UNSET
