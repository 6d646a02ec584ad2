"""What a request may cost before it waits for the engine: one misfit, a deadline, too long texts.

Encodings are counted, at every request that encodes texts.
"""

import time
from dataclasses import replace

import pytest

from recserve.core.errors import DeadlineExceeded
from recserve.schemas.chat_messages import ChatMessage
from recserve.schemas.encoding import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from recserve.schemas.items import InvalidRequest
from recserve.schemas.scoring import GenerativeScoringRequest, RerankRequest
from recserve.schemas.text import ChatRequest, CompletionRequest
from recserve.service.errors import ContextExceeded
from recserve.service.text import embeddings
from recserve.service.text.completions import TextService
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.scripted_text import scripted

CONTEXT = 1000
SHORT, LONG = "short", "x" * (CONTEXT + 1)


class Refusing:
    """An engine that no request of these tests may reach."""

    def submit_all(self, requests, client):
        raise AssertionError("a request was submitted")


@pytest.fixture
def service(tmp_path):
    """Texts of a model whose tokeniser has no bound of bytes per token, as WordPiece has none."""
    model = scripted(tmp_path, lambda prompt, seed: "").text.model
    tokenizer = replace(model.tokenizer, max_bytes_per_token=None)
    return TextService(Refusing(), replace(model, tokenizer=tokenizer, context=CONTEXT))


@pytest.fixture
def encoded(monkeypatch):
    """The texts that have been encoded."""
    texts = []
    for name in ("encode", "encode_literal"):
        plain = getattr(TextTokenizer, name)

        def count(self, text, *arguments, plain=plain, **options):
            texts.append(text)
            return plain(self, text, *arguments, **options)

        monkeypatch.setattr(TextTokenizer, name, count)
    return texts


def rerank(service, texts, deadline_s, **options):
    body = RerankRequest(query="q", documents=texts, **options)
    return service.scores.begin_rerank(body, "2", deadline_s=deadline_s)


def score(service, texts, deadline_s):
    body = GenerativeScoringRequest(query="q", items=texts, label_token_ids=[1, 2])
    return service.scores.begin_scoring(body, deadline_s=deadline_s)


def score_tokens(service, texts, deadline_s):
    return score(service, [[1] * len(text) for text in texts], deadline_s)


def embed(service, texts, deadline_s):
    return service.embeddings.begin(EmbeddingsRequest(input=texts), deadline_s)


def complete(service, texts, deadline_s):
    return service.begin_completion(CompletionRequest(prompt=texts), deadline_s=deadline_s)


SEVERAL = (rerank, score, score_tokens, embed, complete)


@pytest.mark.parametrize("begin", SEVERAL)
@pytest.mark.parametrize("place", [0, 1, 7])
def test_a_text_that_does_not_fit_refuses_those_after_it(service, encoded, begin, place):
    """It is named, and no text after it is encoded."""
    texts = [f"{SHORT}{n}" for n in range(20)]
    texts[place] = LONG
    with pytest.raises(ContextExceeded) as refused:
        begin(service, texts, None)
    assert f"[{place}]" in refused.value.param
    assert not set(texts[place + 1 :]) & set(encoded)


def chat(service, texts, deadline_s):
    body = ChatRequest(messages=[ChatMessage(role="user", content=text) for text in texts])
    return service.begin_chat(body, deadline_s=deadline_s)


def tokenize_chat(service, texts, deadline_s):
    body = TokenizeRequest(messages=[ChatMessage(role="user", content=text) for text in texts])
    return service.embeddings.tokenize(body, deadline_s)


@pytest.mark.parametrize("begin", [*SEVERAL, chat, tokenize_chat])
def test_a_request_whose_deadline_passes_encodes_no_further_text(service, encoded, begin):
    with pytest.raises(DeadlineExceeded):
        begin(service, [SHORT, SHORT], time.monotonic() - 1)
    assert SHORT not in encoded


@pytest.mark.parametrize("bounded", [False, True], ids=["by count", "by bytes"])
@pytest.mark.parametrize("form", ["prompt", "messages", "tokens"])
def test_tokens_and_texts_are_converted_up_to_a_bound(service, encoded, monkeypatch, form, bounded):
    """A text may be longer than the context. The bound of bytes refuses it before it is encoded."""
    most = 4 * CONTEXT
    monkeypatch.setattr(embeddings, "MAX_CONVERTED", most)
    if bounded:
        tokenizer = replace(service.model.tokenizer, max_bytes_per_token=1)
        service = TextService(Refusing(), replace(service.model, tokenizer=tokenizer))

    def convert(size):
        if form == "tokens":
            return len(service.embeddings.detokenize(DetokenizeRequest(tokens=[1] * size)).prompt)
        text = "x" * size
        if form == "messages":
            return tokenize_chat(service, [text], None).count
        body = TokenizeRequest(prompt=text, add_special_tokens=False)
        return service.embeddings.tokenize(body).count

    assert convert(2 * CONTEXT) >= 2 * CONTEXT
    encoded.clear()
    with pytest.raises(InvalidRequest, match=f"at most {most} tokens") as refused:
        convert(most + 1)
    assert refused.value.param == form
    assert not (bounded and encoded)
