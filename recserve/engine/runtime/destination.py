"""Where a request goes: the model it is for, and its strategy or drafter."""

from __future__ import annotations

from recserve.core.request import (
    LikelihoodRequest,
    RankRequest,
    RecommendRequest,
    Request,
    TextScoreRequest,
    WarmDraftRequest,
    WarmRequest,
)
from recserve.speculation.text_request import TextRequest


def destination(request: Request | TextRequest) -> tuple[str, str]:
    """Model and strategy or drafter that a request is for."""
    match request:
        case WarmDraftRequest():
            return "recommender", "warm_draft"
        case RecommendRequest():
            return "recommender", request.strategy
        case LikelihoodRequest():
            return "recommender", "likelihood"
        case RankRequest():
            return "ranker", "ranker"
        case WarmRequest():
            return request.model, "warm"
        case TextScoreRequest():
            return "text_scores", "text_scores"
        case TextRequest():
            return "text", request.speculation.drafter


def in_background(request: Request | TextRequest) -> bool:
    """Whether nobody waits for the answer."""
    return isinstance(request, WarmRequest | WarmDraftRequest)
