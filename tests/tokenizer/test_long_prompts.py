"""Long prompts: those that cannot fit are refused unencoded, others are encoded without the GIL."""

import random
import sys
import threading
import time
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.live_server import live
from tests.support.paths import reference
from tests.support.scripted_text import CONTEXT, byte_tokenizer, scripted

MARK = "▁"
BYTES_PER_TOKEN = 4  # of the scripted model: `</s>` is its longest token


def saved(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextTokenizer.open(folder)


def byte_level(folder, normalizer=None, splitters=(), added=(), alphabet=None):
    """Byte-level BPE in which `ab`, `abab` and `abababab` are tokens."""
    alphabet = sorted(alphabet or pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: n for n, c in enumerate(alphabet)}
    merges = [("a", "b"), ("ab", "ab"), ("abab", "abab")] if "a" in vocabulary else []
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitters, last])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return saved(tokenizer, folder)


def sentence_piece(folder, byte_fallback=True):
    """SentencePiece BPE in which `▁▁▁▁` is a token, as Llama 2's tokeniser is laid out."""
    pieces = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), MARK, "a", MARK * 2, MARK * 4]
    merges = [(MARK, MARK), (MARK * 2, MARK * 2)]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    model = models.BPE(
        vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return saved(tokenizer, folder)


KEEPING = {
    "byte level": byte_level,
    "normal form": lambda folder: byte_level(folder, normalizers.NFC()),
    "compatibility form and lower case": lambda folder: byte_level(
        folder, normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "split and added": lambda folder: byte_level(
        folder,
        splitters=[pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits(True)],
        added=[AddedToken("a long token with spaces", special=False)],
    ),
    "sentence piece": sentence_piece,
}


def hard_texts():
    """Texts that many bytes of become one token, and texts that normalisers shorten."""
    draw = random.Random(7)
    alphabet = "aab b\n\t09éßK①ＡΩ\u0301\u1100\u1161\u11a8한𝐔\u0308\u0304👩\u200d▁ﬃ𝔄\u212a\u1fef"
    yield from ("", " ", "a", "abababab" * 9, MARK * 64, " " * 64, "𝐔\u0308\u0304" * 20, "𝐀" * 30)
    yield from ("\u1100\u1161\u11a8" * 20, "\u212a" * 30, "a long token with spaces" * 5)
    for _ in range(300):
        yield "".join(draw.choices(alphabet, k=draw.randrange(1, 60)))


@pytest.mark.parametrize("name", KEEPING)
def test_no_text_has_fewer_tokens_than_the_bound(tmp_path, name):
    tokenizer = KEEPING[name](tmp_path)
    assert tokenizer.max_bytes_per_token is not None
    for text in hard_texts():
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, special=False)), text
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode_literal(text)), text


@pytest.mark.parametrize("folder", ["tokenizer-gpt2", "stories260k"])
def test_the_bound_holds_for_published_tokenisers(folder):
    tokenizer = TextTokenizer.open(reference(folder))
    assert tokenizer.max_bytes_per_token is not None
    for text in [
        *hard_texts(),
        *(token.decode("utf-8", "ignore") for token in tokenizer.all_bytes),
    ]:
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, special=False)), text


