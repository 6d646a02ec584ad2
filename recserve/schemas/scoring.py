"""Bodies and answers of the routes that score given texts.

`/v1/rerank` and `/v2/rerank` have Jina's and Cohere's fields, `/generative_scoring` vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.schemas.items import MAX_CANDIDATES, InvalidRequest, RequestId, StrictStruct
from recserve.schemas.text import TextTimeoutMs, TokenId, Usage

MAX_LABELS = 64

ModelName = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
TokenTexts = Annotated[list[TokenId], Meta(min_length=1)]


class Document(StrictStruct, frozen=True, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /v1/rerank and /v2/rerank. instruction: what makes a document relevant.

    max_tokens_per_doc: longer documents are cut there; None: they are refused where they do not
    fit. rank_fields, max_chunks_per_doc: Cohere's, refused.
    """

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    model: ModelName | None = None
    top_n: Count | None = None
    return_documents: bool = False
    instruction: Annotated[str, Meta(max_length=4096)] | None = None
    max_tokens_per_doc: Count | None = None
    rank_fields: Any = None
    max_chunks_per_doc: Any = None
    timeout_ms: TextTimeoutMs | None = None
    request_id: RequestId | None = None

    def check(self) -> None:
        """Raises InvalidRequest for what is not done here."""
        for name in ("rank_fields", "max_chunks_per_doc"):
            if getattr(self, name) is not None:
                raise InvalidRequest(name, "not done here; a document is one text")


class GenerativeScoringRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /generative_scoring: how likely each label token is after query and item.

    query, items: texts, or lists of token numbers. apply_softmax: normalise over the labels; False:
    probabilities over the whole vocabulary. add_special_tokens: before the query.
    """

    query: str | list[TokenId]
    items: Annotated[list[str | TokenTexts], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LABELS)]
    model: ModelName | None = None
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    timeout_ms: TextTimeoutMs | None = None
    request_id: RequestId | None = None

    def check(self) -> None:
        """Raises InvalidRequest for what is not done here."""
        if self.item_first:
            why = "not done here; the query comes first, so that all items share it"
            raise InvalidRequest("item_first", why)


class RerankResult(Struct, frozen=True, kw_only=True):
    """index: place of the document in the body."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class ApiVersion(Struct, frozen=True):
    """Cohere's."""

    version: str


class RerankMeta(Struct, frozen=True):
    """Cohere's."""

    api_version: ApiVersion


class RerankResponse(Struct, frozen=True, kw_only=True):
    """The best documents first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: RerankMeta


class ItemScore(Struct, frozen=True, kw_only=True):
    """score: of the first label. scores: of all, in their order."""

    index: int
    object: str = "score"
    score: float
    scores: list[float]


class GenerativeScoringResponse(Struct, frozen=True, kw_only=True):
    """One score per item, in their order."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage
