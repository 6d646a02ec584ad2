"""Tokens to text: exact over every split, stop strings over token borders, both families."""

import json
import random

import pytest

from recserve.tokenizer.detokenizer import Detokenizer, StopMatcher
from recserve.tokenizer.token_bytes import Spelling, UnsupportedTokenizer, format_token, token_bytes
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.paths import reference

FAMILIES = ("stories260k", "tokenizer-gpt2")
SENTENCE = "Zoë paid 3 € for a 👩‍👩‍👧 cake — naïve, 日本語 and\n\ttabs  and  spaces."


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request):
    folder = reference(request.param)
    return TextTokenizer.open(folder)


def test_text_comes_back_token_by_token(tokenizer):
    numbers = tokenizer.encode(SENTENCE, special=False)
    detokenizer = Detokenizer(tokenizer.spelling)
    pieces = [detokenizer.push(number) for number in numbers]
    assert "".join(pieces) + detokenizer.finish() == SENTENCE
    assert all("�" not in piece for piece in pieces)
    assert any(piece == "" for piece in pieces), "no character was spread over tokens"
    assert detokenizer.num_tokens == len(numbers)


def test_equal_to_the_tokenizers_own_decoding(tokenizer):
    """200 drawn texts, with the space that SentencePiece puts before a text left out."""
    rng = random.Random(7)
    for _ in range(200):
        text = "".join(rng.choice("ab é€\n👧日x ,.'") for _ in range(rng.randrange(1, 40)))
        numbers = tokenizer.encode(text, special=False)
        assert tokenizer.decode(numbers) == tokenizer.tokenizer.decode(numbers) == text


def test_bytes_that_are_no_character_show_as_a_replacement(tokenizer):
    (number,) = [n for n, spelled in enumerate(tokenizer.all_bytes) if spelled == b"\xe2"]
    detokenizer = Detokenizer(tokenizer.spelling)
    assert detokenizer.push(number) == ""
    assert detokenizer.finish() == "�"
    assert format_token(b"\xe2") == "\\xe2" and format_token("é".encode()) == "é"


def test_any_tokens_stream_to_what_decoding_gives():
    """500 drawn rows of tokens, most of them no valid UTF-8."""
    folder = reference("tokenizer-gpt2")
    tokenizer, rng = TextTokenizer.open(folder), random.Random(2)
    assert tokenizer.encode("Hello world") == [15496, 995]
    broken = 0
    for _ in range(500):
        numbers = [rng.randrange(256) for _ in range(rng.randrange(20))]
        detokenizer = Detokenizer(tokenizer.spelling)
        text = "".join(detokenizer.push(n) for n in numbers) + detokenizer.finish()
        assert text == tokenizer.tokenizer.decode(numbers)
        broken += "�" in text
    assert broken > 300


def test_tokens_write_what_the_decoder_says():
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps = [spaces, {"type": "ByteFallback"}]
    decoder = {"type": "Sequence", "decoders": steps}
    spelling = token_bytes(decoder, {0: "▁a", 2: "<0xE2>", 3: "▁<think>"})
    assert spelling.texts == (b" a", b"", b"\xe2", b" <think>")
    assert Detokenizer(spelling).push(99) == ""
    assert token_bytes(None, {0: "a"}).texts == (b" a",)


@pytest.mark.parametrize("decoder", ["CTC", "BPEDecoder"])
def test_another_family_is_refused_by_name(decoder):
    with pytest.raises(UnsupportedTokenizer, match=decoder):
        token_bytes({"type": decoder}, {0: "a"})


def test_a_stop_string_of_single_bytes_ends_the_text_at_once():
    """Llama 2 writes a new line as one byte, which could begin a character that takes more."""
    spelling = Spelling((b"a", b"\n", b"\xe2"), {}, frozenset({1, 2}))
    detokenizer = Detokenizer(spelling, ["\n"])
    assert detokenizer.push(0) == "a" and detokenizer.push(1) == "" and detokenizer.stopped
    detokenizer = Detokenizer(spelling, ["\n"], min_tokens=2)
    assert [detokenizer.push(token) for token in (0, 1, 0, 2)] == ["a", "", "\na", ""]
    assert not detokenizer.stopped and detokenizer.finish() == "�"
    detokenizer = Detokenizer(spelling)
    assert "".join(map(detokenizer.push, [1] * 40)) == "\n" * 32  # long runs are shown


def cut_at_stop(text, stops):
    """Plain loop: the first prefix of the text that ends with a stop string, without it."""
    for end in range(1, len(text) + 1):
        fitting = [s for s in stops if text[:end].endswith(s)]
        if fitting:
            return text[: end - max(map(len, fitting))], True
    return text, False


def test_stop_strings_against_a_plain_loop():
    """3,000 drawn texts over two letters, stop strings that overlap, every way of cutting."""
    rng = random.Random(11)
    stopped = 0
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 16)))
        stops = [
            "".join(rng.choice("ab") for _ in range(rng.randrange(1, 6)))
            for _ in range(rng.randrange(1, 4))
        ]
        matcher, shown_text, rest = StopMatcher(stops), "", text
        while rest and matcher.found is None:
            cut = rng.randrange(1, 4)
            shown_text += matcher.push(rest[:cut])
            rest = rest[cut:]
            whole, _ = cut_at_stop(text, stops)
            assert whole.startswith(shown_text), "something was shown that had to be held back"
        if matcher.found is None:
            shown_text += matcher.flush()
        assert (shown_text, matcher.found is not None) == cut_at_stop(text, stops)
        stopped += matcher.found is not None
    assert 500 < stopped < 2900


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("one\n") == "one"
    assert matcher.push("two\n\n") == "\ntwo"
    assert matcher.push("Us") == "" and matcher.push("ing") == "\n\nUsing"
    assert matcher.push("\n\nUser: x") == "" and matcher.found == "\n\nUser:"


def test_no_stop_string_counts_before_min_tokens():
    detokenizer = Detokenizer(Spelling((b"a", b"."), {}), ["."], min_tokens=2)
    assert [detokenizer.push(n) for n in (0, 1, 0, 1)] == ["a", ".", "a", ""]
    assert detokenizer.stopped and detokenizer.finish() == ""


def test_end_token_and_template_come_from_the_folder(tmp_path):
    source = reference("stories260k")
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    assert TextTokenizer.open(tmp_path).end_tokens == ()
    said = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    assert TextTokenizer.open(tmp_path).end_tokens == (2,)
    assert TextTokenizer.open(tmp_path).template is None
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    template = TextTokenizer.open(tmp_path).template
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert TextTokenizer.open(tmp_path, own).template.render([]) == "own"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UnsupportedTokenizer, match="tokenizer_config.json is not JSON"):
        TextTokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedTokenizer, match="tokenizer.json is not a tokeniser"):
        TextTokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedTokenizer, match="has no tokenizer.json"):
        TextTokenizer.open(tmp_path)
