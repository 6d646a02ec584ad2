"""Drawn tokenizer folders are read as transformers reads them, whichever file names a fact."""

import json

import numpy as np
import pytest

from recserve.tokenizer.detokenizer import Detokenizer
from recserve.tokenizer.token_bytes import UnsupportedTokenizer
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support.scripted_text import byte_tokenizer
from tests.support.tokenizer_folders import FAMILIES, draw_text, write_folder

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_transformers(tmp_path, family, seed):
    random = np.random.default_rng([seed, len(family)])
    write_folder(tmp_path, family, random)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = TextTokenizer.open(tmp_path)
    assert ours.tokenizer.get_vocab() == theirs.get_vocab()
    assert ours.special == theirs.special_tokens_map
    said = [{"role": "user", "content": "hi"}]
    assert ours.template.render(said) == theirs.apply_chat_template(said, tokenize=False)
    for _ in range(20):
        text, special = draw_text(random), bool(random.integers(2))
        assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
    size = len(ours.all_bytes) + 2
    for _ in range(12):
        tokens = [int(token) for token in random.integers(0, size, random.integers(9))]
        if random.integers(2):
            tokens += ours.encode(draw_text(random))
        skip = bool(random.integers(2))
        assert ours.decode(tokens, skip) == theirs.decode(tokens, skip_special_tokens=skip)
        whole = theirs.decode(tokens, skip_special_tokens=True)
        writer = Detokenizer(ours.spelling)
        assert "".join(map(writer.push, tokens)) + writer.finish() == whole, tokens
        # A prompt of one space takes the whole of a wider strip, and clean-up ends with a prompt.
        if not ours.spelling.cleans and ours.spelling.num_stripped < 2:
            tokens = ours.encode(draw_text(random))
            cut = int(random.integers(len(tokens) + 1))
            assert continued(ours, tokens[:cut], tokens[cut:]) == ours.decode(tokens)


def continued(ours, prompt, tokens):
    """Returns the text of a prompt and of the tokens behind it, as an echo shows them."""
    end = len(prompt) - ours.spelling.num_open(prompt)
    begun = ours.spelling.is_begun(prompt[:end])
    writer = Detokenizer(ours.spelling, begun=begun)
    return (
        "".join([ours.decode(prompt[:end]), writer.prime(prompt[end:]), *map(writer.push, tokens)])
        + writer.finish()
    )


def contradict(folder, file, token, number):
    """Lets a file give an id to a token."""
    if file == "added_tokens.json":
        (folder / file).write_text(json.dumps({token: number}))
        return
    path = folder / file
    fields = json.loads(path.read_text())
    if file == "tokenizer.json":
        fields["added_tokens"].append({"id": number, **NEW, "content": token})
    else:
        fields["added_tokens_decoder"] = {str(number): {**NEW, "content": token}}
    path.write_text(json.dumps(fields))


NEW = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("token, number", [("<new>", 5), ("<new>", 257), ("<new>", 300), ("b", 5)])
def test_an_id_with_two_contents_is_refused(tmp_path, file, token, number):
    contradict(byte_tokenizer(tmp_path), file, token, number)
    with pytest.raises(UnsupportedTokenizer) as caught:
        TextTokenizer.open(tmp_path)
    assert str(caught.value).startswith(f"{file}: {token!r} has the id {number}")


@pytest.mark.parametrize("file", FILES[1:])
def test_a_token_that_the_model_lacks(tmp_path, file):
    """With an id it is refused. With only a name it is no token, but templates know it."""
    folder = byte_tokenizer(tmp_path)
    (folder / "config.json").write_text('{"vocab_size": 258}')
    named = {"cls_token": "<cls>", "chat_template": "{{ cls_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = TextTokenizer.open(folder)
    assert len(tokenizer.encode("<cls>")) == len("<cls>")
    assert tokenizer.template.render([]) == "<cls>"
    contradict(folder, file, "<cls>", 258)
    with pytest.raises(UnsupportedTokenizer, match="scores only 258 tokens"):
        TextTokenizer.open(folder)
    (folder / "config.json").write_text('{"vocab_size": 259}')
    assert TextTokenizer.open(folder).encode("<cls>") == [258]


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("added_tokens_decoder", [], "added_tokens_decoder is []; expected an object"),
        ("added_tokens_decoder", {"x": {}}, "'x' is no token id"),
        ("added_tokens_decoder", {"3": {}}, "added_tokens_decoder.3 is {}; expected"),
        ("added_tokens_decoder", {"3": {"content": "a", "lstrip": 1}}, "3.lstrip is 1; expected"),
        ("cls_token", 3, "cls_token is 3; expected a token's text"),
        ("additional_special_tokens", "<x>", "additional_special_tokens is '<x>'; expected a list"),
        ("additional_special_tokens", [7], "additional_special_tokens[0] is 7; expected"),
    ],
)
def test_a_bad_field_is_named(tmp_path, field, value, words):
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(UnsupportedTokenizer) as caught:
        TextTokenizer.open(tmp_path)
    assert words in str(caught.value)