DROPPING = {
    "strips": lambda folder: byte_level(folder, normalizers.Strip()),
    "removes accents": lambda folder: byte_level(
        folder, normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "shortens": lambda folder: byte_level(folder, normalizers.Replace("  ", " ")),
    "removes spaces": lambda folder: byte_level(
        folder, splitters=[pre_tokenizers.Split(" ", "removed")]
    ),
    "added token takes spaces": lambda folder: byte_level(
        folder, added=[AddedToken("<end>", rstrip=True, special=True)]
    ),
    "lacks bytes": lambda folder: byte_level(folder, alphabet="abĠ"),
    "fuses unknown characters": lambda folder: sentence_piece(folder, byte_fallback=False),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_tokeniser_that_may_drop_text_has_no_bound(tmp_path, name):
    tokenizer = DROPPING[name](tmp_path)
    assert tokenizer.max_bytes_per_token is None
    assert tokenizer.min_tokens("x" * 10**6) == 0


class Recording:
    """A tokeniser that counts the calls that encode."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0

    def __getattr__(self, name):
        if name.startswith("encode"):
            self.calls += 1
        return getattr(self.tokenizer, name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live(scripted(tmp_path_factory.mktemp("toy"), lambda prompt, seed: "yes")) as running:
        yield running


@pytest.fixture
def calls(server, monkeypatch):
    """Returns how often a text was encoded since the test began."""
    texts = server.app.state.lifecycle.service.text
    tokenizer = texts.model.tokenizer
    recording = [Recording(tokenizer.tokenizer), Recording(tokenizer.literal)]
    model = replace(
        texts.model, tokenizer=replace(tokenizer, tokenizer=recording[0], literal=recording[1])
    )
    monkeypatch.setattr(texts, "model", model)
    monkeypatch.setattr(texts.scores, "model", model)
    return lambda: sum(each.calls for each in recording)


TOO_LONG = "x" * (CONTEXT * BYTES_PER_TOKEN + 1)
REFUSED = {
    "completion": ("/v1/completions", {"prompt": TOO_LONG}, "prompt"),
    "one of several": ("/v1/completions", {"prompt": [TOO_LONG, "a"]}, "prompt[0]"),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TOO_LONG}]},
        "messages",
    ),
    "query to score": (
        "/generative_scoring",
        {"query": TOO_LONG, "items": ["a"], "label_token_ids": [1]},
        "query",
    ),
    "item to score": (
        "/generative_scoring",
        {"query": [1], "items": [[2], TOO_LONG], "label_token_ids": [1]},
        "items[1]",
    ),
    "query of documents": ("/v1/rerank", {"query": TOO_LONG, "documents": ["a"]}, "query"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_that_cannot_fit_is_refused_unencoded(server, calls, name):
    route, body, param = REFUSED[name]
    answer = server.post(route, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "context_length_exceeded",
        param,
    )
    assert error["message"].startswith(
        f"{param}: This model's maximum context length is {CONTEXT} tok"
    )
    assert "is too large: it is longer than the model's context length" in error["message"]
    assert calls() == 0


def test_a_document_that_cannot_fit_is_refused_unencoded(server, calls, monkeypatch):
    monkeypatch.setattr("recserve.service.text.text_scores.RERANK_SYSTEM_PROMPT", "Judge.")
    monkeypatch.setattr("recserve.service.text.text_scores.INSTRUCTION", "Search.")
    asked = {"query": "q", "documents": ["a", TOO_LONG]}
    answer = server.post("/v1/rerank", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "documents[1]"
    around = calls()
    assert server.post("/v1/rerank", json={**asked, "documents": [TOO_LONG]}).status_code == 400
    assert calls() == 2 * around == 6  # "yes", "no" and what stands before a document


def test_a_document_that_is_cut_may_be_of_any_length(server, calls, monkeypatch):
    engine = server.app.state.lifecycle.service.engine
    monkeypatch.setattr("recserve.service.text.text_scores.RERANK_SYSTEM_PROMPT", "Judge.")
    monkeypatch.setattr("recserve.service.text.text_scores.INSTRUCTION", "Search.")
    sent = []
    monkeypatch.setattr(engine, "submit_all", lambda queries, client: sent.extend(queries) or 1 / 0)
    asked = {"query": "q", "documents": [TOO_LONG], "max_tokens_per_doc": 5}
    assert server.post("/v1/rerank", json=asked).status_code == 500
    (x,) = server.app.state.lifecycle.service.text.model.tokenizer.encode_literal("x")
    assert sent[0].tokens[:5].tolist() == [x] * 5 and sent[0].tokens[5] != x


def test_the_longest_text_that_fits_is_answered(server, calls):
    prompt = "</s>" * (CONTEXT - 1)
    answer = server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == CONTEXT - 1
    assert calls() == 1


def test_a_text_at_the_bound_is_encoded_to_know(server, calls):
    at_bound = "x" * (CONTEXT * BYTES_PER_TOKEN)
    answer = server.post("/v1/completions", json={"prompt": at_bound})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert f"of {len(at_bound)} tokens" in answer.json()["error"]["message"]
    assert calls() == 1


def test_without_a_bound_a_long_text_is_encoded_and_refused_alike(tmp_path):
    served = scripted(tmp_path, lambda prompt, seed: "yes")
    model = served.text.model
    served.text.model = replace(model, tokenizer=replace(model.tokenizer, max_bytes_per_token=None))
    with live(served) as running:
        answer = running.post("/v1/completions", json={"prompt": TOO_LONG})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "prompt",
    )


@pytest.mark.parametrize("method", ["encode", "encode_literal"])
def test_other_threads_run_while_a_long_text_is_encoded(tmp_path, method):
    """The other thread needs the GIL at each of its steps, and nobody is made to give it up."""
    encode = getattr(TextTokenizer.open(byte_tokenizer(tmp_path)), method)
    text = "some words, and some more. " * 20_000
    steps, running, stop = 0, threading.Event(), threading.Event()

    def work():
        nonlocal steps
        while not stop.is_set():
            time.sleep(0.0002)
            steps += 1
            running.set()

    thread, interval = threading.Thread(target=work, daemon=True), sys.getswitchinterval()
    thread.start()
    assert running.wait(30)
    sys.setswitchinterval(1000)
    try:
        before = steps
        for _ in range(50):
            encode(text)
            if steps >= before + 20:
                break
        gained = steps - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert gained >= 20


def test_encoding_gives_the_tokens_it_always_gave(tmp_path):
    tokenizer = sentence_piece(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in hard_texts():
        for special in (False, True):
            assert (
                tokenizer.encode(text, special)
                == plain.encode(text, add_special_tokens=special).ids
            )
        assert tokenizer.encode_literal(text) == plain.encode(text, add_special_tokens=False).ids
