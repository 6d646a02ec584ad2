"""Scores given texts in one forward pass: the query is the prefix, documents or items are branches.

Relevance is the probability of "yes" against "no" after query and document, as in Qwen3-Reranker
(Zhang et al. 2025, section 2). Any instruction-tuned model is a reranker, without a special head.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from recserve.core.client import LOCAL, Client
from recserve.core.request import GROUP_TOKENS, Prefix, Scores, TextScoreQuery
from recserve.models.inputs import NodeInputs
from recserve.schemas.items import InvalidRequest
from recserve.schemas.scoring import (
    ApiVersion,
    Document,
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    ItemScore,
    RerankMeta,
    RerankRequest,
    RerankResponse,
    RerankResult,
)
from recserve.schemas.text import PromptDetails, Usage
from recserve.service.pending import Pending
from recserve.service.text.model import TextEngine, TextModel
from recserve.service.text.prompts import (
    apply_template,
    check_deadline,
    check_length,
    check_tokens,
    encode_text,
)

A = TypeVar("A")
INSTRUCTION = "Given a search query, retrieve relevant documents that answer the query"
RERANK_SYSTEM_PROMPT = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
# Stands for the document while the template is applied. A query that contains it is refused.
DOCUMENT_PLACEHOLDER = "\ue000document\ue001"


@dataclass(frozen=True)
class Question:
    """The reranking prompt around a document.

    Attributes:
        param: Field of the request that makes most of it, for errors.
        before: Tokens before the document.
        after: Tokens after the document.
        labels: Tokens of "yes" and of "no".
    """

    param: str
    before: list[int]
    after: list[int]
    labels: tuple[int, int]


@dataclass(frozen=True)
class Branches:
    """Texts to score after a query.

    Attributes:
        params: Fields of the query and of the branches, for errors.
        query: Tokens of the query.
        encoded: Tokens of M branches. They are encoded one by one, so that the first one that does
            not fit refuses the others before they cost anything.
        labels: K tokens to score after each branch.
    """

    params: tuple[str, str]
    query: list[int]
    encoded: Iterable[list[int]]
    labels: tuple[int, ...]


class TextScores:
    """A language model as a scorer of given texts."""

    def __init__(self, engine: TextEngine, model: TextModel) -> None:
        self.engine = engine
        self.model = model

    def begin_scoring(
        self,
        body: GenerativeScoringRequest,
        request_id: str | None = None,
        deadline_s: float | None = None,
        client: Client = LOCAL,
    ) -> Pending[GenerativeScoringResponse]:
        """Starts the scores of items.

        Args:
            body: The request.
            request_id: Last part of the response's id; None generates one.
            deadline_s: time.monotonic() value after which the scores are useless; None means never.
            client: Who sends the request.

        Raises:
            InvalidRequest: If a field is out of range.
            ContextExceeded: If query and item do not fit the context.
            UnknownModel: If the body names another model.
            Exception: What the engine refuses the request with.
        """
        self.model.check_name(body.model)
        body.check()
        check_tokens("label_token_ids", body.label_token_ids, self.model)
        query = self._tokens("query", body.query, body.add_special_tokens, deadline_s)
        items = (
            self._tokens(f"items[{n}]", item, False, deadline_s)
            for n, item in enumerate(body.items)
        )

        def respond(values: np.ndarray, usage: Usage) -> GenerativeScoringResponse:
            scores = _softmax(values) if body.apply_softmax else np.exp(values)
            return GenerativeScoringResponse(
                id=f"generative-scoring-{request_id or uuid.uuid4()}",
                created=int(time.time()),
                model=self.model.name,
                data=[
                    ItemScore(index=index, score=row[0], scores=row)
                    for index, row in enumerate(scores.tolist())
                ],
                usage=usage,
            )

        branches = Branches(("query", "items"), query, items, tuple(body.label_token_ids))
        # vLLM writes one token after each item, and counts it.
        return self._begin(branches, deadline_s, client, respond, len(body.items))

    def begin_rerank(
        self,
        body: RerankRequest,
        version: str,
        request_id: str | None = None,
        deadline_s: float | None = None,
        client: Client = LOCAL,
    ) -> Pending[RerankResponse]:
        """Starts the relevance scores of documents; see `begin_scoring` for the other arguments.

        Args:
            version: API version of the route, which the response repeats.
        """
        self.model.check_name(body.model)
        body.check()
        texts = [d.text if isinstance(d, Document) else d for d in body.documents]
        question = self._question(body, deadline_s)
        with_documents = version == "1" if body.return_documents is None else body.return_documents
        encode, most = self.model.tokenizer.encode_literal, body.max_tokens_per_doc or None
        if most is None or most > self.model.context:  # otherwise cut to `most`
            for place, text in enumerate(texts):
                check_length(f"documents[{place}]", text, self.model)

        def encode_documents() -> Iterator[list[int]]:
            for text in texts:
                check_deadline(deadline_s)
                yield [*encode(text)[:most], *question.after]

        def respond(values: np.ndarray, usage: Usage) -> RerankResponse:
            scores = _softmax(values)[:, 0]
            best = np.argsort(-scores, kind="stable")[: body.top_n or None]
            results = [
                RerankResult(index=place, relevance_score=float(scores[place]))
                if not with_documents
                else RerankResult(
                    index=place,
                    relevance_score=float(scores[place]),
                    document=Document(text=texts[place]),
                )
                for place in best.tolist()
            ]
            return RerankResponse(
                id=request_id or str(uuid.uuid4()),
                model=self.model.name,
                results=results,
                usage=usage,
                meta=RerankMeta(ApiVersion(version)),
            )

        params = question.param, "documents"
        branches = Branches(params, question.before, encode_documents(), question.labels)
        return self._begin(branches, deadline_s, client, respond)

    def _begin(
        self,
        texts: Branches,
        deadline_s: float | None,
        client: Client,
        respond: Callable[[np.ndarray, Usage], A],
        counted: int = 0,
    ) -> Pending[A]:
        """Submits one engine request per group of branches.

        Equal branches are scored once. Two calls of a kernel may differ in the last bit, and equal
        texts must tie.

        Args:
            texts: The query and its branches.
            deadline_s: time.monotonic() value after which the scores are useless; None means never.
            client: Who sends the request.
            respond: Makes the response from log-probabilities [M, K] and the usage.
            counted: Tokens that the usage counts as written.
        """
        query, branches = texts.query, list[list[int]]()
        for place, branch in enumerate(texts.encoded):
            above, below = texts.params[0], f"{texts.params[1]}[{place}]"
            if len(query) + len(branch) > self.model.context:
                raise self.model.exceeded(
                    above if len(query) > len(branch) else below,  # the longer one
                    f"{above} takes {len(query)} and {below} {len(branch)}",
                )
            branches.append(branch)
        places: dict[tuple[int, ...], int] = {}
        which = [places.setdefault(tuple(branch), len(places)) for branch in branches]
        keys = np.array(query, np.int64)
        shared = Prefix(NodeInputs(torch.from_numpy(keys).to(self.model.device)), keys)
        requests: list[TextScoreQuery] = []
        for number, group in enumerate(_groups(list(places))):
            tokens = np.array([token for branch in group for token in branch], np.int64)
            offsets = np.cumsum([0, *map(len, group)])
            requests.append(
                TextScoreQuery(shared, tokens, offsets, texts.labels, deadline_s, number)
            )
        num_tokens = len(query) + sum(map(len, branches))

        def finish(results: list[Scores]) -> A:
            usage = Usage(
                prompt_tokens=num_tokens,
                completion_tokens=counted,
                total_tokens=num_tokens + counted,
                prompt_tokens_details=PromptDetails(results[0].timing.prefix_cached),
            )
            values = np.concatenate([r.values for r in results]).astype(np.float64)
            return respond(values[which], usage)

        return Pending(self.engine.submit_all(requests, client), finish)

    def _question(self, body: RerankRequest, deadline_s: float | None) -> Question:
        """Builds the prompt around a document.

        The prompt ends where the tokens of "yes" and "no" first differ.
        """
        tokenizer = self.model.tokenizer
        instruction, query = body.instruction or INSTRUCTION, body.query
        param = "instruction" if len(body.instruction or "") > len(query) else "query"
        turn = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {DOCUMENT_PLACEHOLDER}"
        if tokenizer.template is None:
            text, space = f"{RERANK_SYSTEM_PROMPT}\n{turn}\nAnswer:", " "
        else:
            turns = [
                {"role": "system", "content": RERANK_SYSTEM_PROMPT},
                {"role": "user", "content": turn},
            ]
            settings, space = {"enable_thinking": False}, ""
            text = apply_template(tokenizer.template, param, turns, settings, deadline_s=deadline_s)
        before, found, after = text.partition(DOCUMENT_PLACEHOLDER)
        if not found or DOCUMENT_PLACEHOLDER in after:
            raise InvalidRequest("query", "the model's chat template must show it exactly once")
        check_length(param, before + after, self.model)
        yes, no = (tokenizer.encode(f"{after}{space}{word}", False) for word in ("yes", "no"))
        same = next((n for n, (a, b) in enumerate(zip(yes, no, strict=False)) if a != b), None)
        if same is None:
            raise InvalidRequest("model", "this model's tokeniser encodes yes and no equally")
        head = tokenizer.encode(before, special=tokenizer.template is None)
        return Question(param, head, yes[:same], (yes[same], no[same]))

    def _tokens(
        self, param: str, given: str | list[int], special: bool, deadline_s: float | None
    ) -> list[int]:
        tokens = encode_text(param, given, self.model, special, deadline_s)
        if not tokens and param != "query":
            raise InvalidRequest(param, "is empty; an item needs at least one token")
        return tokens


def _groups(branches: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Splits branches, in order, into groups of at most GROUP_TOKENS tokens.

    A longer branch forms a group of its own.
    """
    groups: list[list[tuple[int, ...]]] = []
    size = GROUP_TOKENS
    for branch in branches:
        if size + len(branch) > GROUP_TOKENS:
            groups.append([])
            size = 0
        groups[-1].append(branch)
        size += len(branch)
    return groups


def _softmax(values: np.ndarray) -> np.ndarray:
    """Normalises log-probabilities [M, K] to probabilities within each row."""
    shares = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))
