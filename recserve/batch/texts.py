"""Completes and scores texts for batch jobs, with responses that depend on the requests alone.

A response of the server holds ids, times and draft statistics that differ from run to run. Here ids
are functions of the row, `created` is 0, and statistics are left out. A text without a `seed` is
drawn with a seed that is a function of the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, structs

from recserve.batch.together import reset, submit_together
from recserve.schemas.items import InvalidRequest
from recserve.schemas.scoring import (
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    RerankRequest,
    RerankResponse,
)
from recserve.schemas.text import ChatRequest, CompletionRequest, TextResponse, Usage
from recserve.schemas.validation import to_message
from recserve.service import Service
from recserve.service.text.prompts import RANDOM_SEED
from recserve.speculation.verifiers.registry import GREEDY, SAMPLE

TextBody = CompletionRequest | ChatRequest | RerankRequest | GenerativeScoringRequest
TextAnswer = TextResponse | RerankResponse | GenerativeScoringResponse

BODIES: dict[str, type[TextBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/generative_scoring": GenerativeScoringRequest,
}


@dataclass(frozen=True)
class TextCall:
    """One request.

    Attributes:
        url: Route of the request, a key of BODIES.
        body: The checked body.
        name: Identifies the request; part of the response's id.
    """

    url: str
    body: TextBody
    name: str


@dataclass(frozen=True)
class TextTask:
    """What all tasks of texts share: a service, and the settings of a job.

    Attributes:
        service: Service with a language model that receives no other requests.
        seed: Seed of the job, from which texts without a seed derive theirs.
        in_flight: Number of rows that are answered together.
        versions: What determines the answers besides.
    """

    service: Service
    seed: int = 0
    in_flight: int = 256
    versions: Mapping[str, object] = field(default_factory=dict)

    @property
    def group_rows(self) -> int:
        """Number of rows that are answered together."""
        return self.in_flight

    @property
    def facts(self) -> dict[str, object]:
        """What determines the answers besides the input."""
        return {"seed": self.seed, "in_flight": self.in_flight, **self.versions}

    def begin_part(self) -> None:
        """Empties the caches of the engine."""
        reset(self.service.engine)


def text_call(url: str, body: dict[str, Any], name: str) -> TextCall:
    """Checks a request like its HTTP route, and draws its seed where it has none.

    Args:
        url: Route of the request.
        body: Fields of the body.
        name: Identifies the request.

    Raises:
        InvalidRequest: If the route or a field is invalid.
    """
    if url not in BODIES:
        raise InvalidRequest("url", f"expected one of {', '.join(BODIES)}, got {url[:80]!r}")
    checked = to_message(body, BODIES[url])
    if isinstance(checked, CompletionRequest | ChatRequest):
        if checked.stream:
            raise InvalidRequest("stream", "expected false in a batch job, got true")
        verifier = checked.speculation and checked.speculation.verifier
        if verifier not in (None, SAMPLE, GREEDY):
            raise InvalidRequest(
                "speculation.verifier",
                f"expected {SAMPLE} or {GREEDY} in a batch job, because texts of other rules "
                f"depend on their drafts, got {verifier!r}",
            )
        if checked.seed in (None, RANDOM_SEED):
            checked = structs.replace(checked, seed=int(name, 16) >> 1)
    return TextCall(url, checked, name)


def call_name(seed: int, row: int, custom_id: str | None) -> str:
    """Returns 16 hex digits that identify a row of a job.

    Args:
        seed: Seed of the job.
        row: Number of the row in its file.
        custom_id: The row's own id; None without one.
    """
    text = f"{seed}:{row}:{custom_id or ''}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def answer_together(service: Service, calls: Sequence[TextCall]) -> list[TextAnswer | Exception]:
    """Returns a response or an error per request; all requests enter the engine together."""
    begin = _begin(service)
    return [
        answer if isinstance(answer, Exception) else _repeatable(answer)
        for answer in submit_together(service.engine, begin, calls)
    ]


def _begin(service: Service) -> Callable[[TextCall], Callable[[], TextAnswer]]:
    texts = service.text

    def begin(call: TextCall) -> Callable[[], TextAnswer]:
        match call.body:
            case CompletionRequest():
                return texts.begin_completion(call.body, call.name).wait
            case ChatRequest():
                return texts.begin_chat(call.body, call.name).wait
            case RerankRequest():
                version = call.url[2]  # of /v1/rerank or /v2/rerank
                return texts.scores.begin_rerank(call.body, version, call.name).wait
            case GenerativeScoringRequest():
                return texts.scores.begin_scoring(call.body, call.name).wait

    return begin


def _repeatable(answer: TextAnswer) -> TextAnswer:
    """Returns a response without what differs between two runs."""
    changes: dict[str, Any] = {}
    if isinstance(answer.usage, Usage):
        changes["usage"] = structs.replace(answer.usage, prompt_tokens_details=UNSET)
    if not isinstance(answer, RerankResponse):
        changes["created"] = 0
    if isinstance(answer, TextResponse):
        changes["metrics"] = UNSET
    return structs.replace(answer, **changes)
