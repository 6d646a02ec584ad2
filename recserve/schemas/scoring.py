"""Requests and responses of the routes that score given texts.

`/v1/rerank` and `/v2/rerank` have the fields of Jina and Cohere, `/generative_scoring` those of
vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from recserve.schemas.items import (
    MAX_CANDIDATES,
    InvalidRequest,
    RequestId,
    StrictStruct,
)
from recserve.schemas.neutral import check_neutral
from recserve.schemas.text import TextTimeoutMs, TokenId, Usage

MAX_LABELS = 64

ModelName = Annotated[str, Meta(max_length=256)]
CountOrZero = Annotated[int, Meta(ge=0, le=2**31)]
TokenTexts = Annotated[list[TokenId], Meta(min_length=1)]


class Document(Struct, frozen=True, kw_only=True):
    """A document in object form. Further fields are ignored."""

    text: str


class PoolingRequest(StrictStruct, frozen=True, kw_only=True):
    """Fields of the routes that vLLM calls pooling. `user` is ignored."""

    model: ModelName | None = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    padding: Any = None
    use_activation: Any = None
    mm_processor_kwargs: Any = None
    cache_salt: Any = None
    user: str | None = None
    timeout_ms: TextTimeoutMs | None = None
    request_id: RequestId | None = None

    def check(self) -> None:
        """Raises InvalidRequest if an unsupported field is set."""
        check_neutral(self)


class RerankRequest(PoolingRequest, frozen=True, kw_only=True):
    """POST /v1/rerank and /v2/rerank.

    Attributes:
        query: The search query.
        documents: Texts or Document objects.
        top_n: Number of best documents to return; None and 0 return all.
        return_documents: Add the texts to the response. None adds them on /v1/rerank, as Jina and
            vLLM do, and not on /v2/rerank, as Cohere does.
        instruction: What makes a document relevant; None means a general instruction.
        max_tokens_per_doc: Longer documents are cut to this length. None and 0 refuse documents
            that do not fit the context.
        rank_fields: Field of Cohere; refused.
        max_chunks_per_doc: Field of Cohere; refused.
    """

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    top_n: CountOrZero | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Meta(max_length=4096)] | None = None
    max_tokens_per_doc: CountOrZero | None = None
    rank_fields: Any = None
    max_chunks_per_doc: Any = None


class GenerativeScoringRequest(StrictStruct, frozen=True, kw_only=True):
    """POST /generative_scoring: the probability of each label token after query and item.

    Attributes:
        query: A text, or a list of token ids.
        items: Texts, or lists of token ids.
        label_token_ids: Tokens whose probabilities are returned, each once.
        apply_softmax: Normalise over the labels. False returns probabilities over the whole
            vocabulary.
        item_first: Refused; the query comes first.
        add_special_tokens: Add special tokens before the query.
    """

    query: str | list[TokenId]
    items: Annotated[list[str | TokenTexts], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LABELS)]
    model: ModelName | None = None
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    cache_salt: Any = None
    timeout_ms: TextTimeoutMs | None = None
    request_id: RequestId | None = None

    def check(self) -> None:
        """Raises InvalidRequest if an unsupported field is set, or a label is repeated."""
        check_neutral(self)
        labels = self.label_token_ids
        for place, label in enumerate(labels):
            if label in labels[:place]:  # it would count twice among the labels
                why = f"expected each token once, got {label} again"
                raise InvalidRequest(f"label_token_ids[{place}]", why)
        if self.item_first:
            why = "not supported; the query comes first, so that all items share it"
            raise InvalidRequest("item_first", why)


class RerankResult(Struct, frozen=True, kw_only=True):
    """The relevance of one document.

    Attributes:
        index: Index of the document in the request.
        relevance_score: Probability of "yes" against "no" to the question whether the document is
            relevant.
        document: The document, if requested.
    """

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class ApiVersion(Struct, frozen=True):
    """Version field of Cohere's response format."""

    version: str


class RerankMeta(Struct, frozen=True):
    """Metadata field of Cohere's response format."""

    api_version: ApiVersion


class RerankResponse(Struct, frozen=True, kw_only=True):
    """Documents by relevance, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: RerankMeta


class ItemScore(Struct, frozen=True, kw_only=True):
    """Label probabilities of one item.

    Attributes:
        score: Probability of the first label.
        scores: Probabilities of all labels, in request order.
    """

    index: int
    object: str = "score"
    score: float
    scores: list[float]


class GenerativeScoringResponse(Struct, frozen=True, kw_only=True):
    """One score per item, in request order."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage
