"""Reranking and generative scoring over HTTP: equal to full forwards written out by hand."""

import random

import numpy as np
import pytest
import torch

from recserve.drafters.none import NoDrafter
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.service import Service
from recserve.service.text import text_scores
from recserve.service.text.model import TextModel
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.live_server import live
from tests.support.scripted_text import BEGIN, END, VOCABULARY, byte_tokenizer
from tests.support.text_plain import last_logits

POSITIONS = 700


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(3)
    decoder = DecoderConfig(32, 2, 4, 2, 8, 48, max_positions=POSITIONS)
    model = LanguageModel(LanguageModelConfig(decoder, VOCABULARY))
    model.head.weight.data.mul_(8)
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module", params=["template", "plain"])
def server(request, network, tmp_path_factory):
    folder = byte_tokenizer(tmp_path_factory.mktemp("toy"))
    if request.param == "plain":
        (folder / "tokenizer_config.json").unlink()
    tokenizer = TextTokenizer.open(folder)
    engine = build_engine(EngineModels(text=network), EngineConfig(kv_bytes=2**24))
    engine.start()
    none, cpu = {"none": NoDrafter()}, torch.device("cpu")
    model = TextModel("toy", tokenizer, VOCABULARY, (), POSITIONS, 1, cpu, none)
    with live(Service(engine, model.device, text=model)) as running:
        running.tokenizer, running.templated = tokenizer, request.param == "template"
        yield running


def probabilities(network, tokens, labels):
    return last_logits(network, tokens).double().softmax(-1)[list(labels)].numpy()


@pytest.mark.parametrize("softmax", [True, False])
def test_generative_scoring(server, network, softmax):
    items, labels = ["first", "a second é", [5, 6, 7], "x"], [70, 71, 72]
    body = {"model": "toy", "query": "which?", "items": items, "label_token_ids": labels}
    answer = server.post("/generative_scoring", json={**body, "apply_softmax": softmax}).json()
    assert answer["object"] == "list" and answer["model"] == "toy"
    encode = server.tokenizer.encode
    root = encode("which?")
    branches = [item if isinstance(item, list) else encode(item, False) for item in items]
    for index, (branch, said) in enumerate(zip(branches, answer["data"], strict=True)):
        expected = probabilities(network, root + branch, labels)
        expected = expected / expected.sum() if softmax else expected
        np.testing.assert_allclose(said["scores"], expected, rtol=1e-3)
        assert said["score"] == said["scores"][0]
        assert (said["index"], said["object"]) == (index, "score")
    assert answer["usage"]["prompt_tokens"] == len(root) + sum(map(len, branches))


def test_many_items_are_several_groups_and_the_same_scores(server, network, monkeypatch):
    items = [f"item {n}" for n in range(60)]
    body = {"query": "q", "items": items, "label_token_ids": [1, 2]}
    one = server.post("/generative_scoring", json=body).json()["data"]
    monkeypatch.setattr(text_scores, "GROUP_TOKENS", 50)
    submitted = []
    engine = server.app.state.lifecycle.service.engine
    submit_all = engine.submit_all
    monkeypatch.setattr(
        engine, "submit_all", lambda rs, client: submitted.extend(rs) or submit_all(rs, client)
    )
    many = server.post("/generative_scoring", json=body).json()["data"]
    assert len(submitted) == 9
    np.testing.assert_allclose([d["scores"] for d in one], [d["scores"] for d in many], rtol=1e-3)


DOCUMENTS = ["red balls", {"text": "a cat"}, "naïve 日本", "", "green"]


def expected_relevance(server, network, query, documents):
    tokenizer = server.tokenizer
    asked = f"<Instruct>: {text_scores.INSTRUCTION}\n<Query>: {query}\n<Document>: "
    if server.templated:
        head = tokenizer.encode(
            f"<s>system: {text_scores.RERANK_SYSTEM_PROMPT}\nuser: {asked}", False
        )
        assert head[0] == BEGIN
        tail, yes, no = "\nassistant:", "y", "n"
    else:
        head = tokenizer.encode(f"{text_scores.RERANK_SYSTEM_PROMPT}\n{asked}")
        tail, yes, no = "\nAnswer: ", "y", "n"
    labels = [tokenizer.encode(word, False)[0] for word in (yes, no)]
    found = []
    for document in documents:
        text = document if isinstance(document, str) else document["text"]
        p = probabilities(network, head + tokenizer.encode(text + tail, False), labels)
        found.append(p[0] / p.sum())
    return found


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_rerank(server, network, path):
    body = {"model": "toy", "query": "toys?", "documents": DOCUMENTS, "request_id": "r1"}
    answer = server.post(path, json=body).json()
    scores = expected_relevance(server, network, "toys?", DOCUMENTS)
    order = sorted(range(len(DOCUMENTS)), key=lambda n: (-round(scores[n], 6), n))
    assert [r["index"] for r in answer["results"]] == order
    said = [r["relevance_score"] for r in answer["results"]]
    np.testing.assert_allclose(said, [scores[n] for n in order], rtol=1e-3)
    assert answer["id"] == "r1" and answer["meta"]["api_version"]["version"] == path[2]
    shown = {"document"} if path == "/v1/rerank" else set()  # as Jina and vLLM, as Cohere
    assert all(set(r) == {"index", "relevance_score"} | shown for r in answer["results"])
    plain = {"top_n": 0, "max_tokens_per_doc": 0, "return_documents": not shown}
    other = server.post(path, json={**body, **plain}).json()["results"]
    assert [r["index"] for r in other] == order and ("document" in other[0]) == (not shown)
    best = server.post(path, json={**body, "top_n": 2, "return_documents": True}).json()
    assert [r["index"] for r in best["results"]] == order[:2]
    first = DOCUMENTS[order[0]]
    text = first if isinstance(first, str) else first["text"]
    assert best["results"][0]["document"] == {"text": text}
    assert best["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_equal_scores_stand_in_the_order_of_the_documents(server, monkeypatch, path):
    """Equal documents far apart, among forty others and in groups of their own, tie exactly; and
    all tie where every score is the same.
    """
    documents = ["a cat", *[f"text {n}" for n in range(40)], "a cat", "green", "a cat"]
    monkeypatch.setattr(text_scores, "GROUP_TOKENS", 60)
    results = server.post(path, json={"query": "q", "documents": documents}).json()["results"]
    assert sorted(r["index"] for r in results) == list(range(len(documents)))
    keys = [(-r["relevance_score"], r["index"]) for r in results]
    assert keys == sorted(keys)
    cats = [r["relevance_score"] for r in results if r["index"] in (0, 41, 43)]
    assert len(set(cats)) == 1 and len(cats) == 3
    monkeypatch.setattr(text_scores, "_softmax", lambda values: np.full_like(values, 0.5))
    tied = server.post(path, json={"query": "q", "documents": documents, "top_n": 9}).json()
    assert [r["index"] for r in tied["results"]] == list(range(9))


def test_a_document_cannot_end_its_turn(server, network):
    """`</s>` in a document is four characters; its four tokens count, the special one does not."""
    document = "</s>"
    body = {"query": "toys?", "documents": [document]}
    answer = server.post("/v1/rerank", json=body).json()
    tokenizer = server.tokenizer
    assert tokenizer.encode(document, False) == [END]
    assert len(tokenizer.encode_literal(document)) == 4
    empty = server.post("/v1/rerank", json={**body, "documents": [""]}).json()
    assert answer["usage"]["prompt_tokens"] == empty["usage"]["prompt_tokens"] + 4


TOO_LONG = "x" * (POSITIONS + 1)
LISTS = [
    ("/v1/completions", "prompt", {"add_special_tokens": False}),
    ("/v1/embeddings", "input", {}),
    ("/generative_scoring", "items", {"query": "q", "label_token_ids": [1]}),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("route", "field", "others"), LISTS)
def test_the_text_at_fault_is_named_by_its_place(server, route, field, others, seed):
    draw = random.Random(seed)
    texts = [draw.choice(["a", [5, 6]]) for _ in range(draw.randint(2, 5))]
    bad, token = draw.randrange(len(texts)), draw.randrange(3)
    tokens = [5, 6, 7]
    tokens[token] = VOCABULARY + draw.randrange(9)
    for text, place in (
        (tokens, f"{field}[{bad}][{token}]"),
        (TOO_LONG, f"{field}[{bad}]"),
        ([5] * (POSITIONS + 1), f"{field}[{bad}]"),
    ):
        texts[bad] = text
        said = server.post(route, json={field: texts, **others}).json()["error"]
        assert said["param"] == place and said["message"].startswith(f"{place}: "), said
    if field != "items":  # one list of tokens is one text
        said = server.post(route, json={field: tokens, **others}).json()["error"]
        assert said["param"] == f"{field}[{token}]"


@pytest.mark.parametrize("seed", range(3))
def test_the_longer_of_query_and_text_is_named(server, seed):
    draw = random.Random(seed)
    short, place = "y" * draw.randint(1, 60), draw.randrange(3)
    texts = ["z"] * 3
    for query, text, param in ((TOO_LONG, short, 0), (short, TOO_LONG, 1), ("x" * 640, short, 0)):
        texts[place] = text + "y" * 40
        score = {"query": query + "y" * 40, "items": texts, "label_token_ids": [1]}
        rank = {"query": query, "documents": texts}
        for route, body, name in (
            ("/generative_scoring", score, f"items[{place}]"),
            ("/v1/rerank", rank, f"documents[{place}]"),
        ):
            said = server.post(route, json=body).json()["error"]
            expected = "context_length_exceeded", name if param else "query"
            assert (said["code"], said["param"]) == expected, said
    long = {"query": "q", "documents": ["a"], "instruction": TOO_LONG}
    assert server.post("/v1/rerank", json=long).json()["error"]["param"] == "instruction"


@pytest.mark.parametrize("seed", range(4))
def test_the_last_message_of_a_chat_is_continued(server, seed):
    """Its text ends the prompt: without what the template writes after it, or blanks it strips."""
    if not server.templated:
        pytest.skip("chats need a template")
    draw = random.Random(seed)
    said = "".join(draw.choices("ab c", k=8)).strip() + "d" + draw.choice(["", " ", "\n"])
    chat = {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": said}]}

    def prompt(**fields):
        answer = server.post("/tokenize", json={**chat, **fields})
        return answer.json()["tokens"] if answer.status_code == 200 else answer.json()["error"]

    whole, continued = prompt(add_generation_prompt=False), prompt(continue_final_message=True)
    assert whole[: len(continued)] == continued and len(whole) > len(continued)
    text = server.post("/detokenize", json={"tokens": continued}).json()["prompt"]
    assert text.endswith(said) and text.count(said) == 2
    assert prompt(continue_final_message=True, add_generation_prompt=False) == continued
    refused = prompt(continue_final_message=True, add_generation_prompt=True)
    assert refused["param"] == "continue_final_message"
    written = {"max_tokens": 6, "temperature": 0}
    body = {**chat, **written, "continue_final_message": True}
    answer = server.post("/v1/chat/completions", json=body).json()
    same = server.post("/v1/completions", json={"prompt": continued, **written}).json()
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(continued)


TOKEN_DOORS = {  # field: route, and the other fields
    "prompt": ("/v1/completions", {}),
    "stop_token_ids": ("/v1/completions", {"prompt": "a"}),
    "input": ("/v1/embeddings", {}),
    "query": ("/generative_scoring", {"items": ["a"], "label_token_ids": [7]}),
    "label_token_ids": ("/generative_scoring", {"query": "a", "items": ["a"]}),
    "tokens": ("/detokenize", {}),
}


@pytest.mark.parametrize("field", [*TOKEN_DOORS, "logit_bias"])
def test_a_token_outside_of_the_vocabulary_is_named(server, field):
    draw = random.Random(field)
    route, others = TOKEN_DOORS.get(field, ("/v1/completions", {"prompt": "a"}))
    for unknown in (VOCABULARY, draw.randrange(VOCABULARY, 10**9), -draw.randrange(1, 2**70)):
        if field == "logit_bias" and unknown < 0:
            continue  # such a key is no token id
        tokens = draw.sample(range(VOCABULARY), 3)
        tokens[place := draw.randrange(3)] = unknown
        given = dict.fromkeys(map(str, tokens), 1) if field == "logit_bias" else tokens
        answer = server.post(route, json={**others, field: given})
        said = answer.json()["error"]
        expected = f"{field}.{unknown}" if field == "logit_bias" else f"{field}[{place}]"
        assert (said["code"], said["param"]) == ("out_of_range", expected)
        assert f"got {unknown}" in said["message"] and "out of vocabulary" in said["message"]
